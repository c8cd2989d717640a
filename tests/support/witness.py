"""The rollout service with a witness in it: `python -m tests.support.witness FOLDER serve RUN.toml ...`.

Always true:
- the service is the shipped one; between it and its buffer, and between its pool and its engines, stands an object that
  passes every call on and writes to the history what was answered;
- a record is written after the answer and before the caller sees it, so what the service goes on from is in the
  history, and what is not in the history may have happened or not;
- what only memory knew when the process was killed is in its flight recorder.
"""

import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from hashlib import blake2b
from pathlib import Path
from typing import Any

from buffer.interface import SampleLease
from protocol.errors import AprilError, EngineDeadError, FencedError, NotFoundError, UnavailableError
from protocol.samples import Group, Sample, Segment
from protocol.settings import RunSettings
from protocol.settings.rollout import EngineBackend
from rollout_service.engines.interface import Chunk, GenerationRequest
from rollout_service.engines.pool import EnginePool
from tests.support.flight import FlightRecorder
from tests.support.journal import Journal

DIGEST_BYTES = 8  # of a piece: two different ones are never taken for the same


def piece_digest(piece: Segment) -> str:
    """What tells a piece's tokens and log-probs from all others."""
    return blake2b(piece.tokens.tobytes() + piece.logprobs.tobytes(), digest_size=DIGEST_BYTES).hexdigest()


class WitnessedBuffer:
    """A `ContinuationBuffer` that writes down its transitions; reads are passed on."""

    def __init__(self, inner: Any, journal: Journal, flight: FlightRecorder) -> None:
        self._inner = inner
        self._journal = journal
        self._flight = flight

    def __getattr__(self, name: str) -> Any:
        """Whatever is not witnessed."""
        return getattr(self._inner, name)

    def impatient(self) -> "WitnessedBuffer":
        return WitnessedBuffer(self._inner.impatient(), self._journal, self._flight)

    async def claim_service(self, service_id: str, *rest: Any) -> int:
        return await self._told("claim", self._inner.claim_service(service_id, *rest), lambda epoch: {"claimed": epoch})

    async def admit(self, groups: Sequence[Any], version: int, cursor: Any) -> list[Group]:
        call = self._inner.admit(groups, version, cursor)
        return await self._told("admit", call, lambda admitted: {"groups": [g.group_id for g in admitted]})

    async def start(self, sample_ids: Sequence[str], worker: str, lease_s: float) -> list[SampleLease]:
        call = self._inner.start(sample_ids, worker, lease_s)
        return await self._told("start", call, lambda leases: {"leases": _pairs(leases)}, lease_s=lease_s)

    async def samples(self, sample_ids: Sequence[str]) -> list[Sample]:
        return await self._told(
            "read",
            self._inner.samples(sample_ids),
            lambda found: {"samples": [[s.sample_id, s.state.value, s.num_tokens, s.num_failures] for s in found]},
        )

    async def renew(self, leases: Sequence[SampleLease], lease_s: float) -> list[SampleLease]:
        call = self._inner.renew(leases, lease_s)
        return await self._told("renew", call, lambda lost: {"lost": _pairs(lost)}, leases=_pairs(leases))

    async def park_expired(self, limit: int) -> list[str]:
        return await self._told("expire", self._inner.park_expired(limit), lambda ids: {"parked": list(ids)})

    async def append(self, lease: SampleLease, piece: Segment) -> None:
        await self._written("append", lease, piece, self._inner.append(lease, piece))

    async def park(self, lease: SampleLease, piece: Segment | None, *rest: Any, **more: Any) -> None:
        await self._written("park", lease, piece, self._inner.park(lease, piece, *rest, **more))

    async def finish(self, lease: SampleLease, piece: Segment | None, *rest: Any, **more: Any) -> None:
        await self._written("finish", lease, piece, self._inner.finish(lease, piece, *rest, **more))

    async def record_failure(self, lease: SampleLease, *rest: Any, **more: Any) -> Any:
        return await self._written("failure", lease, None, self._inner.record_failure(lease, *rest, **more))

    async def score(self, sample_id: str, *rest: Any) -> Any:
        return await self._told("score", self._inner.score(sample_id, *rest), _state, sample=sample_id)

    async def fail(self, sample_id: str, reason: Any, *rest: Any) -> Any:
        call = self._inner.fail(sample_id, reason, *rest)
        return await self._told("fail", call, _state, sample=sample_id, reason=str(reason))

    async def drop(self, group_id: str, reason: Any) -> None:
        await self._told("drop", self._inner.drop(group_id, reason), group=group_id, reason=str(reason))

    async def set_policy_state(self, version: int, state: Any, *rest: Any) -> Any:
        call = self._inner.set_policy_state(version, state, *rest)
        return await self._told("policy", call, version=version, state=str(state.value))

    async def _written(self, op: str, lease: SampleLease, piece: Segment | None, call: Awaitable[Any]) -> Any:
        """A write of a running sample; the flight recorder knows of it while it has no answer."""
        at = (lease.sample_id, lease.attempt)
        asked_at = time.monotonic()
        self._flight.set(*at, pending_since=asked_at, unsent_since=0.0)
        fields: dict[str, Any] = {"sample": lease.sample_id, "attempt": lease.attempt}
        if piece is not None:
            fields |= {"start": piece.start, "end": piece.end, "version": piece.version, "digest": piece_digest(piece)}
        try:
            result = await self._told(op, call, **fields)
        except (FencedError, NotFoundError):
            self._flight.end(*at)
            raise
        if op != "append":
            self._flight.end(*at)
        else:
            stored = piece.end if piece is not None else self._flight.get(*at, "stored")
            self._flight.set(*at, stored=stored, pending_since=0.0, write_s=time.monotonic() - asked_at)
        return result

    async def _told(
        self, op: str, call: Awaitable[Any], describe: Callable[[Any], dict[str, Any]] | None = None, **fields: Any
    ) -> Any:
        fields |= {"op": op, "asked_at": time.monotonic(), "service_epoch": self._inner.store.service_epoch}
        try:
            result = await call
        except UnavailableError as error:
            self._journal.write("buffer", outcome="unknown", detail=str(error), **fields)
            raise
        except AprilError as error:
            outcome = "fenced" if isinstance(error, FencedError) else "refused"
            self._journal.write("buffer", outcome=outcome, detail=str(error), **fields)
            raise
        if describe is not None:
            fields |= describe(result)
        self._journal.write("buffer", outcome="ok", **fields)
        return result


