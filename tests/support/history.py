"""Decides from what the processes wrote down whether the promises were kept. Pure: records in, violations out.

What is decided, by the names in docs/guarantees.md:
- G1: the ledger balances in every status that anybody saw, and at the end the raw records say the same as it;
- G3: once a newer trainer has its session, no call that an older one makes later is carried out; a service that was
  superseded ends;
- G4: segments tile, and every token and log-probability is the one that the simulated engine writes for that sample,
  position and labelled version, up to the length that it has for the sample;
- G5: a step's bytes are the same whenever they are served; a group is in one step only; the checkpoint that survived
  holds each step once, with the bytes that were served, and what was acknowledged is in it;
- G11: no token is older than `max_lag`, counting the versions that brought the run further (those that a restarted
  trainer publishes again are not counted);
- nothing is lost: each admitted group is at the end open, ready, leased, dropped or consumed, and in one of them only;
  no prompt is served twice within an epoch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from protocol.batch import Batch, decode_batch
from protocol.errors import DataError
from protocol.states import FinishReason
from rollout_service.engines.simulated import END_TOKEN, simulated_length, simulated_logprobs, simulated_tokens
from tests.support.journal import Record


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise, and what broke it."""

    promise: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.what}"


def check(records: Sequence[Record], batches: Mapping[str, bytes]) -> list[Violation]:
    """Every violation in a history; records are in the order of time."""
    try:
        run = _History(records, batches)
    except DataError as error:
        return [Violation("G5", f"what was served is no batch: {error}")]
    parts = (_ledger, _fencing, _superseded_services, _refusals, _served_bytes)
    parts += (_groups_once, _survived, _tokens, _lag, _nothing_lost)
    return [violation for part in parts for violation in part(run)]


class _History:
    """A history, sorted by what is asked of it."""

    def __init__(self, records: Sequence[Record], batches: Mapping[str, bytes]) -> None:
        self.by_kind: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.by_kind[record["kind"]].append(record)
        self.config = self.by_kind["config"][0]
        self.final = self.by_kind["final"][0] if self.by_kind["final"] else None
        self.calls = self.by_kind["call"]
        self.batches = {sha: decode_batch(data) for sha, data in batches.items()}

    def answered(self, op: str) -> Iterator[Record]:
        """Calls of a kind that were carried out."""
        return (call for call in self.calls if call["op"] == op and call["outcome"] == "ok")

    def served(self) -> dict[int, list[str]]:
        """Digests by step, as often as they were served."""
        steps: dict[int, list[str]] = defaultdict(list)
        for call in self.answered("lease"):
            steps[call["step"]].append(call["sha256"])
        return steps

    def first_served(self) -> dict[int, Batch]:
        """The batch of each step."""
        return {step: self.batches[digests[0]] for step, digests in self.served().items()}


def _ledger(run: _History) -> Iterator[Violation]:
    for status in run.by_kind["status"]:
        ledger = status["ledger"]
        error = ledger["admitted"] - sum(value for name, value in ledger.items() if name != "admitted")
        if error or status["ledger_error"]:
            yield Violation("G1", f"at {status['at']:.3f} the ledger is out of balance by {error}: {ledger}")
    if run.final:
        yield from (Violation("G1", f"recount: {fault}") for fault in run.final["recount_faults"])


def _fencing(run: _History) -> Iterator[Violation]:
    opened = [(call["at"], call["epoch"]) for call in run.answered("open")]
    epochs = Counter(epoch for _, epoch in opened)
    yield from (Violation("G3", f"epoch {epoch} was given to {n} sessions") for epoch, n in epochs.items() if n > 1)
    for call in run.calls:
        if call["op"] == "open" or call["outcome"] not in ("ok", "empty"):
            continue
        newer = [epoch for at, epoch in opened if at < call["asked_at"] and epoch > call["epoch"]]
        if newer:
            sentence = f"{call['op']} of step {call['step']} by epoch {call['epoch']} was carried out"
            yield Violation("G3", f"{sentence} after epoch {max(newer)} had its session")


def _superseded_services(run: _History) -> Iterator[Violation]:
    for record in run.by_kind["superseded_service"]:
        if record["code"] == 0:
            yield Violation(
                "G3", f"at {record['at']:.3f} a service that was superseded did not end, or as if all was well"
            )


def _refusals(run: _History) -> Iterator[Violation]:
    """The trainers only do what the protocol allows, so only a superseded one may be refused."""
    for call in run.calls:
        if call["outcome"] == "refused":
            yield Violation("G5", f"{call['op']} of step {call['step']} was refused: {call['detail']}")


