"""The comparison of corrections: the sampler writes what it says it writes, and cells become a table and a plot."""

import json
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import Qwen3ForCausalLM

from benchmarks import learning
from benchmarks.correction import main
from benchmarks.learning import METHODS, Cell, cell_settings
from benchmarks.rollouts import Rollout, Sampler
from deploy.demo.task import chain_sums
from tests.trainer.factory import make_settings
from trainer.model import load_policy
from trainer.packing import pack


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)


def weights_of(model: Qwen3ForCausalLM, scale: float) -> dict[str, torch.Tensor]:
    return {name: scale * weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}


def test_a_batch_of_forced_lag_carries_the_logprobs_of_the_weights_that_wrote_it(
    model: Qwen3ForCausalLM, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against the trainer's own forward pass, by version, in float32."""
    monkeypatch.setattr(learning, "MAX_TOKENS", 24)
    monkeypatch.setattr(learning, "NUM_PROMPTS", 3)
    versions = {7: weights_of(model, 1.0), 8: weights_of(model, 1.05), 9: weights_of(model, 1.1)}
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(Qwen3ForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32))
    batch = learning.sample_batch(sampler, deque(versions.items()), chain_sums(1, held_out=False), 10, generator)
    written = batch.versions[batch.loss_mask == 1]
    assert set(written) == {7, 8}, "begun two versions ago, resumed one version ago"
    policy = load_policy(make_settings(tiny_model_dir, tmp_path), tiny_model_dir, torch.device("cpu"))
    micro = pack(batch, range(batch.num_samples))
    for version, weights in versions.items():
        policy.lm.load_state_dict(weights, strict=False)
        mine = micro.versions == version
        with torch.no_grad():
            torch.testing.assert_close(policy(micro).logprobs[mine], micro.behaviour[mine], atol=1e-4, rtol=1e-4)
    ends = [sample.segments[-1].end for sample in batch.header.samples]
    assert max(ends) == 24
    assert all(len(sample.segments) <= 2 for sample in batch.header.samples)


def test_a_rollout_ends_at_its_length_or_by_itself(model: Qwen3ForCausalLM) -> None:
    sampler = Sampler(model)
    sampler.hold(weights_of(model, 1.0), 3)
    rollouts = [Rollout([5, 6, 7]), Rollout([8])]
    sampler.extend(rollouts, [4, 1], torch.Generator().manual_seed(0))
    sampler.extend(rollouts, [4, 6], torch.Generator().manual_seed(1))
    assert [len(r.tokens) for r in rollouts] == [4, 6] or any(r.ended for r in rollouts)
    assert all(len(r.tokens) == len(r.logprobs) == len(r.versions) for r in rollouts)
    before = [list(r.tokens) for r in rollouts]
    sampler.extend(rollouts, [4, 6], torch.Generator())
    assert [r.tokens for r in rollouts] == before, "nothing is left to do"


@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_a_run_that_the_settings_allow(method: str, tmp_path: Path) -> None:
    settings = cell_settings(Cell(method, 2, 1), tmp_path, tmp_path)
    assert settings.algorithm.correction == method.split("/")[0]
    assert settings.data.train_batch_size == 4 * (settings.actor.ppo_mini_batch_size or 0)


def test_cells_become_a_table_and_a_plot(tmp_path: Path) -> None:
    for lag, method in ((0, "none"), (2, "none"), (2, "decoupled/token")):
        for seed in (0, 1):
            cell = {"method": method, "lag": lag, "seed": seed, "steps": 2, "learning_rate": 1e-4, "num_updates": 4}
            detail = [{"reward": 0.5 + seed / 10, "skipped": 0, "importance/ess": 0.9}] * 2
            numbers = {"reward_before": 0.4, "reward_after": 0.6 + seed / 10, "seconds": 3.0, "steps_detail": detail}
            (tmp_path / f"{Cell(method, lag, seed).name}.json").write_text(json.dumps(cell | numbers))
    rows = tmp_path / "rows.json"
    result = CliRunner().invoke(main, ["table", "--out", str(tmp_path), "--json-file", str(rows)])
    assert result.exit_code == 0, result.output
    table = json.loads(rows.read_text())
    assert [(row["lag"], row["seeds"]) for row in table] == [(0, 2), (2, 2), (2, 2)]
    assert table[0]["after"] == pytest.approx(0.65)
    assert (tmp_path / "correction.png").read_bytes().startswith(b"\x89PNG")
    assert np.isfinite([row["ess"] for row in table]).all()


def test_without_cells_it_says_what_to_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["table", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "learn" in result.output
