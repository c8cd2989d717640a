"""Reading a `MemoryStore`. Nothing here writes."""

from collections import Counter
from collections.abc import Sequence

from buffer.interface import GroupBrief, Recount, SampleBrief, Snapshot
from buffer.memory_records import GroupRecord, SampleRecord
from buffer.memory_store import MemoryStore
from buffer.order import resume_order
from protocol.errors import NotFoundError
from protocol.messages import Ledger
from protocol.samples import Group, Sample, merge_segments
from protocol.states import TERMINAL_SAMPLE_STATES, DropReason, GroupState, SampleState


class MemoryReading:
    """Counts, briefs, samples and groups."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def snapshot(self) -> Snapshot:
        """See `ContinuationBuffer.snapshot`."""
        store = self._store
        states = Counter(sample.state for sample in store.all_samples())
        states[SampleState.POOLED] = len(store.pool.samples)
        return Snapshot(
            ledger=store.ledger.model_copy(),
            samples={state: states[state] for state in SampleState},
            dropped={reason: store.dropped[reason] for reason in DropReason},
            offered=store.offered,
            outstanding=store.offered + store.leased_step - store.trained_step,
            leased_steps=tuple(sorted(store.leases)),
            trained_step=store.trained_step,
            durable_step=store.durable_step,
            service_epoch=store.service_epoch,
            trainer_epoch=store.trainer_epoch,
            active_version=store.active_version,
            newest_version=store.newest_version,
            cursor=store.cursor,
            counters={name: count for name, count in store.counters.items() if count},
            held_groups=len(store.held()),
            held_bytes=sum(group.num_bytes for group in store.held()),
            pool=store.pool.ledger,
        )

    def open_samples(self) -> list[SampleBrief]:
        """See `ContinuationBuffer.open_samples`."""
        open_ = [s for s in self._store.all_samples() if s.state not in TERMINAL_SAMPLE_STATES]
        return sorted((self._brief(sample) for sample in open_), key=resume_order)

    def open_groups(self) -> list[GroupBrief]:
        """See `ContinuationBuffer.open_groups`."""
        groups = self._store.groups.values()
        return [_group_brief(g) for g in groups if g.state in (GroupState.OPEN, GroupState.READY)]

    def count_longer(self, num_tokens: int) -> int:
        """See `ContinuationBuffer.count_longer`."""
        waiting = [g for g in self._store.groups.values() if g.state in (GroupState.OPEN, GroupState.READY)]
        samples = [s for g in waiting for s in g.samples] + list(self._store.pool.samples.values())
        return sum(sample.num_tokens > num_tokens for sample in samples)

    def samples(self, sample_ids: Sequence[str]) -> list[Sample]:
        """See `ContinuationBuffer.samples`."""
        return [_sample(self._store.sample(i)) for i in sample_ids]

    def groups(self, group_ids: Sequence[str]) -> list[Group]:
        """See `ContinuationBuffer.groups`."""
        return [self._group(i) for i in group_ids]

    def recount(self) -> Recount:
        """See `ContinuationBuffer.recount`."""
        store = self._store
        states = Counter(group.state for group in store.groups.values())
        dropped = sum(store.dropped.values())
        counted = Ledger(
            admitted=store.group_seq,
            open=states[GroupState.OPEN],
            ready=states[GroupState.READY],
            leased=states[GroupState.LEASED],
            consumed=store.group_seq - len(store.groups) - dropped,
            dropped=dropped,
        )
        faults = [] if counted == store.ledger else [f"the ledger says {store.ledger}, the records say {counted}"]
        spooled = {i for lease in store.leases.values() if lease.sha256 for i in lease.group_ids}
        for sample in store.all_samples():
            expected = 0 if sample.group_id in spooled else sample.num_tokens
            if sum(len(piece.tokens) for piece in sample.pieces) != expected:
                faults.append(f"sample {sample.sample_id} should have {expected} tokens")
        faults += [
            f"{s.sample_id} is pooled and {s.state}"
            for s in store.pool.samples.values()
            if s.state is not SampleState.POOLED
        ]
        if store.pool.ledger.error:
            faults.append(f"the pool's line is out of balance by {store.pool.ledger.error}")
        return Recount(store.ledger.model_copy(), counted, tuple(faults))

    def _brief(self, sample: SampleRecord) -> SampleBrief:
        return SampleBrief(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            group_seq=self._store.groups[sample.group_id].seq,
            state=sample.state,
            num_tokens=sample.num_tokens,
            oldest_version=sample.oldest,
            num_resumes=sample.num_resumes,
            num_failures=sample.num_failures,
            num_expiries=sample.num_expiries,
            aside_s=None if sample.aside_ms is None else max(0, self._store.now_ms() - sample.aside_ms) / 1000,
        )

    def _group(self, group_id: str) -> Group:
        group, tombstone = self._store.groups.get(group_id), self._store.tombstones.get(group_id)
        if group is None:
            if tombstone is None:
                raise NotFoundError(
                    f"there is no group {group_id}: it was consumed, dropped long ago, or never admitted"
                )
            return tombstone.group(group_id)
        samples = tuple(_sample(sample) for sample in group.samples)
        return Group(group_id, group.seq, group.prompt, group.state, group.admitted_version, samples, group.step)


def _group_brief(group: GroupRecord) -> GroupBrief:
    return GroupBrief(
        group_id=group.group_id,
        seq=group.seq,
        state=group.state,
        admitted_version=group.admitted_version,
        num_samples=len(group.samples),
        num_scored=group.count(SampleState.SCORED),
        num_failed=group.count(SampleState.FAILED),
        oldest_version=group.oldest,
    )


def _sample(sample: SampleRecord) -> Sample:
    return Sample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        index=sample.index,
        state=sample.state,
        segments=tuple(merge_segments(list(sample.pieces))),
        num_resumes=sample.num_resumes,
        num_failures=sample.num_failures,
        finish_reason=sample.finish_reason,
        reward=sample.reward,
        fail_reason=sample.fail_reason,
        error=sample.error,
        continued_from=sample.continued_from,
    )