def _served_bytes(run: _History) -> Iterator[Violation]:
    for step, digests in run.served().items():
        if len(set(digests)) > 1:
            yield Violation("G5", f"step {step} was served as {len(set(digests))} different batches")
    for call in run.answered("lease"):
        if call["sha256"] != call["sha256_sent"]:
            yield Violation("G5", f"step {call['step']} arrived with another digest than was sent")
        if run.batches[call["sha256"]].header.step != call["step"]:
            yield Violation("G5", f"the batch of another step was served for step {call['step']}")


def _groups_once(run: _History) -> Iterator[Violation]:
    steps: dict[str, set[int]] = defaultdict(set)
    for step, digests in run.served().items():
        for digest in set(digests):
            groups = _group_ids(run.batches[digest])
            if len(groups) != run.config["batch_groups"]:
                yield Violation("G5", f"step {step} has {len(groups)} groups instead of {run.config['batch_groups']}")
            for group, count in Counter(groups).items():
                steps[group].add(step)
                if count > 1:
                    yield Violation("G5", f"group {group} is {count} times in step {step}")
    for group, seen in steps.items():
        if len(seen) > 1:
            yield Violation("G5", f"group {group} was served in steps {sorted(seen)}")


def _survived(run: _History) -> Iterator[Violation]:
    """The checkpoint that is left is a history without gaps, made of what was served and all that was acknowledged."""
    if run.final is None:
        return
    history = {int(step): entry for step, entry in run.final["history"].items()}
    if sorted(history) != list(range(1, len(history) + 1)):
        yield Violation("G5", f"the surviving history has the steps {sorted(history)}")
    counts = Counter(group for _, groups in history.values() for group in groups)
    yield from (Violation("G5", f"group {group} was trained {n} times") for group, n in counts.items() if n > 1)
    served = run.served()
    for step, (sha256, groups) in history.items():
        if sha256 not in served.get(step, []):
            yield Violation("G5", f"step {step} of the surviving history was trained on bytes that were not served")
        elif groups != _group_ids(run.batches[sha256]):
            yield Violation("G5", f"step {step} of the surviving history has other groups than its batch")
    acknowledged = max((call["step"] for call in run.answered("ack")), default=0)
    if acknowledged > len(history):
        yield Violation("G5", f"step {acknowledged} was acknowledged and the checkpoint ends at {len(history)}")


def _tokens(run: _History) -> Iterator[Violation]:
    for batch in run.batches.values():
        for index, sample in enumerate(batch.header.samples):
            begin = int(batch.sample_offsets[index]) + int(batch.prompt_lengths[index])
            part = slice(begin, int(batch.sample_offsets[index + 1]))
            spans = [(segment.start, segment.end, segment.version) for segment in sample.segments]
            ended = sample.finish_reason is FinishReason.STOP
            where = f"step {batch.header.step}, sample {sample.sample_id}"
            arrays = (batch.tokens[part], batch.logprobs[part], batch.versions[part])
            yield from _sample(run.config, where, sample.sample_id, spans, *arrays, ended)
            yield from _length(run.config, where, sample.sample_id, part.stop - part.start, ended)
            if not batch.loss_mask[part].all() or batch.loss_mask[int(batch.sample_offsets[index]) : begin].any():
                yield Violation("G4", f"{where}: the loss mask is not the response")
    for sample_id, segments in (run.final or {"samples": {}})["samples"].items():
        spans = [(start, start + len(tokens), version) for start, version, tokens, _ in segments]
        tokens = np.array([token for _, _, piece, _ in segments for token in piece], np.int32)
        logprobs = np.array([value for _, _, _, piece in segments for value in piece], np.float32)
        versions = np.array([version for _, version, piece, _ in segments for _ in piece], np.int32)
        where = f"sample {sample_id} in the buffer"
        yield from _sample(run.config, where, sample_id, spans, tokens, logprobs, versions, None)


