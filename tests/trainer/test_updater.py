"""A batch through the updater: the same update for every split and number of ranks, and each setting does its part."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Qwen3ForCausalLM

from protocol.batch import Batch
from protocol.errors import DataError
from protocol.settings import RunSettings
from tests.trainer.factory import make_batch, make_settings
from tests.trainer.in_process import FixedCritic, FixedReference, PlainEngine, SoloRanks, ThreadRanks, on_ranks
from trainer.model import PolicyModel, load_policy
from trainer.update import Updater, UpdateReport

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KL_REWARD = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.3}}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    **{mode: {"actor": {"loss_agg_mode": mode}} for mode in MODES},
    "gspo": {"actor": {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"}},
    "cispo": {"actor": {"policy_loss": "cispo"}},
    "reinforce, behaviour": {"actor": {"policy_loss": "reinforce"}, "algorithm": {"correction": "behaviour"}},
    "version runs": {"algorithm": {"preset": "version_run_tis", "correction_cap": 50}},
    "normalised sequences": {"algorithm": {"preset": "sequence_tis", "correction_normalise": True}},
    "rejection": {"algorithm": {"rejection": "k3", "rejection_level": "version_run", "rejection_upper": 1.0}},
    "loglinear": {"algorithm": {"preset": "cheap_proximal"}},
    "rloo": {"algorithm": {"adv_estimator": "rloo"}},
    "reinforce++": {"algorithm": {"adv_estimator": "reinforce_plus_plus", "gamma": 0.9, **KL_REWARD}},
    "reinforce++ baseline": {"algorithm": {"adv_estimator": "reinforce_plus_plus_baseline", **KL_REWARD}},
    "gae": {"algorithm": {"adv_estimator": "gae", "lam": 0.9, **KL_REWARD, "kl_penalty": "low_var_kl"}},
    "grpo, kl in reward": {"algorithm": KL_REWARD},
    "kl and entropy": {
        "actor": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2", "entropy_coeff": 0.01}
    },
    "filtered": {"algorithm": {"groups_without_spread": "filter", "mask_truncated": True}},
}
pytestmark = pytest.mark.usefixtures("one_thread")
SPLITS = [(10_000, None, 1), (70, 3, 1), (120, None, 2), (1, None, 3)]


@pytest.fixture(scope="module")
def policy(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    """One small layer: its log-probs are as flat as the batches', so that ratios are near one."""
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.update(
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policy")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return load_policy(make_settings(folder, folder), folder, torch.device("cpu")).double()


def off_policy_batch() -> Batch:
    """Uneven groups, two versions in some samples, log-probs near the policy's, and one group without spread."""
    batch = make_batch(num_groups=4, version=3, max_length=24)
    rewards = batch.rewards.copy()
    rewards[batch.group_index == 2] = 1.0
    rewards[0] += 0.5
    return replace(batch, rewards=rewards)


def updated(
    policy: PolicyModel, settings: RunSettings, batch: Batch, ranks: SoloRanks, lr: float = 0.0, critic: Any = None
) -> tuple[PlainEngine, UpdateReport]:
    engine = PlainEngine(copy.deepcopy(policy), ranks, lr)
    if settings.algorithm.adv_estimator == "gae":
        critic = critic or FixedCritic()
    wants = settings.actor.use_kl_loss or settings.algorithm.use_kl_in_reward
    updater = Updater(settings, engine, FixedReference() if wants else None, ranks, critic)  # pyright: ignore[reportArgumentType]
    return engine, updater.run(batch, 1, 3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_update_is_the_same_for_any_split(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path, variant: str
) -> None:
    results: list[tuple[list[list[torch.Tensor]], dict[str, float]]] = []
    for max_tokens, max_samples, size in SPLITS:
        bounds = {"ppo_max_token_len_per_gpu": max_tokens, "ppo_micro_batch_size_per_gpu": max_samples}
        given = VARIANTS[variant]
        actor = bounds | {"ppo_mini_batch_size": 2} | given.get("actor", {})
        sections = {"actor": actor, "algorithm": given.get("algorithm", {})}
        settings = make_settings(tiny_model_dir, tmp_path, **sections)

        def work(ranks: ThreadRanks, settings: RunSettings = settings) -> Any:
            return updated(policy, settings, off_policy_batch(), ranks, lr=0.05)

        engine, report = on_ranks(size, work)[0]
        results.append((engine.gradients, report.metrics))
    assert len(results[0][0]) == 2, "two mini-batches, two updates"
    assert all(max(g.abs().max() for g in gradients) > 1e-4 for gradients in results[0][0])
    for gradients, metrics in results[1:]:
        for ours, whole in zip(gradients, results[0][0], strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-6, atol=1e-10)
        assert metrics == pytest.approx(results[0][1], rel=1e-6, abs=1e-10, nan_ok=True)


def written_by(policy: PolicyModel, batch: Batch) -> Batch:
    """`batch` as if `policy` had sampled it: its own log-probs, as float32 as the wire has them."""
    from trainer.packing import pack, trainable_tokens

    logprobs = batch.logprobs.copy()
    with torch.no_grad():
        logprobs[trainable_tokens(batch)] = policy(pack(batch, range(batch.num_samples))).logprobs.float().numpy()
    return replace(batch, logprobs=logprobs)


@pytest.mark.parametrize("correction", ["decoupled", "behaviour", "none"])
def test_data_written_by_the_very_same_weights_has_ratio_one_at_the_first_update_only(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path, correction: str
) -> None:
    """What the trainer's own weights wrote is on-policy for one update, not for the second on the same data."""
    batch = written_by(policy, make_batch(num_groups=4, version=3, max_length=24))
    reports: list[dict[str, float]] = []
    for epochs in (1, 2):
        settings = make_settings(
            tiny_model_dir, tmp_path, algorithm={"correction": correction}, actor={"ppo_epochs": epochs}
        )
        reports.append(updated(policy, settings, batch, SoloRanks(), lr=20.0)[1].metrics)
    first, both = reports
    assert first["actor/ppo_kl"] == pytest.approx(0, abs=1e-6), "log p - log π"
    assert first["actor/pg_clipfrac"] == 0
    assert first["off_policy/chi2_token"] == pytest.approx(0, abs=1e-6)
    assert first["importance/mean"] == pytest.approx(1, abs=1e-6)
    assert abs(both["actor/ppo_kl"]) > 1e-3
    assert both["actor/pg_clipfrac"] > 0
    if correction != "behaviour":
        assert both["off_policy/chi2_token"] == pytest.approx(0, abs=1e-6), "p and b are what they were"


def test_interpolated_proximal_saves_a_pass_and_comes_near(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """On data of lag 0 and 1, along a straight path of the weights, it is within a tenth of what was recomputed."""
    batch = written_by(policy, make_batch(num_groups=4, version=3, max_length=24))
    batch = replace(batch, versions=np.where(batch.versions < 0, batch.versions, 3).astype(np.int32))
    gradients: dict[str, Any] = {}
    passes: dict[str, int] = {}
    for proximal in ("recompute", "loglinear"):
        settings = make_settings(tiny_model_dir, tmp_path, algorithm={"proximal": proximal}, actor={"ppo_epochs": 2})
        engine, _ = updated(policy, settings, batch, SoloRanks(), lr=0.5)
        gradients[proximal], passes[proximal] = engine.gradients, engine.num_forwards
    assert passes["recompute"] == passes["loglinear"] * 3 / 2
    for ours, exact in zip(gradients["loglinear"], gradients["recompute"], strict=True):
        difference = torch.cat([(a - b).flatten() for a, b in zip(ours, exact, strict=True)]).norm()
        assert difference < 1e-3 * torch.cat([g.flatten() for g in exact]).norm(), "lag 0: the proximal is the writer"


def test_gae_trains_the_critic_alone_while_it_warms_up(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings = make_settings(tiny_model_dir, tmp_path, algorithm={"adv_estimator": "gae"}, trainer={"critic_warmup": 1})
    engine, critic = PlainEngine(copy.deepcopy(policy), SoloRanks()), FixedCritic()
    updater = Updater(settings, engine, None, SoloRanks(), critic)  # pyright: ignore[reportArgumentType]
    batch = off_policy_batch()
    warm = updater.run(batch, 1, 3)
    assert (warm.num_updates, warm.num_skipped, len(engine.gradients)) == (0, 0, 0)
    trained = updater.run(batch, 2, 3)
    assert (trained.num_updates, len(engine.gradients)) == (1, 1)
    assert critic.steps == [1, 2]
    assert trained.metrics["critic/num_tokens"] == batch.loss_mask.sum()
    with_value_one = torch.cat(critic.returns[: len(critic.returns) // 2])
    assert with_value_one.unique().numel() <= len(np.unique(batch.rewards)), "γ = λ = 1: every return is the reward"


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_a_reward_that_is_not_a_number_skips_the_update_and_names_its_samples(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path, estimator: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch = off_policy_batch()
    batch.rewards[5] = np.nan
    settings = make_settings(tiny_model_dir, tmp_path, algorithm={"adv_estimator": estimator})
    with caplog.at_level(logging.ERROR, "april.trainer"):
        engine, report = updated(policy, settings, batch, SoloRanks())
    assert (report.num_updates, report.num_skipped, engine.gradients) == (0, 1, [])
    assert batch.header.samples[5].sample_id in caplog.text
    assert batch.header.samples[15].sample_id not in caplog.text, "the rest of the batch is not to blame"


@pytest.mark.parametrize("correction", ["decoupled", "behaviour"])
@pytest.mark.parametrize("broken", [np.nan, -np.inf, np.inf])
def test_a_broken_behaviour_logprob_is_left_out_of_the_loss(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path, correction: str, broken: float
) -> None:
    batch = off_policy_batch()
    where = int(batch.sample_offsets[1]) - 1
    batch.logprobs[where] = broken
    settings = make_settings(
        tiny_model_dir, tmp_path, algorithm={"correction": correction, "correction_level": "sequence"}
    )
    engine, report = updated(policy, settings, batch, SoloRanks())
    assert report.num_updates == 1
    assert all(bool(g.isfinite().all()) for g in engine.gradients[0])
    assert report.metrics["importance/not_finite_share"] == pytest.approx(1 / batch.loss_mask.sum())
    assert all(np.isfinite(v) for name, v in report.metrics.items() if "_by_lag" not in name)


def test_a_policy_that_is_not_finite_is_noticed_and_not_hidden(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Rejection and veto compare with NaN: what they can't compare they must not leave out."""
    broken = copy.deepcopy(policy)
    with torch.no_grad():
        next(iter(broken.parameters()))[5] = torch.nan
    settings = make_settings(
        tiny_model_dir,
        tmp_path,
        algorithm={"correction": "behaviour", "rejection": "k1", "rejection_level": "token", "veto": 1e-6},
    )
    engine, report = updated(broken, settings, off_policy_batch(), SoloRanks())
    assert (report.num_updates, report.num_skipped, engine.gradients) == (0, 1, [])


def test_data_without_behaviour_logprobs_is_refused_where_they_are_needed(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    batch = replace(off_policy_batch(), logprobs=np.zeros_like(off_policy_batch().logprobs))
    with pytest.raises(DataError, match=r"no behaviour log-probs .* set algorithm.correction = 'none'"):
        updated(policy, make_settings(tiny_model_dir, tmp_path), batch, SoloRanks())
    uncorrected = make_settings(tiny_model_dir, tmp_path, algorithm={"correction": "none"})
    assert updated(policy, uncorrected, batch, SoloRanks())[1].num_updates == 1


def test_a_batch_that_leaves_nothing_to_train_on_makes_no_update_and_no_fault(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    batch = replace(off_policy_batch(), rewards=np.ones(16, np.float32))
    settings = make_settings(tiny_model_dir, tmp_path, algorithm={"groups_without_spread": "filter"})
    _, report = updated(policy, settings, batch, SoloRanks())
    assert (report.num_updates, report.num_skipped) == (0, 0)
    assert report.metrics["samples/left_out"] == 16


def test_the_adaptive_coefficient_moves_with_the_kl_and_survives(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    adaptive = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "horizon": 100}}
    settings = make_settings(tiny_model_dir, tmp_path, algorithm=adaptive | {"kl_penalty": "k2"})

    def make() -> Updater:
        engine: Any = PlainEngine(copy.deepcopy(policy), SoloRanks())
        ranks: Any = SoloRanks()
        return Updater(settings, engine, FixedReference(), ranks)

    updater = make()
    first = updater.run(off_policy_batch(), 1, 3).metrics
    assert first["reward/kl_coefficient"] == 0.1
    assert first["reward/kl_mean"] > settings.algorithm.kl_ctrl.target_kl * 1.2
    assert updater.state() == {"kl_coefficient": pytest.approx(0.1 * (1 + 0.2 * 16 / 100))}
    restored = make()
    restored.load_state(updater.state())
    assert restored.run(off_policy_batch(), 2, 3).metrics["reward/kl_coefficient"] == updater.state()["kl_coefficient"]
