"""Evaluations of the held-out prompts, pinned to the active version.

Always true: an evaluation's samples take no part in rounds, are never cut and never enter the buffer; while one runs no
policy is installed, up to `hold_timeout_s`, after which it is marked as failed and its requests are aborted. One that
was asked for a version that is not active yet waits for it and holds nothing meanwhile.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from protocol.errors import AprilError, ConflictError, EngineError, NotFoundError
from protocol.messages import Evaluation, StartEvaluation
from protocol.samples import Prompt
from protocol.settings import RunSettings
from protocol.states import FinishReason
from rollout_service.engines.interface import GenerationRequest, SamplingParameters, StreamEnd
from rollout_service.events import Changed
from rollout_service.samples import SampleParts, scoring_task
from rollout_service.seeds import segment_seed

log = logging.getLogger(__name__)

NUM_KEPT = 100  # finished evaluations that stay readable; the trainer logs their numbers itself


@dataclass(slots=True)
class _Tally:
    rewards: list[float] = field(default_factory=list[float])
    lengths: list[int] = field(default_factory=list[int])
    truncated: int = 0
    failed: int = 0


class Evaluations:
    """At most one evaluation runs at a time; others wait for their turn."""

    def __init__(self, settings: RunSettings, parts: SampleParts, prompts: Sequence[Prompt]) -> None:
        self._settings = settings
        self._parts = parts
        self._prompts = prompts
        self._numbers = itertools.count(1)
        self._all: dict[str, Evaluation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._installing = False
        self._num_holding = 0
        self.active_version = 0

    @property
    def running(self) -> bool:
        """Whether installs must wait."""
        return self._num_holding > 0

    def install_begins(self) -> None:
        """No evaluation starts until the install is over."""
        self._installing = True

    async def install_ended(self) -> None:
        """Evaluations may start."""
        self._installing = False
        async with self._changed:
            self._changed.notify_all()

    async def version_is(self, version: int) -> None:
        """The active version, as the round loop sees it."""
        if version != self.active_version:
            self.active_version = version
            async with self._changed:
                self._changed.notify_all()

    @property
    def reserved_slots(self) -> int:
        """Slots that rounds must leave to evaluations."""
        return min(self._settings.evaluation.max_concurrency, self._parts.pool.slots // 2) if self.running else 0

    def get(self, evaluation_id: str) -> Evaluation:
        """One evaluation; raises NotFoundError."""
        try:
            return self._all[evaluation_id]
        except KeyError:
            raise NotFoundError(f"evaluation {evaluation_id} is unknown; POST /v1/evaluations starts one") from None

    def start(self, request: StartEvaluation) -> Evaluation:
        """Start one at the active version, or when the version asked for is. Raises ConflictError without prompts."""
        if not self._prompts:
            raise ConflictError("there are no held-out prompts; set data.val_files or a generated data source")
        version = self.active_version if request.version is None else request.version
        prompts = self._prompts[: request.num_prompts or self._settings.data.num_val_prompts]
        n = request.n or self._settings.evaluation.n
        evaluation = Evaluation(
            id=f"e{next(self._numbers)}",
            version=version,
            state="running",
            num_samples=len(prompts) * n,
            num_done=0,
            num_failed=0,
        )
        self._all[evaluation.id] = evaluation
        for old in list(self._all)[:-NUM_KEPT]:
            del self._all[old]
        temperature = self._settings.evaluation.temperature if request.temperature is None else request.temperature
        task = asyncio.create_task(self._run(evaluation, prompts, n, temperature))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return evaluation

    async def close(self) -> None:
        """Cancel what runs."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, evaluation: Evaluation, prompts: Sequence[Prompt], n: int, temperature: float) -> None:
        tally = _Tally()
        try:
            async with self._turn:
                await self._wait_for_version(evaluation)
                await self._hold_and_generate(evaluation, tally, prompts, n, temperature)
        except TimeoutError:
            evaluation.error = f"not finished within {self._settings.evaluation.hold_timeout_s:g} s"
        except AprilError as error:
            evaluation.error = str(error)
        evaluation.state = "failed" if evaluation.error else "done"
        _summarise(evaluation, tally)

    async def _wait_for_version(self, evaluation: Evaluation) -> None:
        async with asyncio.timeout(self._settings.evaluation.hold_timeout_s), self._changed:
            await self._changed.wait_for(lambda: self.active_version >= evaluation.version and not self._installing)
            self._num_holding += 1
        evaluation.version = self.active_version
        self._parts.mailbox.post(Changed())

    async def _hold_and_generate(
        self, evaluation: Evaluation, tally: _Tally, prompts: Sequence[Prompt], n: int, temperature: float
    ) -> None:
        try:
            async with asyncio.timeout(self._settings.evaluation.hold_timeout_s):
                await self._generate(evaluation, tally, prompts, n, temperature)
        finally:
            self._num_holding -= 1
            self._parts.mailbox.post(Changed())

    async def _generate(
        self, evaluation: Evaluation, tally: _Tally, prompts: Sequence[Prompt], n: int, temperature: float
    ) -> None:
        waiting = ((prompt, index) for prompt in prompts for index in range(n))

        async def take_turns() -> None:
            for prompt, index in waiting:
                sample_id = f"eval-{evaluation.id}-{prompt.prompt_id}.{index}"
                await self._sample(evaluation, tally, prompt, sample_id, temperature)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._settings.evaluation.max_concurrency):
                tasks.create_task(take_turns())

    async def _sample(
        self, evaluation: Evaluation, tally: _Tally, prompt: Prompt, sample_id: str, temperature: float
    ) -> None:
        tokens: list[int] = []
        try:
            end = await self._stream(prompt, sample_id, temperature, tokens)
            task = scoring_task(prompt, sample_id, tokens, FinishReason(end.value), self._parts.decode)
            reward = await self._parts.scorer.score(task)
        except AprilError as error:
            log.warning("evaluation sample %s failed: %s", sample_id, error)
            tally.failed += 1
            evaluation.num_failed += 1
            return
        tally.rewards.append(reward.value)
        tally.lengths.append(len(tokens))
        tally.truncated += end is StreamEnd.LENGTH
        evaluation.num_done += 1

    async def _stream(self, prompt: Prompt, sample_id: str, temperature: float, tokens: list[int]) -> StreamEnd:
        rollout = self._settings.rollout
        request = GenerationRequest(
            request_id=f"{sample_id}@1",
            prompt_token_ids=prompt.token_ids,
            num_prefix_tokens=0,
            sampling=SamplingParameters(
                max_tokens=self._settings.data.max_response_length,
                temperature=temperature,
                stop_token_ids=tuple(rollout.stop_token_ids),
                seed=segment_seed(self._settings.run.seed, sample_id, 1) if self._parts.pool.takes_seeds else None,
            ),
        )
        async for chunk in self._parts.pool.generate(request):
            tokens.extend(chunk.tokens.tolist())
            if chunk.end is StreamEnd.ABORT:
                raise EngineError(f"the request of {sample_id} was aborted")
            if chunk.end is not None:
                return chunk.end
        raise EngineError(f"the stream of {sample_id} stopped without an end")


def _summarise(evaluation: Evaluation, tally: _Tally) -> None:
    if not tally.rewards:
        evaluation.error = evaluation.error or "no sample could be scored; the service's log has the reasons"
        evaluation.state = "failed"
        return
    lengths = np.asarray(tally.lengths)
    evaluation.mean_reward = float(np.mean(tally.rewards))
    evaluation.mean_tokens = float(lengths.mean())
    evaluation.p50_tokens = float(np.percentile(lengths, 50))
    evaluation.p99_tokens = float(np.percentile(lengths, 99))
    evaluation.max_tokens = int(lengths.max())
    evaluation.truncated_share = tally.truncated / len(tally.rewards)
