"""The checker of what services were told and knew: a good history passes, each way of breaking a promise is found."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from rollout_service.engines.simulated import simulated_logprobs, simulated_tokens
from tests.support.history import Verdict, judge
from tests.support.journal import Record
from tests.support.recovery import recoveries, service_start_s, undisturbed_step_s
from tests.support.witness import piece_digest
from tests.system.test_history import CONFIG, segment

ONE, TWO = "g000000000.000", "g000000001.000"
LEDGER = {"admitted": 2, "open": 2, "ready": 0, "leased": 0, "consumed": 0, "dropped": 0}
OLD_PID, NEW_PID = 100, 200


@dataclass
class Told:
    """Builds a history and judges it."""

    records: list[Record]

    def verdicts(self) -> dict[str, Verdict]:
        records = sorted(self.records, key=lambda r: r["at"])
        return {verdict.promise: verdict for verdict in judge(records, {})}

    def broken(self) -> set[str]:
        return {promise for promise, verdict in self.verdicts().items() if verdict.word == "BROKEN"}

    def buffer(self, op: str, at: float, epoch: int = 1, outcome: str = "ok", **fields: Any) -> Record:
        base = {"kind": "buffer", "op": op, "at": at, "asked_at": at - 0.01, "service_epoch": epoch, "outcome": outcome}
        self.records.append(base | fields)
        return self.records[-1]

    def write(self, op: str, at: float, sample: str, attempt: int, start: int, end: int, **fields: Any) -> Record:
        piece = segment(sample, start, end, 0, -1)
        fields = {"version": 0, "digest": piece_digest(piece)} | fields
        return self.buffer(op, at, sample=sample, attempt=attempt, start=start, end=end, **fields)

    def find(self, **fields: Any) -> Record:
        return next(r for r in self.records if all(r.get(name) == value for name, value in fields.items()))


@pytest.fixture
def told() -> Told:
    """A service runs two samples; Redis is killed; an engine dies; the service is killed and another goes on."""
    history = Told([copy.deepcopy(CONFIG)])
    history.buffer("claim", 1.0, 0, claimed=1)
    history.buffer("admit", 1.1, groups=["g000000000", "g000000001"])
    history.buffer("start", 1.2, leases=[[ONE, 1], [TWO, 1]], lease_s=5.0)
    history.write("append", 1.4, ONE, 1, 0, 4)
    history.write("append", 1.5, TWO, 1, 0, 3)
    history.records += [
        {"kind": "status", "at": 1.6, "asked_at": 1.55, "pid": OLD_PID, "ledger": LEDGER, "ledger_error": 0}
        | {"durable_step": 0, "newest_version": 0, "trained_step": 0},
        {"kind": "kill", "at": 2.0, "process": "redis", "child": 50},
        {"kind": "ended", "at": 2.1, "process": "redis", "child": 50, "code": -9},
        {"kind": "status", "at": 2.6, "asked_at": 2.5, "pid": OLD_PID, "ledger": LEDGER, "ledger_error": 0}
        | {"durable_step": 0, "newest_version": 0, "trained_step": 0},
        {"kind": "engine_died", "at": 3.0, "worker": "engine-0", "sample": ONE, "attempt": 1, "received": 6},
    ]
    history.write("park", 3.1, ONE, 1, 4, 6)
    history.records.append(
        {"kind": "engine", "at": 3.2, "worker": "engine-0", "life": 2, "asked_version": 0, "version": 0}
    )
    history.buffer("start", 3.3, leases=[[ONE, 2]], lease_s=5.0)
    history.buffer("read", 3.4, samples=[[ONE, "running", 6, 0]])
    history.buffer("renew", 5.5, leases=[[ONE, 2], [TWO, 1]], lost=[])
    history.buffer("renew", 14.0, leases=[[ONE, 2], [TWO, 1]], lost=[])  # late, since Redis was away
    history.records += [
        {"kind": "kill", "at": 15.0, "process": "service", "child": OLD_PID},
        {"kind": "ended", "at": 15.1, "process": "service", "child": OLD_PID, "code": -9},
        {"kind": "flight", "at": 0.0, "pid": OLD_PID, "rows": [row(ONE, 2, generated=12, received=11, stored=6)]},
    ]
    history.buffer("claim", 16.0, 1, claimed=2)
    history.buffer("start", 16.1, 2, leases=[[ONE, 3], [TWO, 2]], lease_s=5.0)
    history.buffer("read", 16.2, 2, samples=[[ONE, "running", 6, 0], [TWO, "running", 3, 0]])
    history.buffer("append", 16.3, 1, "fenced", sample=ONE, attempt=2)
    history.buffer("expire", 22.0, 2, parked=[TWO])
    history.records.append(final({ONE: 6, TWO: 3}))
    return history


def row(sample: str, attempt: int, **fields: Any) -> Record:
    """A line of a flight recorder, of a service that died at 15.0."""
    times = {"pending_since": 0.0, "write_s": 0.001, "unsent_since": 14.95, "received_at": 14.99}
    return {"sample": sample, "attempt": attempt} | times | fields


def final(lengths: dict[str, int]) -> Record:
    def segments(sample: str, length: int) -> list[Any]:
        tokens, logprobs = simulated_tokens(sample, 0, length, 0), simulated_logprobs(sample, 0, length, 0)
        return [[0, 0, tokens.tolist(), logprobs.tolist()]] if length else []

    return {
        "kind": "final",
        "at": 30.0,
        "ledger": LEDGER,
        "recount_faults": [],
        "open": ["g000000000", "g000000001"],
        "ready": [],
        "leased": {},
        "dropped": [],
        "policies": [[0, 0]],
        "prompts": {"g000000000": "sums:0", "g000000001": "sums:1"},
        "samples": {sample: segments(sample, length) for sample, length in lengths.items()},
        "history": {},
    }


def test_good_history_is_kept_in_all_that_it_observes(told: Told) -> None:
    verdicts = told.verdicts()
    assert {promise: v.violations for promise, v in verdicts.items() if v.violations} == {}
    assert verdicts["G2"].seen == {
        "samples taken over from a service that was gone": 2,
        "leases that ran out and were renewed by their owner": 2,
        "leases that ran out and were parked": 1,
        "writes of the one holder": 3,
    }
    assert verdicts["G3"].seen == {"calls of superseded services or attempts refused": 1}
    assert verdicts["G6"].seen["samples found with all acknowledged tokens after Redis was killed"] == 1
    assert verdicts["G7"].seen == {
        "samples that ran when a service died": 1,
        "tokens lost with them": 6,
        "of these by one sample; an interval is 25": 6,
    }
    assert verdicts["G14"].seen == {"engines started again": 1, "samples that ran in an engine that died": 1}
    assert verdicts["G11"].word == "not observed"


def written_by_two(told: Told) -> None:
    told.write("append", 3.6, ONE, 1, 6, 7)


def attempt_given_twice(told: Told) -> None:
    told.buffer("start", 3.5, leases=[[ONE, 2]], lease_s=5.0)


def renewed_by_two(told: Told) -> None:
    told.buffer("renew", 17.0, 2, leases=[[TWO, 1]], lost=[])


def taken_too_early(told: Told) -> None:
    told.find(op="expire")["at"] = told.find(op="expire")["asked_at"] = 20.0


def written_after_it_was_taken(told: Told) -> None:
    told.write("append", 22.5, TWO, 2, 3, 4, service_epoch=2)


def taken_over_from_an_older_token(told: Told) -> None:
    told.find(op="read", at=16.2)["samples"][0][2] = 5


def superseded_service_writes(told: Told) -> None:
    told.find(op="append", outcome="fenced")["outcome"] = "ok"


def written_twice(told: Told) -> None:
    told.find(op="park")["start"] = 3


def other_bytes_than_acknowledged(told: Told) -> None:
    told.find(op="park")["digest"] = "0" * 16


def other_version_than_acknowledged(told: Told) -> None:
    told.find(op="park")["version"] = 1


def tokens_lost_with_redis(told: Told) -> None:
    told.find(op="read", at=16.2)["samples"][1][2] = 2


def ack_lost_with_redis(told: Told) -> None:
    told.records.append(
        {"kind": "call", "op": "ack", "outcome": "ok", "at": 1.9, "asked_at": 1.8, "step": 3, "epoch": 1}
    )


def version_lost_with_redis(told: Told) -> None:
    call = {"kind": "call", "op": "publish", "outcome": "ok", "at": 1.9, "asked_at": 1.8, "step": 1, "epoch": 1}
    told.records.append(call | {"version": 1})


def admission_lost_with_redis(told: Told) -> None:
    told.buffer("admit", 1.9, groups=["g000000002"])


def more_lost_than_the_interval(told: Told) -> None:
    told.find(kind="flight")["rows"][0]["generated"] = 6 + 60  # 0.24 s at 4 ms a token


def kept_longer_than_the_interval(told: Told) -> None:
    told.find(kind="flight")["rows"][0]["unsent_since"] = 14.8


def orderly_end_loses(told: Told) -> None:
    told.records = [r for r in told.records if r["kind"] != "kill" or r["process"] != "service"]
    told.find(kind="ended", process="service")["code"] = 0


def engine_loses_what_it_delivered(told: Told) -> None:
    told.find(kind="engine_died")["received"] = 7


def engine_takes_a_sample_with_it(told: Told) -> None:
    told.records = [r for r in told.records if r.get("op") not in ("start", "read")]
    told.find(kind="final")["samples"] = {}


def engine_comes_back_as_another(told: Told) -> None:
    told.find(kind="engine")["version"] = 1


def blamed_for_a_death(told: Told) -> None:
    told.buffer("fail", 20.0, 2, sample=ONE, reason="quarantined", group_state="open")


@pytest.mark.parametrize(
    ("spoil", "promise"),
    [
        (written_by_two, "G2"),
        (attempt_given_twice, "G2"),
        (renewed_by_two, "G2"),
        (taken_too_early, "G2"),
        (written_after_it_was_taken, "G2"),
        (taken_over_from_an_older_token, "G2"),
        (superseded_service_writes, "G3"),
        (written_twice, "G4"),
        (other_bytes_than_acknowledged, "G4"),
        (other_version_than_acknowledged, "G4"),
        (tokens_lost_with_redis, "G6"),
        (ack_lost_with_redis, "G6"),
        (version_lost_with_redis, "G6"),
        (admission_lost_with_redis, "G6"),
        (more_lost_than_the_interval, "G7"),
        (kept_longer_than_the_interval, "G7"),
        (orderly_end_loses, "G7"),
        (engine_loses_what_it_delivered, "G14"),
        (engine_takes_a_sample_with_it, "G14"),
        (engine_comes_back_as_another, "G14"),
        (blamed_for_a_death, "G14"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, Callable) else value,
)
def test_violation_is_found(told: Told, spoil: Callable[[Told], None], promise: str) -> None:
    spoil(told)
    assert promise in told.broken()


def test_what_an_append_under_way_held_up_may_be_lost_as_well(told: Told) -> None:
    lost = told.find(kind="flight")["rows"][0]
    lost |= {"generated": 6 + 60, "pending_since": 14.7, "unsent_since": 0.0}
    assert "G7" not in told.broken()


def test_answers_that_never_came_bind_nobody(told: Told) -> None:
    told.write("append", 3.45, ONE, 2, 6, 9, outcome="unknown")
    assert told.broken() == set()


def statuses(*steps: tuple[float, int]) -> list[Record]:
    return [{"kind": "status", "at": at, "asked_at": at - 0.01, "pid": 7, "trained_step": step} for at, step in steps]


def test_recovery_is_the_next_step_that_is_trained() -> None:
    pids = count(1)
    records = [
        {"kind": "started", "at": 0.0, "process": "service", "child": 7, "failpoint": ""},
        {"kind": "started", "at": 0.0, "process": "trainer", "child": 9, "failpoint": "mid_step=kill@1"},
        {"kind": "fault", "began_at": 1.0, "at": 2.0, "name": "redis killed", "struck": True},
        {"kind": "fault", "began_at": 6.0, "at": 6.5, "name": "redis killed", "struck": True},
        {"kind": "fault", "began_at": 6.6, "at": 7.0, "name": "trainer killed", "struck": True},
        {"kind": "fault", "began_at": 7.1, "at": 7.1, "name": "engine killed", "struck": False},
        {"kind": "ended", "at": 20.0, "process": "trainer", "child": 9, "code": -9},
        *statuses((0.5, 4), (2.5, 4), (3.0, 3), (4.5, 4), (6.4, 4), (6.8, 4), (7.5, 4), (9.0, 5), (10.0, 6), (11.0, 7)),
        *statuses((21.0, 7), (22.0, 8), (23.0, 9), (next(pids) + 24.0, 10)),
    ]
    found = recoveries(sorted(records, key=lambda r: r["at"]))
    redis = found["redis killed"]
    assert (redis.times, redis.survived, redis.alone_s) == (2, 2, [2.5]), "the second was met by another fault"
    assert found["trainer killed"].alone_s == [2.0]
    assert found["trainer crashed at mid_step"].alone_s == [2.0]
    assert "engine killed" not in found
    assert undisturbed_step_s(records) == 1.0
    assert service_start_s(records) == 0.5


def test_a_system_that_never_trains_again_has_not_survived() -> None:
    fault = {"kind": "fault", "began_at": 1.0, "at": 2.0, "name": "redis killed", "struck": True}
    (recovery,) = recoveries([fault, *statuses((2.5, 4), (3.0, 3), (9.0, 3))]).values()
    assert (recovery.times, recovery.survived, recovery.median_s) == (1, 0, None)
