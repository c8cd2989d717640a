"""The whole system under random faults, judged by the histories alone."""

import pytest
from rich.console import Console

from tests.support.chaos_report import show
from tests.system.chaos import SIMULATED, VLLM, run_chaos

pytestmark = pytest.mark.timeout(900)

ALWAYS_OBSERVED = {"G1", "G2", "G4", "G5", "G11", "cursor", "liveness"}  # by any run that trains some steps


def promises_are_kept(folder, model, seed, seconds, num_faults, scene=SIMULATED):
    report = run_chaos(folder, model, seed, seconds, num_faults, scene)
    show(report, Console(width=120))
    assert report.violations == []
    assert {verdict.promise for verdict in report.verdicts if verdict.word == "kept"} >= ALWAYS_OBSERVED
    assert len(report.final["history"]) > 0
    return report


def test_promises_are_kept_under_a_few_faults(tmp_path, tiny_model_dir):
    report = promises_are_kept(tmp_path, tiny_model_dir, seed=2, seconds=0.0, num_faults=4)
    assert report.faults.total() == 4


@pytest.mark.slow
def test_promises_are_kept_for_a_minute_of_faults(tmp_path, tiny_model_dir):
    report = promises_are_kept(tmp_path, tiny_model_dir, seed=3, seconds=60.0, num_faults=None)
    assert report.faults.total() > 4


@pytest.mark.slow
def test_promises_are_kept_by_a_real_engine(tmp_path, tiny_model_dir):
    report = promises_are_kept(tmp_path, tiny_model_dir, seed=4, seconds=0.0, num_faults=6, scene=VLLM)
    assert report.faults["engine killed"] >= 1
