"""The trainer's metrics by step, as it reports them.

Always true: steps grow; a trainer that goes back takes the steps after its own with it, an evaluation that ends late
joins its own step and takes none; beyond MAX_STEPS every other of the older steps is left out, the newest half stays
whole; of names beyond MAX_SERIES none is taken.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from protocol.watching import Steps

MAX_STEPS = 2_000  # more than a chart has pixels
MAX_SERIES = 500  # twice what a trainer with every metric on reports
EVALUATION = "eval/"  # what all metrics of an evaluation begin with


class StepHistory:
    """Bounded: at most MAX_STEPS x MAX_SERIES numbers."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._values: list[dict[str, float]] = []
        self._names: dict[str, str] = {}
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last_step(self) -> int:
        """The newest step; 0 before the first."""
        return self._steps[-1] if self._steps else 0

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, added to what is there of it. Any but an evaluation's say that it is the newest one."""
        if not all(name.startswith(EVALUATION) for name in metrics):
            self.go_back_to(step)
        place = bisect_left(self._steps, step)
        if place == len(self._steps) or self._steps[place] != step:
            self._steps.insert(place, step)
            self._values.insert(place, {})
        room = MAX_SERIES - len(self._names)
        for name in [n for n in metrics if n not in self._names][:room]:
            self._names[name] = name
        # One string a name, however often it is sent: a step then costs its numbers.
        added = {self._names[n]: v for n, v in metrics.items() if n in self._names}
        self._values[place] = self._values[place] | added
        if len(self._steps) > MAX_STEPS:
            half = MAX_STEPS // 2
            self._steps = self._steps[:-half:2] + self._steps[-half:]
            self._values = self._values[:-half:2] + self._values[-half:]
        self.num_changes += 1

    def go_back_to(self, step: int) -> None:
        """The trainer goes on from `step`: later ones are of a history that was given up."""
        kept = bisect_right(self._steps, step)
        if kept < len(self._steps):
            del self._steps[kept:], self._values[kept:]
            self.num_changes += 1

    def last(self, count: int) -> list[Mapping[str, float]]:
        """Metrics of the last steps, oldest first; each is not to be changed."""
        return list(self._values[-count:])

    def snapshot(self) -> "StepHistory":
        """As it is now, for a thread: rows are replaced and never changed."""
        copy = StepHistory()
        copy._steps, copy._values = list(self._steps), list(self._values)
        return copy

    def picture(self) -> Steps:
        """One value a step for each name."""
        rows = list(self._values)
        names = sorted({name for row in rows for name in row})
        return Steps(steps=list(self._steps), series={name: [row.get(name) for row in rows] for name in names})
