"""Counting a run again from its raw keys, for `april buffer verify` and the tests.

The records are found by SCAN, not through the indexes that are being checked, and pieces are decoded. Other writers go
on meanwhile, so a count that finds faults is taken again: what is really wrong is wrong every time.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from buffer.codec import decode_group_state, decode_left, decode_piece, int_fields, text_fields
from buffer.interface import Recount
from buffer.keys import RUN_KEYS, sample_id_of, split_sample_id
from buffer.raw_run import RawRun, pool_faults
from buffer.scripts import Store
from protocol.errors import AprilError
from protocol.messages import Ledger
from protocol.samples import merge_segments
from protocol.states import TERMINAL_SAMPLE_STATES, GroupState, SampleState

MAX_COUNTS = 3  # a writer that moved something between two reads is not a fault
READ_AT_ONCE = 500  # records in one MULTI, so that Redis answers others in between


class Recounter:
    """Reads everything of a run and compares."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys = store.keys

    async def recount(self) -> Recount:
        """See `ContinuationBuffer.recount`."""
        result = _compare(await self._read())
        for _ in range(MAX_COUNTS - 1):
            if not result.faults:
                break
            result = _compare(await self._read())
        return result

    async def _read(self) -> RawRun:
        raw = RawRun()
        await self._read_records(raw, await self._store.all_keys())
        hashes = ("meta", "ledger", "dropped", "groups", "leases", "spools", "sizes", "pools")
        states = list(SampleState)
        replies = await self._store.read(
            *(("HGETALL", self._keys.named(name)) for name in hashes),
            *(("ZRANGE", self._keys.named(state.value), 0, -1) for state in states),
            ("ZRANGE", self._keys.named("ready"), 0, -1),
            ("ZRANGE", self._keys.named("parked"), 0, -1, "WITHSCORES"),
        )
        raw.hashes = {name: text_fields(reply) for name, reply in zip(hashes, replies, strict=False)}
        *members, scored = replies[len(hashes) :]
        sets = [{i.decode() for i in reply} for reply in members]
        raw.parked = {i.decode(): int(score) for i, score in zip(scored[::2], scored[1::2], strict=True)}
        raw.members, raw.ready = dict(zip(states, sets, strict=False)), sets[-1]
        return raw

    async def _read_records(self, raw: RawRun, names: list[str]) -> None:
        records = [name for name in names if name not in RUN_KEYS]
        for first in range(0, len(records), READ_AT_ONCE):
            part = records[first : first + READ_AT_ONCE]
            keys = [self._keys.prefix + name for name in part]
            commands = [
                ("LRANGE", k, 0, -1) if n[:2] == "t:" else ("HGETALL", k) for k, n in zip(keys, part, strict=True)
            ]
            for name, reply in zip(part, await self._store.read(*commands), strict=True):
                kind, _, record_id = name.partition(":")
                if reply and kind in ("g", "s", "t"):
                    {"g": raw.groups, "s": raw.samples, "t": raw.tokens}[kind][record_id] = reply
                elif reply:
                    raw.strange.append(name)


def _compare(raw: RawRun) -> Recount:
    stored = Ledger(**int_fields({k.encode(): v.encode() for k, v in raw.hashes["ledger"].items()}))
    counted = _count(raw)
    faults = [
        *(f"unknown key {name}" for name in raw.strange),
        *_ledger_faults(stored, counted),
        *_group_faults(raw),
        *_sample_faults(raw),
        *_lease_faults(raw),
        *_capacity_faults(raw),
        *pool_faults(raw),
    ]
    return Recount(stored, counted, tuple(faults))


def _count(raw: RawRun) -> Ledger:
    states = Counter(raw.state_of(i)[0] for i in raw.groups if i in raw.hashes["groups"])
    admitted = int(raw.hashes["meta"].get("group_seq", 0))
    dropped = sum(int(n) for n in raw.hashes["dropped"].values())
    # Records of consumed groups are gone: they are the numbers given out that are nowhere else.
    return Ledger(
        admitted=admitted,
        open=states[GroupState.OPEN],
        ready=states[GroupState.READY],
        leased=states[GroupState.LEASED],
        consumed=admitted - len(raw.groups) - dropped,
        dropped=dropped,
    )


def _ledger_faults(stored: Ledger, counted: Ledger) -> Iterator[str]:
    for name, value in stored.model_dump().items():
        other = getattr(counted, name)
        if value != other:
            yield f"the ledger says {value} groups {name}, the records say {other}"
    if stored.error:
        yield f"the ledger is out of balance by {stored.error}"


