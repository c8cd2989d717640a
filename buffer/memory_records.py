"""Samples and groups as `MemoryStore` keeps them, and the pool of those that belong to no group."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from buffer.pool import UNTOUCHED, PooledBrief
from protocol.errors import LengthError
from protocol.messages import PoolLedger
from protocol.samples import Prompt, Reward, Segment
from protocol.states import (
    ExpiryReason,
    FailReason,
    FinishReason,
    GroupState,
    SampleState,
    check_sample_transition,
)


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
    prompt_id: str = ""
    continued_from: str | None = None

    @property
    def takes_last(self) -> bool:
        """POOLED, and still open to the last tokens of whoever ran it when its group was READY."""
        return self.state is SampleState.POOLED and self.finish_reason is None

    @property
    def brief(self) -> PooledBrief:
        """As a pooled sample."""
        return PooledBrief(self.sample_id, self.num_tokens, self.oldest)

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
    wanted: int | None = None
    oldest: int | None = None

    def age(self, version: int | None) -> None:
        """It has a token of this version."""
        if version is not None:
            self.oldest = version if self.oldest is None else min(self.oldest, version)

    def count(self, state: SampleState) -> int:
        """Samples in a state."""
        return sum(s.state is state for s in self.samples)

    @property
    def batch_order(self) -> tuple[int, int]:
        """Sort key of READY groups."""
        return (self.admitted_version if self.oldest is None else self.oldest, self.ready_seq)


@dataclass
class MemoryPool:
    """Pooled samples by id, and their line."""

    samples: dict[str, SampleRecord] = field(default_factory=dict[str, SampleRecord])
    entered: int = 0
    continued: int = 0
    expired: Counter[ExpiryReason] = field(default_factory=Counter[ExpiryReason])

    @property
    def ledger(self) -> PoolLedger:
        """The line as it stands."""
        return PoolLedger(
            entered=self.entered,
            pooled=len(self.samples),
            continued=self.continued,
            expired={reason: self.expired[reason] for reason in ExpiryReason},
            num_bytes=sum(sample.brief.num_bytes for sample in self.samples.values()),
        )

    def ordered(self) -> list[SampleRecord]:
        """Oldest version first; those without a token come before."""
        return sorted(self.samples.values(), key=lambda s: (UNTOUCHED if s.oldest is None else s.oldest, s.sample_id))

    def enter(self, sample: SampleRecord, prompt_id: str) -> None:
        """A sample left its group."""
        sample.prompt_id = prompt_id
        self.samples[sample.sample_id] = sample
        self.entered += 1

    def of_prompt(self, prompt_id: str) -> list[PooledBrief]:
        """Samples of one prompt."""
        return [s.brief for s in self.samples.values() if s.prompt_id == prompt_id]

    def take(self, sample_id: str) -> SampleRecord:
        """A sample goes on."""
        self.continued += 1
        return self.samples.pop(sample_id)

    def expire(self, sample_ids: Iterable[str], reason: ExpiryReason) -> None:
        """Samples are given up; those without a token as EMPTY."""
        for sample_id in sample_ids:
            sample = self.samples.pop(sample_id)
            self.expired[reason if sample.num_tokens else ExpiryReason.EMPTY] += 1
