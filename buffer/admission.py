"""Admission on Redis: new groups, and the pooled samples of their prompts that go on in them.

Always true: which pooled samples go on is decided on what was read before; the script that admits the groups refuses
if one of them has left its pool meanwhile, and the admission is prepared again; those that are too old for their group
expire once it is admitted, so that an admission that is refused changes nothing.
"""

from collections.abc import Iterable, Sequence

from buffer.checks import check_sizes
from buffer.codec import encode_origin, encode_prompt, optional_int
from buffer.interface import CursorMove, Limits, NewGroup
from buffer.keys import group_id_of, new_group, sample_id_of
from buffer.pool import EXPIRED_A_CALL, PooledBrief, beyond, choose
from buffer.scripts import Arg, Call, Store, new_nonce
from protocol.samples import Group
from protocol.states import ExpiryReason

POOLED_FIELDS = ("num_tokens", "oldest")


class Admission:
    """Groups into the buffer; samples into and out of the pool of their prompt."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._keys = store.keys
        self._limits = limits

    async def admit(self, groups: Sequence[NewGroup], version: int, cursor: CursorMove) -> tuple[list[Group], set[str]]:
        """See `ContinuationBuffer.admit`; also the ids of the groups in which pooled samples go on."""
        check_sizes(groups)
        limits = (self._limits.max_groups, self._limits.max_bytes, self._limits.sample_bytes)
        nonce = new_nonce()
        texts: list[Arg] = []
        for g in groups:
            wanted = "" if g.wanted in (None, g.num_samples) else g.wanted
            texts += [g.num_samples, wanted or "", encode_prompt(g.prompt), encode_origin(g.prompt)]
        first = 0
        continued: list[tuple[str, str, bool]] = []
        stale: list[str] = []

        async def read() -> Call:
            nonlocal first, continued, stale
            names = (self._keys.named("meta"), "group_seq", "pool_samples")
            first, num_pooled = (int(value or 0) for value in await self._store.one("HMGET", *names))
            continued, stale = await self._continued(groups, first) if num_pooled else ([], [])
            keys: list[str] = []
            for seq, group in enumerate(groups, first):
                group_id = group_id_of(seq)
                keys.append(self._keys.group(group_id))
                keys += [self._keys.sample(sample_id_of(group_id, i)) for i in range(group.num_samples)]
            keys += [key for old, new, _ in continued for key in self._keys.to_continue(old, new)]
            fixed = [nonce, first, version, cursor.before, cursor.after, *limits, len(groups)]
            return keys, [*fixed, *texts, *(arg for old, new, ages in continued for arg in (old, new, int(ages)))]

        await self._store.transition_on_read("admit", read, waits_when_full=False)
        await self._expire(stale, ExpiryReason.STALE)
        with_pooled = {new.partition(".")[0] for _, new, _ in continued}
        return [new_group(seq, group, version) for seq, group in enumerate(groups, first)], with_pooled

    async def expire_pooled(self, before_version: int) -> int:
        """See `ContinuationBuffer.expire_pooled`."""
        num_expired = 0
        older = ("-inf", f"({max(before_version, 0)}", "BYSCORE", "LIMIT", 0, EXPIRED_A_CALL)
        while True:
            found = await self._store.one("ZRANGE", self._keys.named("pooled"), *older)
            if not found:
                return num_expired
            await self._expire([i.decode() for i in found], ExpiryReason.STALE)
            num_expired += len(found)

    async def shrink_pool(self) -> None:
        """The oldest pooled samples expire until the others hold no more than `max_pool_bytes`."""
        while True:
            num_bytes = int(await self._store.one("HGET", self._keys.named("meta"), "pool_bytes") or 0)
            if num_bytes <= self._limits.max_pool_bytes:
                return
            first = await self._store.one("ZRANGE", self._keys.named("pooled"), 0, EXPIRED_A_CALL - 1)
            briefs = await self._briefs(i.decode() for i in first)
            await self._expire(beyond(briefs, num_bytes, self._limits.max_pool_bytes), ExpiryReason.FULL)

    async def _continued(self, groups: Sequence[NewGroup], first: int) -> tuple[list[tuple[str, str, bool]], list[str]]:
        """(id, new id, whether its age is the group's) of the pooled samples that go on, and ids of too old ones."""
        prompts = [group.prompt.prompt_id for group in groups]
        lists = await self._store.one("HMGET", self._keys.named("pools"), *prompts) if prompts else []
        ids = {prompt: found.decode().split() for prompt, found in zip(prompts, lists, strict=True) if found}
        briefs = {brief.sample_id: brief for brief in await self._briefs(i for found in ids.values() for i in found)}
        chosen: list[tuple[str, str, bool]] = []
        old_ones: list[str] = []
        for seq, group in enumerate(groups, first):
            pooled = [briefs[i] for i in ids.get(group.prompt.prompt_id, []) if i in briefs]
            taken, stale = choose(pooled, group.num_samples, group.oldest_version)
            new_ids = (sample_id_of(group_id_of(seq), index) for index in range(len(taken)))
            chosen += [(old, new, group.oldest_version is not None) for old, new in zip(taken, new_ids, strict=True)]
            old_ones += stale
            for sample_id in (*taken, *stale):  # the prompt may come twice in one admission
                del briefs[sample_id]
        return chosen, old_ones

    async def _briefs(self, sample_ids: Iterable[str]) -> list[PooledBrief]:
        ids = list(sample_ids)
        records = await self._store.read(*(("HMGET", self._keys.sample(i), *POOLED_FIELDS) for i in ids))
        found = zip(ids, records, strict=True)
        return [PooledBrief(i, int(count), optional_int(oldest)) for i, (count, oldest) in found if count is not None]

    async def _expire(self, sample_ids: Sequence[str], reason: ExpiryReason) -> None:
        for first in range(0, len(sample_ids), EXPIRED_A_CALL):
            ids = sample_ids[first : first + EXPIRED_A_CALL]
            keys = [key for i in ids for key in (self._keys.sample(i), self._keys.tokens(i))]
            await self._store.transition("expire_pooled", keys, [reason.value, *ids])
