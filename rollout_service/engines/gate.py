"""A gate that requests wait at while an engine is held.

Always true: `close` and `open` nest; whoever waits is woken when the gate opens, or alone, by its own name.
"""

import asyncio


class Gate:
    """Closed while at least one holder holds it."""

    def __init__(self) -> None:
        self._num_holds = 0
        self._waiting: dict[str, asyncio.Future[None]] = {}

    @property
    def is_closed(self) -> bool:
        """Whether anybody holds it."""
        return self._num_holds > 0

    @property
    def is_last(self) -> bool:
        """Whether the next `open` opens it."""
        return self._num_holds == 1

    def close(self) -> bool:
        """Hold it; whether this closed it."""
        self._num_holds += 1
        return self._num_holds == 1

    def open(self) -> None:
        """Let go of it once."""
        self._num_holds -= 1
        if not self._num_holds:
            self.wake()

    async def wait(self, name: str) -> None:
        """Return when woken; the caller looks again whether the gate is open."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        try:
            await future
        finally:
            self._waiting.pop(name, None)

    def wake(self, name: str | None = None) -> None:
        """Wake one waiter, or all."""
        for future in [self._waiting.get(name)] if name is not None else list(self._waiting.values()):
            if future is not None and not future.done():
                future.set_result(None)
