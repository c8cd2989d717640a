"""The endless sequence of training prompts.

Always true: the order of an epoch is a function of the prompts' ids, the seed and the epoch alone. It sorts by a
digest of the three, so neither a library's random stream nor the order of loading can change it between restarts. A
cursor always points at the next prompt, at the end of an epoch to the first one of the next.
"""

import hashlib
import re
from collections.abc import Sequence

from protocol.errors import DataError
from protocol.samples import Prompt

CURSOR = re.compile(r"(0|[1-9][0-9]{0,17}):(0|[1-9][0-9]{0,17})", re.ASCII)
NUM_CACHED_EPOCHS = 2  # the running one, and its neighbour while a batch crosses over


class ShuffledOrder:
    """Implements `PromptOrder`: each epoch in its own order, or all in the order of loading without `shuffle`."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        if not prompts:
            raise DataError("there are no training prompts to put into an order; name data with at least one")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._epochs: dict[int, list[int]] = {}

    def take(self, cursor: str, count: int) -> tuple[list[Prompt], str]:
        """The `count` prompts from `cursor` (`EPOCH:POSITION`) on, and the cursor after them. Raises DataError."""
        epoch, position = self._parse(cursor)
        taken: list[Prompt] = []
        while len(taken) < count:
            order = self._order(epoch)
            piece = order[position : position + count - len(taken)]
            taken += [self._prompts[i] for i in piece]
            position += len(piece)
            if position == len(order):
                epoch, position = epoch + 1, 0
        return taken, f"{epoch}:{position}"

    def _parse(self, cursor: str) -> tuple[int, int]:
        match = CURSOR.fullmatch(cursor)
        if match is None:
            raise DataError(f"data cursor {cursor!r} is not EPOCH:POSITION; start a new run with another run.name")
        epoch, position = int(match[1]), int(match[2])
        if position >= len(self._prompts):
            raise DataError(
                f"data cursor {cursor} is beyond the {len(self._prompts)} prompts there are; bring back the data this "
                "run was started with, or start a new run with another run.name"
            )
        return epoch, position

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._epochs:
            while len(self._epochs) >= NUM_CACHED_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = self._permutation(epoch)
        return self._epochs[epoch]

    def _permutation(self, epoch: int) -> list[int]:
        indices = list(range(len(self._prompts)))
        if not self._shuffle:
            return indices
        salt = f"{self._seed}/{epoch}/"
        return sorted(indices, key=lambda i: (_digest(salt + self._prompts[i].prompt_id), self._prompts[i].prompt_id))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
