"""Held-out evaluations, which the service carries out; the trainer asks, waits or looks again between steps."""

import logging

from protocol.errors import AprilError, FencedError
from protocol.messages import Evaluation
from trainer.client import ServiceClient, Stopped
from trainer.publish import Publisher

LOG = logging.getLogger("april.trainer")

POLL_S = 0.5  # between two looks at an evaluation or an install that is waited for


class Evaluator:
    """Rank 0: at most one evaluation in the background, or one that is waited for."""

    def __init__(self, client: ServiceClient, publisher: Publisher) -> None:
        self._client = client
        self._publisher = publisher
        self._running: tuple[int, str] | None = None

    def start(self, step: int) -> None:
        """Ask for an evaluation after `step` and go on; `collect` has the result later."""
        if self._running is not None:
            LOG.warning("step %d: the evaluation of step %d still runs; this one is left out", step, self._running[0])
            return
        evaluation = self._begin()
        if evaluation is not None:
            self._running = (step, evaluation.id)

    def collect(self) -> tuple[int, Evaluation] | None:
        """The step and result of the background evaluation, once, when it is done."""
        if self._running is None:
            return None
        step, evaluation_id = self._running
        evaluation = self._look(evaluation_id)
        if evaluation is not None and evaluation.state == "running":
            return None
        self._running = None
        return (step, evaluation) if evaluation is not None else None

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

    def _begin(self) -> Evaluation | None:
        try:
            return self._client.start_evaluation(self._publisher.version)
        except FencedError:
            raise
        except AprilError as error:
            LOG.warning("no evaluation: %s", error)
            return None

    def _look(self, evaluation_id: str) -> Evaluation | None:
        try:
            evaluation = self._client.evaluation(evaluation_id)
        except FencedError:
            raise
        except AprilError as error:
            LOG.warning("the evaluation %s is lost: %s", evaluation_id, error)
            return None
        if evaluation.state == "failed":
            LOG.warning("the evaluation %s failed: %s", evaluation_id, evaluation.error)
        return evaluation

    def _pause(self) -> None:
        if self._client.stop.wait(POLL_S):
            raise Stopped


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """What is logged of a finished evaluation."""
    named = {
        "eval/reward": evaluation.mean_reward,
        "eval/length_mean": evaluation.mean_tokens,
        "eval/length_p50": evaluation.p50_tokens,
        "eval/length_p99": evaluation.p99_tokens,
        "eval/truncated_share": evaluation.truncated_share,
        "eval/version": evaluation.version,
        "eval/num_failed": evaluation.num_failed,
    }
    return {name: float(value) for name, value in named.items() if value is not None}
