"""One running sample: from its lease in the buffer through the engine to its score.

Always true:
- the engine is sent token ids (prompt and all tokens so far), never text, and the budget that is left, never the whole;
- every token that the engine delivers reaches the buffer, by a checkpoint, a park or a finish, in order and once;
- stop conditions are those of the whole response: a sample that ended at its budget or at a stop token is FINISHED,
  however its last stream ended;
- a sample is scored once and outside the engine's slot; a score that can't be had is a recorded failure.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from buffer.interface import ContinuationBuffer, SampleLease
from protocol.errors import EngineDeadError, EngineError, FencedError, NotFoundError
from protocol.failpoints import Failpoint, failpoint
from protocol.samples import Prompt, Sample, Segment
from protocol.settings import RunSettings
from protocol.states import FailReason, FinishReason, GroupState, SampleState
from rollout_service.engines.interface import Chunk, GenerationRequest, SamplingParameters, StreamEnd
from rollout_service.engines.pool import EnginePool
from rollout_service.events import (
    EngineDied,
    GroupClosed,
    LeasesExpired,
    Mailbox,
    SampleEnded,
    SampleLost,
    SampleParked,
)
from rollout_service.rewards.interface import Scorer, ScoringError, ScoringTask
from rollout_service.seeds import segment_seed
from rollout_service.tuning.trace_recorder import TraceRecorder, group_of

log = logging.getLogger(__name__)

EXPIRED_A_CALL = 1000  # keeps one script under some milliseconds; the next call takes the next thousand

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class SampleParts:
    """What running a sample needs; one object for all samples of a service.

    `owner` names this process: it holds the samples' leases, since it holds their streams.
    """

    owner: str
    settings: RunSettings
    buffer: ContinuationBuffer
    pool: EnginePool
    scorer: Scorer
    mailbox: Mailbox
    decode: Decode
    stop_token_ids: frozenset[int]
    trace: TraceRecorder = field(default_factory=TraceRecorder)


class _Unwritten:
    """Tokens that the engine delivered and the buffer does not hold yet, as pieces that one version wrote."""

    def __init__(self, sample: Sample) -> None:
        self.end = sample.num_tokens
        self.last_token = int(sample.segments[-1].tokens[-1]) if sample.segments else None
        self._runs: list[list[Chunk]] = []

    def add(self, chunk: Chunk) -> None:
        if not len(chunk.tokens):
            return
        last = self._runs[-1][-1] if self._runs else None
        if last is not None and (last.version, last.kv_kept) == (chunk.version, chunk.kv_kept):
            self._runs[-1].append(chunk)
        else:
            self._runs.append([chunk])
        self.end += len(chunk.tokens)
        self.last_token = int(chunk.tokens[-1])

    def take(self) -> list[Segment]:
        """What there is, as pieces that tile; nothing is left."""
        start = self.end - sum(len(c.tokens) for run in self._runs for c in run)
        pieces: list[Segment] = []
        for run in self._runs:
            tokens, logprobs = np.concatenate([c.tokens for c in run]), np.concatenate([c.logprobs for c in run])
            pieces.append(Segment(start, run[0].version, tokens, logprobs, run[0].kv_kept))
            start += len(tokens)
        self._runs = []
        return pieces


class SampleRunner:
    """Runs one attempt at one sample."""

    def __init__(self, parts: SampleParts, lease: SampleLease, sample: Sample, prompt: Prompt) -> None:
        self._parts = parts
        self._lease = lease
        self._sample = sample
        self._prompt = prompt
        self._unwritten = _Unwritten(sample)
        self.request_id = f"{sample.sample_id}@{lease.attempt}"
        self.group_id = sample.group_id
        self.worker: str | None = None
        self.generated = asyncio.Event()
        self._trace = parts.trace.attempt(
            sample.sample_id, lease.attempt, prompt, sample.num_tokens, sample.continued_from
        )

    @property
    def num_tokens(self) -> int:
        """Response tokens that the engine has delivered, those of earlier attempts included."""
        return self._unwritten.end

    @property
    def num_prefilled(self) -> int:
        """Tokens that a resumed sample had prefilled again: prompt and response so far; 0 at a first start."""
        return len(self._prompt.token_ids) + self._sample.num_tokens if self._sample.num_tokens else 0

    async def run(self) -> None:
        """Generate, then score. Posts what became of the sample; raises only what should end the service."""
        finished = None
        try:
            finished = await self._generate()
        except (FencedError, NotFoundError) as error:
            sample_id = self._sample.sample_id
            log.info("sample %s is not ours any more: %s", sample_id, error, extra=_about("sample_lost", sample_id))
            self._parts.mailbox.post(SampleParked(self._sample.sample_id))
            return
        finally:
            self._trace.ended(finished)
            self.generated.set()
        if finished is not None:
            self._parts.mailbox.post(SampleEnded(self._sample.sample_id))
            await score_sample(self._parts, self._sample.sample_id, self._prompt)

    async def _generate(self) -> FinishReason | None:
        try:
            end = self._ended_before() or await self._stream()
        except EngineDeadError as error:
            await self._engine_died(error)
            return None
        except EngineError as error:
            await self._engine_failed(error)
            return None
        reason = self._finish_reason(end)
        last = await self._write_all_but_last()
        if reason is None:
            failpoint(Failpoint.MID_PARK)
            await self._parts.buffer.park(self._lease, last)
            self._trace.parked = True
            failpoint(Failpoint.MID_CUT)
            self._parts.mailbox.post(SampleParked(self._sample.sample_id))
            return None
        await self._parts.buffer.finish(self._lease, last, reason)
        return reason

    def _ended_before(self) -> StreamEnd | None:
        """A crash may have come between the last token's checkpoint and the finish."""
        if self._unwritten.last_token in self._parts.stop_token_ids:
            return StreamEnd.STOP
        return StreamEnd.LENGTH if self._budget() <= 0 else None

    async def _stream(self) -> StreamEnd:
        interval_s = self._parts.settings.rollout.checkpoint_interval_s
        written_s = time.monotonic()
        request = self._request()
        self.worker = self._trace.worker = self._parts.pool.assign(self.request_id)
        async for chunk in self._parts.pool.generate(request):
            self._check_budget(chunk)
            self._unwritten.add(chunk)
            self._trace.wrote(len(chunk.tokens), chunk.version)
            if chunk.end is not None:
                return chunk.end
            if time.monotonic() - written_s >= interval_s:
                await self._write()
                written_s = time.monotonic()
        raise EngineError(f"the stream of {self.request_id} stopped without an end")

    async def _write(self) -> None:
        for piece in self._unwritten.take():
            await self._parts.buffer.append(self._lease, piece)

    async def _write_all_but_last(self) -> Segment | None:
        """The last piece goes into the transition that ends the attempt."""
        pieces = self._unwritten.take()
        for piece in pieces[:-1]:
            await self._parts.buffer.append(self._lease, piece)
        return pieces[-1] if pieces else None

    async def _engine_died(self, error: EngineDeadError) -> None:
        """Its own doing or a neighbour's: that is for the scheduler to find out, and no failure of this sample."""
        sample_id = self._sample.sample_id
        log.warning("sample %s goes on elsewhere: %s", sample_id, error, extra=_about("sample_lost", sample_id))
        if self.worker is not None:
            self._parts.mailbox.post(EngineDied(self.worker))
        await self._parts.buffer.park(self._lease, await self._write_all_but_last())
        self._parts.mailbox.post(SampleLost(self._sample.sample_id))

    async def _engine_failed(self, error: EngineError) -> None:
        await self._write()
        limit = self._parts.settings.rollout.max_sample_failures
        state = await self._parts.buffer.record_failure(self._lease, _encodable(error), limit)
        mailbox, sample_id = self._parts.mailbox, self._sample.sample_id
        log.warning("sample %s failed in the engine: %s", sample_id, error, extra=_about("sample_failed", sample_id))
        if state is not None:
            self._parts.trace.scored(sample_id, None, FailReason.ENGINE_ERROR.value)
        mailbox.post(SampleParked(sample_id) if state is None else SampleEnded(sample_id))
        if state in (GroupState.READY, GroupState.DROPPED):
            mailbox.post(GroupClosed(self._sample.group_id, state is GroupState.READY))

    def _check_budget(self, chunk: Chunk) -> None:
        """An engine that writes on and on would fill the buffer, whose room was reserved for the budget."""
        if len(chunk.tokens) > self._budget():
            raise EngineError(f"the engine wrote more tokens of {self.request_id} than it was asked for")

    def _budget(self) -> int:
        settings = self._parts.settings
        written = self._unwritten.end
        return min(
            settings.data.max_response_length - written,
            settings.max_model_len - len(self._prompt.token_ids) - written,
        )

    def _finish_reason(self, end: StreamEnd) -> FinishReason | None:
        if end is not StreamEnd.ABORT:
            return FinishReason(end.value)
        if self._unwritten.last_token in self._parts.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._budget() <= 0 else None

    def _request(self) -> GenerationRequest:
        rollout = self._parts.settings.rollout
        seed = segment_seed(self._parts.settings.run.seed, self._sample.sample_id, self._lease.attempt)
        return GenerationRequest(
            request_id=self.request_id,
            prompt_token_ids=(*self._prompt.token_ids, *self._sample.tokens.tolist()),
            num_prefix_tokens=self._sample.num_tokens,
            sampling=SamplingParameters(
                max_tokens=self._budget(),
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                min_p=rollout.min_p,
                stop_token_ids=tuple(rollout.stop_token_ids),
                seed=seed if self._parts.pool.takes_seeds else None,
            ),
        )


