"""Evaluations of the held-out prompts, pinned to the active version.

Always true: an evaluation's samples take no part in rounds, are never cut and never enter the buffer; while one runs no
policy is installed, up to `hold_timeout_s`, after which it is marked as failed and its requests are aborted. One that
was asked for a version that is not active yet waits for it and holds nothing meanwhile. One that ends is `done` with
scores or `failed` with the reason, whatever happened; it lives in this process alone, and its id is never used again.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Sequence

from protocol.errors import AprilError, ConflictError, NotFoundError, RequestError
from protocol.messages import Evaluation, StartEvaluation
from protocol.samples import Prompt
from protocol.settings import RunSettings
from rollout_service.engines.interface import SamplingParameters
from rollout_service.evaluation_answers import AnswerReader
from rollout_service.evaluation_metrics import score, score_by_source
from rollout_service.evaluation_run import EvaluationPlan, EvaluationRun, Turns
from rollout_service.events import Changed
from rollout_service.prompts.apportion import representative
from rollout_service.samples import SampleParts

log = logging.getLogger(__name__)

NUM_KEPT = 100  # finished evaluations that stay readable; the trainer logs their numbers itself


class Evaluations:
    """At most one evaluation runs at a time; others wait for their turn."""

    def __init__(
        self,
        settings: RunSettings,
        parts: SampleParts,
        prompts: Sequence[Prompt],
        answers: AnswerReader | None = None,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._prompts = prompts
        self._answers = answers or AnswerReader(settings)
        self._numbers = itertools.count(1)
        self._process = secrets.token_hex(4)
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
        """Start one at the active version, or when the version asked for is.

        Raises ConflictError without prompts, RequestError for several greedy samples of a prompt.
        """
        if not self._prompts:
            raise ConflictError("there are no held-out prompts; set data.val_files or a generated data source")
        plan = self._plan(request)
        evaluation = Evaluation(
            id=f"e{next(self._numbers)}-{self._process}",
            version=self.active_version if request.version is None else request.version,
            state="running",
            num_samples=len(plan.prompts) * plan.n,
            num_done=0,
            num_failed=0,
            n=plan.n,
            temperature=plan.sampling.temperature,
        )
        self._keep(evaluation)
        task = asyncio.create_task(self._run(evaluation, plan))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return evaluation

    async def close(self) -> None:
        """Cancel what runs."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._answers.close()

    def _plan(self, request: StartEvaluation) -> EvaluationPlan:
        own = self._settings.evaluation
        temperature = request.temperature
        if temperature is None:
            temperature = 0.0 if own.greedy else own.temperature
        n = request.n or own.n
        if n > 1 and temperature == 0:
            raise RequestError(f"{n} greedy samples of a prompt would all be the same; ask for n = 1 or a temperature")
        sampling = SamplingParameters(
            max_tokens=self._settings.data.max_response_length,
            temperature=temperature,
            top_p=own.top_p if temperature else 1.0,
            top_k=own.top_k if temperature else -1,
            stop_token_ids=tuple(self._settings.rollout.stop_token_ids),
        )
        count = request.num_prompts or self._settings.data.num_val_prompts
        return EvaluationPlan(representative(self._prompts, count), n, sampling)

    def _keep(self, evaluation: Evaluation) -> None:
        """Finished ones make room; one that runs is never forgotten."""
        self._all[evaluation.id] = evaluation
        for old in list(self._all.values())[:-NUM_KEPT]:
            if old.state != "running":
                del self._all[old.id]

    async def _run(self, evaluation: Evaluation, plan: EvaluationPlan) -> None:
        try:
            async with self._turn:
                await self._wait_for_version(evaluation)
                run = await self._hold_and_generate(evaluation, plan)
            self._summarise(evaluation, run, plan)
        except TimeoutError:
            evaluation.error = f"not finished within {self._settings.evaluation.hold_timeout_s:g} s"
        except AprilError as error:
            evaluation.error = str(error)
        except asyncio.CancelledError:
            evaluation.error = "the service stops; ask again when it is up"
            raise
        except Exception as error:
            # Whatever it is: who waits for this evaluation must learn that it is over, and training must go on.
            log.exception("evaluation %s ended by a fault", evaluation.id)
            evaluation.error = _describe(error)
        finally:
            evaluation.state = "failed" if evaluation.error else "done"

    async def _wait_for_version(self, evaluation: Evaluation) -> None:
        async with asyncio.timeout(self._settings.evaluation.hold_timeout_s), self._changed:
            await self._changed.wait_for(lambda: self.active_version >= evaluation.version and not self._installing)
            self._num_holding += 1
        evaluation.version = self.active_version
        self._parts.mailbox.post(Changed())

    async def _hold_and_generate(self, evaluation: Evaluation, plan: EvaluationPlan) -> EvaluationRun:
        run = EvaluationRun(evaluation, plan, self._parts, self._answers if plan.n > 1 else None)
        try:
            async with asyncio.timeout(self._settings.evaluation.hold_timeout_s):
                if plan.n > 1:
                    await self._answers.start()
                await self._generate(run, plan)
        finally:
            self._num_holding -= 1
            self._parts.mailbox.post(Changed())
        run.check()
        return run

    async def _generate(self, run: EvaluationRun, plan: EvaluationPlan) -> None:
        turns = Turns(len(plan.prompts), plan.n)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(max(1, self.reserved_slots)):
                tasks.create_task(run.take_turns(turns))

    def _summarise(self, evaluation: Evaluation, run: EvaluationRun, plan: EvaluationPlan) -> None:
        pass_reward = self._settings.evaluation.pass_reward
        scores = score(run.results, plan.n, pass_reward)
        if scores is None:
            evaluation.error = "no sample could be scored; the service's log has the reasons"
            return
        evaluation.scores = scores
        evaluation.sources = score_by_source(run.results, plan.n, pass_reward)
        evaluation.mean_reward = scores.mean
        evaluation.mean_tokens = scores.mean_tokens
        evaluation.p50_tokens = scores.p50_tokens
        evaluation.p99_tokens = scores.p99_tokens
        evaluation.max_tokens = scores.max_tokens
        evaluation.truncated_share = scores.truncated_share


def _describe(error: BaseException) -> str:
    """The first cause: a group of errors says only how many there are."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
