"""What the service asks of rewards.

Always true: a score is a finite number or the call raises `ScoringError` with a reason; there is no silent zero.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from protocol.errors import RewardError
from protocol.samples import Json, Reward
from protocol.states import FailReason, FinishReason


@dataclass(frozen=True, slots=True)
class ScoringTask:
    """A finished response and what its prompt says about the right answer; picklable by design of plain data."""

    sample_id: str
    data_source: str
    prompt: str
    response: str
    ground_truth: Json
    extra: dict[str, Any]
    finish_reason: FinishReason
    num_tokens: int


class ScoringError(RewardError):
    """A sample could not be scored; it is FAILED with `reason`."""

    def __init__(self, reason: FailReason, message: str) -> None:
        """`message` is one sentence for people."""
        super().__init__(message)
        self.reason = reason


class Scorer(Protocol):
    """Scores one sample at a time; many calls may wait at once."""

    async def start(self) -> None:
        """Start the worker processes; raises DataError if the scorer can't be loaded."""
        ...

    async def score(self, task: ScoringTask) -> Reward:
        """The reward of one sample. Raises ScoringError."""
        ...

    async def close(self) -> None:
        """End the worker processes."""
        ...
