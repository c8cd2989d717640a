"""Requests to stop: the first begins an orderly end, and one that follows at once does not spoil it.

Always true: the first SIGTERM or Ctrl-C only sets an event, which the loop obeys between steps: checkpoint,
acknowledge, exit 0. A second within `REPEAT_GRACE_S` is ignored, since those who stop processes often ask twice; a
third, or one that comes later, ends the process as the signal does by itself, and the last checkpoint stays.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

LOG = logging.getLogger("april.trainer")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_GRACE_S = 10.0  # who asks again after this has waited, and means it


class StopRequests:
    """Counts requests; `event` is set by the first."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._times_s: list[float] = []

    def ask(self, number: int, _: FrameType | None = None) -> None:
        """A signal handler."""
        self._times_s.append(time.monotonic())
        if len(self._times_s) == 1:
            LOG.info("asked to stop: the step is finished and saved first")
            self.event.set()
        elif len(self._times_s) == 2 and self._times_s[1] - self._times_s[0] <= REPEAT_GRACE_S:
            LOG.info("already stopping: the step is finished and saved first; asked once more, it ends at once")
        else:
            LOG.warning("ends at once: training goes on from the last checkpoint")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def stop_requests() -> Generator[threading.Event]:
    """An event that is set when the process is asked to stop; outside of the main thread nothing sets it."""
    requests = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield requests.event
        return
    old = {number: signal.signal(number, requests.ask) for number in SIGNALS}
    try:
        yield requests.event
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def stop_no_more() -> None:
    """All is saved and the process is about to end: a request to stop must not turn its exit code into a failure."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
