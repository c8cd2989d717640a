"""Checks of arguments that both buffers make before they look at anything stored."""

from collections.abc import Sequence

from buffer.interface import Limits, NewGroup
from buffer.keys import MAX_GROUP_SAMPLES
from protocol.errors import BufferFullError, ConflictError, RequestError


def check_sizes(groups: Sequence[NewGroup]) -> None:
    """Refuse groups that can't be numbered."""
    for group in groups:
        if not 1 <= group.num_samples <= MAX_GROUP_SAMPLES:
            raise RequestError(f"a group of {group.num_samples} samples: give 1 to {MAX_GROUP_SAMPLES}")
        if group.wanted is not None and not 1 <= group.wanted <= group.num_samples:
            raise RequestError(f"a group that wants {group.wanted} of {group.num_samples} samples: give 1 to that many")


def check_distinct(sample_ids: Sequence[str]) -> None:
    """Refuse to start a sample twice in one call."""
    if len(set(sample_ids)) != len(sample_ids):
        raise ConflictError("a sample is named twice in one start: name each once")


def check_batch_size(num_groups: int) -> None:
    """Refuse a batch of no groups."""
    if num_groups < 1:
        raise RequestError(f"a batch of {num_groups} groups: give at least 1")


def lease_ms(lease_s: float) -> int:
    """A lease in the milliseconds that it is kept in."""
    return round(lease_s * 1000)


def check_room(groups: Sequence[NewGroup], limits: Limits, held_groups: int, held_bytes: int) -> None:
    """Refuse an admission that would hold more than the limits."""
    num_bytes = sum(group.num_samples for group in groups) * limits.sample_bytes
    if groups and held_groups + len(groups) > limits.max_groups:
        raise BufferFullError(
            f"{held_groups} groups are not trained yet, {len(groups)} more would pass "
            f"buffer.max_groups = {limits.max_groups}: train a step first, or raise it"
        )
    if limits.max_bytes and num_bytes and held_bytes + num_bytes > limits.max_bytes:
        raise BufferFullError(
            f"{held_bytes} bytes are held by groups that are not trained yet, {num_bytes} more would pass "
            f"buffer.max_bytes = {limits.max_bytes}: train a step first, or raise it"
        )
