"""What `april top` does: one snapshot, or a live view."""

import asyncio
import signal
import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from deploy.top.drawing import glyphs_for
from deploy.top.feed import Feed
from deploy.top.keys import pressed_keys
from deploy.top.screen import Screen, plain_text
from deploy.top.seen import Seen
from deploy.top.target import Target

REFRESH_S = 1.0  # ages go on while nothing is heard
NOTE_S = 5.0  # how long the answer to a key stays
PLAIN_WIDTH = 100  # of a snapshot that goes to a file


async def snapshot(target: Target) -> dict[str, Any]:
    """Print what is so now; the same for programs. Raises AprilError if there is no status."""
    seen = Seen()
    feed = Feed(target, seen)
    try:
        await feed.first()
        await feed.pictures()
    finally:
        await feed.close()
    width = Console().width if sys.stdout.isatty() else PLAIN_WIDTH
    print(plain_text(seen, target.shown, time.time(), width, glyphs_for(sys.stdout.encoding)), end="")
    parts = {"status": seen.status, "tail": seen.tail, "moments": seen.moments}
    return {name: part and part.model_dump(mode="json") for name, part in parts.items()}


async def watch(target: Target, control: bool) -> None:
    """Show the service until q or Ctrl-C. Raises AprilError if at the start nothing listens there."""
    await Watcher(target, control).run()


class Watcher:
    """The live view: a task that follows the service, keys, and a screen that is drawn when something changes."""

    def __init__(self, target: Target, control: bool) -> None:
        self._target = target
        self._control = control
        self._seen = Seen()
        self._dirty, self._quit = asyncio.Event(), asyncio.Event()
        self._feed = Feed(target, self._seen, self._dirty.set)
        self._note, self._note_at = "", 0.0
        self._asked: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until q, Ctrl-C, SIGTERM, or an error that only a user can mend."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._quit.set)
        loop.add_signal_handler(signal.SIGWINCH, self._dirty.set)
        try:
            await self._feed.first(starting=True)
            await self._show()
        finally:
            await self._feed.close()

    async def _show(self) -> None:
        console = Console()
        glyphs = glyphs_for(console.encoding)
        keys = "q quit" + ("   p pause or resume" if self._control else "")
        following = asyncio.create_task(self._feed.follow())
        quitting = asyncio.create_task(self._quit.wait())
        try:
            with pressed_keys(self._pressed), Live(console=console, screen=True, auto_refresh=False) as live:
                while not (following.done() or quitting.done()):
                    note = self._note if time.monotonic() - self._note_at < NOTE_S else ""
                    live.update(
                        Screen(self._seen, self._target.shown, time.time(), glyphs, glyphs.plain(keys), note),
                        refresh=True,
                    )
                    self._dirty.clear()
                    drawing = asyncio.create_task(self._dirty.wait())
                    await asyncio.wait(
                        {drawing, following, quitting}, timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    drawing.cancel()
            if following.done():
                following.result()
        finally:
            for task in (following, quitting, *([self._asked] if self._asked else [])):
                task.cancel()
            await asyncio.gather(following, quitting, return_exceptions=True)

    def _pressed(self, key: str) -> None:
        if key in ("q", "Q"):
            self._quit.set()
        elif key == "p" and self._control:
            self._asked = asyncio.create_task(self._pause_or_resume())
        elif key == "p":
            self._say("read-only: start april top with --control")

    async def _pause_or_resume(self) -> None:
        paused = self._seen.status is not None and self._seen.status.paused
        self._say(await self._feed.control("resume" if paused else "pause"))

    def _say(self, note: str) -> None:
        self._note, self._note_at = note, time.monotonic()
        self._dirty.set()
