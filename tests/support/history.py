"""Decides from what the processes wrote down whether the promises were kept. Pure: records in, verdicts out.

What is decided, by the names in docs/guarantees.md; G2, G6, G7, G14 and the services' part of G3 and G4 are in
history_samples.py:
- G1: the ledger balances in every status that anybody saw, and at the end the raw records say the same as it; each
  admitted group is at the end open, ready, leased, dropped or consumed, and in one of them only;
- G3: once a newer trainer has its session, no call that an older one makes later is carried out; a service that was
  superseded ends;
- G4: segments tile, and, with the simulated engine, every token and log-probability is the one that it writes for that
  sample, position and labelled version, up to the length that it has for the sample;
- G5: a step's bytes are the same whenever they are served; a group is in one step only; the checkpoint that survived
  holds each step once, with the bytes that were served, and what was acknowledged is in it;
- G11: no token is older than `max_lag`, counting the versions that brought the run further (those that a restarted
  trainer publishes again are not counted);
- cursor: no prompt is served twice within an epoch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from protocol.batch import Batch
from protocol.errors import DataError
from protocol.states import FinishReason
from rollout_service.engines.simulated import END_TOKEN, simulated_length, simulated_logprobs, simulated_tokens
from tests.support.history_samples import ORDERLY_ENDS, ORDERLY_SAMPLES, check_samples
from tests.support.journal import Record
from tests.support.run_history import RunHistory, Violation, final_samples, numbered

PROMISES = {
    "G1": "every group is in one state, the ledger balances",
    "G2": "a sample has one holder; leases run out or are renewed",
    "G3": "who was superseded changes nothing",
    "G4": "samples only grow; tokens, log-probs and versions are those that were written",
    "G5": "a group is trained on once; a step is the same bytes again",
    "G6": "what was acknowledged outlives a kill of Redis",
    "G7": "a killed service loses at most a checkpoint interval",
    "G11": "no trained token is older than max_lag",
    "G14": "an engine that dies takes no sample with it",
    "cursor": "every prompt of an epoch is served once",
    "liveness": "the system goes on by itself and ends in order",
}


ASIDE = (ORDERLY_ENDS, ORDERLY_SAMPLES)  # what is counted beside a promise and puts it to no test by itself


@dataclass
class Verdict:
    """What a promise was judged by, and what broke it."""

    promise: str
    text: str
    seen: dict[str, int] = field(default_factory=dict[str, int])
    violations: list[Violation] = field(default_factory=list[Violation])

    @property
    def word(self) -> str:
        """What a reader wants to know."""
        if self.violations:
            return "BROKEN"
        return "kept" if any(count for what, count in self.seen.items() if what not in ASIDE) else "not observed"


def judge(records: Sequence[Record], batches: Mapping[str, bytes], more: Sequence[Violation] = ()) -> list[Verdict]:
    """One verdict for each promise; records are in the order of time, `more` was found by other means."""
    verdicts = {name: Verdict(name, text) for name, text in PROMISES.items()}
    violations, seen = _check(records, batches)
    for violation in [*more, *violations]:
        verdicts[violation.promise].violations.append(violation)
    for (promise, what), count in seen.items():
        verdicts[promise].seen[what] = count
    return list(verdicts.values())


def check(records: Sequence[Record], batches: Mapping[str, bytes]) -> list[Violation]:
    """Every violation in a history."""
    return _check(records, batches)[0]


def _check(
    records: Sequence[Record], batches: Mapping[str, bytes]
) -> tuple[list[Violation], Mapping[tuple[str, str], int]]:
    try:
        run = RunHistory(records, batches)
    except DataError as error:
        return [Violation("G5", f"what was served is no batch: {error}")], {}
    parts = (_ledger, _fencing, _superseded_services, _refusals, _served_bytes)
    parts += (_groups_once, _survived, _tokens, _lag, _nothing_lost, check_samples)
    return [violation for part in parts for violation in part(run)], run.seen


def _ledger(run: RunHistory) -> Iterator[Violation]:
    run.saw("G1", "statuses whose ledger was checked", len(run.by_kind["status"]))
    for status in run.by_kind["status"]:
        ledger = status["ledger"]
        error = ledger["admitted"] - sum(value for name, value in ledger.items() if name != "admitted")
        if error or status["ledger_error"]:
            yield Violation("G1", f"at {status['at']:.3f} the ledger is out of balance by {error}: {ledger}")
    if run.final:
        yield from (Violation("G1", f"recount: {fault}") for fault in run.final["recount_faults"])


def _fencing(run: RunHistory) -> Iterator[Violation]:
    opened = [(call["at"], call["epoch"]) for call in run.answered("open")]
    epochs = Counter(epoch for _, epoch in opened)
    yield from (Violation("G3", f"epoch {epoch} was given to {n} sessions") for epoch, n in epochs.items() if n > 1)
    for call in run.calls:
        run.saw("G3", "calls of superseded trainers refused", call["outcome"] == "fenced")
        if call["op"] == "open" or call["outcome"] not in ("ok", "empty"):
            continue
        newer = [epoch for at, epoch in opened if at < call["asked_at"] and epoch > call["epoch"]]
        if newer:
            sentence = f"{call['op']} of step {call['step']} by epoch {call['epoch']} was carried out"
            yield Violation("G3", f"{sentence} after epoch {max(newer)} had its session")


def _superseded_services(run: RunHistory) -> Iterator[Violation]:
    run.saw("G3", "services superseded while they slept", len(run.by_kind["superseded_service"]))
    for record in run.by_kind["superseded_service"]:
        if record["code"] == 0:
            yield Violation(
                "G3", f"at {record['at']:.3f} a service that was superseded did not end, or as if all was well"
            )


def _refusals(run: RunHistory) -> Iterator[Violation]:
    """The trainers only do what the protocol allows, so only a superseded one may be refused.

    But a trainer that is started beside another may read its checkpoint just before the other writes and acknowledges
    a newer one: then its session is refused, rightly.
    """
    began = {record["child"]: record["at"] for record in run.by_kind["started"]}
    for call in run.calls:
        if call["outcome"] != "refused":
            continue
        own = began.get(call.get("pid"), call["asked_at"])
        late = any(ack["step"] > call["step"] and ack["at"] > own for ack in run.answered("ack"))
        if call["op"] == "open" and late:
            run.saw("G5", "sessions refused whose checkpoint was overtaken")
        else:
            yield Violation("G5", f"{call['op']} of step {call['step']} was refused: {call['detail']}")


def _served_bytes(run: RunHistory) -> Iterator[Violation]:
    for step, digests in run.served().items():
        run.saw("G5", "batches served")
        run.saw("G5", "batches served again and compared", len(digests) - 1)
        if len(set(digests)) > 1:
            yield Violation("G5", f"step {step} was served as {len(set(digests))} different batches")
    for call in run.answered("lease"):
        if call["sha256"] != call["sha256_sent"]:
            yield Violation("G5", f"step {call['step']} arrived with another digest than was sent")
        if run.batches[call["sha256"]].header.step != call["step"]:
            yield Violation("G5", f"the batch of another step was served for step {call['step']}")


def _groups_once(run: RunHistory) -> Iterator[Violation]:
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


def _survived(run: RunHistory) -> Iterator[Violation]:
    """The checkpoint that is left is a history without gaps, made of what was served and all that was acknowledged."""
    if run.final is None:
        return
    history = {int(step): entry for step, entry in run.final["history"].items()}
    if sorted(history) != list(range(1, len(history) + 1)):
        yield Violation("G5", f"the surviving history has the steps {sorted(history)}")
    counts = Counter(group for _, groups in history.values() for group in groups)
    yield from (Violation("G5", f"group {group} was trained {n} times") for group, n in counts.items() if n > 1)
    run.saw("G5", "groups in the history that survived", len(counts))
    served = run.served()
    for step, (sha256, groups) in history.items():
        if sha256 not in served.get(step, []):
            yield Violation("G5", f"step {step} of the surviving history was trained on bytes that were not served")
        elif groups != _group_ids(run.batches[sha256]):
            yield Violation("G5", f"step {step} of the surviving history has other groups than its batch")
    acknowledged = max((call["step"] for call in run.answered("ack")), default=0)
    if acknowledged > len(history):
        yield Violation("G5", f"step {acknowledged} was acknowledged and the checkpoint ends at {len(history)}")


def _tokens(run: RunHistory) -> Iterator[Violation]:
    for batch in run.batches.values():
        for index, sample in enumerate(batch.header.samples):
            begin = int(batch.sample_offsets[index]) + int(batch.prompt_lengths[index])
            part = slice(begin, int(batch.sample_offsets[index + 1]))
            spans = [(segment.start, segment.end, segment.version) for segment in sample.segments]
            ended = sample.finish_reason is FinishReason.STOP
            where = f"step {batch.header.step}, sample {sample.sample_id}"
            arrays = (batch.tokens[part], batch.logprobs[part], batch.versions[part])
            run.saw("G4", f"delivered samples checked{' token by token' if run.config['simulated'] else ''}")
            run.saw("G4", "of these continued in a later epoch", sample.continued_from is not None)
            yield from _sample(run, where, sample.sample_id, spans, *arrays, ended)
            if run.config["simulated"] and sample.continued_from is None:
                yield from _length(run.config, where, sample.sample_id, part.stop - part.start, ended)
            if not batch.loss_mask[part].all() or batch.loss_mask[int(batch.sample_offsets[index]) : begin].any():
                yield Violation("G4", f"{where}: the loss mask is not the response")
    for sample_id, segments in final_samples(run).items():
        spans = [(start, start + len(tokens), version) for start, version, tokens, _ in segments]
        tokens = np.array([token for _, _, piece, _ in segments for token in piece], np.int32)
        logprobs = np.array([value for _, _, _, piece in segments for value in piece], np.float32)
        versions = np.array([version for _, version, piece, _ in segments for _ in piece], np.int32)
        where = f"sample {sample_id} in the buffer"
        yield from _sample(run, where, sample_id, spans, tokens, logprobs, versions, None)


def _sample(
    run: RunHistory,
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
    if not np.isfinite(logprobs).all() or (logprobs > 0).any():
        yield Violation("G4", f"{where}: a log-probability is not one")
    for start, end, version in spans:
        if (versions[start:end] != version).any():
            yield Violation("G4", f"{where}: tokens {start}..{end} are labelled otherwise than their segment")
    if run.config["simulated"]:
        yield from _written(run, where, sample_id, spans, tokens, logprobs, ended)


def _written(
    run: RunHistory,
    where: str,
    sample_id: str,
    spans: Sequence[tuple[int, int, int]],
    tokens: np.ndarray,
    logprobs: np.ndarray,
    ended: bool | None,
) -> Iterator[Violation]:
    """Each token is what its version writes at its place; of a continued sample first under its former id."""
    origin = run.origins.get(sample_id)
    expected, expected_logprobs = _by(sample_id, spans)
    if origin is not None:
        former, former_logprobs = _by(origin, spans)
        differ = np.flatnonzero(logprobs != former_logprobs)
        began = int(differ[0]) if len(differ) else len(tokens)
        expected = np.concatenate([former[:began], expected[began:]])
        expected_logprobs = np.concatenate([former_logprobs[:began], expected_logprobs[began:]])
    # How long a continued sample gets follows from both its ids, so that it has ended is taken from its last token.
    whole = origin is not None or len(tokens) == _drawn_length(run.config, sample_id)
    if whole and ended is not False and len(tokens) and (origin is None or tokens[-1] == END_TOKEN):
        expected[-1] = END_TOKEN
    for start, end, version in spans:
        if not np.array_equal(tokens[start:end], expected[start:end]):
            yield Violation("G4", f"{where}: tokens {start}..{end} are not those of version {version}")
        if not np.array_equal(logprobs[start:end], expected_logprobs[start:end]):
            yield Violation("G4", f"{where}: log-probs {start}..{end} are not those of version {version}")


def _by(writer: str, spans: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs of a response that `writer` wrote alone."""
    tokens = [simulated_tokens(writer, start, end - start, version) for start, end, version in spans]
    logprobs = [simulated_logprobs(writer, start, end - start, version) for start, end, version in spans]
    return np.concatenate([np.zeros(0, np.int32), *tokens]), np.concatenate([np.zeros(0, np.float32), *logprobs])


