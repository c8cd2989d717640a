"""How a user's function is called."""

import pytest

from protocol.errors import DataError
from rollout_service.rewards.user import load_user_scorer


@pytest.fixture
def scorer_of(tmp_path, monkeypatch):
    """Load a scorer from source."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(source: str, **settings: object):
        name = f"own_{abs(hash(source))}"
        (tmp_path / f"{name}.py").write_text(source)
        return load_user_scorer(f"{name}:f", settings)

    return load


def test_called_like_compute_score_of_verl(scorer_of, make_task):
    source = "def f(data_source, solution_str, ground_truth, extra_info=None): return [data_source, solution_str, "
    source += "ground_truth, extra_info]"
    source_name, response, label, extra = scorer_of(source).score(make_task("text", "72"))
    assert (source_name, response, label) == ("own", "text", "72")
    assert extra == {
        "split": "train",
        "prompt": "question",
        "sample_id": "g0/0",
        "finish_reason": "stop",
        "num_tokens": 3,
    }


@pytest.mark.parametrize(
    "source",
    [
        "def f(solution_str, ground_truth): return solution_str == ground_truth",
        "def f(solution_str, ground_truth, **kwargs): return kwargs['data_source'] == 'own'",
        "def f(task): return task.response == task.ground_truth",
        "class F:\n    def __call__(self, task): return task.num_tokens == 3\nf = F()",
    ],
)
def test_functions_that_want_less(scorer_of, make_task, source):
    assert scorer_of(source).score(make_task("72", "72")) is True


def test_settings_are_keyword_arguments(scorer_of, make_task):
    source = "def f(task, bonus=0.0): return bonus"
    assert scorer_of(source, bonus=0.5).score(make_task("")) == 0.5


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        ("def f(a, b): return 0", {}, "can't be called .*missing a required argument: 'b'.*data_source, solution_str"),
        ("def f(): return 0", {}, "can't be called"),
        ("def f(task): return 0", {"x": 1}, "unexpected keyword argument 'x'"),
        ("f = 3", {}, "no function 'f'"),
        ("raise RuntimeError('no licence')", {}, "RuntimeError: no licence"),
    ],
)
def test_functions_that_can_not_be_used(scorer_of, source, settings, words):
    with pytest.raises(DataError, match=words):
        scorer_of(source, **settings)


@pytest.mark.parametrize("spec", ["module:", ":function"])
def test_names_without_a_module_or_a_function(spec):
    with pytest.raises(DataError, match="write module:function"):
        load_user_scorer(spec, {})


def test_modules_in_the_working_folder_are_found(tmp_path, monkeypatch, make_task):
    (tmp_path / "beside_me.py").write_text("def f(task): return 1.0")
    monkeypatch.chdir(tmp_path)
    assert load_user_scorer("beside_me:f", {}).score(make_task("")) == 1.0
