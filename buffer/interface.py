"""What a continuation buffer does, whoever keeps it.

Always true, after every call that returns or raises:
- a group is in exactly one state, and admitted = open + ready + leased + consumed + dropped;
- a sample only grows: an append names the length it expects, and the segments tile the tokens;
- whoever was superseded (an older service epoch, trainer epoch or sample attempt) changes nothing: its call raises
  `FencedError`, is counted, and the stored bytes stay as they were;
- each method is one transition: it happens whole or not at all. Methods that take many ids are a pipeline of such
  transitions, each whole by itself;
- a group that wanted fewer samples than it was admitted with is READY as soon as so many are SCORED; the others are
  POOLED in the same transition, are in no group, and entered = pooled + continued + expired.

Order is the buffer's business: PARKED samples resume oldest version first, then by order of admission; batches take
the READY groups whose oldest token is oldest first, then by order of readiness.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from buffer.epochs import EpochKeeper
from protocol.messages import Ledger, Policy, PolicyState, PoolLedger, SettingsChange
from protocol.samples import Group, Prompt, Reward, Sample, Segment
from protocol.states import DropReason, FailReason, FinishReason, GroupState, SampleState

NO_CAP = 2**53  # more groups than a run can number
MAX_POOL_BYTES = 1 << 30  # as in `buffer.max_pool_bytes`


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A prompt to admit, and how many samples of it; the first `wanted` that are scored make the group (None: all).

    Pooled samples of the prompt go on in it if their oldest token is of `oldest_version` or later; older ones expire.
    With None they all do, and their tokens don't count for the group's age.
    """

    prompt: Prompt
    num_samples: int
    wanted: int | None = None
    oldest_version: int | None = 0


@dataclass(frozen=True, slots=True)
class CursorMove:
    """Position in the data set before and after an admission; both change in the admission's own transaction.

    The buffer keeps it as an opaque string and refuses (ConflictError) a move that does not start where it is.
    """

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What an admission may not pass: groups that aren't trained yet, and the bytes that their samples may need.

    `max_bytes` 0 is no cap. `sample_bytes` is what a sample's tokens take at the most, reserved at its admission, so
    that an admitted sample can always grow. `max_pool_bytes`: what pooled samples may hold, the oldest go.
    """

    max_groups: int = NO_CAP
    max_bytes: int = 0
    sample_bytes: int = 0
    max_pool_bytes: int = MAX_POOL_BYTES

    def room(self, snapshot: "Snapshot", num_samples: int) -> int:
        """How many groups of `num_samples` may be admitted now."""
        groups = self.max_groups - snapshot.held_groups
        needed = num_samples * self.sample_bytes
        if self.max_bytes and needed:
            groups = min(groups, (self.max_bytes - snapshot.held_bytes) // needed)
        return max(groups, 0)


@dataclass(frozen=True, slots=True)
class SampleLease:
    """The right to write one running sample. `attempt` grows at every start: it is the fencing token."""

    sample_id: str
    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SampleBrief:
    """A sample without its tokens: what the scheduler decides on. `oldest_version` is None before the first token.

    `aside_s`: how long ago, by the store's clock, it was last set aside (parked, or queued again); None if never.
    """

    sample_id: str
    group_id: str
    group_seq: int
    state: SampleState
    num_tokens: int
    oldest_version: int | None
    num_resumes: int
    num_failures: int
    num_expiries: int = 0
    aside_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class GroupBrief:
    """A group without its samples' tokens. `oldest_version` is the least of its samples', or None.

    `num_samples` are in it: not those that were POOLED when it became READY.
    """

    group_id: str
    seq: int
    state: GroupState
    admitted_version: int
    num_samples: int
    num_scored: int
    num_failed: int
    oldest_version: int | None


@dataclass(frozen=True, slots=True)
class BatchLease:
    """The groups of one step. `sha256` is None until the encoded batch has been spooled."""

    step: int
    group_ids: tuple[str, ...]
    policy_version: int
    trained: bool
    sha256: str | None


@dataclass(frozen=True, slots=True)
class OpenedTrainer:
    """A trainer session: its epoch, and what was acknowledged by opening it."""

    trainer_epoch: int
    durable_step: int
    released: tuple[BatchLease, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts of everything, read in one go. `outstanding` = offered + leased but not trained batches.

    `held_groups` and `held_bytes` count what is admitted and neither trained nor dropped: groups, and the bytes that
    their samples may need at the worst (`Limits.sample_bytes` each, as it was when they were admitted).
    """

    ledger: Ledger
    samples: Mapping[SampleState, int]
    dropped: Mapping[DropReason, int]
    offered: int
    outstanding: int
    leased_steps: tuple[int, ...]
    trained_step: int
    durable_step: int
    service_epoch: int
    trainer_epoch: int
    active_version: int
    newest_version: int
    cursor: str
    counters: Mapping[str, int]
    held_groups: int = 0
    held_bytes: int = 0
    pool: PoolLedger = field(default_factory=PoolLedger)