def _length(config: Record, where: str, sample_id: str, num_tokens: int, ended: bool) -> Iterator[Violation]:
    drawn, most = _drawn_length(config, sample_id), config["max_response_length"]
    if num_tokens != min(drawn, most) or ended != (drawn <= most):
        how = "stop" if ended else "length"
        yield Violation("G4", f"{where}: {num_tokens} tokens ({how}), its length is {drawn}, at most {most}")


def _drawn_length(config: Record, sample_id: str) -> int:
    return simulated_length(config["seed"], sample_id, config["median_tokens"], config["sigma"])


def _lag(run: RunHistory) -> Iterator[Violation]:
    repeated = _repeated_versions(run)
    for step, batch in run.first_served().items():
        held = batch.header.policy_version
        for sample in batch.header.samples:
            oldest = min((segment.version for segment in sample.segments), default=held)
            lag = sum(version not in repeated for version in range(oldest + 1, held + 1))
            run.saw("G11", "trained samples checked")
            run.saw("G11", f"of them with lag {lag}")
            if lag > run.config["max_lag"]:
                sentence = f"step {step} (version {held}) has tokens of version {oldest} in {sample.sample_id}"
                yield Violation("G11", f"{sentence}, {lag} versions older, max_lag is {run.config['max_lag']}")


