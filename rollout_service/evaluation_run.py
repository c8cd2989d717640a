"""The samples of one evaluation: generated beside the rounds, scored, and counted.

Always true: every token of it is written by the version that it is pinned to; a sample that fails is counted as failed
and is no zero; if no engine is left, the whole evaluation fails instead of being judged by what came before.
"""

import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from protocol.errors import AprilError, EngineDeadError, EngineError
from protocol.messages import Evaluation
from protocol.samples import Prompt
from protocol.states import FinishReason
from rollout_service.engines.interface import Chunk, GenerationRequest, SamplingParameters, StreamEnd
from rollout_service.evaluation_answers import AnswerReader
from rollout_service.evaluation_metrics import PromptResults, SampleResult
from rollout_service.samples import SampleParts, scoring_task
from rollout_service.seeds import segment_seed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """What is evaluated: `n` samples of each prompt."""

    prompts: Sequence[Prompt]
    n: int
    sampling: SamplingParameters


class EvaluationRun:
    """Carries out one plan; `results` grow while it does, in the order of the prompts."""

    def __init__(
        self, evaluation: Evaluation, plan: EvaluationPlan, parts: SampleParts, answers: AnswerReader | None
    ) -> None:
        self._evaluation = evaluation
        self._plan = plan
        self._parts = parts
        self._answers = answers
        self._fault: EngineDeadError | None = None
        self.results = [PromptResults(prompt.data_source) for prompt in plan.prompts]

    async def take_turns(self, turns: "Turns") -> None:
        """Run samples one after the other until there are none. Several tasks share the turns."""
        for place, index in turns:
            if self._fault is not None:
                return
            await self._sample(place, index)

    def check(self) -> None:
        """Raise EngineDeadError if it ended because no engine was left."""
        if self._fault is not None:
            raise self._fault

    async def _sample(self, place: int, index: int) -> None:
        prompt, results = self._plan.prompts[place], self.results[place]
        sample_id = f"eval-{self._evaluation.id}-{prompt.prompt_id}.{index}"
        try:
            result = await self._attempt(prompt, sample_id)
        except EngineDeadError as error:
            self._fault = error
        except AprilError as error:
            log.warning("evaluation sample %s failed: %s", sample_id, error)
            results.num_failed += 1
            self._evaluation.num_failed += 1
        else:
            results.samples.append(result)
            self._evaluation.num_done += 1

    async def _attempt(self, prompt: Prompt, sample_id: str) -> SampleResult:
        """Generate, again if an engine fails, and score."""
        last = self._parts.settings.rollout.max_sample_failures
        for attempt in range(1, last + 1):
            try:
                tokens, end = await self._generate(prompt, sample_id, attempt)
            except EngineError as error:
                if attempt == last or not any(stats.alive for stats in self._parts.pool.stats()):
                    raise
                log.info("evaluation sample %s is generated again: %s", sample_id, error)
            else:
                return await self._score(prompt, sample_id, tokens, end)
        raise AssertionError("the last attempt returns or raises")

    async def _score(self, prompt: Prompt, sample_id: str, tokens: list[int], end: StreamEnd) -> SampleResult:
        task = scoring_task(prompt, sample_id, tokens, FinishReason(end.value), self._parts.decode)
        reward = await self._parts.scorer.score(task)
        answer = await self._answers.vote(task) if self._answers else None
        return SampleResult(reward.value, len(tokens), end is StreamEnd.LENGTH, answer)

    async def _generate(self, prompt: Prompt, sample_id: str, attempt: int) -> tuple[list[int], StreamEnd]:
        seed = segment_seed(self._parts.settings.run.seed, sample_id, attempt) if self._parts.pool.takes_seeds else None
        request = GenerationRequest(
            request_id=f"{sample_id}@{attempt}",
            prompt_token_ids=prompt.token_ids,
            num_prefix_tokens=0,
            sampling=replace(self._plan.sampling, seed=seed),
        )
        tokens: list[int] = []
        # Closed at once, so that the permit is free when the next sample takes it and a refused stream is aborted.
        async with aclosing(self._parts.pool.generate(request)) as chunks:
            async for chunk in chunks:
                self._check_version(chunk, sample_id)
                tokens.extend(chunk.tokens.tolist())
                if chunk.end is StreamEnd.ABORT:
                    raise EngineError(f"the request of {sample_id} was aborted")
                if chunk.end is not None:
                    return tokens, chunk.end
        raise EngineError(f"the stream of {sample_id} stopped without an end")

    def _check_version(self, chunk: Chunk, sample_id: str) -> None:
        if len(chunk.tokens) and chunk.version != self._evaluation.version:
            raise EngineError(
                f"{sample_id} was written by version {chunk.version}; {self._evaluation.version} is what is evaluated"
            )


class Turns:
    """The samples of a plan, (place of the prompt, index), each handed out once; first samples of all prompts first."""

    def __init__(self, num_prompts: int, n: int) -> None:
        self._left = ((place, index) for index in range(n) for place in range(num_prompts))

    def __iter__(self) -> "Turns":
        return self

    def __next__(self) -> tuple[int, int]:
        return next(self._left)
