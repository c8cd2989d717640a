"""What `MemoryBuffer` keeps, and the moves that several of its methods share.

Always true: the same as of the Redis buffer, by the tables of `protocol.states`; a method runs to its end without
awaiting, so each is one transition. Several `MemoryBuffer` objects over one store are several services of one run.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from buffer.codec import Tombstone
from buffer.interface import BatchLease, SampleLease
from buffer.keys import split_sample_id
from protocol.errors import FencedError, LengthError, NotFoundError, TransitionError
from protocol.messages import Ledger, Policy, PolicyState, SettingsChange
from protocol.samples import Prompt, Reward, Segment
from protocol.states import (
    TERMINAL_SAMPLE_STATES,
    DropReason,
    FailReason,
    FinishReason,
    GroupState,
    SampleState,
    check_group_transition,
    check_sample_transition,
)

KEPT_TOMBSTONES = 1000  # as in the Lua scripts, which give the reasons
KEPT_POLICIES = 512
KEPT_CHANGES = 1000


@dataclass
class SampleRecord:
    """One sample."""

    sample_id: str
    group_id: str
    index: int
    state: SampleState = SampleState.QUEUED
    pieces: list[Segment] = field(default_factory=list[Segment])
    num_tokens: int = 0
    attempt: int = 0
    worker: str = ""
    expiry_ms: int = 0
    oldest: int | None = None
    newest: int | None = None
    num_resumes: int = 0
    num_failures: int = 0
    num_expiries: int = 0
    aside_ms: int | None = None
    failed_attempt: int = 0
    finish_reason: FinishReason | None = None
    reward: Reward | None = None
    fail_reason: FailReason | None = None
    error: str | None = None

    def move(self, state: SampleState) -> None:
        """Change the state, by the table."""
        check_sample_transition(self.sample_id, self.state, state)
        self.state = state

    def set_aside(self, now_ms: int) -> None:
        """RUNNING → PARKED, or QUEUED if there is no token."""
        self.aside_ms = now_ms
        self.move(SampleState.PARKED)
        if self.num_tokens == 0:
            self.state = SampleState.QUEUED

    def has_last(self, piece: Segment | None) -> bool:
        """Whether this very piece was the last that was appended."""
        if piece is None or not len(piece.tokens) or not self.pieces or piece.end != self.num_tokens:
            return False
        last = self.pieces[-1]
        return (
            (last.start, last.version, last.kv_kept) == (piece.start, piece.version, piece.kv_kept)
            and last.tokens.tobytes() == piece.tokens.tobytes()
            and last.logprobs.tobytes() == piece.logprobs.tobytes()
        )

    def check_fits(self, piece: Segment | None) -> None:
        """Raise LengthError unless the piece starts where the sample ends."""
        if piece is not None and piece.start != self.num_tokens:
            raise LengthError(
                f"sample {self.sample_id} has {self.num_tokens} tokens, the piece starts at {piece.start}: "
                "read the sample again and append what follows"
            )


@dataclass
class GroupRecord:
    """One group."""

    group_id: str
    seq: int
    prompt: Prompt
    admitted_version: int
    samples: list[SampleRecord]
    num_bytes: int = 0
    state: GroupState = GroupState.OPEN
    step: int | None = None
    min_scored: int = 0
    ready_seq: int = 0

    @property
    def oldest(self) -> int | None:
        """The least version that wrote a token of it."""
        return min((s.oldest for s in self.samples if s.oldest is not None), default=None)

    def count(self, state: SampleState) -> int:
        """Samples in a state."""
        return sum(s.state is state for s in self.samples)

    @property
    def batch_order(self) -> tuple[int, int]:
        """Sort key of READY groups."""
        return (self.admitted_version if self.oldest is None else self.oldest, self.ready_seq)


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

    def check_service(self, epoch: int) -> None:
        """Raise FencedError unless this service owns the run."""
        if epoch != self.service_epoch:
            raise self.fenced(
                f"service epoch {epoch} does not own this run, epoch {self.service_epoch} does: "
                "stop this service, or claim the run again"
            )

    def check_trainer(self, epoch: int) -> None:
        """Raise FencedError unless this is the newest trainer session."""
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
        """A sample that is still there."""
        group_id, index = split_sample_id(sample_id)
        group = self.groups.get(group_id)
        return group.samples[index] if group is not None and index < len(group.samples) else None

    def sample(self, sample_id: str) -> SampleRecord:
        """A sample; raises NotFoundError."""
        found = self.find_sample(sample_id)
        if found is None:
            raise NotFoundError(f"there is no sample {sample_id}: list the open samples again")
        return found

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
        """OPEN → READY, DROPPED, or as it is."""
        failed = group.count(SampleState.FAILED)
        if len(group.samples) - failed < max(group.min_scored, 1):
            self.drop(group, DropReason.TOO_FEW_SAMPLES)
        elif all(s.state in TERMINAL_SAMPLE_STATES for s in group.samples):
            self.ready_seq += 1
            group.ready_seq = self.ready_seq
            self.move_group(group, GroupState.READY)
        return group.state

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
