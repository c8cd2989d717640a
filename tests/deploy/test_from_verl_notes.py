"""What `april from-verl` does not read as a shell would is listed with its line and the reason."""

from pathlib import Path

import pytest

from deploy.from_verl import convert
from deploy.verl.outcome import Status
from deploy.verl.overrides import find_overrides
from deploy.verl.shell import read_script
from tests.deploy.verl_scripts import COMMAND, DAPO, GRPO, PPO


def notes(tmp_path: Path, script: str) -> dict[int, tuple[str, str]]:
    """Text and reason of what is not carried, by line."""
    path = tmp_path / "run.sh"
    path.write_bytes(script.encode())
    rows = [row for row in convert(path).rows if row.key.startswith("line ")]
    assert all(row.status is Status.NOT_CARRIED and row.reason and not row.settings for row in rows)
    return {int(row.key.removeprefix("line ")): (row.value, row.reason) for row in rows}


MAIN = f"{COMMAND}data.train_batch_size=64 algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"


@pytest.mark.parametrize(
    ("script", "line", "text", "reason"),
    [
        (f'if [ "$X" = 1 ]; then B=64; else B=128; fi\n{MAIN}', 1, "if [ $X = 1 ]", "branches are not followed"),
        (f"case $X in\n a) B=1;;\nesac\n{MAIN}", 1, "case $X in", "branches are not followed"),
        (f"\nfor n in 4 8; do\n{MAIN} trainer.nnodes=$n\ndone", 2, "for n in 4 8", "loops are not followed"),
        (f"while true; do {MAIN}; done", 1, "while true", "loops are not followed"),
        (f"run() {{\n{MAIN}\n}}\nrun", 1, "run() {", "the body of run counts once"),
        (f"function run {{\n{MAIN}\n}}\nrun", 1, "function run {", "counts once, where it stands"),
        (f'[ -n "$X" ] && B=64\n{MAIN}', 1, "[ -n $X ]", "what it guards counts"),
        (f"{MAIN} &&\\\n {COMMAND} data.val_files=b", 2, "data.val_files=b", "stands in another command"),
        (f"{MAIN}; {COMMAND} data.val_files=b", 1, "data.val_files=b", "stands in another command"),
        (f"{COMMAND} a.b=1 \\  \n {MAIN}", 1, "a.b=1", "stands in another command"),
        (f"{MAIN} \\\n a.b=1 \\ \n data.val_files=b", 3, "data.val_files=b", "stands in another command"),
        (f"{MAIN} \\\n data.train_batch_size=32", 1, "data.train_batch_size=64", "line 2 gives the key again"),
        (f"{MAIN} trainer.nnodes=2 \\\n~trainer.nnodes", 1, "trainer.nnodes=2", "line 2 takes the key out again"),
        (f"{MAIN} ~trainer.nnodes \\\n trainer.nnodes=2", 1, "~trainer.nnodes", "verl refuses without + in front"),
        (f"{MAIN} ~trainer.nnodes \\\n ++trainer.nnodes=2", 1, "~trainer.nnodes", "line 2 adds the key again"),
        (f"# a\r\n{MAIN} \\\r\n trainer.nnodes=2\r\n", 2, f"{MAIN} \\", "a shell would end the command here"),
        (f"bash -c 'python a.b=1 c.d=2'\n{MAIN}", 1, "python a.b=1 c.d=2", "write them as words"),
        (f"{MAIN} --config-name my_trainer", 1, "--config-name my_trainer", "the values of that file are not read"),
        (f"{MAIN} model_engine=megatron", 1, "model_engine=megatron", "chooses a part of verl's own configuration"),
        (f"{MAIN} actor@x.y=mine", 1, "actor@x.y=mine", "chooses a part of verl's own configuration"),
        (f"cat > c.sh <<E\n python a.b=1\nE\n{MAIN}", 2, "python a.b=1", "a here-document is not read"),
    ],
)
def test_what_is_not_read_as_a_shell_does_is_listed(tmp_path: Path, script: str, line: int, text: str, reason: str):
    found = notes(tmp_path, script)
    assert line in found, found
    assert text in found[line][0]
    assert reason in found[line][1]


def test_a_continuation_that_ends_early_is_named_itself(tmp_path: Path):
    path = tmp_path / "run.sh"
    path.write_text(f"{MAIN} \\\n a.b=1 \\ \n data.val_files=b")
    reasons = {row.key: row.reason for row in convert(path).rows if row.key.startswith("line ")}
    assert reasons["line 2"].startswith("a blank after the backslash ends the command there")


def test_a_script_that_is_read_whole_has_no_notes(tmp_path: Path):
    for script in (GRPO, DAPO, PPO):
        assert not notes(tmp_path, script)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("{a", "{ is never closed"),
        ("[a,b", "[ is never closed"),
        ("a]", "] closes nothing"),
        ("[a}", "} closes nothing"),
        ('"\'a"', "' is never closed"),
        ("'[\"a]'", '" is never closed'),
        ("'${data.train_files}'", "looked up in verl's own configuration"),
    ],
)
def test_a_value_that_is_none_is_not_carried(translated, value: str, why: str):
    rows, settings = translated(f"true\n{MAIN} data.val_files={value}")
    row = rows["data.val_files"]
    assert (row.status, row.settings) == (Status.NOT_CARRIED, ())
    assert row.reason.startswith("line 2: ")
    assert why in row.reason
    assert settings.data.val_files == []


@pytest.mark.parametrize("value", ["'[a,b]'", 'don"\'"t', "'[\"[\"]'", "'{a: [1]}'", "x"])
def test_brackets_and_quotes_that_are_in_order_are(value: str):
    assert find_overrides(read_script(f"{COMMAND} a.b={value}", {}))[0].problem is None
