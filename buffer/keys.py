"""Names of keys and ids.

Always true: every key of a run carries the hash tag `{namespace:run}`, so that a run lies in one slot of a cluster; ids
are numbered in order of admission and padded, so that the order of their bytes is the order of admission.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from buffer.interface import NewGroup
from protocol.errors import NotFoundError, SettingsError
from protocol.samples import MAX_GROUP_SAMPLES as MAX_GROUP_SAMPLES
from protocol.samples import Group, Sample
from protocol.states import GroupState, SampleState

# The order is the one in lua/prelude/1_keys.lua; a test compares them.
RUN_KEYS = (
    "meta",
    "ledger",
    "counters",
    "dropped",
    "groups",
    "ready",
    "leases",
    "spools",
    "tombstones",
    "tombstone_order",
    "policies",
    "changes",
    "sizes",
    "repeats",
    "repeat_order",
    "pools",
    *(state.value for state in SampleState),
)
KINDS = ("hash", "list", "zset")  # Redis types that a run's keys have
LIST_KEYS = frozenset({"tombstone_order", "changes", "repeat_order"})
ZSET_KEYS = frozenset({"ready", *(state.value for state in SampleState)})
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")  # neither braces nor what SCAN reads as a pattern
SAMPLE_ID_PATTERN = re.compile(r"(g\d{9,})\.(\d{3})")


def group_id_of(seq: int) -> str:
    """The id of the group that was admitted as number `seq`."""
    return f"g{seq:09d}"


def sample_id_of(group_id: str, index: int) -> str:
    """The id of a group's sample."""
    return f"{group_id}.{index:03d}"


def expected_kind(name: str) -> str | None:
    """The Redis type of a run's key, given without the run's prefix; None for a key that no run has."""
    if name in LIST_KEYS or name.startswith("t:"):
        return "list"
    if name in ZSET_KEYS:
        return "zset"
    return "hash" if name in RUN_KEYS or name.startswith(("g:", "s:")) else None


def split_sample_id(sample_id: str) -> tuple[str, int]:
    """Group id and index of a sample id; raises NotFoundError if it can't be one."""
    match = SAMPLE_ID_PATTERN.fullmatch(sample_id)
    if match is None:
        raise NotFoundError(f"there is no sample {sample_id}: list the open samples again")
    return match[1], int(match[2])


def new_group(seq: int, group: NewGroup, version: int) -> Group:
    """A group as it is right after its admission."""
    group_id = group_id_of(seq)
    ids = [sample_id_of(group_id, i) for i in range(group.num_samples)]
    samples = tuple(Sample(i, group_id, n, SampleState.QUEUED) for n, i in enumerate(ids))
    return Group(group_id, seq, group.prompt, GroupState.OPEN, version, samples)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one run."""

    namespace: str
    run: str

    def __post_init__(self) -> None:
        """Refuse names that would break the hash tag or a SCAN."""
        for name in (self.namespace, self.run):
            if not NAME_PATTERN.fullmatch(name):
                raise SettingsError(f"{name!r} can't name a Redis key: use letters, digits, '.', '_', ':' and '-'")

    @property
    def prefix(self) -> str:
        """What all keys of the run start with."""
        return f"{{{self.namespace}:{self.run}}}:"

    def of_run(self) -> list[str]:
        """The keys that every script is given first."""
        return [self.prefix + name for name in RUN_KEYS]

    def named(self, name: str) -> str:
        """One of RUN_KEYS."""
        return self.prefix + RUN_KEYS[RUN_KEYS.index(name)]

    def group(self, group_id: str) -> str:
        """HASH of a group: seq, prompt, counts of its samples."""
        return f"{self.prefix}g:{group_id}"

    def sample(self, sample_id: str) -> str:
        """HASH of a sample, without its tokens."""
        return f"{self.prefix}s:{sample_id}"

    def tokens(self, sample_id: str) -> str:
        """LIST of a sample's pieces (`buffer.codec`)."""
        return f"{self.prefix}t:{sample_id}"

    def of_sample(self, sample_id: str) -> list[str]:
        """Sample, tokens and group: the keys of a transition of one sample."""
        return [self.sample(sample_id), self.tokens(sample_id), self.group(split_sample_id(sample_id)[0])]

    def of_group(self, group_id: str, num_samples: int) -> list[str]:
        """Group, then sample and tokens of each of its samples: the keys of a transition of a group."""
        ids = [sample_id_of(group_id, index) for index in range(num_samples)]
        return [self.group(group_id), *(key for i in ids for key in (self.sample(i), self.tokens(i)))]

    def to_continue(self, sample_id: str, continued_as: str) -> list[str]:
        """A pooled sample and its tokens, then the group, sample and tokens that it goes on as."""
        group_id, _ = split_sample_id(continued_as)
        ids = (self.group(group_id), self.sample(continued_as), self.tokens(continued_as))
        return [self.sample(sample_id), self.tokens(sample_id), *ids]

    def of_groups(self, sizes: Sequence[tuple[str, int]]) -> list[str]:
        """`of_group` for several groups, given as (id, number of samples)."""
        return [key for group_id, num_samples in sizes for key in self.of_group(group_id, num_samples)]