def _repeated_versions(run: RunHistory) -> set[int]:
    """Versions of a step that an earlier version had reached: of a trainer that was started again."""
    steps = {call["version"]: call["step"] for call in run.answered("publish")}
    steps |= dict(run.final["policies"]) if run.final else {}
    newest, repeated = 0, set[int]()
    for version, step in sorted(steps.items()):
        if step <= newest:
            repeated.add(version)
        newest = max(newest, step)
    return repeated


def _nothing_lost(run: RunHistory) -> Iterator[Violation]:
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
    run.saw("G1", "groups accounted for at the end", final["ledger"]["admitted"])
    for group in numbered(final["ledger"]["admitted"]):
        if counts[group] != 1:
            where = [name for name, ids in places.items() if group in ids]
            yield Violation("G1", f"group {group} is in {where or 'no state'} at the end")
    for name, ids in places.items():
        if len(ids) != final["ledger"][name]:
            yield Violation("G1", f"{len(ids)} groups are {name} at the end, the ledger says {final['ledger'][name]}")
    yield from _prompts_once(run)


def _prompts_once(run: RunHistory) -> Iterator[Violation]:
    prompts: dict[str, str] = dict(run.final["prompts"]) if run.final else {}
    for batch in run.batches.values():
        prompts |= {group.group_id: group.prompt_id for group in batch.header.groups}
    seen: dict[tuple[int, str], str] = {}
    run.saw("cursor", "prompts compared", len(prompts))
    for group, prompt in sorted(prompts.items()):
        epoch = int(group[1:]) // run.config["num_prompts"]
        other = seen.setdefault((epoch, prompt), group)
        if other != group:
            yield Violation("cursor", f"prompt {prompt} was served twice in epoch {epoch}: {other} and {group}")


def _group_ids(batch: Batch) -> list[str]:
    return [group.group_id for group in batch.header.groups]