@dataclass(frozen=True, slots=True)
class Recount:
    """What `verify` found by counting the raw records, against what the ledger says."""

    stored: Ledger
    counted: Ledger
    faults: tuple[str, ...] = field(default=())


class ContinuationBuffer(Protocol):
    """One run's buffer. Raises `UnavailableError` when the store doesn't answer and patience, if any, has run out."""

    @property
    def waiting_since(self) -> float | None:
        """Since when calls wait for the store, of this object and of its views, in seconds since the epoch; or None."""
        ...

    def impatient(self) -> "ContinuationBuffer":
        """A view with the same epochs that doesn't wait for a store that doesn't answer. Closing it does nothing."""
        ...

    # Owners

    async def claim_service(
        self, service_id: str, identity: Mapping[str, str] | None = None, epochs: EpochKeeper | None = None
    ) -> int:
        """Become the run's service: raise the service epoch, fence every older one, return the new epoch.

        RUNNING samples of older epochs become PARKED (QUEUED if they have no token). Every later call of this object
        carries the epoch. `identity`: what must not change in a run; the buffer keeps what it has not yet. `epochs`:
        new epochs begin above those that it knows, and it is told of each before it is returned.

        Raises SettingsError, with nothing changed, if the buffer's run has another identity.
        """
        ...

    async def open_trainer(self, durable_step: int) -> OpenedTrainer:
        """Start a trainer session: raise the trainer epoch and acknowledge the steps up to `durable_step`.

        Leased steps after it are no longer trained (they will be replayed) and pass to the new epoch. Raises
        ConflictError if `durable_step` is below the last acknowledged step.
        """
        ...

    # Generation

    async def admit(self, groups: Sequence[NewGroup], version: int, cursor: CursorMove) -> list[Group]:
        """Admit groups (OPEN, their samples QUEUED) and move the data cursor, all in one transaction.

        Pooled samples of a group's prompt go on as its first ones, PARKED (or FINISHED, to be scored), with all their
        tokens: at most `num_samples`, oldest version first, then the longest.

        Raises BufferFullError, at once and with nothing admitted, if they would pass the buffer's `Limits` or the
        store has no memory left.
        """
        ...

    async def start(self, sample_ids: Sequence[str], worker: str, lease_s: float) -> list[SampleLease]:
        """QUEUED or PARKED → RUNNING, leased to `worker`; counts a resume if the sample was PARKED."""
        ...

    async def renew(self, leases: Sequence[SampleLease], lease_s: float) -> list[SampleLease]:
        """Renew the leases of running samples, expired or not; returns those that were lost."""
        ...

    async def park_expired(self, limit: int) -> list[str]:
        """RUNNING → PARKED (QUEUED without a token) for at most `limit` samples whose lease expired.

        By the store's clock; counted as `leases_expired`, and in the sample as `num_expiries`. What the owner sends
        afterwards is refused. Returns the ids.
        """
        ...

    async def append(self, lease: SampleLease, piece: Segment) -> None:
        """Append new tokens of a running sample. `piece.start` must be the stored length (LengthError)."""
        ...

    async def park(self, lease: SampleLease, piece: Segment | None) -> None:
        """RUNNING → PARKED with its last tokens (back to QUEUED if it has none at all).

        A sample that was POOLED while it ran still takes the last tokens of whoever ran it, and stays POOLED; so do
        `append` and `finish`.
        """
        ...

    async def finish(self, lease: SampleLease, piece: Segment | None, reason: FinishReason) -> None:
        """RUNNING → FINISHED with its last tokens."""
        ...

    async def record_failure(self, lease: SampleLease, error: str, max_failures: int) -> GroupState | None:
        """A running sample failed in the engine: PARKED (or QUEUED) again, or FAILED at the `max_failures`-th time.

        Returns the group's state if the sample is now FAILED, else None.
        """
        ...

    async def score(self, sample_id: str, reward: Reward, min_scored: int) -> GroupState:
        """FINISHED → SCORED; the last terminal or wanted one makes the group READY, or DROPPED with too few scored.

        Raises NotFoundError for a sample that is POOLED: its group was READY without it.
        """
        ...

    async def fail(self, sample_id: str, reason: FailReason, error: str, min_scored: int) -> GroupState:
        """FINISHED or RUNNING → FAILED; the group goes on without it while `min_scored` can be reached."""
        ...

    async def drop(self, group_id: str, reason: DropReason) -> None:
        """OPEN or READY → DROPPED; its samples' records are deleted, its running leases are lost."""
        ...

    async def expire_pooled(self, before_version: int) -> int:
        """Give up pooled samples whose oldest token is older, and those without a token; how many there were."""
        ...

    # Delivery

    async def offer(self, num_groups: int) -> bool:
        """Offer one more batch if enough READY groups are not spoken for; whether it did.

        What is READY beyond it is counted as `surplus_groups_kept`: a group once for each round that it waits out.
        """
        ...

    async def resize_offers(self, num_groups: int) -> int:
        """Batches have this many groups from now on: offers that READY groups don't cover then are taken back.

        For a service that starts with another batch size than the one before. Returns the offers that are left.
        """
        ...

    async def lease_batch(self, step: int, trainer_epoch: int, num_groups: int) -> BatchLease | None:
        """Lease the batch of `step`: the same groups for the same step, for ever; None if none is offered.

        A new lease must be for the step after the last leased one (ConflictError names it); a step that is already
        durable is a ConflictError. Records the version that the trainer holds when the step starts: the newest
        published one plus the steps leased since it was published.
        """
        ...

    async def record_spool(self, step: int, sha256: str) -> None:
        """The encoded batch is on disk: keep its digest and delete the token data of its samples."""
        ...

    async def mark_trained(self, step: int, trainer_epoch: int) -> int:
        """Steps up to `step` are trained: frees capacity; idempotent. Returns the last trained step."""
        ...

    async def ack(self, step: int, trainer_epoch: int) -> list[BatchLease]:
        """Steps up to `step` are durable: their groups become CONSUMED. Returns the leases that this released."""
        ...

    # Policies

    async def publish_policy(self, step: int, path: str, trainer_epoch: int) -> Policy:
        """Give published weights the next version, QUEUED.

        The same epoch and step again gives the same version, QUEUED once more if its install had failed.
        """
        ...

    async def set_policy_state(
        self, version: int, state: PolicyState, error: str | None, install_s: float | None
    ) -> Policy:
        """Move a version on. ACTIVE makes the previously active one SUPERSEDED and sets the active version."""
        ...

    async def policies(self) -> list[Policy]:
        """Every version still known, oldest first. Version 0 is the model as started."""
        ...

    # Reading

    async def snapshot(self) -> Snapshot:
        """Counts of everything."""
        ...

    async def open_samples(self) -> list[SampleBrief]:
        """Samples of OPEN groups that are not terminal: those that wait, in resume order, then RUNNING and FINISHED."""
        ...

    async def open_groups(self) -> list[GroupBrief]:
        """OPEN and READY groups by order of admission."""
        ...

    async def count_longer(self, num_tokens: int) -> int:
        """Samples with more tokens that were not leased yet: those of OPEN and READY groups, and POOLED ones."""
        ...

    async def samples(self, sample_ids: Sequence[str]) -> list[Sample]:
        """Samples with their tokens, in the order asked for. Raises NotFoundError for an unknown id."""
        ...

    async def groups(self, group_ids: Sequence[str]) -> list[Group]:
        """Groups with their samples. Token data is gone once the group's batch is spooled."""
        ...

    async def batch_leases(self) -> list[BatchLease]:
        """Leases that are not durable yet, by step."""
        ...

    async def recount(self) -> Recount:
        """Count everything again from the raw records and compare with the ledger."""
        ...

    # Operator

    async def record_change(self, change: SettingsChange) -> None:
        """Append to the audit record of live settings."""
        ...

    async def changes(self) -> list[SettingsChange]:
        """The audit record, oldest first."""
        ...

    async def close(self) -> None:
        """Release connections; nothing else changes."""
        ...
