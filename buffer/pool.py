"""Which pooled samples of a prompt go on when it comes up again, for both buffers."""

from collections.abc import Iterable
from dataclasses import dataclass

from buffer.codec import BYTES_PER_TOKEN

POOLED_BYTES = 512  # of a record besides its tokens, about; as in lua/prelude/5_pool.lua
EXPIRED_A_CALL = 500  # keeps one script under some milliseconds
UNTOUCHED = -1  # the version that a pooled sample without a token is ordered by


@dataclass(frozen=True, slots=True)
class PooledBrief:
    """A pooled sample without its tokens."""

    sample_id: str
    num_tokens: int
    oldest_version: int | None

    @property
    def num_bytes(self) -> int:
        """What it counts for in `buffer.max_pool_bytes`."""
        return POOLED_BYTES + BYTES_PER_TOKEN * self.num_tokens


def choose(pooled: Iterable[PooledBrief], num_samples: int, oldest_version: int | None) -> tuple[list[str], list[str]]:
    """Ids of those that go on in a group of `num_samples`, and of those that are too old for it.

    The oldest go first, since they expire first; of equally old ones the longest, since a race that the fastest win is
    lost by them again and again. What is left over stays pooled, and so does a sample that has no token yet.
    """
    limit = UNTOUCHED if oldest_version is None else oldest_version
    begun = [(p.oldest_version, -p.num_tokens, p.sample_id) for p in pooled if p.oldest_version is not None]
    fit = sorted(entry for entry in begun if entry[0] >= limit)
    return [entry[2] for entry in fit[:num_samples]], [entry[2] for entry in begun if entry[0] < limit]


def beyond(pooled: Iterable[PooledBrief], num_bytes: int, max_bytes: int) -> list[str]:
    """Ids of the first of `pooled` that must go so that `num_bytes` are at most `max_bytes`."""
    gone: list[str] = []
    for brief in pooled:
        if num_bytes <= max_bytes:
            break
        gone.append(brief.sample_id)
        num_bytes -= brief.num_bytes
    return gone
