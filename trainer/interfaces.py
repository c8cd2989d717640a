"""What the updater needs of the models beside the policy."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from trainer.packing import MicroBatch


class Reference(Protocol):
    """The reference policy of the KL terms."""

    def logprobs(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs [R] of the response tokens of each micro-batch."""
        ...


class ValueModel(Protocol):
    """The critic of `gae`."""

    def values(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Value [R] of the state before each response token of each micro-batch."""
        ...

    def update(
        self,
        micros: Sequence[MicroBatch],
        returns: Sequence[Tensor],
        old_values: Sequence[Tensor],
        num_tokens: int,
        step: int,
    ) -> dict[str, float]:
        """One optimizer step; metrics over all ranks."""
        ...
