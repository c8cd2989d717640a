"""Which corrections give the true policy gradient, by enumeration: no sampling, so no tolerance for noise.

The objective itself is used, with its defaults but for the correction, sequence sums, and a fixed baseline.
"""

import math

import pytest
import torch

from benchmarks.enumerable import (
    NUM_PREFIXES,
    VOCABULARY,
    Writers,
    ascended,
    enumerate_responses,
    gradient_moments,
    random_table,
    true_gradient,
)
from protocol.settings.algorithm import Correction, Level
from trainer.corrections import Corrector
from trainer.losses import Clip
from trainer.objective import Objective

pytestmark = pytest.mark.usefixtures("one_thread")
BASELINE = 0.3
CLIP = Clip(0.2, 0.2, 3.0)


def objective(
    correction: Correction, loss: str = "ppo_clip", level: Level = "token", cap: float = math.inf
) -> Objective:
    corrector = Corrector(level=level, cap=cap)
    return Objective(correction, CLIP, corrector, policy_loss=loss, aggregation="seq-mean-token-sum")


@pytest.fixture(scope="module")
def tables() -> list[torch.Tensor]:
    """A run's versions, oldest first."""
    return ascended(random_table(torch.Generator().manual_seed(0)), rate=1.5, num_steps=4)


@pytest.fixture(scope="module")
def writers(tables: list[torch.Tensor]) -> Writers:
    """Responses begun four versions ago and resumed one version ago."""
    return Writers(tables[0], tables[3], lags=(4, 1))


def bias(estimator: Objective, table: torch.Tensor, writers: Writers) -> float:
    """Relative to the true gradient's norm."""
    truth = true_gradient(table, BASELINE)
    mean = gradient_moments(estimator, table, writers, BASELINE).mean
    return float((mean - truth).norm() / truth.norm())


def test_the_enumeration_is_complete(tables: list[torch.Tensor], writers: Writers) -> None:
    responses = enumerate_responses()
    assert (len(responses), VOCABULARY, max(len(r.tokens) for r in responses)) == (31, 3, 4)
    assert {int(row) for r in responses for row in r.prefixes} == set(range(NUM_PREFIXES))
    for logprobs in (lambda r: r.logprobs(tables[-1]), writers.logprobs):
        assert float(sum(logprobs(r).sum().exp() for r in responses)) == pytest.approx(1, abs=1e-12)
    assert {len(writers.versions(r).unique()) for r in responses} == {1, 2}, "some responses have two writers"


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "cispo"])
def test_untruncated_sequence_weights_give_the_true_gradient(
    tables: list[torch.Tensor], writers: Writers, loss: str
) -> None:
    assert bias(objective(Correction.DECOUPLED, loss, "sequence"), tables[-1], writers) < 1e-12


def test_the_ratio_to_the_behaviour_gives_it_too_where_it_is_the_sequences(
    tables: list[torch.Tensor], writers: Writers
) -> None:
    estimator = objective(Correction.BEHAVIOUR, "reinforce", "sequence")
    assert bias(estimator, tables[-1], writers) < 1e-12


def test_on_policy_every_correction_is_exact(tables: list[torch.Tensor]) -> None:
    own = Writers(tables[-1], tables[-1], lags=(0, 0))
    for correction in Correction:
        for loss in ("ppo_clip", "gspo", "cispo", "reinforce"):
            assert bias(objective(correction, loss), tables[-1], own) < 1e-12


def test_no_correction_is_biased_and_truncation_trades_bias_for_variance(
    tables: list[torch.Tensor], writers: Writers, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order is what the corrections promise; the numbers are printed."""
    estimators = {
        "none": objective(Correction.NONE),
        "token": objective(Correction.DECOUPLED),
        "token, C = 2": objective(Correction.DECOUPLED, cap=2.0),
        "version run": objective(Correction.DECOUPLED, level="version_run"),
        "sequence, C = 2": objective(Correction.DECOUPLED, level="sequence", cap=2.0),
        "sequence": objective(Correction.DECOUPLED, level="sequence"),
    }
    biases = {name: bias(estimator, tables[-1], writers) for name, estimator in estimators.items()}
    variances = {
        name: gradient_moments(estimator, tables[-1], writers, BASELINE).total_variance
        for name, estimator in estimators.items()
    }
    with capsys.disabled():
        for name in estimators:
            print(f"\n{name:16} bias {biases[name]:.4f}  variance {variances[name]:.3f}", end="")
    assert biases["none"] > 0.1
    assert biases["sequence"] < 1e-12 < biases["version run"] < biases["token"] < biases["none"]
    assert biases["token, C = 2"] > 1e-3
    assert biases["sequence, C = 2"] > 1e-3
    assert variances["sequence, C = 2"] < variances["sequence"]
    assert variances["token, C = 2"] <= variances["token"]
