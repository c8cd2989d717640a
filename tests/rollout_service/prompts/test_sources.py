"""Prompts from reasoning-gym and from a user's function."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import DataError
from protocol.settings.data import ReasoningGymTask
from protocol.states import FinishReason
from rollout_service.prompts.generators import generate_rows, shares
from rollout_service.prompts.load import load_prompts
from rollout_service.rewards.gym import score_reasoning_gym
from rollout_service.rewards.interface import ScoringTask
from rollout_service.rewards.labels import check_labels

MIXTURE = [
    {"name": "chain_sum", "weight": 3, "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}},
    {"name": "chain_sum", "weight": 1, "settings": {"min_terms": 8, "max_terms": 8}},
    {"name": "countdown", "weight": 1},
]


def test_a_mixture_of_generators(make_settings):
    data = {"reasoning_gym": MIXTURE, "num_train_prompts": 50, "num_val_prompts": 10, "max_prompt_length": 4096}
    loaded = load_prompts(make_settings(**data))
    assert Counter(p.data_source for p in loaded.train) == {
        "reasoning_gym/chain_sum": 40,
        "reasoning_gym/countdown": 10,
    }
    assert len({p.prompt_id for p in loaded.train + loaded.validation}) == 60
    assert not {p.text for p in loaded.train} & {p.text for p in loaded.validation}
    assert load_prompts(make_settings(**data)) == loaded, "the same seed gives the same prompts"
    assert load_prompts(make_settings(**data, seed=1)).train != loaded.train
    check_labels(loaded.train + loaded.validation, make_settings(**data))
    for prompt in loaded.train:
        answer = prompt.ground_truth["answer"]
        task = ScoringTask("s", prompt.data_source, "", answer, prompt.ground_truth, {}, FinishReason.STOP, 1)
        assert score_reasoning_gym(task) == 1


def test_a_prefix_of_the_mixture_is_a_mixture():
    tasks = [ReasoningGymTask.model_validate(task) for task in MIXTURE]
    train, _ = generate_rows(tasks, 0, 100, 1)
    assert len({row.data_source for row in train[:30]}) == 2


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(1, 1000))
def test_shares_add_up_and_follow_the_weights(weights, count):
    tasks = [ReasoningGymTask(name="chain_sum", weight=weight) for weight in weights]
    parts = shares(tasks, count)
    assert sum(parts) == count
    assert all(abs(part - count * w / sum(weights)) < 1 + 1e-6 for part, w in zip(parts, weights, strict=True))


def test_held_out_questions_of_a_tiny_space_are_new_as_far_as_there_are_any(caplog):
    tiny = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    tasks = [ReasoningGymTask(name="chain_sum", settings=tiny)]
    train, held_out = generate_rows(tasks, 0, 60, 20)
    assert not {r.prompt for r in train} & {r.prompt for r in held_out}
    assert not caplog.records
    _, held_out = generate_rows(tasks, 0, 3000, 20)
    assert len(held_out) == 20
    assert "held-out questions also occur in training" in caplog.text


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"name": "chain_sun"}, "no generator 'chain_sun'; near names: chain_sum"),
        ({"name": "chain_sum", "settings": {"terms": 3}}, "refuses the settings of chain_sum"),
        ({"name": "chain_sum", "settings": {"seed": 3}}, "leave seed out of chain_sum's settings"),
    ],
)
def test_bad_generators(make_settings, task, words):
    with pytest.raises(DataError, match=words):
        load_prompts(make_settings(reasoning_gym=[task]))


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Write a module with a function `rows`, give its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(body: str) -> str:
        name = f"source_{abs(hash(body))}"
        (tmp_path / f"{name}.py").write_text(f"def rows(settings):\n    {body}\n")
        return f"{name}:rows"

    return write


def test_a_source_of_ones_own(make_settings, source):
    spec = source(
        "row = {'prompt': 'q', 'ground_truth': settings.data.train_batch_size, 'data_source': 'own'}; "
        "return [row, {**row, 'id': 'x', 'extra': {'k': 1}}], [row]"
    )
    loaded = load_prompts(make_settings(source=spec, train_batch_size=7))
    assert [p.prompt_id for p in loaded.train] == ["own:0", "x"]
    assert [p.prompt_id for p in loaded.validation] == ["val/own:0"]
    assert loaded.train[1].extra == {"k": 1}
    assert loaded.train[0].ground_truth == 7


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [], []", "there are no training prompts"),
        ("return []", r"returned a list; it must return \(train, validation\)"),
        ("return None, None", "train is a NoneType; it must be a list of rows"),
        ("return ['q'], []", "train row 0 is a str; it must be a dict with prompt, ground_truth, data_source"),
        ("return [{'prompt': 'q'}], []", "row 0 lacks ground_truth, data_source"),
        (
            "return [{'prompt': 'q', 'ground_truth': 1, 'data_source': 'd', 'idd': 3}], []",
            "has idd, which nothing reads",
        ),
        (
            "return [{'prompt': 'q', 'ground_truth': 1, 'data_source': 'd', 'id': 3}] * 2, []",
            "1 prompt ids occur more than once, '3' first",
        ),
        ("return [{'prompt': 'q', 'ground_truth': 1, 'data_source': chr(0xd800)}], []", "half a surrogate pair"),
        ("return [{'prompt': 'q', 'ground_truth': 1, 'data_source': 'd', 'id': chr(0xd800)}], []", "half a surrogate"),
        ("return [{'prompt': 'q', 'ground_truth': {1}, 'data_source': 'd'}], []", "can't be written as JSON"),
        ("raise OSError('disk')", "raised OSError: disk"),
    ],
)
def test_sources_that_are_wrong(make_settings, source, body, words):
    with pytest.raises(DataError, match=words):
        load_prompts(make_settings(source=source(body)))


def test_a_source_that_can_not_be_imported(make_settings):
    with pytest.raises(DataError, match=r"data.source = 'nothing_here:rows' can't be imported: ModuleNotFoundError"):
        load_prompts(make_settings(source="nothing_here:rows"))


def test_no_source_at_all(make_settings):
    with pytest.raises(DataError, match=r"set data\.train_files, data\.reasoning_gym or data\.source"):
        load_prompts(make_settings())
