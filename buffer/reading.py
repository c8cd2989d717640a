"""Reading a run from Redis. Nothing here writes.

Each method reads in one MULTI, so that what it returns stood there at one moment; ids that it needs first are read
before, and what has gone meanwhile is left out of lists.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from buffer.codec import (
    Record,
    Tombstone,
    decode_group_state,
    decode_left,
    decode_prompt,
    decode_sample,
    int_fields,
    optional_int,
    text_fields,
)
from buffer.interface import GroupBrief, SampleBrief, Snapshot
from buffer.keys import sample_id_of, split_sample_id
from buffer.order import resume_order
from buffer.scripts import Store
from protocol.errors import NotFoundError
from protocol.messages import Ledger, PoolLedger
from protocol.samples import Group, Sample
from protocol.states import DropReason, ExpiryReason, GroupState, SampleState

OPEN_SAMPLE_STATES = (SampleState.QUEUED, SampleState.PARKED, SampleState.RUNNING, SampleState.FINISHED)
BRIEF_FIELDS = ("state", "num_tokens", "oldest", "resumes", "failures", "expiries", "aside")
# Read at every resume, and parsing a field takes redis-py longer than the server takes for a thousand tokens.
SAMPLE_FIELDS = (
    "state",
    "resumes",
    "failures",
    "finish_reason",
    "reward",
    "fail_reason",
    "error",
    "continued_from",
)
GROUP_FIELDS = ("seq", "admitted_version", "num_samples", "num_scored", "num_failed", "oldest", "left")


class Reading:
    """Counts, briefs, samples and groups."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys = store.keys

    async def snapshot(self) -> Snapshot:
        """See `ContinuationBuffer.snapshot`."""
        hashes = [("HGETALL", self._keys.named(name)) for name in ("meta", "ledger", "counters", "dropped")]
        cards = [("ZCARD", self._keys.named(state.value)) for state in SampleState]
        leases = ("HKEYS", self._keys.named("leases"))
        meta, ledger, counters, dropped, steps, *counts = await self._store.read(*hashes, leases, *cards)
        return _snapshot(
            text_fields(meta),
            Ledger(**int_fields(ledger)),
            dict(zip(SampleState, counts, strict=True)),
            dropped=int_fields(dropped),
            counters={name: count for name, count in int_fields(counters).items() if count},
            leased_steps=tuple(sorted(int(step) for step in steps)),
        )

    async def open_samples(self) -> list[SampleBrief]:
        """See `ContinuationBuffer.open_samples`. Reads all of them: a pipeline of one command a sample."""
        names = [self._keys.named(state.value) for state in OPEN_SAMPLE_STATES]
        replies = await self._store.read(*(("ZRANGE", name, 0, -1) for name in names))
        ids = [i.decode() for reply in replies for i in reply]
        time, *records = await self._store.read(
            ("TIME",), *(("HMGET", self._keys.sample(i), *BRIEF_FIELDS) for i in ids)
        )
        now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
        found = [(i, record) for i, record in zip(ids, records, strict=True) if record[0] is not None]
        briefs = [_sample_brief(i, record, now_ms) for i, record in found]
        return sorted((b for b in briefs if b.state in OPEN_SAMPLE_STATES), key=resume_order)

    async def open_groups(self) -> list[GroupBrief]:
        """See `ContinuationBuffer.open_groups`."""
        states: dict[bytes, bytes] = await self._store.one("HGETALL", self._keys.named("groups"))
        found = {i.decode(): decode_group_state(value)[0] for i, value in states.items()}
        ids = sorted(i for i, state in found.items() if state in (GroupState.OPEN, GroupState.READY))
        records = await self._store.read(*(("HMGET", self._keys.group(i), *GROUP_FIELDS) for i in ids))
        pairs = zip(ids, records, strict=True)
        return [_group_brief(i, found[i], record) for i, record in pairs if record[0] is not None]

    async def count_longer(self, num_tokens: int) -> int:
        """See `ContinuationBuffer.count_longer`. Reads a number of each sample, no tokens."""
        names = [self._keys.named(state.value) for state in SampleState]
        states, *replies = await self._store.read(
            ("HGETALL", self._keys.named("groups")), *(("ZRANGE", name, 0, -1) for name in names)
        )
        groups = {i.decode(): decode_group_state(value)[0] for i, value in states.items()}
        waiting = {i for i, state in groups.items() if state in (GroupState.OPEN, GroupState.READY)}
        found = [(state, i.decode()) for state, ids in zip(SampleState, replies, strict=True) for i in ids]
        ids = [i for state, i in found if state is SampleState.POOLED or split_sample_id(i)[0] in waiting]
        lengths = await self._store.read(*(("HGET", self._keys.sample(i), "num_tokens") for i in ids))
        return sum(int(length or 0) > num_tokens for length in lengths)

    async def samples(self, sample_ids: Sequence[str]) -> list[Sample]:
        """See `ContinuationBuffer.samples`."""
        found = await self._samples(sample_ids)
        for sample_id in sample_ids:
            if sample_id not in found:
                raise NotFoundError(f"there is no sample {sample_id}: list the open samples again")
        return [found[sample_id] for sample_id in sample_ids]

    async def _samples(self, sample_ids: Sequence[str]) -> dict[str, Sample]:
        """Those that are there."""
        places = [split_sample_id(sample_id) for sample_id in sample_ids]
        commands: list[tuple[str | int, ...]] = []
        for sample_id in sample_ids:
            commands += [
                ("HMGET", self._keys.sample(sample_id), *SAMPLE_FIELDS),
                ("LRANGE", self._keys.tokens(sample_id), 0, -1),
            ]
        replies = await self._store.read(*commands)
        records = zip(sample_ids, places, replies[::2], replies[1::2], strict=True)
        found = (_sample(i, place, values, pieces) for i, place, values, pieces in records)
        return {sample.sample_id: sample for sample in found if sample is not None}

    async def groups(self, group_ids: Sequence[str]) -> list[Group]:
        """See `ContinuationBuffer.groups`. Of a dropped group its reason and its prompt's id are known, for a while."""
        replies = await self._store.read(*(command for i in group_ids for command in self._group_commands(i)))
        heads = {i: replies[3 * n : 3 * n + 3] for n, i in enumerate(group_ids)}
        ids = [s for i, head in heads.items() for s in _sample_ids(i, head[0])]
        found = await self._samples(ids)
        samples = {i: [found[s] for s in _sample_ids(i, head[0]) if s in found] for i, head in heads.items()}
        return [_group(i, heads[i], samples[i]) for i in group_ids]

    def _group_commands(self, group_id: str) -> list[tuple[str, ...]]:
        return [
            ("HGETALL", self._keys.group(group_id)),
            ("HGET", self._keys.named("groups"), group_id),
            ("HGET", self._keys.named("tombstones"), group_id),
        ]


