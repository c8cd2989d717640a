"""Settings without effect: each rule speaks where it should, and nowhere else."""

from pathlib import Path

import pytest

from deploy.toml import toml_text
from protocol.errors import SettingsError
from protocol.settings import dump_settings, iter_fields, load_settings, settings_without_effect
from protocol.settings.effect import RULES

ROOT = Path(__file__).parents[2]
SHIPPED = ("deploy/demo/demo.toml", "examples/qwen3_8b_gsm8k.toml", "examples/smollm2_gsm8k.toml")


def said(*words: str) -> str:
    return "\n".join(settings_without_effect(load_settings(None, [f"--{word}" for word in words])))


@pytest.mark.parametrize(
    ("idle", "effective"),
    [
        ("algorithm.gamma=0.9", "algorithm.adv_estimator=gae"),
        ("algorithm.lam=0.9", "algorithm.adv_estimator=gae"),
        ("ref.path=/models/a", "actor.use_kl_loss=true"),
        ("ref.param_offload=true", "algorithm.use_kl_in_reward=true"),
        ("actor.kl_loss_coef=0.01", "actor.use_kl_loss=true"),
        ("actor.kl_loss_coef=0.001", "actor.use_kl_loss=true"),
        ("algorithm.kl_penalty=k2", "algorithm.use_kl_in_reward=true"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.use_kl_in_reward=true"),
        ("algorithm.overlong_penalty_factor=0.5", "algorithm.overlong_buffer_len=8"),
        ("algorithm.rejection_upper=1.5", "algorithm.rejection=k1"),
        ("algorithm.rejection_lower=0.5", "algorithm.rejection=k1"),
        ("algorithm.rejection_level=token", "algorithm.rejection=k3"),
        ("actor.loss_scale_factor=100", "actor.loss_agg_mode=seq-mean-token-sum-norm"),
        ("rollout.autotune_min_ess=0.3", "rollout.autotune=on"),
        ("rollout.allow_epoch_lag=true", "rollout.samples_ratio=1.5"),
        ("buffer.username=me", "buffer.url=redis://there"),
        ("engine.simulated.sigma=2", "engine.backend=simulated"),
        ("evaluation.answer_pattern=x", "evaluation.n=2"),
    ],
)
def test_a_setting_is_named_until_what_it_needs_is_set(idle: str, effective: str) -> None:
    name = idle.partition("=")[0]
    assert f"{name} has no effect: it needs " in said(idle)
    assert name not in said(idle, effective)


@pytest.mark.parametrize(
    ("idle", "switch"),
    [
        ("algorithm.correction_cap=3", "algorithm.correction=none"),
        ("algorithm.correction_cap=3", "algorithm.correction_band=[0.5,2]"),
        ("algorithm.correction_band=[0.5,2]", "algorithm.correction=behaviour"),
        ("algorithm.correction_level=sequence", "algorithm.correction=none"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "algorithm.adv_estimator=rloo"),
        ("algorithm.rejection_lower=0.5 algorithm.rejection=k1", "algorithm.rejection=k2"),
        ("algorithm.rejection_reduce=max algorithm.rejection=k2", "algorithm.rejection_level=token"),
        ("actor.clip_ratio_high=0.3", "actor.policy_loss=reinforce"),
        ("actor.clip_ratio_c=4", "actor.policy_loss=gspo"),
        ("trainer.total_epochs=2", "trainer.total_training_steps=9"),
        ("trainer.test_freq=10", "trainer.total_training_steps=9"),
        ("evaluation.top_p=0.5", "evaluation.temperature=0"),
        ("evaluation.temperature=0.5", "evaluation.do_sample=false"),
        ("data.truncation=left", "data.filter_overlong_prompts=true"),
        ("actor.use_kl_loss=true", "actor.kl_loss_coef=0"),
        ("trace.max_files=3", "trace.enabled=false"),
    ],
)
def test_a_setting_is_named_where_another_switches_it_off(idle: str, switch: str) -> None:
    name = idle.partition("=")[0]
    assert name not in said(*idle.split())
    assert name in said(*idle.split(), switch)


def test_weights_matter_to_a_loss_without_ratio() -> None:
    words = ("algorithm.correction=behaviour", "algorithm.correction_cap=3")
    assert "correction_cap" in said(*words)
    assert not said(*words, "actor.policy_loss=reinforce")


def test_several_of_one_rule_are_one_sentence() -> None:
    found = said("actor.kl_loss_coef=0.1", "actor.kl_loss_type=k2")
    assert found == "actor.kl_loss_coef and actor.kl_loss_type have no effect: they need use_kl_loss = true"


def test_defaults_and_what_is_off_are_not_named() -> None:
    assert not said()
    assert not said("algorithm.gamma=1.0", "algorithm.rejection_lower=0", "ref.param_offload=false")


def test_what_a_preset_fills_in_is_not_named_but_what_is_given_beside_it_is() -> None:
    assert not said("algorithm.preset=icepop")
    assert not said("algorithm.preset=token_tis", "algorithm.correction=behaviour")
    assert "correction_cap" in said("algorithm.preset=icepop", "algorithm.correction_cap=7")


def test_a_printed_run_says_no_more_than_the_run_itself(tmp_path: Path) -> None:
    printed = tmp_path / "run.toml"
    words = ["--actor.kl_loss_coef=0.5", "--buffer.url=redis://x", "--run.name=b"]
    printed.write_text(toml_text(dump_settings(load_settings(None, words))))
    assert settings_without_effect(load_settings(printed)) == settings_without_effect(load_settings(None, words))


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_has_an_effect(name: str) -> None:
    assert not settings_without_effect(load_settings(ROOT / name))


def test_rules_name_settings_that_exist() -> None:
    names = {setting.name for setting in iter_fields()}
    assert {f"{rule.section}.{name}" for rule in RULES for name in rule.names} <= names


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["algorithm.correction_band=[1.5,3]"], "leaves out the weight 1, which on-policy tokens have"),
        (["algorithm.correction_band=[0.1,0.9]"], "give one that holds 1"),
        (["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0"], "and 0 stays 0"),
        (["algorithm.rejection=k1", "algorithm.rejection_lower=1.1"], "set rejection_lower <= 1 <= rejection_upper"),
        (["algorithm.rejection=k1", "algorithm.rejection_lower=0.1", "algorithm.rejection_upper=0.9"], "leave out 1"),
        (
            ["algorithm.adv_estimator=gae", "trainer.critic_warmup=5", "trainer.total_training_steps=5"],
            "critic_warmup = 5 of 5 training steps leaves none",
        ),
    ],
)
def test_a_run_that_would_train_nothing_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(None, [f"--{word}" for word in words])
    assert sentence in str(refused.value)


def test_a_warm_up_that_outlasts_the_run_is_told() -> None:
    words = ["actor.optim.lr=1e-5", "actor.optim.lr_warmup_steps=10", "critic.optim.lr_warmup_steps=20"]
    assert "lr_warmup_steps" not in said("actor.optim.lr_warmup_steps=10", "trainer.total_training_steps=10")
    told = said(*words[:2], "trainer.total_training_steps=5")
    assert "actor.optim.lr_warmup_steps = 10 is more than the 5 training steps: the rate ends at 5e-06" in told
    told = said(*words, "trainer.total_training_steps=5", "algorithm.adv_estimator=gae")
    assert "critic.optim.lr_warmup_steps = 20 is more" in told
