"""What the service asks of prompts.

Always true: the order is a pure function of (prompts, seed, weights, cursor), so the same cursor gives the same prompts
after any restart; in each epoch every prompt is served exactly once, or with weights every data source by its share.
"""

from dataclasses import dataclass
from typing import Protocol

from protocol.samples import Prompt

START_CURSOR = "0:0"  # epoch 0, position 0


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of a run; `num_filtered` were longer than `max_prompt_length` and left out, `num_truncated` were cut."""

    train: tuple[Prompt, ...]
    validation: tuple[Prompt, ...]
    num_filtered: int
    num_truncated: int = 0


class PromptOrder(Protocol):
    """The endless sequence of training prompts."""

    def take(self, cursor: str, count: int) -> tuple[list[Prompt], str]:
        """The `count` prompts from `cursor` (`EPOCH:POSITION`) on, and the cursor after them. Raises DataError."""
        ...
