"""`april demo`, shortened: the whole loop with the real base policy."""

import json
import subprocess
import sys

import pytest

from deploy.demo.summary import DemoSummary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_demo_reports_a_loop_that_ran(tmp_path):
    words = ["--trainer.total_training_steps=8", "--data.num_val_prompts=64"]
    command = [sys.executable, "-m", "deploy.cli", "demo", f"--dir={tmp_path}", f"--json={tmp_path / 'out.json'}"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = DemoSummary.model_validate(json.loads((tmp_path / "out.json").read_text()))
    assert summary.steps == 8
    assert summary.groups_consumed == summary.ledger.consumed == 8 * 16
    assert summary.samples_trained == 8 * 16 * 8
    assert summary.samples_resumed > 0
    assert summary.samples_multi_version > 0
    assert summary.max_lag >= 1
    assert summary.ledger_error == 0
    assert len({summary.processes.service, summary.processes.trainer, summary.processes.redis}) == 3
    assert summary.tokens_generated >= summary.tokens_trained > 0
    assert 0 < summary.eval_reward_before < 1
    assert 0 < summary.eval_reward_after < 1
