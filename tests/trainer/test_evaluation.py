"""The trainer asks for evaluations, goes on meanwhile, and asks again when the service has forgotten one."""

import threading
from typing import Any

import pytest

from protocol.errors import ConflictError, FencedError, NotFoundError, TrainingError
from protocol.messages import Evaluation, EvaluationScores, TrainerMetrics
from trainer import evaluation as evaluation_module
from trainer.client import Stopped
from trainer.evaluation import MAX_REPEATS, Evaluator, evaluation_metrics

SCORES = EvaluationScores(
    num_prompts=2,
    num_samples=8,
    num_failed=0,
    mean=0.5,
    mean_stderr=0.125,
    pass_at={1: 0.5, 2: 0.75, 4: 1.0},
    majority=0.625,
    truncated_share=0.25,
    mean_tokens=9.0,
    p50_tokens=8.0,
    p99_tokens=20.0,
    max_tokens=21,
)


class Publisher:
    version = 3


class Client:
    """A service with evaluations that end when the test says so; it may be started again and forget them."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.asked: list[int] = []
        self.known: dict[str, Evaluation] = {}
        self.error: Exception | None = None
        self.looks = 0
        self.on_look = lambda: None

    def start_evaluation(self, version: int) -> Evaluation:
        if self.error:
            raise self.error
        self.asked.append(version)
        name = f"e{len(self.asked)}"
        self.known[name] = Evaluation(
            id=name, version=version, state="running", num_samples=8, num_done=0, num_failed=0
        )
        return self.known[name]

    def evaluation(self, evaluation_id: str) -> Evaluation:
        self.looks += 1
        self.on_look()
        if self.error:
            raise self.error
        if evaluation_id not in self.known:
            raise NotFoundError(f"evaluation {evaluation_id} is unknown")
        return self.known[evaluation_id]

    def finish(self, **fields: Any) -> None:
        for name, evaluation in self.known.items():
            self.known[name] = evaluation.model_copy(update={"state": "done", **fields})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_module, "POLL_S", 0)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def publisher() -> Publisher:
    return Publisher()


@pytest.fixture
def evaluator(client: Client, publisher: Publisher) -> Evaluator:
    return Evaluator(client, publisher)  # pyright: ignore[reportArgumentType]  both are duck-typed here


def test_training_goes_on_and_the_result_comes_once(client: Client, evaluator: Evaluator) -> None:
    assert evaluator.collect() is None
    evaluator.start(5)
    assert evaluator.collect() is None
    client.finish(mean_reward=0.5)
    done = evaluator.collect()
    assert done is not None
    assert (done[0], done[1].mean_reward, client.asked) == (5, 0.5, [3])
    assert evaluator.collect() is None
    assert client.looks == 2


def test_one_at_a_time(client: Client, evaluator: Evaluator, caplog: pytest.LogCaptureFixture) -> None:
    evaluator.start(5)
    evaluator.start(10)
    assert client.asked == [3]
    assert "step 10: the evaluation of step 5 still runs; this one is left out" in caplog.text


def test_a_service_that_was_started_again_is_asked_again(
    client: Client, evaluator: Evaluator, caplog: pytest.LogCaptureFixture
) -> None:
    evaluator.start(5)
    client.known.clear()
    assert evaluator.collect() is None
    assert client.asked == [3, 3]
    assert "forgot the evaluation of step 5; it is asked for again" in caplog.text
    client.finish()
    done = evaluator.collect()
    assert done is not None
    assert (done[0], done[1].id) == (5, "e2")


def test_what_newer_weights_have_replaced_is_lost_and_said(
    client: Client, publisher: Publisher, evaluator: Evaluator, caplog: pytest.LogCaptureFixture
) -> None:
    evaluator.start(5)
    client.known.clear()
    publisher.version = 4
    assert evaluator.collect() is None
    assert client.asked == [3]
    assert "the evaluation of step 5 is lost: the service forgot it, and version 3 has been replaced" in caplog.text
    evaluator.start(10)
    assert client.asked == [3, 4], "the next one is asked for as ever"


def test_a_service_that_dies_of_it_is_not_asked_for_ever(client: Client, evaluator: Evaluator) -> None:
    client.on_look = client.known.clear
    evaluator.start(5)
    assert evaluator.wait() is None
    assert len(client.asked) == 1 + MAX_REPEATS


def test_waiting_survives_a_restart_of_the_service(client: Client, evaluator: Evaluator) -> None:
    looks = iter([client.known.clear, client.finish])
    client.on_look = lambda: next(looks)()
    evaluation = evaluator.run(0)
    assert evaluation is not None
    assert (evaluation.id, client.asked) == ("e2", [3, 3])


def test_failures_do_not_end_training(client: Client, evaluator: Evaluator, caplog: pytest.LogCaptureFixture) -> None:
    client.error = ConflictError("there are no held-out prompts")
    assert evaluator.run(0) is None
    assert "no evaluation: there are no held-out prompts" in caplog.text
    client.error = None
    evaluator.start(5)
    client.error = TrainingError("answered something else")
    assert evaluator.collect() is None
    client.error = None
    assert evaluator.collect() is None
    evaluator.start(10)
    client.finish(state="failed", error="not finished within 1 s")
    done = evaluator.collect()
    assert done is not None
    assert "the evaluation of step 10 failed: not finished within 1 s" in caplog.text


def test_a_superseded_trainer_ends(client: Client, evaluator: Evaluator) -> None:
    client.error = FencedError("superseded")
    with pytest.raises(FencedError):
        evaluator.start(5)
    client.error = None
    evaluator.start(5)
    client.error = FencedError("superseded")
    with pytest.raises(FencedError):
        evaluator.collect()


def test_a_stop_ends_the_wait(client: Client, evaluator: Evaluator) -> None:
    client.stop.set()
    with pytest.raises(Stopped):
        evaluator.run(5)


def test_metrics_of_an_evaluation() -> None:
    evaluation = Evaluation(
        id="e1",
        version=7,
        state="done",
        num_samples=8,
        num_done=8,
        num_failed=0,
        n=4,
        mean_reward=0.5,
        scores=SCORES,
        sources={"openai/gsm8k": SCORES, "a b": SCORES.model_copy(update={"majority": None})},
    )
    found = evaluation_metrics(evaluation)
    TrainerMetrics(step=1, metrics=found)
    assert (found["eval/mean@4"], found["eval/maj@4"], found["eval/pass@2"], found["eval/version"]) == (
        0.5,
        0.625,
        0.75,
        7,
    )
    assert found["eval/reward_stderr"] == 0.125
    assert found["eval/source/openai/gsm8k/pass@4"] == 1
    assert found["eval/source/a_b/truncated_share"] == 0.25
    assert "eval/source/a_b/maj@4" not in found


def test_metrics_of_a_failed_evaluation_have_no_scores() -> None:
    failed = Evaluation(id="e1", version=7, state="failed", num_samples=8, num_done=3, num_failed=1, error="late")
    assert evaluation_metrics(failed) == {"eval/version": 7, "eval/num_failed": 1}
