"""How far a simulation is: a bar on a terminal, a plain line now and then where stderr is a file or a pipe."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 10.0  # often enough to see that it goes on, and a few hundred lines an hour in a log


class PlainLines:
    """Says how many parts are done, at most every LINE_EVERY_S. `now_s`: a clock."""

    def __init__(self, what: str, total: int, say: Callable[[str], None], now_s: Callable[[], float]) -> None:
        self._what, self._total, self._say, self._now_s = what, total, say, now_s
        self._began_s = self._said_s = now_s()
        self._num_done = 0

    def part_done(self) -> None:
        """One more."""
        self._num_done += 1
        now_s = self._now_s()
        if now_s - self._said_s < LINE_EVERY_S:
            return
        self._said_s = now_s
        self._say(f"{self._what}: {self._num_done} of {self._total} parts after {now_s - self._began_s:.0f} s")


@contextmanager
def part_progress(what: str, total: int) -> Generator[Callable[[], None]]:
    """Yields what to call after each of `total` parts."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PlainLines(what, total, lambda line: console.print(line, soft_wrap=True), time.monotonic).part_done
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
