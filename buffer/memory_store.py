"""What `MemoryBuffer` keeps, and the moves that several of its methods share.

Always true: the same as of the Redis buffer, by the tables of `protocol.states`; a method runs to its end without
awaiting, so each is one transition. Several `MemoryBuffer` objects over one store are several services of one run.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from buffer.codec import Tombstone
from buffer.epochs import Epochs
from buffer.interface import BatchLease, SampleLease
from buffer.keys import split_sample_id
from buffer.memory_records import GroupRecord, MemoryPool, SampleRecord
from buffer.pool import choose
from protocol.errors import FencedError, NotFoundError, SettingsError, TransitionError
from protocol.messages import Ledger, Policy, PolicyState, SettingsChange
from protocol.samples import Segment
from protocol.states import (
    TERMINAL_SAMPLE_STATES,
    DropReason,
    ExpiryReason,
    FailReason,
    GroupState,
    SampleState,
    check_group_transition,
)

KEPT_TOMBSTONES = 1000  # as in the Lua scripts, which give the reasons
KEPT_POLICIES = 512
KEPT_CHANGES = 1000


def wall_clock_ms() -> int:
    """Milliseconds, as Redis' TIME gives them."""
    return int(time.time() * 1000)


@dataclass
class MemoryStore:
    """One run in memory."""

    now_ms: Callable[[], int] = wall_clock_ms
    groups: dict[str, GroupRecord] = field(default_factory=dict[str, GroupRecord])
    ledger: Ledger = field(default_factory=Ledger)
    counters: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[DropReason] = field(default_factory=Counter[DropReason])
    tombstones: dict[str, Tombstone] = field(default_factory=dict[str, Tombstone])
    leases: dict[int, BatchLease] = field(default_factory=dict[int, BatchLease])
    policies: dict[int, Policy] = field(default_factory=dict[int, Policy])
    changes: list[SettingsChange] = field(default_factory=list[SettingsChange])
    pool: MemoryPool = field(default_factory=MemoryPool)
    cursor: str = ""
    group_seq: int = 0
    ready_seq: int = 0
    offered: int = 0
    offer_size: int = 1
    leased_step: int = 0
    trained_step: int = 0
    durable_step: int = 0
    service_epoch: int = 0
    trainer_epoch: int = 0
    identity: dict[str, str] = field(default_factory=dict[str, str])
    active_version: int = 0
    newest_version: int = 0
    newest_step: int = 0

    def __post_init__(self) -> None:
        """Version 0 is the model as started."""
        self.policies[0] = Policy(version=0, step=0, trainer_epoch=0, path="", state=PolicyState.ACTIVE)

    # Fences

    def fenced(self, sentence: str) -> FencedError:
        """Count a refusal and make its error."""
        self.counters["fenced_writes"] += 1
        return FencedError(sentence)

    def _lost(self, who: str, epoch: int, current: int) -> FencedError:
        return self.fenced(
            f"{who} epoch {epoch} was not given out by this buffer, which has come to {current}: was it emptied or set "
            f"back? Stop this {who}, and see what is gone before you go on"
        )

    def claim(self, identity: Mapping[str, str], known: Epochs) -> int:
        """The next service epoch; see lua/claim_service.lua. Raises SettingsError for another identity."""
        for name, value in identity.items():
            if self.identity.get(name, value) != value:
                raise SettingsError(
                    f"the buffer holds a run with {name} = {self.identity[name]} and this one has {value}, so its "
                    "unfinished samples can't be continued; set another run.dir and run.name"
                )
        self.identity |= identity
        self.service_epoch = max(self.service_epoch, known.service) + 1
        if self.trainer_epoch < known.trainer:
            self.trainer_epoch = known.trainer + 1
        return self.service_epoch

    def check_service(self, epoch: int) -> None:
        """Raise FencedError unless this service owns the run."""
        if epoch > self.service_epoch:
            raise self._lost("service", epoch, self.service_epoch)
        if epoch != self.service_epoch:
            raise self.fenced(
                f"service epoch {epoch} does not own this run, epoch {self.service_epoch} does: "
                "stop this service, or claim the run again"
            )

    def check_trainer(self, epoch: int) -> None:
        """Raise FencedError unless this is the newest trainer session."""
        if epoch > self.trainer_epoch:
            raise self._lost("trainer", epoch, self.trainer_epoch)
        if epoch != self.trainer_epoch:
            raise self.fenced(
                f"trainer epoch {epoch} was superseded by epoch {self.trainer_epoch}: "
                "stop this trainer, or open a new session"
            )

    def leased_sample(self, lease: SampleLease) -> SampleRecord:
        """The sample of a lease; raises FencedError if the lease was lost."""
        sample = self.find_sample(lease.sample_id)
        if sample is None or (sample.worker, sample.attempt) != (lease.worker, lease.attempt):
            raise self.fenced(
                f"attempt {lease.attempt} of {lease.worker} no longer holds sample {lease.sample_id}: "
                "stop generating it"
            )
        return sample

    # Finding

    def find_sample(self, sample_id: str) -> SampleRecord | None:
        """A sample that is still there, in a group or pooled."""
        group_id, index = split_sample_id(sample_id)
        group = self.groups.get(group_id)
        samples = () if group is None else group.samples
        return next((s for s in samples if s.index == index), self.pool.samples.get(sample_id))

    def sample(self, sample_id: str) -> SampleRecord:
        """A sample; raises NotFoundError."""
        found = self.find_sample(sample_id)
        if found is None:
            raise NotFoundError(f"there is no sample {sample_id}: list the open samples again")
        return found

    def member(self, sample_id: str) -> tuple[SampleRecord, GroupRecord]:
        """A sample and the group that it is in; raises NotFoundError, also for a POOLED one."""
        sample = self.sample(sample_id)
        if sample.state is SampleState.POOLED:
            raise NotFoundError(f"there is no sample {sample_id} in its group: it is READY without it")
        return sample, self.groups[sample.group_id]

    def ready(self) -> list[GroupRecord]:
        """READY groups in the order in which batches take them."""
        return sorted((g for g in self.groups.values() if g.state is GroupState.READY), key=lambda g: g.batch_order)

    def all_samples(self) -> Iterator[SampleRecord]:
        """Samples of all groups that are still there, by order of admission."""
        return (sample for group in self.groups.values() for sample in group.samples)

    def held(self) -> list[GroupRecord]:
        """Groups that are admitted and neither trained nor dropped."""
        return [g for g in self.groups.values() if g.step is None or g.step > self.trained_step]

    # Moves

    def move_group(self, group: GroupRecord, state: GroupState) -> None:
        """Change a group's state, by the table, and the ledger with it."""
        check_group_transition(group.group_id, group.state, state)
        for name, change in ((group.state.value, -1), (state.value, 1)):
            setattr(self.ledger, name, getattr(self.ledger, name) + change)
        group.state = state

    def extend(self, sample: SampleRecord, piece: Segment | None) -> None:
        """Append a piece that fits."""
        if piece is None or not len(piece.tokens):
            return
        copy = Segment(piece.start, piece.version, piece.tokens.copy(), piece.logprobs.copy(), piece.kv_kept)
        sample.pieces.append(copy)
        sample.num_tokens = piece.end
        sample.oldest = piece.version if sample.oldest is None else min(sample.oldest, piece.version)
        sample.newest = piece.version if sample.newest is None else max(sample.newest, piece.version)
        self.counters["tokens_appended"] += len(piece.tokens)
        if sample.state is SampleState.POOLED:
            self.counters["raced_tokens_left"] += len(piece.tokens)
        else:
            self.groups[sample.group_id].age(piece.version)

    def expire(self, sample: SampleRecord) -> None:
        """RUNNING → set aside, because its lease ran out."""
        sample.num_expiries += 1
        self.counters["leases_expired"] += 1
        sample.set_aside(self.now_ms())

    def fail_sample(self, sample: SampleRecord, reason: FailReason, error: str) -> GroupState:
        """→ FAILED, and what becomes of the group."""
        sample.move(SampleState.FAILED)
        sample.fail_reason, sample.error, sample.worker = reason, error, ""
        self.counters["samples_failed"] += 1
        self.counters[f"failed:{reason.value}"] += 1
        return self.settle(self.groups[sample.group_id])

    def settle(self, group: GroupRecord) -> GroupState:
        """OPEN → READY, DROPPED, or as it is; a group that is READY parts with what is not terminal."""
        failed, scored = group.count(SampleState.FAILED), group.count(SampleState.SCORED)
        count = len(group.samples)
        if count - failed < max(group.min_scored, 1):
            self.drop(group, DropReason.TOO_FEW_SAMPLES)
        elif scored + failed == count or scored == group.wanted:
            if group.wanted is not None:
                self._part(group)
            self.ready_seq += 1
            group.ready_seq = self.ready_seq
            self.move_group(group, GroupState.READY)
        return group.state

    def continue_pooled(self, group: GroupRecord, oldest_version: int | None) -> None:
        """Pooled samples of the group's prompt go on as its first ones; too old ones expire."""
        pooled = self.pool.of_prompt(group.prompt.prompt_id)
        taken, stale = choose(pooled, len(group.samples), oldest_version)
        self.pool.expire(stale, ExpiryReason.STALE)
        for index, sample_id in enumerate(taken):
            sample, new = self.pool.take(sample_id), group.samples[index]
            finished = sample.finish_reason is not None
            sample.move(SampleState.FINISHED if finished else SampleState.PARKED)
            sample.sample_id, sample.group_id, sample.index = new.sample_id, new.group_id, new.index
            sample.worker, sample.aside_ms, sample.continued_from = "", self.now_ms(), sample_id
            group.samples[index] = sample
            if oldest_version is not None:
                group.age(sample.oldest)

    def _part(self, group: GroupRecord) -> None:
        left = [s for s in group.samples if s.state not in TERMINAL_SAMPLE_STATES]
        trained = [s for s in group.samples if s.state is SampleState.SCORED]
        for outcome, samples in (("left", left), ("trained", trained)):
            self.counters[f"raced_samples_{outcome}"] += len(samples)
            self.counters[f"raced_tokens_{outcome}"] += sum(s.num_tokens for s in samples)
        for sample in left:
            if sample.state is not SampleState.RUNNING:
                sample.worker = ""
            sample.move(SampleState.POOLED)
            self.pool.enter(sample, group.prompt.prompt_id)
        group.num_bytes -= group.num_bytes // len(group.samples) * len(left)
        group.samples = [s for s in group.samples if s not in left]

    def drop(self, group: GroupRecord, reason: DropReason) -> None:
        """→ DROPPED; offers that READY groups no longer cover are taken back."""
        self.move_group(group, GroupState.DROPPED)
        del self.groups[group.group_id]
        self.dropped[reason] += 1
        prompt = group.prompt
        self.tombstones[group.group_id] = Tombstone(
            reason, group.seq, group.admitted_version, prompt.prompt_id, prompt.data_source
        )
        if len(self.tombstones) > KEPT_TOMBSTONES:
            del self.tombstones[next(iter(self.tombstones))]
        self.withdraw()

    def withdraw(self) -> None:
        """Take back offers that READY groups don't cover."""
        self.offered = min(self.offered, len(self.ready()) // self.offer_size)

    def release(self, step: int) -> list[BatchLease]:
        """Make steps durable: their groups become CONSUMED and are forgotten."""
        released = [lease for lease in self.current_leases() if lease.step <= step]
        for lease in released:
            del self.leases[lease.step]
            for group_id in lease.group_ids:
                self.move_group(self.groups.pop(group_id), GroupState.CONSUMED)
        self.durable_step = step
        return released

    def current_leases(self) -> list[BatchLease]:
        """Leases by step, as they stand."""
        return [
            BatchLease(lease.step, lease.group_ids, lease.policy_version, step <= self.trained_step, lease.sha256)
            for step, lease in sorted(self.leases.items())
        ]

    def check_state(self, sample: SampleRecord, state: SampleState, wanted: str) -> None:
        """Raise TransitionError unless the sample is in a state."""
        if sample.state is not state:
            raise TransitionError(f"sample {sample.sample_id} is {sample.state} and can't become {wanted}")
