"""The batch encoding: round trip, determinism, and refusal of what is not a batch."""

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from protocol.batch import TENSOR_DTYPES, batch_to_json, build_batch, decode_batch, encode_batch
from protocol.errors import DataError, LengthError
from protocol.samples import Group, Prompt, Reward, Sample, Segment, merge_segments
from protocol.states import FailReason, FinishReason, GroupState, SampleState


def segment(start, version, count):
    return Segment(start, version, np.arange(start, start + count, dtype=np.int32), np.full(count, -0.5, np.float32))


def make_sample(group_id, index, counts, failed=False):
    starts = np.cumsum([0, *counts])
    segments = tuple(segment(int(s), v, c) for v, (s, c) in enumerate(zip(starts, counts, strict=False)))
    return Sample(
        sample_id=f"{group_id}.{index}",
        group_id=group_id,
        index=index,
        state=SampleState.FAILED if failed else SampleState.SCORED,
        segments=segments,
        finish_reason=None if failed else FinishReason.STOP,
        reward=None if failed else Reward(0.5, {"format": 1.0}),
        fail_reason=FailReason.REWARD_TIMEOUT if failed else None,
    )


groups_strategy = st.lists(
    st.tuples(
        st.integers(1, 5),
        st.lists(st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans()), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


def make_groups(shape):
    return [
        Group(
            f"g{g}",
            g,
            Prompt(f"p:{g}", tuple(range(n)), "text", "source", {"answer": g}),
            GroupState.LEASED,
            0,
            tuple(make_sample(f"g{g}", i, counts, failed) for i, (counts, failed) in enumerate(samples)),
        )
        for g, (n, samples) in enumerate(shape)
    ]


@given(groups_strategy)
def test_round_trip_keeps_every_token_and_where_it_came_from(shape):
    groups = make_groups(shape)
    data = encode_batch(build_batch("run", 3, 7, groups))
    batch = decode_batch(data)
    assert encode_batch(batch) == data
    scored = [(i, g, s) for i, g in enumerate(groups) for s in g.samples if s.state is SampleState.SCORED]
    assert batch.num_samples == len(scored)
    for row, (index, group, sample) in enumerate(scored):
        begin, end = batch.sample_offsets[row : row + 2]
        prompt_end = begin + batch.prompt_lengths[row]
        assert batch.group_index[row] == index
        np.testing.assert_array_equal(batch.tokens[begin:prompt_end], group.prompt.token_ids)
        np.testing.assert_array_equal(batch.tokens[prompt_end:end], sample.tokens)
        np.testing.assert_array_equal(batch.versions[prompt_end:end], sample.versions)
        np.testing.assert_array_equal(batch.loss_mask[begin:end], [0] * (prompt_end - begin) + [1] * sample.num_tokens)
        assert (batch.versions[begin:prompt_end] == -1).all()
        assert (batch.logprobs[begin:prompt_end] == 0).all()
    num_failed = sum(len(g.failed) for g in batch.header.groups)
    assert num_failed + batch.num_samples == sum(len(g.samples) for g in groups)


def test_dtypes_are_those_of_the_contract():
    data = encode_batch(build_batch("run", 1, 0, make_groups([(2, [([3], False)])])))
    tensors = safetensors.numpy.load(data)
    assert {name: t.dtype for name, t in tensors.items()} == {n: np.dtype(d) for n, d in TENSOR_DTYPES.items()}
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert list(header) == ["batch"]


def test_json_form_is_json():
    batch = build_batch("run", 1, 0, make_groups([(2, [([3], False)])]))
    assert json.loads(json.dumps(batch_to_json(batch)))["tokens"] == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_cut_bytes_are_refused(cut):
    data = encode_batch(build_batch("run", 1, 0, make_groups([(2, [([3], False)])])))
    with pytest.raises(DataError, match="ask the service for the step again"):
        decode_batch(data[:cut])


def test_tensors_that_disagree_are_refused():
    data = encode_batch(build_batch("run", 1, 0, make_groups([(2, [([3], False)])])))
    tensors = safetensors.numpy.load(data)
    tensors["logprobs"] = tensors["logprobs"][:-1]
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    with pytest.raises(DataError, match="disagree in length"):
        decode_batch(safetensors.numpy.save(tensors, metadata=metadata))


def test_segments_must_tile():
    with pytest.raises(LengthError, match="expected start 3, found 4"):
        merge_segments([segment(0, 0, 3), segment(4, 1, 2)])


def test_log_probs_must_be_as_many_as_tokens():
    with pytest.raises(LengthError, match="must be equal"):
        Segment(0, 0, np.zeros(3, np.int32), np.zeros(4, np.float32))


def test_neighbours_of_one_version_become_one_segment():
    merged = merge_segments([segment(0, 0, 3), segment(3, 0, 2), segment(5, 1, 1)])
    assert [(s.start, s.end, s.version) for s in merged] == [(0, 5, 0), (5, 6, 1)]
