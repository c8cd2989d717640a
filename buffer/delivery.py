"""Delivery on Redis: offers, leases, spooled batches, trained and durable steps, trainer sessions."""

import json
from collections.abc import Callable

from buffer.checks import check_batch_size
from buffer.codec import decode_left
from buffer.epochs import Epochs
from buffer.interface import BatchLease, OpenedTrainer
from buffer.keys import sample_id_of
from buffer.scripts import Arg, Call, Store, new_nonce


class Delivery:
    """READY → LEASED → CONSUMED."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys = store.keys

    async def offer(self, num_groups: int) -> bool:
        """See `ContinuationBuffer.offer`."""
        check_batch_size(num_groups)
        (offered,) = await self._store.transition("offer", [], [new_nonce(), num_groups])
        return offered == 1

    async def resize_offers(self, num_groups: int) -> int:
        """See `ContinuationBuffer.resize_offers`."""
        check_batch_size(num_groups)
        (offered,) = await self._store.transition("resize_offers", [], [num_groups])
        return offered

    async def lease_batch(self, step: int, trainer_epoch: int, num_groups: int) -> BatchLease | None:
        """See `ContinuationBuffer.lease_batch`."""
        check_batch_size(num_groups)
        reply = await self._store.transition("lease_batch", [], [trainer_epoch, step, num_groups])
        if not reply:
            return None
        await self._store.sync()
        lease, sha256, trained_step = reply
        return decode_lease(step, lease, sha256 or None, trained_step)

    async def record_spool(self, step: int, sha256: str) -> None:
        """See `ContinuationBuffer.record_spool`."""
        lease = await self._store.one("HGET", self._keys.named("leases"), step)
        ids = decode_lease(step, lease, None, 0).group_ids if lease else ()
        records = await self._store.read(*(("HMGET", self._keys.group(i), "num_samples", "left") for i in ids))
        sizes = [(i, int(count or 0), decode_left(left)) for i, (count, left) in zip(ids, records, strict=True)]
        kept = [sample_id_of(i, n) for i, count, left in sizes for n in range(count) if n not in left]
        tokens = [self._keys.tokens(i) for i in kept]
        await self._store.transition("record_spool", tokens, [step, sha256])

    async def mark_trained(self, step: int, trainer_epoch: int) -> int:
        """See `ContinuationBuffer.mark_trained`."""
        (trained,) = await self._store.transition("mark_trained", [], [trainer_epoch, step])
        return trained

    async def ack(self, step: int, trainer_epoch: int) -> list[BatchLease]:
        """See `ContinuationBuffer.ack`."""
        _, released = await self._release("ack", step, lambda durable, _: [trainer_epoch, step, durable])
        await self._store.sync()
        return released

    async def open_trainer(self, durable_step: int) -> OpenedTrainer:
        """See `ContinuationBuffer.open_trainer`.

        A checkpoint that is ahead of the run (the Redis was lost, the checkpoint was not) moves the run's steps on.
        """
        nonce = new_nonce()
        reply, released = await self._release(
            "open_trainer", durable_step, lambda durable, leased: [nonce, durable_step, durable, leased]
        )
        await self._store.sync()
        await self._store.link.keep_epochs(Epochs(self._store.link.service_epoch or 0, reply[0]))
        return OpenedTrainer(reply[0], durable_step, tuple(released))

    async def batch_leases(self) -> list[BatchLease]:
        """See `ContinuationBuffer.batch_leases`."""
        return (await self._read())[0]

    async def _release(
        self, name: str, step: int, args: Callable[[int, int], list[Arg]]
    ) -> tuple[list[int], list[BatchLease]]:
        """Run `ack` or `open_trainer`, both of which need the keys of the groups that they release."""
        released: list[BatchLease] = []

        async def read() -> Call:
            nonlocal released
            leases, durable, leased = await self._read()
            released = [lease for lease in leases if lease.step <= step]
            sizes = await self._sizes([i for lease in released for i in lease.group_ids])
            return self._keys.of_groups(sizes), [*args(durable, leased), *(i for i, _ in sizes)]

        reply = await self._store.transition_on_read(name, read)
        return reply, released

    async def _read(self) -> tuple[list[BatchLease], int, int]:
        """Leases by step, the durable step, the last leased step."""
        names = (self._keys.named("leases"), self._keys.named("spools"))
        steps = ("HMGET", self._keys.named("meta"), "trained_step", "durable_step", "leased_step")
        leases, spools, meta = await self._store.read(*(("HGETALL", name) for name in names), steps)
        trained, durable, leased = (int(value or 0) for value in meta)
        ordered = sorted((int(step), step) for step in leases)
        found = [decode_lease(n, leases[step], spools.get(step), trained) for n, step in ordered]
        return found, durable, leased

    async def _sizes(self, group_ids: list[str] | tuple[str, ...]) -> list[tuple[str, int]]:
        counts = await self._store.read(*(("HGET", self._keys.group(i), "num_samples") for i in group_ids))
        return [(i, int(count or 0)) for i, count in zip(group_ids, counts, strict=True)]


def decode_lease(step: int, data: bytes, sha256: bytes | None, trained_step: int) -> BatchLease:
    """A lease from its JSON and digest."""
    fields = json.loads(data)
    return BatchLease(
        step=step,
        group_ids=tuple(fields["groups"]),
        policy_version=fields["policy_version"],
        trained=step <= trained_step,
        sha256=sha256.decode() if sha256 else None,
    )
