"""The demo's task: what is asked, what counts as right, and what is held out."""

import subprocess
import sys
from itertools import islice

import pytest

from deploy.demo.task import DATA_SOURCE, MIXTURE, ChainSum, chain_sums, rows, score
from protocol.errors import RewardError
from protocol.settings import RunSettings


def run_settings(num_train_prompts: int, num_val_prompts: int) -> RunSettings:
    return RunSettings.model_validate(
        {"data": {"num_train_prompts": num_train_prompts, "num_val_prompts": num_val_prompts}}
    )


SIZES = run_settings(num_train_prompts=400, num_val_prompts=100)
STOP = {"finish_reason": "stop", "num_tokens": 9}
LENGTH = {"finish_reason": "length", "num_tokens": 9}


@pytest.fixture(scope="module")
def items() -> list[ChainSum]:
    return list(islice(chain_sums(seed=5, held_out=False), 1000))


def test_the_format_is_what_the_docstring_shows() -> None:
    item = ChainSum((3, 5, 0, 6), ("-", "+", "+"), 4)
    assert item.prompt == "a3b-5c+0d+6\n"
    assert item.solution() == "a3b-5=-2c+0=-2d+6=4#4"
    assert item.solution(2) == "a3b-5=-2#-2"
    assert item.solution(1) == "a3#3"
    assert item.solution(0) == "#4"


def test_worked_solutions_are_right(items: list[ChainSum]) -> None:
    for item in items:
        assert score(DATA_SOURCE, item.solution(), str(item.answer), STOP) == {"score": 1.0, "right": 1.0, "ended": 1.0}
        assert score(DATA_SOURCE, item.solution(0), str(item.answer), STOP)["score"] == 1.0


def test_the_prompt_says_what_its_answer_is(items: list[ChainSum]) -> None:
    for item in items:
        expression = "".join(c for c in item.prompt if not c.isalpha())
        assert eval(expression) == item.answer


def test_an_early_stop_is_right_only_where_the_running_sum_is_the_answer(items: list[ChainSum]) -> None:
    rewards: list[float] = []
    for item in items:
        for count in range(1, len(item.terms)):
            reward = score(DATA_SOURCE, item.solution(count), str(item.answer), STOP)["score"]
            assert reward == float(item.sums[count - 1] == item.answer)
            rewards.append(reward)
    assert 0 < sum(rewards) < 0.15 * len(rewards)


@pytest.mark.parametrize(
    ("response", "extra", "expected"),
    [
        ("a3b-5=-2c+0=-2d+6=4#4", STOP, 1),
        ("a3b-5=-2c+0=-2d+6=4#4", LENGTH, 0),
        ("#4", STOP, 1),
        ("#+4", STOP, 0),
        ("#3", STOP, 0),
        ("4", STOP, 0),
        ("", STOP, 0),
        ("#", STOP, 0),
        ("#3#4", STOP, 0),
        ("#4 ", STOP, 0),
        ("#4\n", STOP, 0),
        ("#٤", STOP, 0),
        ("#" + "4" * 5000, STOP, 0),
    ],
)
def test_only_one_answer_at_the_very_end_counts(response: str, extra: dict[str, object], expected: int) -> None:
    assert score(DATA_SOURCE, response, "4", extra)["score"] == expected


def test_parts_tell_a_wrong_answer_from_one_that_never_came() -> None:
    assert score(DATA_SOURCE, "a3#3", "4", STOP) == {"score": 0.0, "right": 0.0, "ended": 1.0}
    assert score(DATA_SOURCE, "a3#4", "4", LENGTH) == {"score": 0.0, "right": 1.0, "ended": 0.0}


@pytest.mark.parametrize("extra", [None, {}])
def test_a_response_of_unknown_end_is_refused_and_not_scored_zero(extra: dict[str, object] | None) -> None:
    with pytest.raises(RewardError, match="finish_reason"):
        score(DATA_SOURCE, "#4", "4", extra)


def test_another_data_source_is_refused() -> None:
    with pytest.raises(RewardError, match="gsm8k"):
        score("openai/gsm8k", "#4", "4", STOP)


def test_rows_are_the_same_at_every_start() -> None:
    train, held_out = rows(SIZES)
    assert (train, held_out) == rows(SIZES)
    assert (len(train), len(held_out)) == (400, 100)
    assert len({row["id"] for row in train + held_out}) == 500
    assert set(train[0]) == {"id", "prompt", "ground_truth", "data_source"}


def test_fewer_rows_are_the_first_of_more() -> None:
    train, held_out = rows(SIZES)
    fewer = rows(run_settings(num_train_prompts=50, num_val_prompts=10))
    assert fewer == (train[:50], held_out[:10])


def test_held_out_expressions_are_never_trained_on_whatever_the_seed() -> None:
    _, held_out = rows(run_settings(num_train_prompts=1, num_val_prompts=500))
    asked = {row["prompt"] for row in held_out}
    for seed in range(3):
        assert asked.isdisjoint(item.prompt for item in islice(chain_sums(seed, held_out=False), 2000))


def test_seeds_give_different_expressions(items: list[ChainSum]) -> None:
    long = {item.prompt for item in items if len(item.terms) > 10}
    other = {item.prompt for item in islice(chain_sums(6, held_out=False), 1000) if len(item.terms) > 10}
    assert long
    assert long.isdisjoint(other)


def test_lengths_follow_the_mixture(items: list[ChainSum]) -> None:
    for share, low, high in MIXTURE:
        counted = sum(low <= len(item.terms) <= high for item in items) / len(items)
        assert abs(counted - share) < 4 * (share * (1 - share) / len(items)) ** 0.5


def test_prompts_and_solutions_fit_the_run_settings(items: list[ChainSum]) -> None:
    assert max(len(item.prompt) for item in items) <= 96
    assert max(len(item.solution()) for item in items) + 1 <= 256


def test_scorer_workers_load_neither_torch_nor_transformers() -> None:
    code = "import sys, deploy.demo.task; print({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
