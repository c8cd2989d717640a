"""What the pool asks of a replica beyond `Engine`: to hold still, and to undo its last install.

They make a switch of weights whole over several replicas: all are held, all install, and only then does any of them
write a token; if one fails, those that had changed go back.
"""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from rollout_service.engines.interface import Chunk, Engine, GenerationRequest


class Replica(Engine, Protocol):
    """An engine that can be held and reverted, and whose streams can be closed early."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream the response to one request; closing the stream aborts it."""
        ...

    async def prepare(self, path: Path) -> None:
        """Check published weights as far as that needs no engine, before anything is held. Raises WeightsError."""
        ...

    async def hold(self) -> None:
        """Write no token until `release`; holds nest. Running requests keep their place, new ones wait."""
        ...

    async def release(self) -> None:
        """Undo one `hold`."""
        ...

    async def revert(self) -> None:
        """Put back the weights and the version from before the last install. Raises `EngineError`."""
        ...
