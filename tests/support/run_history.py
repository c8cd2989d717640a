"""A history as its checkers need it: sorted by kind, and what was looked at counted beside what was wrong."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.batch import Batch, decode_batch
from tests.support.journal import Record


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise, and what broke it."""

    promise: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.what}"


class RunHistory:
    """A history, sorted by what is asked of it. `seen` counts what a promise was judged by."""

    def __init__(self, records: Sequence[Record], batches: Mapping[str, bytes]) -> None:
        self.by_kind: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.by_kind[record["kind"]].append(record)
        self.config = self.by_kind["config"][0]
        self.final = self.by_kind["final"][0] if self.by_kind["final"] else None
        self.calls = self.by_kind["call"]
        self.batches = {sha: decode_batch(data) for sha, data in batches.items()}
        self.seen: Counter[tuple[str, str]] = Counter()
        self.origins = self._origins()
        ended = self.by_kind["ended"]
        self._redis_ends = sorted(r["at"] for r in ended if r["process"] == "redis")
        self.service_ends = {r["child"]: r for r in ended if r["process"] == "service"}

    def _origins(self) -> dict[str, str]:
        """Sample -> the id under which a group of an earlier epoch started it."""
        found: dict[str, str] = dict((self.final or {}).get("continued", {}))
        for batch in self.batches.values():
            found |= {s.sample_id: s.continued_from for s in batch.header.samples if s.continued_from}
        return found

    def saw(self, promise: str, what: str, count: int = 1) -> None:
        """Something that a promise was judged by; a promise without any was not observed."""
        if count:
            self.seen[promise, what] += count

    def saw_at_most(self, promise: str, what: str, value: int) -> None:
        """The largest of some values that a promise was judged by."""
        if value:
            self.seen[promise, what] = max(value, self.seen[promise, what])

    def answered(self, op: str) -> Iterator[Record]:
        """Calls of trainers that were carried out."""
        return (call for call in self.calls if call["op"] == op and call["outcome"] == "ok")

    def acknowledged(self, *ops: str) -> list[Record]:
        """Transitions of the buffer that a service was told of, in the order in which they were answered."""
        return [r for r in self.by_kind["buffer"] if r["op"] in ops and r["outcome"] == "ok"]

    def served(self) -> dict[int, list[str]]:
        """Digests by step, as often as they were served."""
        steps: dict[int, list[str]] = defaultdict(list)
        for call in self.answered("lease"):
            steps[call["step"]].append(call["sha256"])
        return steps

    def first_served(self) -> dict[int, Batch]:
        """The batch of each step."""
        return {step: self.batches[digests[0]] for step, digests in self.served().items()}

    def redis_ended_between(self, after: float, before: float) -> bool:
        """Whether Redis was found dead in that time."""
        return bisect_right(self._redis_ends, before) > bisect_right(self._redis_ends, after)


def final_samples(run: RunHistory) -> Mapping[str, Sequence[Any]]:
    """Samples that are in the buffer at the end: their segments as [start, version, tokens, log-probs]."""
    return (run.final or {"samples": {}})["samples"]


def numbered(count: int) -> Iterable[str]:
    """Ids of the first groups."""
    return (f"g{number:09d}" for number in range(count))
