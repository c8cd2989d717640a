"""Waiting samples into the engines: their leases and what they have so far.

A decision may be older than what happened to a group since: one that was dropped, or became READY without a sample,
costs the other samples of the decision nothing.
"""

from collections.abc import Sequence

from buffer.interface import ContinuationBuffer, SampleLease
from protocol.errors import NotFoundError
from protocol.samples import Sample
from protocol.states import SampleState
from rollout_service.samples import SampleParts

Started = list[tuple[SampleLease, Sample]]


async def start_samples(parts: SampleParts, sample_ids: Sequence[str]) -> Started:
    """Lease and read those of the samples that are still there to run, in their order."""
    try:
        leases = await parts.buffer.start(sample_ids, parts.owner, parts.settings.buffer.sample_lease_s)
    except NotFoundError:
        if len(sample_ids) == 1:
            return []
        return [started for sample_id in sample_ids for started in await start_samples(parts, [sample_id])]
    return await _read(parts.buffer, leases)


async def _read(buffer: ContinuationBuffer, leases: Sequence[SampleLease]) -> Started:
    try:
        samples = await buffer.samples([lease.sample_id for lease in leases])
    except NotFoundError:
        if len(leases) == 1:
            return []
        return [started for lease in leases for started in await _read(buffer, [lease])]
    pairs = zip(leases, samples, strict=True)
    return [(lease, sample) for lease, sample in pairs if sample.state is SampleState.RUNNING]
