"""Held-out evaluations, which the service carries out; the trainer asks, waits or looks again between steps.

Always true: at most one is under way; it never holds up training, except one that is waited for; one that the service
has lost, because it was started again, is asked for again while the weights that it was about are still the newest.
"""

import logging
from dataclasses import dataclass, replace

from protocol.errors import AprilError, FencedError, NotFoundError
from protocol.messages import Evaluation, EvaluationScores
from trainer.client import ServiceClient, Stopped
from trainer.publish import Publisher
from trainer.sources import metric_name

LOG = logging.getLogger("april.trainer")

POLL_S = 0.5  # between two looks at an evaluation or an install that is waited for
MAX_REPEATS = 3  # a service that dies of an evaluation must not be asked for it for ever


@dataclass(frozen=True, slots=True)
class _Asked:
    """An evaluation under way: of the weights after `step`, published as `version`."""

    step: int
    version: int
    evaluation_id: str
    num_repeats: int = 0


class Evaluator:
    """Rank 0: at most one evaluation in the background, or one that is waited for."""

    def __init__(self, client: ServiceClient, publisher: Publisher) -> None:
        self._client = client
        self._publisher = publisher
        self._running: _Asked | None = None

    def start(self, step: int) -> None:
        """Ask for an evaluation after `step` and go on; `collect` has the result later."""
        if self._running is not None:
            LOG.warning("step %d: the evaluation of step %d still runs; this one is left out", step, self._running.step)
            return
        version = self._publisher.version
        evaluation = self._begin(version)
        if evaluation is not None:
            self._running = _Asked(step, version, evaluation.id)

    def collect(self) -> tuple[int, Evaluation] | None:
        """The step and result of the background evaluation, once, when it is over."""
        asked = self._running
        if asked is None:
            return None
        try:
            evaluation = self._client.evaluation(asked.evaluation_id)
        except FencedError:
            raise
        except NotFoundError:
            self._running = self._ask_again(asked)
            return None
        except AprilError as error:
            LOG.warning("the evaluation of step %d is lost: %s", asked.step, error)
            self._running = None
            return None
        if evaluation.state == "running":
            return None
        self._running = None
        if evaluation.state == "failed":
            LOG.warning("the evaluation of step %d failed: %s", asked.step, evaluation.error)
        return asked.step, evaluation

    def wait(self) -> tuple[int, Evaluation] | None:
        """Wait for the background evaluation, if there is one; raises `Stopped` when asked to stop."""
        while self._running is not None:
            done = self.collect()
            if done is not None:
                return done
            self._pause()
        return None

    def run(self, step: int) -> Evaluation | None:
        """Evaluate the newest weights and wait. Raises `Stopped` when asked to stop."""
        self.start(step)
        done = self.wait()
        return done[1] if done else None

    def _begin(self, version: int) -> Evaluation | None:
        try:
            return self._client.start_evaluation(version)
        except FencedError:
            raise
        except AprilError as error:
            LOG.warning("no evaluation: %s", error)
            return None

    def _ask_again(self, asked: _Asked) -> _Asked | None:
        """The service was started again and knows nothing of it."""
        if asked.version != self._publisher.version or asked.num_repeats == MAX_REPEATS:
            reason = "version %d has been replaced" if asked.num_repeats < MAX_REPEATS else "version %d is given up"
            LOG.warning(
                "the evaluation of step %d is lost: the service forgot it, and " + reason, asked.step, asked.version
            )
            return None
        LOG.warning("the service forgot the evaluation of step %d; it is asked for again", asked.step)
        evaluation = self._begin(asked.version)
        if evaluation is None:
            return None
        return replace(asked, evaluation_id=evaluation.id, num_repeats=asked.num_repeats + 1)

    def _pause(self) -> None:
        if self._client.stop.wait(POLL_S):
            raise Stopped


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """What is logged of an evaluation that is over; of a failed one only that it failed."""
    found: dict[str, float | None] = {
        "eval/version": evaluation.version,
        "eval/num_failed": evaluation.num_failed,
        "eval/reward": evaluation.mean_reward,
        "eval/length_mean": evaluation.mean_tokens,
        "eval/length_p50": evaluation.p50_tokens,
        "eval/length_p99": evaluation.p99_tokens,
        "eval/truncated_share": evaluation.truncated_share,
    }
    if evaluation.scores is not None:
        found["eval/length_max"] = evaluation.scores.max_tokens
        found["eval/reward_stderr"] = evaluation.scores.mean_stderr
        found |= _at_k(evaluation.scores, evaluation.n, "eval")
    for source, scores in evaluation.sources.items():
        prefix = f"eval/source/{metric_name(source)}"
        found |= _at_k(scores, evaluation.n, prefix)
        found[f"{prefix}/length_mean"] = scores.mean_tokens
        found[f"{prefix}/truncated_share"] = scores.truncated_share
        found[f"{prefix}/num_prompts"] = scores.num_prompts
    return {name: float(value) for name, value in found.items() if value is not None}


def _at_k(scores: EvaluationScores, k: int, prefix: str) -> dict[str, float | None]:
    passed: dict[str, float | None] = {f"{prefix}/pass@{j}": share for j, share in scores.pass_at.items()}
    return {f"{prefix}/mean@{k}": scores.mean, f"{prefix}/maj@{k}": scores.majority} | passed