async def score_sample(parts: SampleParts, sample_id: str, prompt: Prompt) -> None:
    """FINISHED → SCORED or FAILED, and tell the loop if that closed the group.

    The group may be dropped meanwhile, because too few of its other samples can be scored: then there is nothing to do.
    """
    try:
        await _score(parts, sample_id, prompt)
    except NotFoundError:
        parts.trace.not_scored(sample_id)
        log.info("sample %s is not needed any more: its group is READY without it, or was dropped", sample_id)


async def _score(parts: SampleParts, sample_id: str, prompt: Prompt) -> None:
    (sample,) = await parts.buffer.samples([sample_id])
    if sample.state is SampleState.POOLED:
        parts.trace.not_scored(sample_id)
        return  # its group was READY without it; it is scored when it goes on in another
    assert sample.finish_reason is not None, "only finished samples are scored"
    min_scored = parts.settings.rollout.min_group_samples
    try:
        task = scoring_task(prompt, sample.sample_id, sample.tokens.tolist(), sample.finish_reason, parts.decode)
        reward = await parts.scorer.score(task)
    except ScoringError as error:
        log.warning("sample %s could not be scored: %s", sample_id, error, extra=_about("score_failed", sample_id))
        state = await parts.buffer.fail(sample_id, error.reason, _encodable(error), min_scored)
        parts.trace.scored(sample_id, None, error.reason.value)
    else:
        state = await parts.buffer.score(sample_id, reward, min_scored)
        parts.trace.scored(sample_id, reward.value)
    if state in (GroupState.READY, GroupState.DROPPED):
        parts.mailbox.post(GroupClosed(sample.group_id, state is GroupState.READY))


