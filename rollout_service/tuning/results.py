"""What is counted in each simulated round and of each trained batch."""

from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True)
class RoundResult:
    """One round, from its start (or the end of the one before) to the offer of its batch."""

    number: int
    started_s: float
    ended_s: float = 0.0
    idle_slot_s: float = 0.0
    slot_s: float = 0.0
    generated_tokens: int = 0
    dispatched_tokens: int = 0
    num_fresh: int = 0
    num_resumes: int = 0
    reprefilled_tokens: int = 0
    num_preemptions: int = 0
    surplus_groups: int = 0
    parked_groups: int = 0
    parked_samples: int = 0
    parked_tokens: int = 0
    tail_saved_s: float = 0.0

    def account(self, took_s: float, running: int, slots: int) -> None:
        """Time passed with so many slots in use."""
        self.slot_s += took_s * slots
        self.idle_slot_s += took_s * (slots - running)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One trained batch: its tokens by lag, and for how many rounds its groups were in flight."""

    step: int
    trained_s: float
    tokens_by_lag: Counter[int]
    mean_start_age: float
    lengths: list[int]
    mixed_samples: int
    num_samples: int
