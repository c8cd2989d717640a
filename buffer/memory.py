"""The continuation buffer in memory, for tests and simulation.

Always true: it does what the one on Redis does, which the contract tests and a state machine over both show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from buffer.checks import check_distinct, check_room, check_sizes, lease_ms
from buffer.codec import decode_prompt, decode_reward, encode_prompt, encode_reward, piece_args
from buffer.epochs import EpochKeeper, Epochs
from buffer.interface import (
    BatchLease,
    CursorMove,
    GroupBrief,
    Limits,
    NewGroup,
    OpenedTrainer,
    Recount,
    SampleBrief,
    SampleLease,
    Snapshot,
)
from buffer.keys import new_group, split_sample_id
from buffer.memory_delivery import MemoryDelivery
from buffer.memory_reading import MemoryReading
from buffer.memory_records import GroupRecord, SampleRecord
from buffer.memory_store import KEPT_CHANGES, MemoryStore
from buffer.pool import beyond
from protocol.errors import ConflictError, NotFoundError, TransitionError
from protocol.messages import Policy, PolicyState, SettingsChange
from protocol.samples import Group, Reward, Sample, Segment
from protocol.states import DropReason, ExpiryReason, FailReason, FinishReason, GroupState, SampleState


class MemoryBuffer:
    """A `ContinuationBuffer` over a `MemoryStore`; share the store to have several services of one run."""

    def __init__(self, store: MemoryStore | None = None, limits: Limits | None = None) -> None:
        self.store = MemoryStore() if store is None else store
        self._limits = limits or Limits()
        self._reading = MemoryReading(self.store)
        self._delivery = MemoryDelivery(self.store, self._owned)
        self._service_epoch = 0
        self._epochs: EpochKeeper | None = None

    @property
    def waiting_since(self) -> float | None:
        """Nothing here is ever waited for."""
        return None

    def impatient(self) -> "MemoryBuffer":
        """This buffer, which never waits."""
        return self

    # Owners

    async def claim_service(
        self, service_id: str, identity: Mapping[str, str] | None = None, epochs: EpochKeeper | None = None
    ) -> int:
        """See `ContinuationBuffer.claim_service`."""
        self._service_epoch = self.store.claim(identity or {}, epochs.read() if epochs else Epochs())
        self._epochs = epochs
        self._keep_epochs(self._service_epoch, self.store.trainer_epoch)
        for sample in self.store.all_samples():
            if sample.state is SampleState.RUNNING:
                sample.set_aside(self.store.now_ms())
                sample.worker = ""
        return self._service_epoch

    async def open_trainer(self, durable_step: int) -> OpenedTrainer:
        """See `ContinuationBuffer.open_trainer`."""
        opened = self._delivery.open_trainer(durable_step)
        self._keep_epochs(self._service_epoch, opened.trainer_epoch)
        return opened

    # Generation

    async def admit(self, groups: Sequence[NewGroup], version: int, cursor: CursorMove) -> list[Group]:
        """See `ContinuationBuffer.admit`."""
        check_sizes(groups)
        # Through JSON, so that what Redis could not keep is refused here too and nothing is shared with the caller.
        copies = [replace(g, prompt=decode_prompt(encode_prompt(g.prompt))) for g in groups]
        store = self._owned()
        if cursor.before != store.cursor:
            raise ConflictError(f'the data cursor is at "{store.cursor}", not at "{cursor.before}": go on from there')
        held = store.held()
        check_room(copies, self._limits, len(held), sum(g.num_bytes for g in held))
        admitted = [new_group(seq, group, version) for seq, group in enumerate(copies, store.group_seq)]
        for group, new in zip(admitted, copies, strict=True):
            samples = [SampleRecord(s.sample_id, s.group_id, s.index) for s in group.samples]
            num_bytes = len(samples) * self._limits.sample_bytes
            record = GroupRecord(group.group_id, group.seq, group.prompt, version, samples, num_bytes)
            record.wanted = None if new.wanted == new.num_samples else new.wanted
            store.groups[group.group_id] = record
            store.continue_pooled(record, new.oldest_version)
        store.cursor = cursor.after
        store.group_seq += len(admitted)
        store.ledger.admitted += len(admitted)
        store.ledger.open += len(admitted)
        return self._reading.groups([group.group_id for group in admitted])

    async def start(self, sample_ids: Sequence[str], worker: str, lease_s: float) -> list[SampleLease]:
        """See `ContinuationBuffer.start`; all of them start, or none."""
        check_distinct(sample_ids)
        if not sample_ids:
            return []
        store = self._owned()
        now = store.now_ms()
        samples = [store.member(i)[0] for i in sample_ids]
        for sample in samples:
            expired = sample.state is SampleState.RUNNING and sample.expiry_ms <= now
            if sample.state not in (SampleState.QUEUED, SampleState.PARKED) and not expired:
                raise TransitionError(f"sample {sample.sample_id} is {sample.state} and can't become running")
        return [self._start(sample, worker, now + lease_ms(lease_s)) for sample in samples]

    async def renew(self, leases: Sequence[SampleLease], lease_s: float) -> list[SampleLease]:
        """See `ContinuationBuffer.renew`."""
        if not leases:
            return []
        store, lost = self._owned(), list[SampleLease]()
        for lease in leases:
            sample = store.find_sample(lease.sample_id)
            held = sample is not None and (sample.worker, sample.attempt) == (lease.worker, lease.attempt)
            if sample is not None and held and sample.state is SampleState.RUNNING:
                sample.expiry_ms = store.now_ms() + lease_ms(lease_s)
            else:
                lost.append(lease)
        return lost

    async def park_expired(self, limit: int) -> list[str]:
        """See `ContinuationBuffer.park_expired`."""
        if limit < 1:
            return []
        store = self._owned()
        now = store.now_ms()
        running = [s for s in store.all_samples() if s.state is SampleState.RUNNING]
        running.sort(key=lambda s: (s.expiry_ms, s.sample_id))
        expired = [sample for sample in running[:limit] if sample.expiry_ms <= now]
        for sample in expired:
            store.expire(sample)
            sample.worker = ""
        return [sample.sample_id for sample in expired]

    async def append(self, lease: SampleLease, piece: Segment) -> None:
        """See `ContinuationBuffer.append`."""
        sample = self._held(lease, piece)
        if sample.has_last(piece):
            return
        self._check_grows(sample, "longer")
        sample.check_fits(piece)
        self.store.extend(sample, piece)

    async def park(self, lease: SampleLease, piece: Segment | None) -> None:
        """See `ContinuationBuffer.park`."""
        sample = self._held(lease, piece)
        aside = sample.state in (SampleState.PARKED, SampleState.QUEUED) or sample.takes_last
        if not (aside and self._is_repeat(sample, piece)):
            self._take_last(sample, piece, "parked")
            if sample.state is SampleState.RUNNING:
                sample.set_aside(self.store.now_ms())

    async def finish(self, lease: SampleLease, piece: Segment | None, reason: FinishReason) -> None:
        """See `ContinuationBuffer.finish`."""
        sample = self._held(lease, piece)
        ended = sample.state in (SampleState.FINISHED, SampleState.POOLED) and sample.finish_reason is reason
        if not (ended and self._is_repeat(sample, piece)):
            self._take_last(sample, piece, "finished")
            if sample.state is SampleState.RUNNING:
                sample.move(SampleState.FINISHED)
            sample.finish_reason = reason

    async def record_failure(self, lease: SampleLease, error: str, max_failures: int) -> GroupState | None:
        """See `ContinuationBuffer.record_failure`."""
        store = self._owned()
        known = store.find_sample(lease.sample_id)
        if known is not None and known.failed_attempt == lease.attempt:
            return store.groups[known.group_id].state if known.state is SampleState.FAILED else None
        sample = store.leased_sample(lease)
        if sample.state is SampleState.POOLED:
            return None
        store.check_state(sample, SampleState.RUNNING, "failed")
        sample.num_failures += 1
        sample.error, sample.failed_attempt = error, lease.attempt
        if sample.num_failures >= max_failures:
            return self._settled(store.fail_sample(sample, FailReason.ENGINE_ERROR, error))
        sample.set_aside(store.now_ms())
        return None

    async def score(self, sample_id: str, reward: Reward, min_scored: int) -> GroupState:
        """See `ContinuationBuffer.score`."""
        text = encode_reward(reward)
        split_sample_id(sample_id)
        store = self._owned()
        sample, group = store.member(sample_id)
        if sample.state is SampleState.SCORED and sample.reward is not None and encode_reward(sample.reward) == text:
            return group.state
        sample.move(SampleState.SCORED)
        sample.reward = decode_reward(text)
        group.min_scored = min_scored
        store.counters["samples_scored"] += 1
        if sample.oldest != sample.newest:
            store.counters["samples_multi_version"] += 1
        return self._settled(store.settle(group))

    async def fail(self, sample_id: str, reason: FailReason, error: str, min_scored: int) -> GroupState:
        """See `ContinuationBuffer.fail`."""
        split_sample_id(sample_id)
        store = self._owned()
        sample, group = store.member(sample_id)
        if sample.state is SampleState.FAILED and sample.fail_reason is reason:
            return group.state
        if sample.state not in (SampleState.FINISHED, SampleState.RUNNING):
            raise TransitionError(f"sample {sample_id} is {sample.state} and can't become failed")
        group.min_scored = min_scored
        return self._settled(store.fail_sample(sample, reason, error))

    async def drop(self, group_id: str, reason: DropReason) -> None:
        """See `ContinuationBuffer.drop`."""
        store = self._owned()
        group, tombstone = store.groups.get(group_id), store.tombstones.get(group_id)
        if group is not None:
            store.drop(group, reason)
        elif tombstone is None:
            raise NotFoundError(f"there is no group {group_id}: list the open groups again")
        elif tombstone.reason is not reason:
            raise TransitionError(f"group {group_id} is dropped as {tombstone.reason} and can't become dropped")

    async def expire_pooled(self, before_version: int) -> int:
        """See `ContinuationBuffer.expire_pooled`."""
        pool = self._owned().pool
        old = [s.sample_id for s in pool.ordered() if s.oldest is None or s.oldest < before_version]
        pool.expire(old, ExpiryReason.STALE)
        return len(old)

    # Delivery and policies

    async def offer(self, num_groups: int) -> bool:
        """See `ContinuationBuffer.offer`."""
        return self._delivery.offer(num_groups)

    async def resize_offers(self, num_groups: int) -> int:
        """See `ContinuationBuffer.resize_offers`."""
        return self._delivery.resize_offers(num_groups)

    async def lease_batch(self, step: int, trainer_epoch: int, num_groups: int) -> BatchLease | None:
        """See `ContinuationBuffer.lease_batch`."""
        return self._delivery.lease_batch(step, trainer_epoch, num_groups)

    async def record_spool(self, step: int, sha256: str) -> None:
        """See `ContinuationBuffer.record_spool`."""
        self._delivery.record_spool(step, sha256)

    async def mark_trained(self, step: int, trainer_epoch: int) -> int:
        """See `ContinuationBuffer.mark_trained`."""
        return self._delivery.mark_trained(step, trainer_epoch)

    async def ack(self, step: int, trainer_epoch: int) -> list[BatchLease]:
        """See `ContinuationBuffer.ack`."""
        return self._delivery.ack(step, trainer_epoch)

    async def publish_policy(self, step: int, path: str, trainer_epoch: int) -> Policy:
        """See `ContinuationBuffer.publish_policy`."""
        return self._delivery.publish_policy(step, path, trainer_epoch)

    async def set_policy_state(
        self, version: int, state: PolicyState, error: str | None, install_s: float | None
    ) -> Policy:
        """See `ContinuationBuffer.set_policy_state`."""
        return self._delivery.set_policy_state(version, state, error, install_s)

    async def policies(self) -> list[Policy]:
        """See `ContinuationBuffer.policies`."""
        return self._delivery.policies()

    # Reading

    async def snapshot(self) -> Snapshot:
        """See `ContinuationBuffer.snapshot`."""
        return self._reading.snapshot()

    async def open_samples(self) -> list[SampleBrief]:
        """See `ContinuationBuffer.open_samples`."""
        return self._reading.open_samples()

    async def open_groups(self) -> list[GroupBrief]:
        """See `ContinuationBuffer.open_groups`."""
        return self._reading.open_groups()

    async def count_longer(self, num_tokens: int) -> int:
        """See `ContinuationBuffer.count_longer`."""
        return self._reading.count_longer(num_tokens)

    async def samples(self, sample_ids: Sequence[str]) -> list[Sample]:
        """See `ContinuationBuffer.samples`."""
        return self._reading.samples(sample_ids)

    async def groups(self, group_ids: Sequence[str]) -> list[Group]:
        """See `ContinuationBuffer.groups`."""
        return self._reading.groups(group_ids)

    async def batch_leases(self) -> list[BatchLease]:
        """See `ContinuationBuffer.batch_leases`."""
        return self.store.current_leases()

    async def recount(self) -> Recount:
        """See `ContinuationBuffer.recount`."""
        return self._reading.recount()

    # Operator

    async def record_change(self, change: SettingsChange) -> None:
        """See `ContinuationBuffer.record_change`."""
        self._owned().changes.append(change)
        del self.store.changes[:-KEPT_CHANGES]

    async def changes(self) -> list[SettingsChange]:
        """See `ContinuationBuffer.changes`."""
        return list(self.store.changes)

    async def close(self) -> None:
        """Nothing to release."""

    def _owned(self) -> MemoryStore:
        self.store.check_service(self._service_epoch)
        return self.store

    def _keep_epochs(self, service: int, trainer: int) -> None:
        if self._epochs is not None:
            self._epochs.raise_to(Epochs(service, trainer))

    def _held(self, lease: SampleLease, piece: Segment | None) -> SampleRecord:
        piece_args(piece)
        return self._owned().leased_sample(lease)

    def _is_repeat(self, sample: SampleRecord, piece: Segment | None) -> bool:
        return piece is None or not len(piece.tokens) or sample.has_last(piece)

    def _check_grows(self, sample: SampleRecord, wanted: str) -> None:
        if not sample.takes_last:
            self.store.check_state(sample, SampleState.RUNNING, wanted)

    def _take_last(self, sample: SampleRecord, piece: Segment | None, wanted: str) -> None:
        self._check_grows(sample, wanted)
        if not sample.has_last(piece):
            sample.check_fits(piece)
            self.store.extend(sample, piece)

    def _settled(self, state: GroupState) -> GroupState:
        """The pool may have grown."""
        pool = self.store.pool
        num_bytes = pool.ledger.num_bytes
        gone = beyond((s.brief for s in pool.ordered()), num_bytes, self._limits.max_pool_bytes)
        pool.expire(gone, ExpiryReason.FULL)
        return state

    def _start(self, sample: SampleRecord, worker: str, expiry_ms: int) -> SampleLease:
        counters = self.store.counters
        if sample.state is SampleState.RUNNING:
            self.store.expire(sample)
        if sample.num_tokens:
            counters["resumes"] += 1
            sample.num_resumes += 1
            counters["samples_resumed"] += sample.num_resumes == 1
        sample.move(SampleState.RUNNING)
        sample.worker, sample.expiry_ms, sample.attempt = worker, expiry_ms, sample.attempt + 1
        return SampleLease(sample.sample_id, worker, sample.attempt)