def _snapshot(
    meta: Mapping[str, str],
    ledger: Ledger,
    samples: Mapping[SampleState, int],
    dropped: Mapping[str, int],
    counters: Mapping[str, int],
    leased_steps: tuple[int, ...],
) -> Snapshot:
    def number(name: str) -> int:
        return int(meta.get(name, 0))

    return Snapshot(
        ledger=ledger,
        samples=samples,
        dropped={reason: dropped.get(reason.value, 0) for reason in DropReason},
        offered=number("offered"),
        outstanding=number("offered") + number("leased_step") - number("trained_step"),
        leased_steps=leased_steps,
        trained_step=number("trained_step"),
        durable_step=number("durable_step"),
        service_epoch=number("service_epoch"),
        trainer_epoch=number("trainer_epoch"),
        active_version=number("active_version"),
        newest_version=number("newest_version"),
        cursor=meta.get("cursor", ""),
        counters=counters,
        held_groups=number("held_groups"),
        held_bytes=number("held_bytes"),
        pool=pool_ledger(meta),
    )


def pool_ledger(meta: Mapping[str, str]) -> PoolLedger:
    """The pool's line, which the run's record keeps once a sample has been pooled."""
    return PoolLedger(
        entered=int(meta.get("pool_entered", 0)),
        pooled=int(meta.get("pool_samples", 0)),
        continued=int(meta.get("pool_continued", 0)),
        expired={reason: int(meta.get(f"pool_expired:{reason.value}", 0)) for reason in ExpiryReason},
        num_bytes=int(meta.get("pool_bytes", 0)),
    )


def _sample_brief(sample_id: str, record: Sequence[bytes | None], now_ms: int) -> SampleBrief:
    state, num_tokens, oldest, resumes, failures, expiries, aside = record
    group_id, _ = split_sample_id(sample_id)
    return SampleBrief(
        sample_id=sample_id,
        group_id=group_id,
        group_seq=int(group_id[1:]),
        state=SampleState((state or b"").decode()),
        num_tokens=int(num_tokens or 0),
        oldest_version=optional_int(oldest),
        num_resumes=int(resumes or 0),
        num_failures=int(failures or 0),
        num_expiries=int(expiries or 0),
        aside_s=None if aside is None else max(0, now_ms - int(aside)) / 1000,
    )


def _group_brief(group_id: str, state: GroupState, record: Sequence[bytes | None]) -> GroupBrief:
    seq, version, num_samples, scored, failed, oldest, left = record
    return GroupBrief(
        group_id=group_id,
        seq=int(seq or 0),
        state=state,
        admitted_version=int(version or 0),
        num_samples=int(num_samples or 0) - len(decode_left(left)),
        num_scored=int(scored or 0),
        num_failed=int(failed or 0),
        oldest_version=optional_int(oldest),
    )


def _sample(
    sample_id: str, place: tuple[str, int], values: Sequence[bytes | None], pieces: list[bytes]
) -> Sample | None:
    record = {name.encode(): value for name, value in zip(SAMPLE_FIELDS, values, strict=True) if value is not None}
    return decode_sample(sample_id, *place, record, pieces) if record else None


def _sample_ids(group_id: str, record: Record) -> list[str]:
    left = decode_left(record.get(b"left"))
    return [sample_id_of(group_id, i) for i in range(int(record.get(b"num_samples", 0))) if i not in left]


def _group(group_id: str, head: Sequence[Any], samples: list[Sample]) -> Group:
    """`samples`: those that are there; one that isn't, or is POOLED, left the group since its record was read."""
    record, state, tombstone = head
    if not record or state is None:
        if tombstone is None:
            raise NotFoundError(f"there is no group {group_id}: it was consumed, dropped long ago, or never admitted")
        return Tombstone.decode(tombstone).group(group_id)
    fields = text_fields(record)
    if "wanted" not in fields and len(samples) < int(fields["num_samples"]):
        raise NotFoundError(f"group {group_id} is being dropped or consumed just now: ask again")
    samples = [sample for sample in samples if sample.state is not SampleState.POOLED]
    group_state, step = decode_group_state(state)
    prompt, version = decode_prompt(fields["prompt"]), int(fields["admitted_version"])
    return Group(group_id, int(fields["seq"]), prompt, group_state, version, tuple(samples), step)
