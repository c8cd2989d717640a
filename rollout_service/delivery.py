"""Batches on their way to the trainer.

Always true: the batch of a step is encoded once and written whole (temporary file, fsync, rename, fsync of the folder)
before the buffer is told its digest and forgets the tokens; a replay sends those bytes after checking the digest. The
digest is in the file's name, so a superseded service that is still writing can't touch what its successor serves.
"""

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from buffer.interface import BatchLease, ContinuationBuffer
from protocol.batch import Batch, build_batch, decode_batch, encode_batch
from protocol.errors import UnavailableError
from protocol.failpoints import Failpoint, failpoint
from protocol.samples import Group
from rollout_service.events import Changed, Mailbox

log = logging.getLogger(__name__)

TROUBLE_S = 15.0  # a trainer that got no batch asks again within seconds


class Deliveries(Protocol):
    """Wants to know of every batch that is sent."""

    def delivered(self, policy_version: int, groups: Sequence[Group]) -> None:
        """A batch is sent for the first time, to a trainer that will hold `policy_version` when it trains on it."""
        ...

    def replayed(self) -> None:
        """A batch is sent again, as it was."""
        ...


class Delivery:
    """Leases batches and keeps their bytes until they are durable at the trainer."""

    def __init__(
        self, buffer: ContinuationBuffer, mailbox: Mailbox, run: str, batch_groups: int, spool_dir: Path
    ) -> None:
        self._buffer = buffer
        self._mailbox = mailbox
        self._run = run
        self._batch_groups = batch_groups
        self._spool_dir = spool_dir
        self._lock = asyncio.Lock()
        self._offered = asyncio.Condition()
        self._stopping = False
        self.told: Deliveries | None = None
        self._trouble: tuple[float, str] | None = None

    async def lease(self, step: int, trainer_epoch: int, wait_s: float) -> tuple[bytes, str] | None:
        """(bytes, SHA-256) of the batch of `step`, waiting up to `wait_s` for it; None if there is none by then."""
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while True:
            async with self._offered:
                if self._stopping:
                    raise UnavailableError("the service is stopping; ask again when it has been started")
                lease = await self._buffer.lease_batch(step, trainer_epoch, self._batch_groups)
                if lease is None and not await self._wait_for_offer(deadline_s):
                    return None
            if lease is not None:
                self._mailbox.post(Changed())
                async with self._lock:
                    return await self._sent(step)

    @property
    def trouble(self) -> str | None:
        """Why the last batch that was asked for couldn't be sent; a trainer that waits for it asks again and again."""
        if self._trouble is None or time.monotonic() - self._trouble[0] > TROUBLE_S:
            return None
        return self._trouble[1]

    async def stop(self) -> None:
        """Nobody waits for a batch any more: waiting calls end with UnavailableError."""
        self._stopping = True
        await self.batch_offered()

    async def batch_offered(self) -> None:
        """Wake whoever waits for a batch."""
        async with self._offered:
            self._offered.notify_all()

    async def read_batch(self, step: int) -> Batch | None:
        """The batch of a leased step as it was sent, or None if it was not sent yet."""
        lease = next((b for b in await self._buffer.batch_leases() if b.step == step), None)
        if lease is None or lease.sha256 is None:
            return None
        return decode_batch(await asyncio.to_thread(self._read, step, lease.sha256))

    def discard(self, released: list[BatchLease]) -> None:
        """Delete the bytes of batches that are durable, and what a service that died left of such steps."""
        durable_step = max((lease.step for lease in released), default=0)
        for path in self._spool_dir.glob("step-*-*"):
            if int(path.name.split("-")[1]) <= durable_step:
                path.unlink(missing_ok=True)

    async def _wait_for_offer(self, deadline_s: float) -> bool:
        remaining_s = deadline_s - asyncio.get_running_loop().time()
        if remaining_s <= 0:
            return False
        try:
            async with asyncio.timeout(remaining_s):
                await self._offered.wait()
        except TimeoutError:
            return False
        return True

    async def _sent(self, step: int) -> tuple[bytes, str]:
        try:
            sent = await self._bytes_of(step)
        except UnavailableError as error:
            if self.trouble != str(error):
                log.error("%s", error, extra={"event": "delivery_stuck", "step": step})
            self._trouble = time.monotonic(), str(error)
            raise
        self._trouble = None
        return sent

    async def _bytes_of(self, step: int) -> tuple[bytes, str]:
        lease = next(b for b in await self._buffer.batch_leases() if b.step == step)
        if lease.sha256 is not None:
            if self.told is not None:
                self.told.replayed()
            return await asyncio.to_thread(self._read, lease.step, lease.sha256), lease.sha256
        groups = await self._buffer.groups(lease.group_ids)
        data = await asyncio.to_thread(lambda: encode_batch(build_batch(self._run, step, lease.policy_version, groups)))
        try:
            sha256 = await asyncio.to_thread(self._write, step, data)
        except OSError as error:
            raise UnavailableError(
                f"the batch of step {step} can't be written to {self._spool_dir} ({error.strerror}); mend it, and the "
                "step is served"
            ) from error
        failpoint(Failpoint.AFTER_SPOOL)
        await self._buffer.record_spool(step, sha256)
        if self.told is not None:
            self.told.delivered(lease.policy_version, groups)
        return data, sha256

    def _read(self, step: int, sha256: str) -> bytes:
        try:
            data = self._path(step, sha256).read_bytes()
        except FileNotFoundError as error:
            raise UnavailableError(
                f"the batch of step {step} is not in {self._spool_dir}; put its file back to replay the step"
            ) from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise UnavailableError(
                f"{self._path(step, sha256)} was changed since it was written; put the original back"
            )
        return data

    def _write(self, step: int, data: bytes) -> str:
        self._spool_dir.mkdir(parents=True, exist_ok=True)
        sha256 = hashlib.sha256(data).hexdigest()
        path = self._path(step, sha256)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)  # on a full disk it is in the way of what would help
            raise
        folder = os.open(self._spool_dir, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return sha256

    def _path(self, step: int, sha256: str) -> Path:
        return self._spool_dir / f"step-{step:08d}-{sha256[:16]}.safetensors"