class WitnessedEngine:
    """A `Replica` that writes down its lives, and of each stream how far it came."""

    def __init__(self, inner: Any, journal: Journal, flight: FlightRecorder) -> None:
        self._inner = inner
        self._journal = journal
        self._flight = flight

    def __getattr__(self, name: str) -> Any:
        """Whatever is not witnessed."""
        return getattr(self._inner, name)

    async def start(self) -> None:
        await self._inner.start()
        self._tell(0)

    async def restart(self, path: Path | None, version: int) -> None:
        await self._inner.restart(path, version)
        self._tell(version)

    def _tell(self, version: int) -> None:
        stats = self._inner.stats()
        fields = {"worker": stats.worker, "life": stats.epoch, "asked_version": version, "version": stats.version}
        self._journal.write("engine", processes=self._inner.process_ids, **fields)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        sample, _, word = request.request_id.partition("@")
        at = (sample, int(word)) if word.isdecimal() else (request.request_id, 0)
        length = request.num_prefix_tokens
        self._flight.begin(*at, length)
        try:
            async with aclosing(self._inner.generate(request)) as chunks:
                async for chunk in chunks:
                    if len(chunk.tokens):
                        length += len(chunk.tokens)
                        self._received(at, length)
                    yield chunk
        except EngineDeadError:
            fields = {"worker": self._inner.worker, "sample": at[0], "attempt": at[1], "received": length}
            self._journal.write("engine_died", **fields)
            raise

    def _received(self, at: tuple[str, int], length: int) -> None:
        now = time.monotonic()
        since = self._flight.get(*at, "unsent_since") or now
        generated = max(length, self._flight.get(*at, "generated"))
        self._flight.set(*at, received=length, generated=generated, received_at=now, unsent_since=since)


def _pairs(leases: Sequence[SampleLease]) -> list[list[Any]]:
    return [[lease.sample_id, lease.attempt] for lease in leases]


def _state(state: Any) -> dict[str, Any]:
    return {"group_state": getattr(state, "value", None)}


def install_witness(folder: Path) -> None:
    """Put the witness into the parts that this process will build its service from."""
    from rollout_service import parts
    from rollout_service.engines import pool
    from tests.support.mortal_engine import MortalEngine

    journal = Journal(folder)
    flight = FlightRecorder(folder, os.getpid())
    open_buffer = parts.open_buffer
    build_engine = pool._build_engine

    async def open_witnessed(settings: RunSettings, **words: Any) -> tuple[Any, Any]:
        opened, server = await open_buffer(settings, **words)
        return WitnessedBuffer(opened, journal, flight), server

    def build_witnessed(settings: RunSettings) -> EnginePool:
        engines: list[Any] = []
        for index in range(settings.engine.num_replicas):
            worker = f"engine-{index}"
            mortal = settings.engine.backend is EngineBackend.SIMULATED
            engines.append(MortalEngine(settings, worker, flight) if mortal else build_engine(settings, worker))
        return EnginePool([WitnessedEngine(engine, journal, flight) for engine in engines])

    parts.open_buffer = open_witnessed
    parts.build_pool = build_witnessed


def main() -> None:
    """`april` with the words after the folder."""
    from deploy.cli import main as april

    install_witness(Path(sys.argv[1]))
    april(sys.argv[2:])


if __name__ == "__main__":
    main()
