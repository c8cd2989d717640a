"""The checker of histories: a good one passes, and each way of breaking a promise is found."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from protocol.batch import build_batch, encode_batch
from protocol.samples import Group, Prompt, Reward, Sample, Segment
from protocol.states import FinishReason, GroupState, SampleState
from rollout_service.engines.simulated import END_TOKEN, simulated_length, simulated_logprobs, simulated_tokens
from tests.support.history import check
from tests.support.journal import Journal, Record, read_history

CONFIG: Record = {
    "kind": "config",
    "at": 0.0,
    "seed": 5,
    "median_tokens": 20.0,
    "sigma": 0.5,
    "max_response_length": 40,
    "max_lag": 2,
    "batch_groups": 2,
    "num_prompts": 100,
    "simulated": True,
    "step_s": 0.004,
    "checkpoint_interval_s": 0.1,
    "sample_lease_s": 5.0,
    "max_sample_failures": 3,
}
LEDGER = {"admitted": 6, "open": 1, "ready": 1, "leased": 2, "consumed": 2, "dropped": 0}


def segment(sample_id: str, start: int, end: int, version: int, total: int) -> Segment:
    """What the simulated engine writes."""
    tokens = simulated_tokens(sample_id, start, end - start, version)
    if end == total == length(sample_id):
        tokens[-1] = END_TOKEN
    return Segment(start, version, tokens, simulated_logprobs(sample_id, start, end - start, version))


def length(sample_id: str) -> int:
    return simulated_length(CONFIG["seed"], sample_id, CONFIG["median_tokens"], CONFIG["sigma"])


def sample(group_id: str, index: int, versions: Sequence[int]) -> Sample:
    """A scored response, written by `versions` in equal parts."""
    sample_id = f"{group_id}.{index:03d}"
    total = min(length(sample_id), CONFIG["max_response_length"])
    edges = [round(i * total / len(versions)) for i in range(len(versions) + 1)]
    segments = [segment(sample_id, *ends, v, total) for ends, v in zip(pairwise(edges), versions, strict=True)]
    reason = FinishReason.STOP if length(sample_id) == total else FinishReason.LENGTH
    return Sample(
        sample_id, group_id, index, SampleState.SCORED, tuple(segments), finish_reason=reason, reward=Reward(1.0)
    )


def group(number: int, versions: Sequence[int] = (0,)) -> Group:
    group_id = f"g{number:09d}"
    prompt = Prompt(f"sums:{number}", (1, 2, 3), "", "sums")
    samples = tuple(sample(group_id, index, versions) for index in range(2))
    return Group(group_id, number, prompt, GroupState.LEASED, 0, samples)


@dataclass
class History:
    """A history that a test may break before it is checked."""

    records: list[Record]
    batches: dict[str, bytes]

    def promises_broken(self) -> set[str]:
        return {violation.promise for violation in check(sorted(self.records, key=lambda r: r["at"]), self.batches)}

    def find(self, **fields: Any) -> Record:
        return next(r for r in self.records if all(r.get(name) == value for name, value in fields.items()))

    def serve(self, step: int, groups: Sequence[Group], version: int, at: float, **fields: Any) -> str:
        """Add a lease that was answered; the digest of its bytes."""
        data = encode_batch(build_batch("test", step, version, groups))
        sha256 = hashlib.sha256(data).hexdigest()
        self.batches[sha256] = data
        call = {"op": "lease", "outcome": "ok", "epoch": 1, "step": step, "asked_at": at - 0.1}
        self.records.append({"kind": "call", "at": at, "sha256": sha256, "sha256_sent": sha256} | call | fields)
        return sha256


def call(op: str, at: float, step: int, outcome: str = "ok", epoch: int = 1, **fields: Any) -> Record:
    record = {"kind": "call", "at": at, "asked_at": at - 0.1, "op": op, "step": step}
    return record | {"outcome": outcome, "epoch": epoch} | fields


@pytest.fixture
def good() -> History:
    """Two steps; the trainer died after the first was durable and was served the second again."""
    history = History([copy.deepcopy(CONFIG)], {})
    history.records += [call("open", 1.0, 0), {"kind": "status", "at": 1.5, "ledger": LEDGER, "ledger_error": 0}]
    first = history.serve(1, [group(0), group(1)], 0, 2.0)
    history.records += [call("publish", 3.0, 1, version=1), call("ack", 3.5, 1)]
    second = history.serve(2, [group(2, (0, 1)), group(3, (1,))], 1, 4.0)
    history.records += [call("open", 5.0, 1, epoch=2), call("publish", 5.5, 1, epoch=2, version=2)]
    history.serve(2, [group(2, (0, 1)), group(3, (1,))], 1, 6.0, epoch=2)
    history.records += [call("ack", 7.0, 2, "fenced", detail="superseded by epoch 2"), call("ack", 7.5, 1, epoch=2)]
    part = segment("g000000004.000", 0, 5, 2, -1)
    final: Record = {
        "kind": "final",
        "at": 9.0,
        "ledger": LEDGER,
        "recount_faults": [],
        "open": ["g000000004"],
        "ready": ["g000000005"],
        "leased": {"2": ["g000000002", "g000000003"]},
        "dropped": [],
        "policies": [[0, 0], [1, 1], [2, 1]],
        "prompts": {"g000000004": "sums:4", "g000000005": "sums:5"},
        "samples": {"g000000004.000": [[0, 2, part.tokens.tolist(), part.logprobs.tolist()]]},
        "history": {
            "1": [first, ["g000000000", "g000000001"]],
            "2": [second, ["g000000002", "g000000003"]],
        },
    }
    history.records.append(final)
    return history


def test_good_history_has_no_violation(good):
    assert good.promises_broken() == set()


def continued(group_id: str, origin: str, under_origin: int) -> Sample:
    """A response that `origin` began with so many tokens, before its prompt came up again."""
    sample_id = f"{group_id}.000"
    end = under_origin + 3
    first, rest = segment(origin, 0, under_origin, 0, -1), segment(sample_id, under_origin, end, 1, -1)
    rest.tokens[-1] = END_TOKEN
    return Sample(
        sample_id,
        group_id,
        0,
        SampleState.SCORED,
        (first, rest),
        finish_reason=FinishReason.STOP,
        reward=Reward(1.0),
        continued_from=origin,
    )


@pytest.mark.parametrize("origin", ["g000000009.001", "g000000008.001"])
def test_a_continued_sample_is_written_under_both_its_ids(good, origin):
    went_on = continued("g000000006", "g000000009.001", 4)
    samples = (replace(went_on, continued_from=origin), sample("g000000006", 1, (1,)))
    good.serve(3, [replace(group(6), samples=samples), group(7, (1,))], 1, 8.0, epoch=2)
    assert good.promises_broken() == (set() if origin == "g000000009.001" else {"G4"})


def unbalanced(history: History) -> None:
    history.find(kind="status")["ledger"] = LEDGER | {"open": 2}


def recount_differs(history: History) -> None:
    history.find(kind="final")["recount_faults"] = ["the ledger says 1 groups open, the records say 2"]


def superseded_call_carried_out(history: History) -> None:
    history.find(op="ack", outcome="fenced")["outcome"] = "ok"


def superseded_long_poll_answered(history: History) -> None:
    history.records.append(call("lease", 6.5, 3, "empty"))


def epoch_given_twice(history: History) -> None:
    history.records.append(call("open", 5.2, 1, epoch=2))


def superseded_service_lives_on(history: History) -> None:
    history.records.append({"kind": "superseded_service", "at": 8.0, "code": 0})


def legal_call_refused(history: History) -> None:
    history.records.append(call("open", 8.0, 1, "refused", 0, detail="steps up to 2 are acknowledged"))


def session_refused_after_a_late_ack(history: History) -> None:
    history.records.append({"kind": "started", "at": 7.6, "process": "trainer", "child": 9, "failpoint": ""})
    history.records.append(call("open", 8.0, 0, "refused", 0, detail="steps up to 1 are acknowledged", pid=9))


def replay_differs(history: History) -> None:
    history.records = [r for r in history.records if r.get("step") != 2 or r.get("epoch") != 2]
    history.serve(2, [group(2, (0, 1)), group(3, (0, 1))], 1, 6.0, epoch=2)


def batch_of_another_step(history: History) -> None:
    sha256 = history.find(op="lease", step=1)["sha256"]
    history.records.append(call("lease", 6.5, 3, epoch=2, sha256=sha256, sha256_sent=sha256))


def not_a_batch(history: History) -> None:
    history.batches[history.find(op="lease", step=1)["sha256"]] = b"half a file"


def digest_differs(history: History) -> None:
    history.find(op="lease", step=1)["sha256_sent"] = "0" * 64


def group_in_two_steps(history: History) -> None:
    history.serve(3, [group(1), group(6)], 1, 8.0, epoch=2)


def batch_too_small(history: History) -> None:
    history.serve(3, [group(6)], 1, 8.0, epoch=2)


def group_twice_in_a_step(history: History) -> None:
    history.serve(3, [group(6), group(6)], 1, 8.0, epoch=2)


def trained_twice(history: History) -> None:
    entries = history.find(kind="final")["history"]
    entries["2"][1] = entries["1"][1]


def step_missing(history: History) -> None:
    entries = history.find(kind="final")["history"]
    entries["3"] = entries.pop("2")


def trained_on_other_bytes(history: History) -> None:
    history.find(kind="final")["history"]["2"][0] = "0" * 64


def acknowledged_and_gone(history: History) -> None:
    history.records.append(call("ack", 8.0, 3, epoch=2))


def buffer_has_other_tokens(history: History) -> None:
    history.find(kind="final")["samples"]["g000000004.000"][0][2][3] += 1


def buffer_has_a_gap(history: History) -> None:
    history.find(kind="final")["samples"]["g000000004.000"][0][0] = 1


def buffer_lacks_a_logprob(history: History) -> None:
    history.find(kind="final")["samples"]["g000000004.000"][0][3].pop()


def wrong_version_label(history: History) -> None:
    spoilt = group(6)
    samples = [replace(s, segments=tuple(replace(p, version=1) for p in s.segments)) for s in spoilt.samples]
    history.serve(3, [replace(spoilt, samples=tuple(samples)), group(7)], 1, 8.0, epoch=2)


def lost_tail(history: History) -> None:
    spoilt = group(6)
    first = spoilt.samples[0]
    cut = segment(first.sample_id, 0, first.num_tokens - 2, 0, -1)
    history.serve(3, [replace(spoilt, samples=(replace(first, segments=(cut,)),)), group(7)], 1, 8.0, epoch=2)


def too_old(history: History) -> None:
    history.records += [call("publish", 8.0 + v / 10, v, epoch=2, version=v + 1) for v in (2, 3, 4)]
    history.find(kind="final")["policies"] += [[3, 2], [4, 3], [5, 4]]
    history.serve(3, [group(6), group(7)], 5, 8.9, epoch=2)


def group_lost(history: History) -> None:
    history.find(kind="final")["open"] = []


def group_in_two_states(history: History) -> None:
    history.find(kind="final")["ready"].append("g000000004")


def ledger_counts_otherwise(history: History) -> None:
    history.find(kind="final")["ledger"] = LEDGER | {"ready": 0, "dropped": 1}


def prompt_twice(history: History) -> None:
    history.find(kind="final")["prompts"]["g000000005"] = "sums:0"


@pytest.mark.parametrize(
    ("spoil", "promise"),
    [
        (unbalanced, "G1"),
        (recount_differs, "G1"),
        (superseded_call_carried_out, "G3"),
        (superseded_long_poll_answered, "G3"),
        (epoch_given_twice, "G3"),
        (superseded_service_lives_on, "G3"),
        (legal_call_refused, "G5"),
        (session_refused_after_a_late_ack, "G5"),
        (replay_differs, "G5"),
        (batch_of_another_step, "G5"),
        (not_a_batch, "G5"),
        (digest_differs, "G5"),
        (group_in_two_steps, "G5"),
        (batch_too_small, "G5"),
        (group_twice_in_a_step, "G5"),
        (trained_twice, "G5"),
        (step_missing, "G5"),
        (trained_on_other_bytes, "G5"),
        (acknowledged_and_gone, "G5"),
        (buffer_has_other_tokens, "G4"),
        (buffer_has_a_gap, "G4"),
        (buffer_lacks_a_logprob, "G4"),
        (wrong_version_label, "G4"),
        (lost_tail, "G4"),
        (too_old, "G11"),
        (group_lost, "G1"),
        (group_in_two_states, "G1"),
        (ledger_counts_otherwise, "G1"),
        (prompt_twice, "cursor"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, Callable) else value,
)
def test_violation_is_found(good, spoil, promise):
    spoil(good)
    assert promise in good.promises_broken()


def test_a_session_may_be_refused_whose_checkpoint_was_overtaken(good):
    good.records.append({"kind": "started", "at": 7.4, "process": "trainer", "child": 9, "failpoint": ""})
    good.records.append(call("open", 8.0, 0, "refused", 0, detail="steps up to 1 are acknowledged", pid=9))
    assert good.promises_broken() == set()


def test_versions_that_a_restarted_trainer_publishes_again_do_not_age_tokens(good):
    good.records += [call("publish", 8.0 + v / 10, 1, epoch=2, version=v) for v in (3, 4, 5)]
    good.find(kind="final")["policies"] += [[3, 1], [4, 1], [5, 1]]
    good.serve(3, [group(6), group(7)], 5, 8.9, epoch=2)
    assert "G11" not in good.promises_broken()


def test_journal_keeps_records_and_batches_of_several_writers(tmp_path):
    one, two = Journal(tmp_path), Journal(tmp_path)
    for number in range(3):
        one.write("a", number=number)
        two.write("b", number=number)
    one.keep_batch("ab" * 32, b"bytes")
    two.keep_batch("ab" * 32, b"bytes")
    records, batches = read_history(tmp_path)
    assert [(r["kind"], r["number"]) for r in records] == [(k, n) for n in range(3) for k in "ab"]
    assert batches == {"ab" * 32: b"bytes"}
    for journal in (one, two):
        journal.close()
