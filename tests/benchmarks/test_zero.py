"""Every ZeRO stage, on one and two ranks, trains the demo's policy alike and publishes what the real engine serves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.zero import RANKS, TOLERANCES, VARIANTS


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it may have to make the demo's policy first
def test_stages_ranks_resumes_and_engine_agree(tmp_path: Path) -> None:
    """In a process of its own, since vLLM and DeepSpeed each set up what the other's tests would find."""
    table = tmp_path / "table.json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.zero", "--json", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(table.read_text())
    assert [(row["variant"], row["ranks"]) for row in rows] == [(name, ranks) for name in VARIANTS for ranks in RANKS]
    for row in rows:
        assert {name: row[name] for name, limit in TOLERANCES.items() if row[name] > limit} == {}, row
        assert row["tokens served"] > 100
