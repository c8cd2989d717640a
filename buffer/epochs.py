"""The highest epochs of a run, and who keeps them outside of its buffer."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Epochs:
    """The highest epochs that were given out."""

    service: int = 0
    trainer: int = 0


class EpochKeeper(Protocol):
    """Keeps the highest epochs outside of the buffer, so that one that was emptied gives none of them out again."""

    def read(self) -> Epochs:
        """Those that are known."""
        ...

    def raise_to(self, epochs: Epochs) -> None:
        """Keep each that is higher than what is known; what is lower changes nothing. Called from any thread.

        Raises nothing: what Redis has done already must not look refused.
        """
        ...
