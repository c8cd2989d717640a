"""What batches of the simulated engine must hold, and a trainer that takes no time."""

import numpy as np

from rollout_service.engines.simulated import simulated_logprobs, simulated_tokens


async def train_steps(service, headers, steps, first=1):
    batches = []
    for step in range(first, first + steps):
        batches.append(await service.batch(step, headers))
        await service.publish(step, headers)
    return batches


def check_provenance(batch):
    """Every token is the one that the labelled version writes at its place: none lost, doubled or mislabelled."""
    for index, sample in enumerate(batch.header.samples):
        begin, end = batch.sample_offsets[index : index + 2]
        begin += batch.prompt_lengths[index]
        tokens, logprobs = batch.tokens[begin:end], batch.logprobs[begin:end]
        spans = [(s.start, s.end, s.version) for s in sample.segments]
        assert spans[0][0] == 0
        assert spans[-1][1] == end - begin
        for start, stop, version in spans:
            written = simulated_tokens(sample.sample_id, start, stop - start, version)
            last = stop == end - begin and sample.finish_reason == "stop"
            count = stop - start - last
            np.testing.assert_array_equal(tokens[start:stop][:count], written[:count])
            expected = simulated_logprobs(sample.sample_id, start, stop - start, version)
            np.testing.assert_array_equal(logprobs[start:stop][:count], expected[:count])
