"""What `april serve` shows while it runs: a live line under the log on a terminal. Elsewhere the log says it all."""

import asyncio
import logging

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from protocol.errors import UnavailableError
from protocol.messages import Status
from protocol.states import SampleState
from rollout_service.status import StatusBoard

REFRESH_S = 1.0  # people read it


async def show_progress(board: StatusBoard) -> None:
    """Show the status for ever, or return at once if nobody looks: where the log is not for people on a terminal."""
    console = _console()
    if console is not None:
        await _live(board, console)


def _console() -> Console | None:
    """The console that log lines go to, so that they appear above the live line instead of through it."""
    consoles = [h.console for h in logging.getLogger().handlers if isinstance(h, RichHandler)]
    return next((console for console in consoles if console.is_terminal), None)


async def _live(board: StatusBoard, console: Console) -> None:
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while True:
            status = await _status(board)
            live.update(Text(progress_line(status) if status else "waiting for Redis"), refresh=True)
            await asyncio.sleep(REFRESH_S)


async def _status(board: StatusBoard) -> Status | None:
    """The status, or None while Redis is away: showing progress must not end the service."""
    try:
        return await board.make()
    except UnavailableError:
        return None


def progress_line(status: Status) -> str:
    """The state in one line for people."""
    parts = [
        f"round {status.round.round}: {status.round.num_ready} ready" if status.round else "between rounds",
        f"{status.samples.get(SampleState.RUNNING, 0)} running",
        f"{status.samples.get(SampleState.PARKED, 0)} parked",
        f"policy v{status.active_version}",
        f"step {status.trained_step} trained, {status.durable_step} durable",
    ]
    if status.waits:
        parts.append("waiting for " + "; ".join(status.waits))
    return " · ".join(parts)
