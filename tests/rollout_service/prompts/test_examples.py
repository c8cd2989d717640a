"""The example runs load, and say what they promise."""

import re
from pathlib import Path

import pytest

from protocol.settings import load_settings

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
VERL_SCRIPT = ROOT.parent / "shared" / "data" / "verl" / "run_qwen3_8b_grpo_gsm8k.sh"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load(path):
    settings = load_settings(path)
    assert settings.data.train_files
    assert settings.model.path is not None


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES} >= {"smollm2_gsm8k", "qwen3_8b_gsm8k"}


def test_data_can_be_named_on_the_command_line():
    words = ['--data.train_files=["elsewhere/train.jsonl"]', "--model.path=elsewhere/model"]
    settings = load_settings(ROOT / "examples" / "smollm2_gsm8k.toml", words)
    assert settings.data.train_files == [Path("elsewhere/train.jsonl")]
    assert settings.model.path == Path("elsewhere/model")


@pytest.mark.skipif(not VERL_SCRIPT.is_file(), reason="the verl script is not beside this repository")
def test_every_parameter_of_the_verl_script_has_a_place():
    names = re.findall(r"^\s+([a-z_]+\.[a-z_.]+)=", VERL_SCRIPT.read_text(), re.MULTILINE)
    assert len(names) > 30
    text = (ROOT / "examples" / "qwen3_8b_gsm8k.toml").read_text()
    assert [name for name in names if not re.search(rf"{re.escape(name)}\b", text)] == []
