"""Names of spans, as both processes give them and HTTP headers carry them (W3C Trace Context)."""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TRACEPARENT = "traceparent"
PARENT_PATTERN = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")

Value = str | int | float | bool | Sequence[str]


class SpanIds(NamedTuple):
    """Names a span."""

    trace_id: int
    span_id: int

    @property
    def traceparent(self) -> str:
        """The same for a header, as W3C Trace Context writes it; sampled."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


class SpanEvent(NamedTuple):
    """Something that happened within a span, at a time in seconds since the epoch."""

    name: str
    at: float
    attributes: Mapping[str, Value]


def step_ids(run: str, trainer_epoch: int, step: int) -> SpanIds:
    """The ids of the span of one step of the trainer."""
    digest = hashlib.blake2b(f"{run}\0{trainer_epoch}\0{step}".encode(), digest_size=24).digest()
    return SpanIds(int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:], "big") or 1)


def new_ids(trace_id: int | None = None) -> SpanIds:
    """Ids of a span that is yet to be told of, in a trace of its own unless one is given."""
    return SpanIds(trace_id or secrets.randbits(128) or 1, secrets.randbits(64) or 1)


def parent_of(header: str | None) -> SpanIds | None:
    """The ids in a `traceparent` header; None for none, or one that is not of the standard."""
    found = PARENT_PATTERN.fullmatch(header.strip()) if header else None
    return SpanIds(int(found[1], 16), int(found[2], 16)) if found else None
