"""A label that can't be read is a sentence at the start of the run."""

import pytest

from protocol.errors import DataError
from protocol.samples import Prompt
from protocol.settings import RunSettings
from rollout_service.rewards import labels
from rollout_service.rewards.labels import check_labels


def make_prompts(*values, source="openai/gsm8k"):
    return [Prompt(f"{source}:{i}", (1,), "q", source, value) for i, value in enumerate(values)]


def make_settings(**reward):
    return RunSettings.model_validate({"reward": reward})


def test_good_labels_pass():
    check_labels(make_prompts(*(str(i) for i in range(300))), make_settings())
    check_labels(make_prompts("x+1", r"\frac12", 3), make_settings(name="math_verify"))
    check_labels([], make_settings())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("auto", "seventy", r"openai/gsm8k:200: the label 'seventy' is of no use: it must be one number, found 0"),
        ("gsm8k", None, "openai/gsm8k:200: the label None is of no use"),
        ("gsm8k", float("nan"), "the label nan is of no use"),
        ("math_verify", "  ", "openai/gsm8k:200"),
        ("math_verify", float("nan"), "the label nan is of no use: it is no finite number, as where one is missing"),
        ("exact_match", None, "the label None is of no use"),
        ("exact_match", float("nan"), "the label nan is of no use: it is no finite number, as where one is missing"),
        ("exact_match", float("inf"), "no finite number"),
        ("exact_match", ["7", float("nan")], "no finite number"),
        ("exact_match", "", "it is empty"),
        ("exact_match", [], "it must be a string, a number, or a list of them"),
        ("exact_match", ["7", " . "], "a full stop alone, which is not compared"),
        ("exact_match", {"a": 1}, "openai/gsm8k:200"),
        ("reasoning_gym", "7", "openai/gsm8k:0"),
    ],
)
def test_the_first_bad_label_is_named(name, value, words):
    with pytest.raises(DataError, match=words):
        check_labels(make_prompts(*["7"] * 200, value, "8"), make_settings(name=name))


def test_a_data_source_that_auto_does_not_know():
    with pytest.raises(DataError, match=r"mine:0: .*no scorer is known for data source 'mine'; set reward.name"):
        check_labels(make_prompts("7", source="mine"), make_settings())


def test_a_scorer_that_can_not_be_loaded(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"'gms8k' is no scorer; use auto, .*gsm8k"):
        check_labels(make_prompts("7"), make_settings(name="gms8k"))
    (tmp_path / "dies_at_import.py").write_text("import os; os._exit(1)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DataError, match="can't be loaded: its process ended"):
        check_labels(make_prompts("7"), make_settings(name="dies_at_import:f"))


def test_a_parser_that_hangs_is_ended(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "def parse(*args, **kwargs):\n    while True: pass\n"
        "sys.modules['math_verify'] = types.SimpleNamespace(parse=parse)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(labels, "LOAD_TIMEOUT_S", 5.0)
    settings = make_settings(name="math_verify", timeout_s=0.1)
    with pytest.raises(DataError, match=r"hangs or dies over a label between openai/gsm8k:0 and openai/gsm8k:1"):
        check_labels(make_prompts("7", "8"), settings)


def test_of_very_many_labels_an_even_spread_is_read(monkeypatch):
    monkeypatch.setattr(labels, "MAX_LABELS", 10)
    values = ["7"] * 100
    values[50] = "bad"
    with pytest.raises(DataError, match="openai/gsm8k:50"):
        check_labels(make_prompts(*values), make_settings())
