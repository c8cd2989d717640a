"""What `april serve` shows while it runs: a live line on a terminal, a JSON line a round otherwise."""

import asyncio
import json
import logging
import sys

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
    """Show the status for ever."""
    if sys.stderr.isatty():
        await _live(board)
    else:
        await _json_lines(board)


async def _live(board: StatusBoard) -> None:
    with Live(console=_console(), transient=True, auto_refresh=False) as live:
        while True:
            status = await _status(board)
            live.update(Text(progress_line(status) if status else "waiting for Redis"), refresh=True)
            await asyncio.sleep(REFRESH_S)


def _console() -> Console:
    """The console that log lines go to, so that they appear above the live line instead of through it."""
    handlers = logging.getLogger().handlers
    return next((h.console for h in handlers if isinstance(h, RichHandler)), Console(stderr=True))


async def _json_lines(board: StatusBoard) -> None:
    shown = 0
    while True:
        status = await _status(board)
        if status and status.round and status.round.round > shown:
            shown = status.round.round
            print(json.dumps(progress_record(status)), flush=True)
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


def progress_record(status: Status) -> dict[str, object]:
    """The state of a round that begins, for programs."""
    return {
        "event": "round",
        "round": status.round.round if status.round else None,
        "running": status.samples.get(SampleState.RUNNING, 0),
        "parked": status.samples.get(SampleState.PARKED, 0),
        "active_version": status.active_version,
        "trained_step": status.trained_step,
        "ledger": status.ledger.model_dump(),
        "ledger_error": status.ledger_error,
        "waits": status.waits,
    }
