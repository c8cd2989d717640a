"""How a launcher ends by a signal: as it ends by Ctrl-C, so that what it started is ended first, in order.

Always true: the first of the signals unwinds the launcher's block; those after it change nothing, for they would cut
short the wait for a child. Each child is given a bounded time, so the launcher ends too.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C; an orchestrator; a terminal that is closed
SIGNAL_EXIT = 128  # a shell's exit code of a process that a signal ended is this and the signal's number


@contextmanager
def ended_by_signals() -> Generator[None]:
    """Within the block a signal raises `KeyboardInterrupt` or `SystemExit`, once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    # One that whoever started us has switched off, as nohup does, stays off.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def end(number: int, _frame: FrameType | None) -> None:
        for other in taken:
            signal.signal(other, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(SIGNAL_EXIT + number)

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
