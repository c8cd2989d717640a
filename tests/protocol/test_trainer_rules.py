"""Settings of the trainer that do not go together: one sentence each, before anything is loaded."""

import pytest

from protocol.errors import SettingsError
from protocol.settings import dump_settings, load_settings
from protocol.settings.run import RunSettings


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--deepspeed.offload_optimizer=true"], r"offload_optimizer needs deepspeed\.zero_stage >= 1"),
        (["--deepspeed.offload_param=true", "--deepspeed.zero_stage=2"], r"offload_param needs .* = 3 and it is 2"),
        (['--deepspeed.config={"zero_optimization":{"stage":1}}'], r"zero_optimization\.stage, .* use deepspeed\.zero"),
        (['--deepspeed.config={"fp16":{"enabled":true}}'], r"sets fp16\.enabled, .* use model\.dtype"),
        (['--deepspeed.config={"gradient_accumulation_steps":4}'], "gradient_accumulation_steps, which the trainer"),
        (['--deepspeed.config={"optimizer":{"type":"Adam"}}'], r"optimizer\.type, .* use actor\.optim"),
        (['--deepspeed.config={"zero_optimization":true}'], r"zero_optimization, .* use deepspeed\.zero"),
        (['--deepspeed.config={"bf16":true}'], r"sets bf16, .* use model\.dtype"),
        (
            ['--deepspeed.config={"gradient_allreduce_op":"sum"}'],
            "remove it, since the loss is already a mean over the tokens",
        ),
        (['--deepspeed.config={"gradient_cliping":1}'], "does not read; did you mean gradient_clipping?"),
        (["--actor.optim.betas=[1,1]"], r"actor\.optim\.betas: \[1\.0, 1\.0\] must be two numbers from 0 to below 1"),
        (["--actor.optim.betas=[-0.1,0.9]"], "two numbers from 0 to below 1"),
        (["--algorithm.adv_estimator=gae", "--critic.optim.betas=[0.9,2]"], r"critic\.optim\.betas"),
        (["--critic.optim.lr=1e-4"], r"critic\.\* needs algorithm\.adv_estimator = 'gae' and it is 'grpo'"),
        (["--trainer.critic_warmup=5"], r"trainer\.critic_warmup needs algorithm\.adv_estimator = 'gae'"),
        (["--actor.optim.lr_warmup_steps=2", "--actor.optim.lr_warmup_steps_ratio=0.1"], "leave one of them at 0"),
        (["--actor.optim.min_lr_ratio=0.1"], r"min_lr_ratio needs lr_scheduler_type = 'cosine' or 'linear'"),
        (["--model.lora_alpha=64"], r"need model\.lora_rank >= 1"),
        (["--model.lora_rank=8", "--model.target_modules=[]"], "target_modules is empty"),
    ],
)
def test_is_refused_in_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load_settings(None, words)


@pytest.mark.parametrize(
    "words",
    [
        ["--deepspeed.zero_stage=3", "--deepspeed.offload_param=true", "--deepspeed.offload_optimizer=true"],
        ['--deepspeed.config={"zero_optimization":{"reduce_bucket_size":1000000}}'],
        ['--deepspeed.config={"zero_optimization":{},"wall_clock_breakdown":true,"bf16":{}}'],
        ["--actor.optim.betas=[0,0.99]"],
        ["--algorithm.adv_estimator=gae", "--critic.optim.lr=1e-4", "--trainer.critic_warmup=5"],
        ["--actor.optim.lr_scheduler_type=cosine", "--actor.optim.min_lr_ratio=0.1"],
        ["--model.lora_rank=8", "--model.lora_alpha=64", '--model.target_modules=["q_proj"]'],
    ],
)
def test_is_taken_and_survives_being_written_out(words: list[str]) -> None:
    settings = load_settings(None, words)
    assert RunSettings(**dump_settings(settings)) == settings


def test_the_critics_rate_is_its_own_also_where_only_part_of_its_optimizer_is_set() -> None:
    settings = load_settings(None, ["--algorithm.adv_estimator=gae", "--critic.optim.weight_decay=0.1"])
    assert settings.critic.optim.lr == 1e-5
    assert settings.actor.optim.lr == 1e-6
