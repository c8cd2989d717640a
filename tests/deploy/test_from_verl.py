"""`april from-verl`: scripts are read as a shell reads them, nothing is run, every parameter gets a row."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.cli import main
from deploy.from_verl import convert
from deploy.toml import toml_text
from deploy.verl.outcome import Status
from deploy.verl.overrides import find_overrides, parse_value
from deploy.verl.rules import RULES
from deploy.verl.shell import read_script
from deploy.verl.translate import Row
from protocol.errors import DataError
from protocol.settings import iter_fields, load_settings
from tests.deploy.verl_scripts import COMMAND, DAPO, GRPO, PPO


def words(script: str, **environment: str) -> dict[str, object]:
    return {o.key: o.value for o in find_overrides(read_script(script, environment))}


def test_the_grpo_script_is_carried(translated):
    rows, settings = translated(GRPO)
    assert settings.data.train_files == [Path("/home/me/data/gsm8k/train.parquet")]
    assert (settings.data.train_batch_size, settings.actor.ppo_mini_batch_size, settings.rollout.n) == (1024, 256, 5)
    assert settings.actor.optim.lr == 1e-6
    assert settings.ref.param_offload
    assert settings.deepspeed.zero_stage == 3
    assert not settings.actor.use_dynamic_bsz, "what verl does without being told"
    assert settings.trainer.test_freq == 0
    assert settings.trainer.logger == ["console", "wandb", "jsonl"]
    assert rows["actor_rollout_ref.model.path"].status is Status.CHANGED
    assert "nothing is downloaded" in rows["actor_rollout_ref.model.path"].reason
    asked = {o.key for o in find_overrides(read_script(GRPO, {}))}
    assert asked <= set(rows)
    assert not [key for key in asked if rows[key].status is Status.UNKNOWN]


def test_what_verl_leaves_unsaid_is_added(translated):
    rows, settings = translated(GRPO)
    assert rows["data.max_response_length"].status is Status.ADDED
    assert settings.data.max_response_length == 512
    assert settings.trainer.val_before_train
    assert settings.evaluation.do_sample is False
    assert settings.rollout.ratio == 1.25


def test_the_dapo_recipe_with_rollout_correction(translated):
    rows, settings = translated(DAPO)
    assert settings.data.max_response_length == 20 * 1024
    assert settings.model.path == Path("/home/me/verl/models/Qwen2.5-32B")
    assert settings.trainer.nnodes == 16
    assert (settings.actor.clip_ratio_low, settings.actor.clip_ratio_high, settings.actor.clip_ratio_c) == (
        0.2,
        0.28,
        10,
    )
    assert settings.actor.use_dynamic_bsz
    assert settings.actor.ppo_max_token_len_per_gpu == 22 * 1024
    assert settings.deepspeed.offload_param
    algorithm = settings.algorithm
    assert (algorithm.overlong_buffer_len, algorithm.overlong_penalty_factor) == (4096, 1.0)
    assert algorithm.groups_without_spread == "filter"
    assert (algorithm.correction_level, algorithm.correction_cap, algorithm.correction_normalise) == (
        "sequence",
        2.0,
        True,
    )
    assert (algorithm.rejection, algorithm.rejection_level, algorithm.rejection_reduce) == ("k1", "sequence", "mean")
    # verl's k1 is the log of behaviour/proximal, which tests/data/losses.json shows where bounds are not symmetric.
    assert (algorithm.rejection_lower, algorithm.rejection_upper) == (1 / 1.02, 1 / 0.99)
    assert (settings.evaluation.top_p, settings.evaluation.do_sample) == (0.7, True)
    assert rows["data.gen_batch_size"].status is Status.NOT_CARRIED
    assert "rollout.ratio" in rows["data.gen_batch_size"].reason


def test_bounds_of_older_versions_are_of_the_ratio_itself(translated):
    older = "algorithm.rollout_correction.rollout_rs"
    _, settings = translated(
        DAPO.replace(f'{older}="seq_mean_k1"', f"{older}=geometric").replace(
            f'{older}_threshold="0.99_1.02"', f"{older}_threshold=1.02 {older}_threshold_lower=0.99"
        )
    )
    algorithm = settings.algorithm
    assert (algorithm.rejection, algorithm.rejection_level, algorithm.rejection_reduce) == ("k1", "sequence", "mean")
    assert (algorithm.rejection_lower, algorithm.rejection_upper) == (0.99, 1.02)


def test_ppo_with_a_critic(translated):
    rows, settings = translated(PPO)
    assert settings.data.train_files == [Path(f"/home/me/data/{d}/train.parquet") for d in ("gsm8k", "math")]
    assert settings.algorithm.adv_estimator == "gae"
    assert (settings.actor.clip_ratio_low, settings.actor.clip_ratio_high) == (0.1, 0.1)
    assert rows["trainer.save_freq"].status is Status.NOT_CARRIED
    ours = {setting.name for setting in iter_fields()}
    for key in ("critic.optim.lr", "critic.cliprange_value"):
        assert (rows[key].status is Status.CARRIED) == (key in ours)


def test_a_critic_without_gae_is_not_carried(translated):
    rows, _ = translated(GRPO.replace("data.truncation='error'", "critic.optim.lr=1e-5"))
    assert rows["critic.optim.lr"].status is Status.NOT_CARRIED


@pytest.mark.parametrize(
    ("override", "status", "reason"),
    [
        ("data.train_batch_sise=3", Status.UNKNOWN, "did you mean data.train_batch_size?"),
        ("foo.bar.baz_qux=3", Status.UNKNOWN, "neither verl nor this project has it"),
        ("trainer.nnodes=$(nproc)", Status.NOT_CARRIED, "only running the script would tell $(nproc)"),
        ("trainer.nnodes=`rm -rf x`", Status.NOT_CARRIED, "only running the script"),
        ("trainer.nnodes=$WORLD", Status.NOT_CARRIED, "only running the script would tell $WORLD"),
        ("~trainer.nnodes", Status.NOT_CARRIED, "takes a key out"),
        ("data.truncation=sideways", Status.NOT_CARRIED, "data.truncation does not take 'sideways'"),
        ("actor_rollout_ref.rollout.top_p=0.9", Status.NOT_CARRIED, "biases the importance ratios"),
        ("actor_rollout_ref.actor.megatron.x.y=1", Status.NOT_CARRIED, "Megatron is not offered"),
        ("trainer.logger=swanlab", Status.CHANGED, "swanlab is not offered"),
        ("++actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4", Status.CARRIED, "passed to vLLM"),
        ("custom_reward_function.path=/code/my_reward.py", Status.CHANGED, "PYTHONPATH"),
        ("algorithm.kl_ctrl.kl_coef=abc", Status.NOT_CARRIED, "algorithm.kl_ctrl.kl_coef does not take 'abc'"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=abc", Status.NOT_CARRIED, "not a value that verl takes"),
    ],
)
def test_single_parameters(translated, override: str, status: Status, reason: str):
    rows, _ = translated(f"{COMMAND} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 {override}")
    row: Row = rows[override.lstrip("+~").split("=")[0]]
    assert row.status is status
    assert reason in row.reason


def test_quotes_continuations_arrays_and_defaults():
    script = r"""