def _group_faults(raw: RawRun) -> Iterator[str]:
    for group_id in raw.hashes["groups"].keys() ^ raw.groups.keys():
        yield f"group {group_id} has a record without a state, or a state without a record"
    for group_id in raw.hashes["groups"].keys() & raw.groups.keys():
        record, state = text_fields(raw.groups[group_id]), raw.state_of(group_id)[0]
        left = decode_left(record.get("left"))
        ids = [sample_id_of(group_id, i) for i in range(int(record["num_samples"])) if i not in left]
        states = Counter(raw.samples[i][b"state"].decode() for i in ids if i in raw.samples)
        if sum(states.values()) != len(ids):
            yield f"group {group_id} lacks {len(ids) - sum(states.values())} of its samples"
        if (states["scored"], states["failed"]) != (int(record.get("num_scored", 0)), int(record.get("num_failed", 0))):
            yield f"group {group_id} miscounts its samples: {dict(states)}"
        if (state is GroupState.OPEN) == (states["scored"] + states["failed"] == len(ids)):
            yield f"group {group_id} is {state}, its samples are {dict(states)}"
        if (state is GroupState.READY) != (group_id in raw.ready):
            yield f"group {group_id} is {state} and the order of readiness says otherwise"


def _sample_faults(raw: RawRun) -> Iterator[str]:
    for sample_id in raw.tokens.keys() - raw.samples.keys():
        yield f"tokens of {sample_id} have no sample"
    places = Counter(i for members in raw.members.values() for i in members)
    for sample_id in places.keys() - raw.samples.keys():
        yield f"sample {sample_id} is listed and has no record"
    for sample_id, record in raw.samples.items():
        fields = text_fields(record)
        state = SampleState(fields["state"])
        if places[sample_id] != 1 or sample_id not in raw.members[state]:
            yield f"sample {sample_id} is {state} and listed elsewhere"
        if state is SampleState.PARKED and raw.parked.get(sample_id) != int(fields.get("oldest", -1)):
            yield f"sample {sample_id} is not in the order of its oldest token"
        yield from _token_faults(raw, sample_id, fields, state)


def _token_faults(raw: RawRun, sample_id: str, fields: Mapping[str, str], state: SampleState) -> Iterator[str]:
    group_id, _ = split_sample_id(sample_id)
    value = raw.hashes["groups"].get(group_id)
    step = decode_group_state(value.encode())[1] if value and state is not SampleState.POOLED else None
    expected = 0 if step is not None and str(step) in raw.hashes["spools"] else int(fields["num_tokens"])
    try:
        segments = merge_segments([decode_piece(piece) for piece in raw.tokens.get(sample_id, [])])
    except AprilError as error:
        yield f"tokens of {sample_id}: {error}"
        return
    if (segments[-1].end if segments else 0) != expected:
        yield f"sample {sample_id} should have {expected} tokens and has {segments[-1].end if segments else 0}"
    empty = int(fields["num_tokens"]) == 0
    if (state is SampleState.PARKED and empty) or (state is SampleState.QUEUED and not empty):
        yield f"sample {sample_id} is {state} with {fields['num_tokens']} tokens"
    if (state in TERMINAL_SAMPLE_STATES) != ("reward" in fields or "fail_reason" in fields):
        yield f"sample {sample_id} is {state} without what ended it, or has ended and is not"


def _lease_faults(raw: RawRun) -> Iterator[str]:
    leased = Counter(step for _, step in (raw.state_of(i) for i in raw.hashes["groups"]) if step is not None)
    for step in leased.keys() ^ {int(s) for s in raw.hashes["leases"]}:
        yield f"step {step} has a lease without groups, or groups without a lease"


def _capacity_faults(raw: RawRun) -> Iterator[str]:
    sizes = {group_id: int(size) for group_id, size in raw.hashes["sizes"].items()}
    for group_id in sizes.keys() ^ raw.hashes["groups"].keys():
        yield f"group {group_id} has no size, or a size without a group"
    trained = int(raw.hashes["meta"].get("trained_step", 0))
    steps = {group_id: raw.state_of(group_id)[1] for group_id in raw.hashes["groups"]}
    held = [group_id for group_id, step in steps.items() if step is None or step > trained]
    counted = {"held_groups": len(held), "held_bytes": sum(sizes.get(group_id, 0) for group_id in held)}
    for name, value in counted.items():
        stored = int(raw.hashes["meta"].get(name, 0))
        if stored != value:
            yield f"the run says {name} = {stored}, its groups say {value}"