def _about(event: str, sample_id: str) -> dict[str, str]:
    """Fields of a log line on one sample."""
    return {"event": event, "sample": sample_id, "group": group_of(sample_id)}


def _encodable(error: Exception) -> str:
    """Its message without what UTF-8 can't hold, such as half a surrogate pair from a user's function."""
    return str(error).encode("utf-8", "replace").decode()


def scoring_task(
    prompt: Prompt, sample_id: str, tokens: Sequence[int], reason: FinishReason, decode: Decode
) -> ScoringTask:
    """What a scorer is told of a finished response."""
    return ScoringTask(
        sample_id=sample_id,
        data_source=prompt.data_source,
        prompt=prompt.text,
        response=decode(tokens),
        ground_truth=prompt.ground_truth,
        extra=prompt.extra,
        finish_reason=reason,
        num_tokens=len(tokens),
    )


async def renew_leases(parts: SampleParts, leases: Callable[[], list[SampleLease]]) -> None:
    """Renew the leases of what runs, for ever, three times within each lease's time; then set aside what expired.

    In this order, so that after an outage of the store what still runs here is renewed and not set aside.
    """
    lease_s = parts.settings.buffer.sample_lease_s
    while True:
        await asyncio.sleep(lease_s / 3)
        if held := leases():
            lost = await parts.buffer.renew(held, lease_s)
            for lease in set(lost).intersection(leases()):  # the others ended while they were renewed
                about = _about("lease_lost", lease.sample_id)
                log.warning("the lease of sample %s was lost", lease.sample_id, extra=about)
        if expired := await parts.buffer.park_expired(EXPIRED_A_CALL):
            log.warning("nobody renewed the leases of %d samples: they go on from their last tokens", len(expired))
            parts.mailbox.post(LeasesExpired(tuple(expired), await _worn_out(parts, expired)))


async def _worn_out(parts: SampleParts, sample_ids: Sequence[str]) -> tuple[str, ...]:
    limit = parts.settings.rollout.max_sample_failures
    briefs = await parts.buffer.open_samples()
    return tuple(b.sample_id for b in briefs if b.sample_id in set(sample_ids) and b.num_expiries >= limit)
