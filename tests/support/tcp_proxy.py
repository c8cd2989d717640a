"""A TCP proxy whose connections can be cut, delayed and half-opened.

Always true: bytes that are passed on are passed in order and unchanged; what a cut or a half-open connection swallowed
is never delivered later, as on a network whose connection is gone.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any

READ_BYTES = 1 << 16


class Mode(StrEnum):
    """What becomes of bytes."""

    PASS = "pass"
    CUT = "cut"
    """Every connection is closed, new ones at once."""
    DELAY = "delay"
    """Each piece waits `delay_s` in each direction."""
    HALF_OPEN = "half_open"
    """Requests arrive and answers don't: the client can't know what was done. Closed when the mode ends."""
    MUTE = "mute"
    """Nothing arrives in either direction, and nothing is closed until the mode ends."""


class TcpProxy:
    """Listens on a loopback port of its own, in a thread of its own; `target_port` may be changed while it runs."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.num_connections = 0
        self._mode = Mode.PASS
        self._delay_s = 0.0
        self._open: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)

    def __enter__(self) -> "TcpProxy":
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def set(self, mode: Mode, delay_s: float = 0.0) -> None:
        """Change what becomes of bytes from now on."""
        self._run(self._set(mode, delay_s))

    def drop_connections(self) -> None:
        """Close every open connection; new ones are taken as the mode says."""
        self._run(self._close_all())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        assert self._server is not None, "it listens"
        self._server.close()
        await self._close_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _set(self, mode: Mode, delay_s: float) -> None:
        swallowed = self._mode in (Mode.HALF_OPEN, Mode.MUTE)
        self._mode, self._delay_s = mode, delay_s
        if mode is Mode.CUT or swallowed:
            await self._close_all()

    async def _close_all(self) -> None:
        for ends in list(self._open.items()):
            for writer in ends:
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(OSError):
            if self._mode is Mode.CUT:
                writer.transport.abort()
                return
            target_reader, target = await asyncio.open_connection("127.0.0.1", self.target_port)
            self._open[writer] = target
            try:
                await asyncio.gather(self._pump(reader, target, True), self._pump(target_reader, writer, False))
            finally:
                del self._open[writer]
                target.close()
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_target: bool) -> None:
        """Pass on until one side ends; then end the other."""
        try:
            while data := await reader.read(READ_BYTES):
                if self._mode is Mode.DELAY:
                    await asyncio.sleep(self._delay_s)
                if self._mode is Mode.MUTE or (self._mode is Mode.HALF_OPEN and not to_target):
                    continue
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
