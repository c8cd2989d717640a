"""`april data`: convert and look."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deploy.cli import main

ROWS = [
    *({"prompt": f"{i}+1=", "ground_truth": i + 1, "data_source": "big"} for i in range(6)),
    *({"prompt": f"{i}*[b]2=", "ground_truth": 2 * i, "data_source": "rare"} for i in range(2)),
]


@pytest.fixture
def april():
    return lambda *words: CliRunner().invoke(main, ["data", *map(str, words)])


@pytest.fixture
def run_toml(tmp_path: Path, tiny_model_dir: Path):
    def write(rows: list[dict[str, Any]], **data: Any) -> Path:
        lines = tmp_path / "train.jsonl"
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = tmp_path / "run.toml"
        values = {"train_files": str(lines), "val_files": str(lines), "apply_chat_template": False, **data}
        body = "\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
        path.write_text(
            f'[model]\npath = "{tiny_model_dir}"\n[reward]\nname = "exact_match"\n[data]\n{body}\n', encoding="utf-8"
        )
        return path

    return write


def test_inspect_shows_sources_repeats_and_an_example(april, run_toml, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = april("inspect", run_toml([*ROWS, ROWS[0]]), "--json", report)
    assert result.exit_code == 0, result.output
    assert "1 training prompts repeat an earlier one, 0 of them with another right answer; 9 held-out" in result.output
    assert 'source_weights = { "big" = 7, "rare" = 2 }' in result.output
    assert "0+1=" in result.output
    found = json.loads(report.read_text())
    big, rare = found["train"]
    assert (big["data_source"], big["num_rows"], big["num_used"], big["max_tokens"]) == ("big", 7, 7, 4)
    assert (rare["share"], rare["times_served"]) == (pytest.approx(2 / 9), 1)
    assert found["example"] == {"prompt_id": "big:0", "text": "0+1=", "num_tokens": 4, "ground_truth": 1}
    assert found["fault"] is None


def test_inspect_shows_weights_in_force(april, run_toml, tmp_path: Path) -> None:
    report, weights = tmp_path / "report.json", json.dumps({"big": 1, "rare": 1})
    result = april("inspect", run_toml(ROWS), f"--data.source_weights={weights}", "--json", report)
    assert result.exit_code == 0, result.output
    _, rare = json.loads(report.read_text())["train"]
    assert (rare["share"], rare["times_served"]) == (0.5, 2)
    assert "50.00%" in result.output


@pytest.mark.parametrize(
    ("data", "sentence", "counts"),
    [
        ({"max_prompt_length": 5}, "train.jsonl line 7: the prompt has 7 tokens", (0, 0, 2)),
        ({"max_prompt_length": 5, "truncation": "left"}, None, (0, 2, 0)),
        ({"max_prompt_length": 5, "filter_overlong_prompts": True}, None, (2, 0, 0)),
        ({"source_weights": {"big": 1}}, "has no weight for 'rare'", (0, 0, 0)),
    ],
)
def test_inspect_counts_first_and_complains_last(april, run_toml, tmp_path: Path, data, sentence, counts) -> None:
    report, settings = tmp_path / "report.json", dict(data)
    weights = settings.pop("source_weights", None)
    words = [f"--data.source_weights={json.dumps(weights)}"] if weights else []
    result = april("inspect", run_toml(ROWS, **settings), *words, "--json", report)
    rare = json.loads(report.read_text())["train"][1]
    assert (rare["num_filtered"], rare["num_truncated"], rare["num_refused"]) == counts
    assert "Training prompts" in result.output
    assert result.exit_code == (2 if sentence else 0)
    assert ("april: " in result.output) == (sentence is not None)
    assert sentence is None or sentence in result.output


def test_inspect_reads_the_labels(april, run_toml) -> None:
    result = april("inspect", run_toml([*ROWS, {"prompt": "x", "ground_truth": {"a": 1}, "data_source": "big"}]))
    assert result.exit_code == 2
    assert "big:6: the label {'a': 1} is of no use" in result.output


def test_inspect_of_rows_that_can_not_be_read(april, run_toml) -> None:
    result = april("inspect", run_toml([{"prompt": 3, "ground_truth": 1}]))
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "line 1: the prompt is a number; it must be text or a list of messages" in result.output


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (None, "line 9 has null as its reward_model.ground_truth or ground_truth; the scorer needs the right answer"),
        (float("nan"), "line 9: the right answer is NaN; fill it in, or remove the row"),
        (" ", "line 9: the right answer is empty; fill it in, or remove the row"),
        ([], "the label [] is of no use"),
        ([float("nan")], "the label [nan] is of no use: it is no finite number"),
        (float("inf"), "the label inf is of no use: it is no finite number"),
        (True, "the label True is of no use"),
    ],
)
def test_inspect_finds_answers_that_are_missing(april, run_toml, label: Any, words: str) -> None:
    result = april("inspect", run_toml([*ROWS, {"prompt": "x", "ground_truth": label, "data_source": "big"}]))
    assert result.exit_code == 2
    assert words in result.output


def test_convert_and_inspect(april, run_toml, tmp_path: Path) -> None:
    lines, out = tmp_path / "gsm.jsonl", tmp_path / "gsm.parquet"
    lines.write_text(json.dumps({"question": "How many?", "answer": "so\n#### 72"}) + "\n")
    result = april("convert", lines, "--out", out, "--instruction", "Think.", "--split", "test")
    assert (result.exit_code, result.output) == (0, f"{out}: 1 prompts\n")
    again = april("convert", lines, "--out", out)
    assert again.exit_code == 2
    assert again.output == f"april: {out} exists; name another file, or say --force\n"
    shown = april("inspect", run_toml(ROWS), f"--data.train_files={out}", "--reward.name=gsm8k", "--data.val_files=[]")
    assert shown.exit_code == 0, shown.output
    assert "How many? Think." in shown.output
    assert "openai/gsm8k" in shown.output


@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_help(april, command) -> None:
    result = april(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output
