"""The command line: help, dry run, and one sentence with an exit code for what a user got wrong."""

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.cli import main
from protocol.settings import iter_fields


@pytest.fixture
def april():
    return lambda *words: CliRunner().invoke(main, words)


@pytest.fixture
def run_toml(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "cli"\n')
    return str(path)


COMMANDS = ["buffer", "data", "demo", "doctor", "from-verl", "report", "serve", "top", "train"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(april, command):
    result = april(command, "--help")
    assert result.exit_code == 0
    assert "--help" in result.output


def test_commands_are_those_of_the_contract(april):
    assert sorted(main.commands) == [
        *("buffer", "calibrate", "data", "demo", "doctor", "from-verl", "report", "serve", "simulate", "top", "trace"),
        *("train", "tune"),
    ]


@pytest.mark.parametrize("command", ["serve", "train"])
def test_dry_run_prints_resolved_settings(april, run_toml, command):
    result = april(command, run_toml, "--dry-run", "--rollout.ratio=1.5", "--actor.optim.lr=2e-6")
    settings = tomllib.loads(result.output)
    assert settings["rollout"]["ratio"] == 1.5
    assert settings["actor"]["optim"]["lr"] == 2e-6
    assert settings["run"]["name"] == "cli"


def test_list_settings_names_every_setting(april):
    result = april("serve", "--list-settings")
    assert all(f"{setting.name} = " in result.output for setting in iter_fields())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["serve", "RUN", "--rollout.ratoi=2"], "did you mean rollout.ratio?"),
        (["train", "RUN", "--rollout.n=1"], "rollout.n must be at least 2"),
        (["serve", "missing.toml"], "missing.toml does not exist"),
        (["serve", "RUN", "word"], "write --section.field=value"),
        (["doctor", "missing.toml"], "missing.toml does not exist"),
        (["serve", "RUN", "--service.host=0.0.0.0"], "set a token"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(april, run_toml, words, sentence):
    result = april(*[run_toml if w == "RUN" else w for w in words])
    assert result.exit_code == 2
    assert sentence in result.output
    assert result.output.count("\n") == 1
    assert result.output.startswith("april: ")


@pytest.mark.parametrize("command", ["serve", "train"])
def test_a_dry_run_names_settings_without_effect_beside_the_toml(tmp_path: Path, command: str) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text("[algorithm]\ngamma = 0.9\n")
    result = CliRunner().invoke(main, [command, str(run_toml), "--dry-run"])
    assert result.exit_code == 0
    assert tomllib.loads(result.stdout)["algorithm"]["gamma"] == 0.9
    needs = "adv_estimator = 'gae' or 'reinforce_plus_plus'"
    assert result.stderr == f"april: warning: algorithm.gamma has no effect: it needs {needs}\n"
