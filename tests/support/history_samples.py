"""Decides from what the services were told by the buffer, and from what they knew when they were killed.

- G2: a sample has one holder at a time: no write or renewal of an attempt is carried out that was sent after a newer
  attempt had begun; no lease is taken from an owner that renewed it in time; who takes over goes on from the last
  acknowledged token;
- G3: nothing that a service sends after a newer one had claimed the run is carried out;
- G4: a write begins where the sample ended, and what was acknowledged is what is delivered, byte for byte;
- G6: what was acknowledged before Redis was killed is there afterwards: tokens, groups, acks, versions;
- G7: what a killed service had generated and not stored is younger than a checkpoint interval and the write under way;
- G14: every sample that ran in an engine that died goes on with all that the engine had delivered.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np

from tests.support.journal import Record
from tests.support.run_history import RunHistory, Violation, final_samples

WRITES = ("append", "park", "finish", "failure")
CLOCKS_S = 0.05  # Redis counts leases by another clock of the same machine
TERMINAL = ("scored", "failed")  # their tokens may be in a spooled batch and deleted here
TICKS = 3  # steps of the engine that may pass between the last look at the clock and the kill
DIGEST_BYTES = 8
ORDERLY_ENDS = "orderly ends of a service"
ORDERLY_SAMPLES = "samples that ran when a service ended in order"
BLAMED = ("engine_died", "quarantined")


@dataclass(slots=True)
class Story:
    """What became of one sample, in the order in which it was answered."""

    starts: list[Record] = field(default_factory=list[Record])
    writes: list[Record] = field(default_factory=list[Record])
    reads: list[tuple[Record, int]] = field(default_factory=list[tuple[Record, int]])
    expiries: list[Record] = field(default_factory=list[Record])
    renewals: list[Record] = field(default_factory=list[Record])


def stories(run: RunHistory) -> dict[str, Story]:
    """By sample id."""
    found: dict[str, Story] = defaultdict(Story)
    for record in run.acknowledged("start"):
        for sample, attempt in record["leases"]:
            found[sample].starts.append(record | {"attempt": attempt})
    for record in run.acknowledged(*WRITES):
        found[record["sample"]].writes.append(record)
    for record in run.acknowledged("read"):
        for sample, state, num_tokens, _ in record["samples"]:
            if state not in TERMINAL:
                found[sample].reads.append((record, num_tokens))
    for record in run.acknowledged("expire"):
        for sample in record["parked"]:
            found[sample].expiries.append(record)
    for record in run.acknowledged("renew"):
        lost = [tuple(pair) for pair in record["lost"]]
        for sample, attempt in record["leases"]:
            if (sample, attempt) not in lost:
                found[sample].renewals.append(record | {"attempt": attempt})
    return found


def check_samples(run: RunHistory) -> Iterator[Violation]:
    """Everything that is decided sample by sample."""
    found = stories(run)
    for sample, story in found.items():
        yield from _one_holder(run, sample, story)
        yield from _leases(run, sample, story)
        yield from _grows(run, sample, story)
    yield from _claims(run)
    yield from _facts(run)
    yield from _pieces(run, found)
    yield from _crashes(run, found)
    yield from _engines(run, found)


def _one_holder(run: RunHistory, sample: str, story: Story) -> Iterator[Violation]:
    attempts = [start["attempt"] for start in story.starts]
    for attempt in {a for a in attempts if attempts.count(a) > 1}:
        yield Violation("G2", f"attempt {attempt} at sample {sample} was given {attempts.count(attempt)} times")
    for before, after in pairwise(story.starts):
        if before["service_epoch"] != after["service_epoch"]:
            run.saw("G2", "samples taken over from a service that was gone")
    for act in [*story.writes, *story.renewals]:
        newer = [s for s in story.starts if s["attempt"] > act["attempt"] and s["at"] < act["asked_at"]]
        if newer:
            yield Violation(
                "G2", f"{act['op']} of attempt {act['attempt']} at {sample} was carried out after a newer one"
            )
        if any(_holder(story, e["asked_at"]) == act["attempt"] and e["at"] < act["asked_at"] for e in story.expiries):
            yield Violation("G2", f"{act['op']} of {sample} was carried out after its lease had been taken")
    run.saw("G2", "writes of the one holder", len(story.writes))


def _holder(story: Story, at: float) -> int:
    return max((start["attempt"] for start in story.starts if start["at"] <= at), default=0)


def _leases(run: RunHistory, sample: str, story: Story) -> Iterator[Violation]:
    lease_s = run.config["sample_lease_s"]
    held = sorted([*story.starts, *story.renewals], key=lambda record: record["at"])
    for expiry in story.expiries:
        last = max((r["asked_at"] for r in held if r["at"] <= expiry["asked_at"]), default=None)
        if last is not None and expiry["at"] < last + lease_s - CLOCKS_S:
            yield Violation("G2", f"the lease of {sample} was taken {expiry['at'] - last:.2f} s after it was renewed")
        run.saw("G2", "leases that ran out and were parked")
    for before, after in pairwise(held):
        same = before["attempt"] == after["attempt"] and after["op"] == "renew"
        if same and after["asked_at"] > before["at"] + lease_s:
            run.saw("G2", "leases that ran out and were renewed by their owner")


def _grows(run: RunHistory, sample: str, story: Story) -> Iterator[Violation]:
    """What is acknowledged stays, and the next write begins after it."""
    pieces = [write for write in story.writes if "end" in write]
    for before, after in pairwise(pieces):
        if after["start"] < before["end"]:
            yield Violation("G4", f"{sample} was written from {after['start']} on, and had {before['end']} tokens")
    looks = [(record["asked_at"], record["service_epoch"], length) for record, length in story.reads]
    if run.final and sample in final_samples(run):
        length = sum(len(tokens) for _, _, tokens, _ in final_samples(run)[sample])
        looks.append((run.final["at"], None, length))
    looked_at = 0.0
    for asked_at, epoch, length in looks:
        known = max((p for p in pieces if p["at"] < asked_at), key=lambda p: p["end"], default=None)
        if known is None:
            continue
        if run.redis_ended_between(max(known["at"], looked_at), asked_at):
            run.saw("G6", "samples found with all acknowledged tokens after Redis was killed", length >= known["end"])
        looked_at = asked_at
        if length < known["end"]:
            crossed = run.redis_ended_between(known["at"], asked_at)
            other = epoch is not None and epoch != known["service_epoch"]
            promise = "G6" if crossed else "G2" if other else "G4"
            yield Violation(promise, f"{sample} had {known['end']} tokens by an acknowledged write, then {length}")


def _claims(run: RunHistory) -> Iterator[Violation]:
    claims = [(record["at"], record["claimed"]) for record in run.acknowledged("claim")]
    changed = ("admit", "start", *WRITES, "score", "fail", "drop", "policy", "expire")
    for record in run.by_kind["buffer"]:
        if record["outcome"] == "fenced":
            run.saw("G3", "calls of superseded services or attempts refused")
        elif record["outcome"] == "ok" and record["op"] in changed:
            newer = [epoch for at, epoch in claims if at < record["asked_at"] and epoch > record["service_epoch"]]
            if newer:
                sentence = f"{record['op']} of service epoch {record['service_epoch']} was carried out"
                yield Violation("G3", f"{sentence} after epoch {max(newer)} had claimed the run")


def _facts(run: RunHistory) -> Iterator[Violation]:
    """Steps, versions and groups that were acknowledged are never fewer in a status that was asked for later."""
    facts: list[tuple[float, str, int]] = []
    facts += [(call["at"], "durable_step", call["step"]) for call in run.answered("ack")]
    facts += [(call["at"], "newest_version", call["version"]) for call in run.answered("publish")]
    admitted = 0
    for record in run.acknowledged("admit"):
        admitted += len(record["groups"])
        facts.append((record["at"], "admitted", admitted))
    looks = [(s["asked_at"], s) for s in run.by_kind["status"] if "asked_at" in s]
    events = sorted([*facts, *looks], key=lambda event: event[0])
    known: dict[str, tuple[int, float]] = {}
    looked_at = 0.0
    for event in events:
        if len(event) == 3:
            at, name, value = event
            if value >= known.get(name, (0, 0.0))[0]:
                known[name] = (value, at)
            continue
        asked_at, status = event
        if run.redis_ended_between(looked_at, asked_at):
            run.saw("G6", "acks, versions and admissions found after Redis was killed", len(known))
        looked_at = asked_at
        for name, (value, at) in known.items():
            found = status["ledger"]["admitted"] if name == "admitted" else status[name]
            if found < value:
                promise = "G6" if run.redis_ended_between(at, asked_at) else "G1" if name == "admitted" else "G5"
                yield Violation(promise, f"{name} {value} was acknowledged, later it was {found}")


def _pieces(run: RunHistory, found: dict[str, Story]) -> Iterator[Violation]:
    """Each acknowledged piece is in what is delivered, or in the buffer at the end, as it was written."""
    for batch in run.batches.values():
        for index, sample in enumerate(batch.header.samples):
            begin = int(batch.sample_offsets[index]) + int(batch.prompt_lengths[index])
            part = slice(begin, int(batch.sample_offsets[index + 1]))
            arrays = batch.tokens[part], batch.logprobs[part], batch.versions[part]
            where = f"step {batch.header.step}, sample {sample.sample_id}"
            yield from _compare(run, where, _writes(run, found, sample.sample_id), *arrays)
    for sample_id, segments in final_samples(run).items():
        tokens = np.array([token for _, _, piece, _ in segments for token in piece], np.int32)
        logprobs = np.array([value for _, _, _, piece in segments for value in piece], np.float32)
        versions = np.array([version for _, version, piece, _ in segments for _ in piece], np.int32)
        where = f"sample {sample_id} in the buffer"
        yield from _compare(run, where, _writes(run, found, sample_id), tokens, logprobs, versions)


def _writes(run: RunHistory, found: dict[str, Story], sample_id: str) -> list[Record]:
    """Of the sample, under a former id, too."""
    origin = run.origins.get(sample_id)
    return [*(found[origin].writes if origin else ()), *found[sample_id].writes]


def _compare(
    run: RunHistory,
    where: str,
    writes: Sequence[Record],
    tokens: np.ndarray,
    logprobs: np.ndarray,
    versions: np.ndarray,
) -> Iterator[Violation]:
    for piece in (write for write in writes if "digest" in write):
        part = slice(piece["start"], piece["end"])
        data = tokens[part].tobytes() + logprobs[part].tobytes()
        same = blake2b(data, digest_size=DIGEST_BYTES).hexdigest() == piece["digest"]
        if not same or (versions[part] != piece["version"]).any():
            yield Violation("G4", f"{where}: tokens {part.start}..{part.stop} are not those that were acknowledged")
        run.saw("G4", "acknowledged pieces compared with what was delivered")


def _crashes(run: RunHistory, found: dict[str, Story]) -> Iterator[Violation]:
    killed = {r["child"]: r["at"] for r in run.by_kind["kill"] if r["process"] == "service"}
    for flight in run.by_kind["flight"]:
        end = run.service_ends.get(flight["pid"])
        if end is None:
            continue
        if end["code"] == 0:
            run.saw("G7", ORDERLY_ENDS)
        died_at = min(killed.get(flight["pid"], end["at"]), end["at"])
        for row in flight["rows"]:
            after = _next_length(run, found[row["sample"]], row["sample"], end["at"])
            if after is not None:
                yield from _lost(run, row, max(0, row["generated"] - after), died_at, end["code"] == 0)


def _next_length(run: RunHistory, story: Story, sample: str, at: float) -> int | None:
    for record, length in story.reads:
        if record["asked_at"] > at:
            return length
    if sample in final_samples(run):
        return sum(len(tokens) for _, _, tokens, _ in final_samples(run)[sample])
    return None  # its group was dropped, or it is trained and its tokens were compared there


def _lost(run: RunHistory, row: dict[str, Any], lost: int, died_at: float, in_order: bool) -> Iterator[Violation]:
    interval_s = run.config["checkpoint_interval_s"]
    run.saw("G7", ORDERLY_SAMPLES if in_order else "samples that ran when a service died")
    run.saw("G7", "tokens lost with them", lost)
    if step_s := run.config.get("step_s"):
        run.saw_at_most("G7", f"of these by one sample; an interval is {interval_s / step_s:.0f}", lost)
    where = f"sample {row['sample']} lost {lost} tokens"
    if in_order and lost:
        yield Violation("G7", f"{where} with a service that ended in order")
    waited_s = died_at - row["pending_since"] if row["pending_since"] else 0.0
    allowed_s = interval_s + row["write_s"] + max(0.0, waited_s)
    if step_s and lost > allowed_s / step_s + TICKS:
        yield Violation(
            "G7", f"{where}, which took {lost * step_s:.2f} s to write; at most {allowed_s:.2f} s may be lost"
        )
    if not row["pending_since"] and row["unsent_since"] and row["received_at"] - row["unsent_since"] > interval_s:
        kept_s = row["received_at"] - row["unsent_since"]
        yield Violation("G7", f"{where}: the service kept {kept_s:.2f} s of tokens, the interval is {interval_s:g} s")


def _engines(run: RunHistory, found: dict[str, Story]) -> Iterator[Violation]:
    for record in run.by_kind["engine"]:
        if record["life"] > 1:
            run.saw("G14", "engines started again")
        if record["version"] != record["asked_version"]:
            yield Violation(
                "G14", f"{record['worker']} came back as {record['version']}, not {record['asked_version']}"
            )
    yield from _blamed(run)
    gone = {r["group"] for r in run.acknowledged("drop")} | set((run.final or {"dropped": []})["dropped"])
    done = {s.sample_id for batch in run.batches.values() for s in batch.header.samples}
    done |= {r["sample"] for r in run.acknowledged("fail")}
    for death in run.by_kind["engine_died"]:
        sample, story = death["sample"], found[death["sample"]]
        told = [w for w in story.writes if w["op"] != "append" and w["attempt"] == death["attempt"]]
        if not told:
            continue  # the service died as well, or was superseded: G7 and G3 say what must hold
        run.saw("G14", "samples that ran in an engine that died")
        after = _next_length(run, story, sample, told[0]["at"])
        if after is not None and after < death["received"]:
            yield Violation("G14", f"{sample} had {death['received']} tokens when its engine died, and {after} then")
        goes_on = any(s["attempt"] > death["attempt"] for s in story.starts) or sample in final_samples(run)
        if run.final and not (goes_on or sample in done or sample.partition(".")[0] in gone):
            yield Violation("G14", f"{sample} ran in an engine that died and was not seen again")


def _blamed(run: RunHistory) -> Iterator[Violation]:
    """No prompt here kills an engine: who is given up for it must at least have been there often."""
    deaths = Counter(death["sample"] for death in run.by_kind["engine_died"])
    for record in run.acknowledged("fail"):
        if record["reason"] in BLAMED and deaths[record["sample"]] < run.config["max_sample_failures"]:
            yield Violation("G14", f"{record['sample']} was given up after {deaths[record['sample']]} engine deaths")