export A=3; B="${A}x"
EXTRA="q.r=1 q.s=2"
ARGS=(
  a.b=1   # why
  a.c="x y"
)
ARGS+=(a.d="${MISSING:-de fault}")
cat <<EOF
not.an=override
EOF
python3 -m x "${ARGS[@]}" $EXTRA b.single='$A' b.double="$B" b.joined=a"b"'c' \
  b.path=v0.1\
    b.sum=$((A * (2 + 1) - 1)) "$@" $1 b.empty= b.list=[a,'b c',1] b.alt=${A:+set} # the end
"""
    assert words(script) == {
        "a.b": 1, "a.c": "x y", "a.d": "de fault", "q.r": 1, "q.s": 2, "b.single": "$A", "b.double": "3x",
        "b.joined": "abc", "b.path": "v0.1", "b.sum": 8, "b.empty": "", "b.list": ["a", "b c", 1], "b.alt": "set",
    }  # fmt: skip


def test_nothing_is_executed(tmp_path: Path):
    touched = tmp_path / "touched"
    script = f'X=$(touch {touched})\nY=`touch {touched}`\n{COMMAND} a.b=$X a.c="$(touch {touched})" a.d=$((1+1))'
    overrides = {o.key: o for o in find_overrides(read_script(script, {}))}
    assert not touched.exists()
    assert overrides["a.b"].unknown
    assert overrides["a.c"].unknown
    assert overrides["a.d"].value == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True), ("null", None), ("1e-6", 1e-6), ("1_000", 1000), ("-1", -1), ("0.99_1.01", "0.99_1.01"),
        ("[console, 'wandb']", ["console", "wandb"]), ("[[1,2],[3]]", [[1, 2], [3]]),
        ("{a: 1, b: [x,y]}", {"a": 1, "b": ["x", "y"]}),
        ('["a"]', ["a"]), ("[]", []), ("v1.2.3", "v1.2.3"), ("'quoted'", "quoted"),
    ],
)  # fmt: skip
def test_values_are_read_as_hydra_reads_them(text: str, value: object):
    assert parse_value(text) == value


def test_every_rule_names_settings_that_exist(tmp_path: Path):
    """A rule whose setting was renamed would silently carry nothing."""
    path = tmp_path / "run.sh"
    path.write_text(COMMAND + " ".join(f"{key}=1" for key in RULES if not key.endswith(".*")))
    missing = {row.key for row in convert(path).rows if "this version has no setting" in row.reason}
    assert not missing


def test_the_command_writes_a_file_that_train_accepts(tmp_path: Path):
    script, output, table = tmp_path / "run.sh", tmp_path / "RUN.toml", tmp_path / "table.json"
    script.write_text(GRPO)
    words = ["from-verl", str(script), "-o", str(output), "--json", str(table)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "carried" in result.output
    rows = json.loads(table.read_text())
    assert {"verl", "value", "status", "settings", "reason"} == set(rows[0])
    dry = CliRunner().invoke(main, ["train", str(output), "--dry-run"])
    assert tomllib.loads(dry.output)["rollout"]["n"] == 5
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 2
    assert "--force" in again.output
    assert CliRunner().invoke(main, [*words, "--force"]).exit_code == 0


def test_settings_that_contradict_each_other_are_written_and_named(tmp_path: Path):
    script, output = tmp_path / "run.sh", tmp_path / "RUN.toml"
    script.write_text(GRPO.replace("train_batch_size=1024", "train_batch_size=1000"))
    result = CliRunner().invoke(main, ["from-verl", str(script), "-o", str(output)])
    assert result.exit_code == 2
    assert output.exists()
    assert "is written, and a run would refuse it: actor.ppo_mini_batch_size = 256 must divide" in result.output


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo hello\n", "no command with key=value overrides"),
        ("", "no command with key=value overrides"),
        (f'{COMMAND} a.b="x', "a double quote is never closed"),
        (f"{COMMAND} a.b=$(x", "is never closed"),
    ],
)
def test_what_is_no_launch_script_is_one_sentence(tmp_path: Path, script: str, sentence: str):
    path = tmp_path / "run.sh"
    path.write_text(script)
    with pytest.raises(DataError, match=sentence.replace("(", r"\(")):
        convert(path)
    with pytest.raises(DataError, match="can't be read"):
        convert(tmp_path / "missing.sh")


def test_toml_survives_the_way_there_and_back():
    values = {
        "a": {"text": 'quo"te\n\\ £ \x7f', "number": 1, "small": 1e-06, "whole": 2.0, "on": True, "none": None},
        "b": {"list": [1.5, "x"], "tables": [{"name": "n", "settings": {"k": [1]}}], "empty": {}, "c": {"odd key": 1}},
    }
    read = tomllib.loads(toml_text(values, {"a.number": "why\nand how"}))
    expected = {**values, "a": {k: v for k, v in values["a"].items() if v is not None}}
    assert read == expected
    assert "# none is not set" in toml_text(values)


def test_dry_run_output_loads_as_the_same_settings(tmp_path: Path):
    first = tmp_path / "run.toml"
    first.write_text(
        '[run]\nname = "x"\n[data]\nreasoning_gym = [{ name = "chain_sum", settings = { min_terms = 2 } }]\n'
    )
    output = CliRunner().invoke(main, ["serve", str(first), "--dry-run"]).output
    second = tmp_path / "again.toml"
    second.write_text(output)
    assert load_settings(second) == load_settings(first)
