"""The whole system under random faults, judged by the histories alone."""

import pytest
from rich.console import Console

from tests.system.chaos import run_chaos, show

pytestmark = pytest.mark.timeout(900)


def promises_are_kept(folder, tokenizer, seed, seconds, num_faults):
    report = run_chaos(folder, tokenizer, seed, seconds, num_faults)
    show(report, Console(width=120))
    assert report.violations == []
    assert report.numbers["batches served"] > 0
    assert len(report.final["history"]) > 0
    return report


def test_promises_are_kept_under_a_few_faults(tmp_path, tiny_model_dir):
    report = promises_are_kept(tmp_path, tiny_model_dir, seed=2, seconds=0.0, num_faults=4)
    assert report.faults.total() == 4


@pytest.mark.slow
def test_promises_are_kept_for_a_minute_of_faults(tmp_path, tiny_model_dir):
    report = promises_are_kept(tmp_path, tiny_model_dir, seed=3, seconds=60.0, num_faults=None)
    assert report.faults.total() > 4
