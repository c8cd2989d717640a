"""The endless sequence of training prompts.

Always true: what is served is a function of the prompts' ids and sources, the seed, the weights and the cursor alone.
It is sorted by digests of them, so neither a library's random stream nor the order of loading can change it between
restarts. A cursor always points at the next prompt, at the end of an epoch to the first one of the next; an epoch
serves as many prompts as there are: each once without weights, each data source by its share with them.
"""

import hashlib
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from operator import itemgetter

from protocol.errors import DataError
from protocol.samples import Prompt
from protocol.settings import RunSettings
from rollout_service.prompts.apportion import apportion
from rollout_service.prompts.interface import PromptOrder

CURSOR = re.compile(r"(0|[1-9][0-9]{0,17}):(0|[1-9][0-9]{0,17})", re.ASCII)
NUM_CACHED_EPOCHS = 2  # the running one, and its neighbour while a batch crosses over
JITTER_BITS = 64  # of a place within its part of the epoch: two that meet are one in 2^64
JITTERS_A_DIGEST = 8  # a digest of 64 bytes costs as much as one of 8


def build_order(prompts: Sequence[Prompt], settings: RunSettings) -> PromptOrder:
    """The order that the settings ask for. Raises DataError for weights that don't fit the prompts."""
    data, seed = settings.data, settings.run.seed
    if data.source_weights:
        return MixedOrder(prompts, seed, data.shuffle, data.source_weights)
    return ShuffledOrder(prompts, seed, data.shuffle)


class _EpochOrder(ABC):
    """Implements `PromptOrder` over what `_plan` gives for an epoch."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        if not prompts:
            raise DataError("there are no training prompts to put into an order; name data with at least one")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._epochs: dict[int, list[int]] = {}

    @abstractmethod
    def _plan(self, epoch: int) -> list[int]:
        """Indices of the prompts of an epoch, as many as there are prompts, in the order in which they are served."""

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
            self._epochs[epoch] = self._plan(epoch)
        return self._epochs[epoch]

    def _shuffled(self, indices: list[int], salt: str) -> list[int]:
        if not self._shuffle:
            return indices
        return sorted(indices, key=lambda i: (_digest(salt + self._prompts[i].prompt_id), self._prompts[i].prompt_id))


class ShuffledOrder(_EpochOrder):
    """Each epoch serves every prompt once, in its own order, or in the order of loading without `shuffle`."""

    def _plan(self, epoch: int) -> list[int]:
        return self._shuffled(list(range(len(self._prompts))), f"{self._seed}/{epoch}/")


class MixedOrder(_EpochOrder):
    """Each epoch serves every data source by its weight, spread evenly over the epoch.

    A source of n prompts that gets q of an epoch's places goes through its prompts in passes, each pass in an order of
    its own: in epoch e it serves numbers e·q to (e+1)·q − 1 of that endless sequence. So no prompt comes again before
    all others of its source have come. Its k-th place lies at (k + u) / q of the epoch, u in [0, 1) from a digest: it
    has exactly one place in each q-th of the epoch, so that batches hold about its share and not a lucky draw of it.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool, weights: Mapping[str, float]) -> None:
        super().__init__(prompts, seed, shuffle)
        check_weights(prompts, weights)
        self._sources: dict[str, list[int]] = {name: [] for name in sorted(weights)}
        for i, prompt in enumerate(prompts):
            self._sources[prompt.data_source].append(i)
        self.quotas = source_quotas(weights, len(self._prompts))

    def _plan(self, epoch: int) -> list[int]:
        placed: list[tuple[int, int]] = []
        for name, quota in self.quotas.items():
            drawn = self._drawn(name, epoch * quota, quota)
            placed += zip(self._places(epoch, name, quota), drawn, strict=True)
        placed.sort(key=itemgetter(0))  # stable: places that meet keep the order of names
        return [i for _, i in placed]

    def _drawn(self, name: str, start: int, count: int) -> list[int]:
        """Numbers start … start + count − 1 of the source's endless sequence."""
        members = self._sources[name]
        drawn: list[int] = []
        number, offset = divmod(start, len(members))
        while len(drawn) < count:
            one_pass = self._shuffled(members, f"{self._seed}/pass {number}/")
            drawn += one_pass[offset : offset + count - len(drawn)]
            number, offset = number + 1, 0
        return drawn

    def _places(self, epoch: int, name: str, quota: int) -> list[int]:
        """Where the places of a source lie in the epoch, in units far below the distance of two places."""
        middle = [1 << (JITTER_BITS - 1)] * JITTERS_A_DIGEST
        places: list[int] = []
        for start in range(0, quota, JITTERS_A_DIGEST):
            jitters = _jitters(f"{self._seed}/{epoch}/{name}/{start}") if self._shuffle else middle
            piece = zip(range(start, min(start + JITTERS_A_DIGEST, quota)), jitters, strict=False)
            places += [(((k << JITTER_BITS) + jitter) << JITTER_BITS) // quota for k, jitter in piece]
        return places


def source_quotas(weights: Mapping[str, float], count: int) -> dict[str, int]:
    """Places of an epoch of `count` prompts by data source, those without a place left out."""
    names = sorted(weights)
    quotas = apportion([weights[name] for name in names], count, at_least_one=True)
    return {name: quota for name, quota in zip(names, quotas, strict=True) if quota}


def check_weights(prompts: Sequence[Prompt], weights: Mapping[str, float]) -> None:
    """Raise DataError unless the weights name exactly the data sources of the prompts."""
    sources = sorted({prompt.data_source for prompt in prompts})
    unknown = sorted(weights.keys() - set(sources))
    missing = [name for name in sources if name not in weights]
    if unknown:
        raise DataError(
            f"data.source_weights names {unknown[0]!r}, but no training prompt has that data_source (there are "
            f"{_some(sources)}); correct the name or leave it out"
        )
    if missing:
        raise DataError(f"data.source_weights has no weight for {_some(missing)}; give it one (0 leaves it out)")


def _some(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _jitters(text: str) -> Sequence[int]:
    """JITTERS_A_DIGEST numbers of JITTER_BITS each."""
    return struct.unpack(f">{JITTERS_A_DIGEST}Q", hashlib.blake2b(text.encode(), digest_size=64).digest())
