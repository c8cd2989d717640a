"""How long samples that were set aside have waited.

Always true: entries are in the order in which they were set aside, so the first is the oldest; each operation costs
O(1), since tens of thousands may wait.
"""

from collections.abc import Iterable


class WaitingSamples:
    """Samples that were set aside and not started since, by a clock that the caller reads."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def restore(self, aside_s: Iterable[tuple[str, float]], now_s: float) -> None:
        """Samples that have waited for so long already, in any order."""
        for sample_id, waited_s in sorted(aside_s, key=lambda entry: -entry[1]):
            self._since[sample_id] = now_s - waited_s

    def add(self, sample_id: str, now_s: float) -> None:
        """It was set aside now."""
        self._since.pop(sample_id, None)
        self._since[sample_id] = now_s

    def discard(self, sample_ids: Iterable[str]) -> None:
        """They run, or are gone."""
        for sample_id in sample_ids:
            self._since.pop(sample_id, None)

    def oldest_s(self, now_s: float) -> float:
        """Age of the oldest; 0 if nothing waits."""
        first = next(iter(self._since.values()), now_s)
        return now_s - first
