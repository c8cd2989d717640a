"""Keys of a terminal as they are pressed. Always true: the terminal is as it was when the block is left."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Generator


@contextlib.contextmanager
def pressed_keys(press: Callable[[str], None]) -> Generator[None]:
    """Call `press` with each key, in the running event loop; nothing happens where standard input is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        data = os.read(descriptor, 64)
        if not data:  # the terminal is gone
            loop.remove_reader(descriptor)
            press("q")
            return
        for key in data.decode(errors="ignore"):
            press(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
