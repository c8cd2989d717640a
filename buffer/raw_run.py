"""What lies in Redis of a run, as `april buffer verify` reads it, and whether its pool agrees with itself."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from buffer.codec import Record, decode_group_state, text_fields
from buffer.pool import PooledBrief
from buffer.reading import pool_ledger
from protocol.states import GroupState, SampleState


@dataclass
class RawRun:
    """What lies in Redis, by kind."""

    hashes: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    members: dict[SampleState, set[str]] = field(default_factory=dict[SampleState, set[str]])
    parked: dict[str, int] = field(default_factory=dict[str, int])
    ready: set[str] = field(default_factory=set[str])
    groups: dict[str, Record] = field(default_factory=dict[str, Record])
    samples: dict[str, Record] = field(default_factory=dict[str, Record])
    tokens: dict[str, list[bytes]] = field(default_factory=dict[str, list[bytes]])
    strange: list[str] = field(default_factory=list[str])

    def state_of(self, group_id: str) -> tuple[GroupState, int | None]:
        """State and step of a group in the `groups` hash."""
        return decode_group_state(self.hashes["groups"][group_id].encode())


def pool_faults(raw: RawRun) -> Iterator[str]:
    """The line of pooled samples, their bytes, and the lists of the prompts, against their records."""
    line = pool_ledger(raw.hashes["meta"])
    if line.error:
        yield f"the pool's line is out of balance by {line.error}: {line}"
    pooled = {i: text_fields(r) for i, r in raw.samples.items() if r[b"state"] == SampleState.POOLED.value.encode()}
    briefs = [PooledBrief(i, int(fields["num_tokens"]), None) for i, fields in pooled.items()]
    for name, stored, counted in (
        ("samples", line.pooled, len(pooled)),
        ("bytes", line.num_bytes, sum(brief.num_bytes for brief in briefs)),
    ):
        if stored != counted:
            yield f"the pool's line says {stored} {name}, the records say {counted}"
    listed = Counter((i, prompt) for prompt, ids in raw.hashes["pools"].items() for i in ids.split())
    if listed != Counter((i, fields["pool"]) for i, fields in pooled.items()):
        yield f"the prompts' pools list {sorted(listed)}, pooled are {sorted(pooled)}"
    for sample_id in pooled:
        group = raw.groups.get(sample_id.partition(".")[0])
        if group is not None and raw.state_of(sample_id.partition(".")[0])[0] is GroupState.OPEN:
            yield f"sample {sample_id} is pooled and its group is open"
