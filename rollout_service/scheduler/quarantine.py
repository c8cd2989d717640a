"""Which prompt kills engines: found by halving those that ran when one died, condemned only when it ran alone.

Always true:
- nothing is held back after a first death: engines also die of other things;
- what ran in two deaths is suspected; half of the suspects run again while the others are held, and a death among
  those that run halves them again, so that about log2(suspects) deaths find the prompt, whatever runs beside it;
- a group is condemned only by a death in which it was alone on its engine and which is at least its `max_deaths`-th:
  nobody is condemned for what a neighbour did;
- who ends an attempt in any other way is a suspect no more, so whoever is held runs again.

It decides and never acts; groups are named by their ids, and one that is closed is forgotten.
"""

from collections import Counter
from collections.abc import Collection, Iterable


class Quarantine:
    """Suspects, those of them that run, and the condemned."""

    def __init__(self, max_deaths: int) -> None:
        self._max_deaths = max_deaths
        self._deaths: Counter[str] = Counter()
        self._probing: set[str] = set()
        self._held: list[list[str]] = []  # a stack of the halves that wait
        self.alone: str | None = None
        self.condemned: set[str] = set()

    @property
    def held(self) -> frozenset[str]:
        """Groups none of whose samples may start now; with `alone` all others are held too."""
        return frozenset(group for half in self._held for group in half) | self.condemned

    def died(self, running: Collection[str]) -> None:
        """An engine died while these groups, and no others, ran on it."""
        self._deaths.update(set(running))
        there = self._probing.intersection(running)
        if len(set(running)) == 1:
            self._alone_died(next(iter(running)))
        elif there:
            self._probing.clear()
            self._narrow(there, proven=True)
        elif not self._probing:
            self._narrow([group for group in set(running) if self._deaths[group] > 1], proven=False)

    def survived(self, group_id: str) -> None:
        """A sample of the group ended an attempt, and its engine lives."""
        self._acquit(group_id)

    def closed(self, group_id: str) -> None:
        """The group is READY or DROPPED."""
        self._deaths.pop(group_id, None)
        self.condemned.discard(group_id)
        self._acquit(group_id)

    def _alone_died(self, group_id: str) -> None:
        if self._deaths[group_id] >= self._max_deaths:
            self.condemned.add(group_id)
            self._acquit(group_id)
        elif self._deaths[group_id] > 1:
            self._probing = {group_id}
            self.alone = group_id

    def _acquit(self, group_id: str) -> None:
        for half in self._held:
            if group_id in half:
                half.remove(group_id)
        if group_id in self._probing:
            self._probing.remove(group_id)
            self.alone = None
        while not self._probing and self._held:
            self._narrow(self._held.pop(), proven=False)

    def _narrow(self, suspects: Iterable[str], proven: bool) -> None:
        """Let half of the suspects run, first those that saw most deaths; `proven`: one of them did it."""
        ordered = sorted(suspects, key=lambda group: (-self._deaths[group], group))
        half = (len(ordered) + 1) // 2
        self._probing = set(ordered[:half])
        if len(ordered) > half:
            self._held.append(ordered[half:])
        self.alone = ordered[0] if proven and len(ordered) == 1 else None
