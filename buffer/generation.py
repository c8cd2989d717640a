"""Transitions of samples and of groups that are not delivered yet, on Redis; admission is in `buffer.admission`.

Always true: whatever a script needs is in its keys, so what only Redis knows (how many samples a group has) is read
first; the script checks again what may have moved on meanwhile.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import chain

from buffer.admission import Admission
from buffer.checks import check_distinct, lease_ms
from buffer.codec import encode_reward, piece_args
from buffer.epochs import EpochKeeper, Epochs
from buffer.interface import SampleLease
from buffer.keys import split_sample_id
from buffer.scripts import Store, new_nonce
from protocol.samples import Reward, Segment
from protocol.states import DropReason, FailReason, FinishReason, GroupState

ORPHANS_A_CALL = 1000  # keeps one script under some milliseconds; claiming goes on with the next thousand


class Generation:
    """Running, scoring and dropping."""

    def __init__(self, store: Store, admission: Admission) -> None:
        self._store = store
        self._keys = store.keys
        self._admission = admission

    async def claim_service(self, service_id: str, identity: Mapping[str, str], keeper: EpochKeeper | None) -> int:
        """Raise the epoch, which fences every older service; then set aside what ran under it."""
        store = self._store
        known = await asyncio.to_thread(keeper.read) if keeper else Epochs()
        args = [service_id, new_nonce(), known.service, known.trainer, *chain.from_iterable(identity.items())]
        epoch, trainer_epoch = await store.run("claim_service", [], args)
        store.link.service_epoch, store.link.epochs = epoch, keeper
        await store.link.keep_epochs(Epochs(epoch, trainer_epoch))
        running = [i.decode() for i in await store.one("ZRANGE", self._keys.named("running"), 0, -1)]
        for first in range(0, len(running), ORPHANS_A_CALL):
            ids = running[first : first + ORPHANS_A_CALL]
            await store.transition("orphan", [self._keys.sample(i) for i in ids], ids)
        return epoch

    async def start(self, sample_ids: Sequence[str], worker: str, lease_s: float) -> list[SampleLease]:
        """See `ContinuationBuffer.start`; all of them start, or none."""
        check_distinct(sample_ids)
        if not sample_ids:
            return []
        keys = [self._keys.sample(i) for i in sample_ids]
        args = [new_nonce(), worker, lease_ms(lease_s), *sample_ids]
        attempts = await self._store.transition("start", keys, args)
        return [SampleLease(i, worker, attempt) for i, attempt in zip(sample_ids, attempts, strict=True)]

    async def renew(self, leases: Sequence[SampleLease], lease_s: float) -> list[SampleLease]:
        """See `ContinuationBuffer.renew`."""
        if not leases:
            return []
        args = [arg for lease in leases for arg in (lease.sample_id, lease.worker, lease.attempt)]
        keys = [self._keys.sample(lease.sample_id) for lease in leases]
        lost = await self._store.transition("renew", keys, [lease_ms(lease_s), *args])
        return [leases[i] for i in lost]

    async def park_expired(self, limit: int) -> list[str]:
        """See `ContinuationBuffer.park_expired`; the script looks at the clock, here only at which are next."""
        if limit < 1:
            return []
        running = [i.decode() for i in await self._store.one("ZRANGE", self._keys.named("running"), 0, limit - 1)]
        keys = [self._keys.sample(i) for i in running]
        parked = await self._store.transition("park_expired", keys, [new_nonce(), *running])
        return [i.decode() for i in parked]

    async def append(self, lease: SampleLease, piece: Segment) -> None:
        """See `ContinuationBuffer.append`."""
        await self._write("append", lease, piece)

    async def park(self, lease: SampleLease, piece: Segment | None) -> None:
        """See `ContinuationBuffer.park`."""
        await self._write("park", lease, piece)

    async def finish(self, lease: SampleLease, piece: Segment | None, reason: FinishReason) -> None:
        """See `ContinuationBuffer.finish`."""
        await self._write("finish", lease, piece, reason.value)

    async def record_failure(self, lease: SampleLease, error: str, max_failures: int) -> GroupState | None:
        """See `ContinuationBuffer.record_failure`."""
        args = [lease.worker, lease.attempt, error, max_failures]
        state = await self._settle("record_failure", lease.sample_id, *args)
        return GroupState(state) if state else None

    async def score(self, sample_id: str, reward: Reward, min_scored: int) -> GroupState:
        """See `ContinuationBuffer.score`."""
        return GroupState(await self._settle("score", sample_id, min_scored, encode_reward(reward)))

    async def fail(self, sample_id: str, reason: FailReason, error: str, min_scored: int) -> GroupState:
        """See `ContinuationBuffer.fail`."""
        return GroupState(await self._settle("fail", sample_id, min_scored, reason.value, error))

    async def drop(self, group_id: str, reason: DropReason) -> None:
        """See `ContinuationBuffer.drop`."""
        keys, _ = await self._keys_of_group(group_id, 0)
        await self._store.transition("drop", keys, [group_id, reason.value])

    async def _write(self, name: str, lease: SampleLease, piece: Segment | None, *more: str) -> None:
        keys = self._keys.of_sample(lease.sample_id)
        args = [lease.sample_id, lease.worker, lease.attempt, *piece_args(piece), *more]
        await self._store.transition(name, keys, args)

    async def _settle(self, name: str, sample_id: str, *more: str | int) -> str:
        group_id, index = split_sample_id(sample_id)
        keys, races = await self._keys_of_group(group_id, index + 1)
        (reply,) = await self._store.transition(name, keys, [new_nonce(), group_id, index, sample_id, *more])
        state = reply.decode().partition(":")[0]
        if races and state == GroupState.READY:
            await self._admission.shrink_pool()
        return state

    async def _keys_of_group(self, group_id: str, at_least: int) -> tuple[list[str], bool]:
        """A group's keys, and whether some of its samples will leave it."""
        # A group never changes its size; one that is gone still needs the key that the script looks at.
        fields = ("num_samples", "wanted")
        stored, wanted = await self._store.one("HMGET", self._keys.group(group_id), *fields)
        return self._keys.of_group(group_id, max(int(stored or 0), at_least)), wanted is not None