def _sample(
    config: Record,
    where: str,
    sample_id: str,
    spans: Sequence[tuple[int, int, int]],
    tokens: np.ndarray,
    logprobs: np.ndarray,
    versions: np.ndarray,
    ended: bool | None,
) -> Iterator[Violation]:
    """Segments tile, and each holds what its version writes there; `ended`: by its end token (None: not known)."""
    edges = [0, *(end for _, end, _ in spans)]
    if [start for start, _, _ in spans] != edges[:-1] or edges[-1] != len(tokens) or len(logprobs) != len(tokens):
        yield Violation("G4", f"{where}: {spans} do not tile {len(tokens)} tokens and {len(logprobs)} log-probs")
        return
    for start, end, version in spans:
        expected = simulated_tokens(sample_id, start, end - start, version)
        last = end == len(tokens) and len(tokens) == _drawn_length(config, sample_id) and ended is not False
        if last and end > start:
            expected[-1] = END_TOKEN
        if not np.array_equal(tokens[start:end], expected):
            yield Violation("G4", f"{where}: tokens {start}..{end} are not those of version {version}")
        if not np.array_equal(logprobs[start:end], simulated_logprobs(sample_id, start, end - start, version)):
            yield Violation("G4", f"{where}: log-probs {start}..{end} are not those of version {version}")
        if (versions[start:end] != version).any():
            yield Violation("G4", f"{where}: tokens {start}..{end} are labelled otherwise than their segment")


def _length(config: Record, where: str, sample_id: str, num_tokens: int, ended: bool) -> Iterator[Violation]:
    drawn, most = _drawn_length(config, sample_id), config["max_response_length"]
    if num_tokens != min(drawn, most) or ended != (drawn <= most):
        how = "stop" if ended else "length"
        yield Violation("G4", f"{where}: {num_tokens} tokens ({how}), its length is {drawn}, at most {most}")


def _drawn_length(config: Record, sample_id: str) -> int:
    return simulated_length(config["seed"], sample_id, config["median_tokens"], config["sigma"])


def _lag(run: _History) -> Iterator[Violation]:
    repeated = _repeated_versions(run)
    for step, batch in run.first_served().items():
        held = batch.header.policy_version
        for sample in batch.header.samples:
            oldest = min((segment.version for segment in sample.segments), default=held)
            lag = sum(version not in repeated for version in range(oldest + 1, held + 1))
            if lag > run.config["max_lag"]:
                sentence = f"step {step} (version {held}) has tokens of version {oldest} in {sample.sample_id}"
                yield Violation("G11", f"{sentence}, {lag} versions older, max_lag is {run.config['max_lag']}")


def _repeated_versions(run: _History) -> set[int]:
    """Versions of a step that an earlier version had reached: of a trainer that was started again."""
    steps = {call["version"]: call["step"] for call in run.answered("publish")}
    steps |= dict(run.final["policies"]) if run.final else {}
    newest, repeated = 0, set[int]()
    for version, step in sorted(steps.items()):
        if step <= newest:
            repeated.add(version)
        newest = max(newest, step)
    return repeated


def _nothing_lost(run: _History) -> Iterator[Violation]:
    if run.final is None:
        return
    final = run.final
    consumed = [group for _, groups in final["history"].values() for group in groups]
    leased = {group for groups in final["leased"].values() for group in groups}
    places = {
        "open": set(final["open"]),
        "ready": set(final["ready"]),
        "leased": leased,
        "consumed": set(consumed) - leased,
        "dropped": set(final["dropped"]),
    }
    counts = Counter(group for ids in places.values() for group in ids)
    for group in _numbered(final["ledger"]["admitted"]):
        if counts[group] != 1:
            where = [name for name, ids in places.items() if group in ids]
            yield Violation("G1", f"group {group} is in {where or 'no state'} at the end")
    for name, ids in places.items():
        if len(ids) != final["ledger"][name]:
            yield Violation("G1", f"{len(ids)} groups are {name} at the end, the ledger says {final['ledger'][name]}")
    yield from _prompts_once(run)


def _prompts_once(run: _History) -> Iterator[Violation]:
    prompts: dict[str, str] = dict(run.final["prompts"]) if run.final else {}
    for batch in run.batches.values():
        prompts |= {group.group_id: group.prompt_id for group in batch.header.groups}
    seen: dict[tuple[int, str], str] = {}
    for group, prompt in sorted(prompts.items()):
        epoch = int(group[1:]) // run.config["num_prompts"]
        other = seen.setdefault((epoch, prompt), group)
        if other != group:
            yield Violation("cursor", f"prompt {prompt} was served twice in epoch {epoch}: {other} and {group}")


def _group_ids(batch: Batch) -> list[str]:
    return [group.group_id for group in batch.header.groups]


def _numbered(count: int) -> Iterable[str]:
    return (f"g{number:09d}" for number in range(count))
