"""Built-in scorers, without processes around them."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.rewards.extract import extract_answer
from rollout_service.rewards.mathematics import check_math_verify, score_math_verify
from rollout_service.rewards.registry import scorer_for
from rollout_service.rewards.scorer import LabelError
from rollout_service.rewards.text import (
    accepted_labels,
    find_numbers,
    read_number,
    score_exact_match,
    score_gsm8k,
)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("48 / 2 = 24\n#### 72", "72", 1),
        ("#### 72.00", 72, 1),
        ("####72", "72", 1),
        ("#### $1,234.50 in all", "1234.5", 1),
        ("#### -5", "-5", 1),
        ("#### 5", "-5", 0),
        ("#### 7\nno, #### 8", "8", 1),
        ("#### 7\nno, #### 8", "7", 0),
        ("the answer is 72.", "72", 1),
        ("72 clips, of which 24 in May", "72", 0),
        ("10-7=3, so 10-7", "7", 1),  # a subtraction is not a negative number
        ("72 ####", "72", 0),  # marked, but nothing after the mark
        ("", "72", 0),
        ("nothing", "72", 0),
        ("#### 72", "She sold 72.\n#### 72", 1),
        ("#### 1e9", "1", 1),
    ],
)
def test_gsm8k(make_task, response, label, score):
    assert score_gsm8k(make_task(response, label)) == score


@pytest.mark.parametrize("label", ["", "seven", "1 or 2", None, True, ["1"], {"answer": 1}])
def test_gsm8k_refuses_labels_that_are_not_one_number(make_task, label):
    with pytest.raises(LabelError):
        score_gsm8k(make_task("#### 1", label))


@given(st.decimals(-(10**12), 10**12, places=2), st.booleans())
def test_numbers_are_read_back_however_they_are_written(number: Decimal, grouped: bool):
    text = f"{number:,}" if grouped else f"{number}"
    assert read_number(text) == number
    assert find_numbers(f"a total of {text}.") == [number]


@given(st.text())
def test_any_response_can_be_scored(text: str):
    assert all(isinstance(number, Decimal) for number in find_numbers(text))
    extract_answer(text, None)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (" Paris. ", "paris", 1),
        ("<answer>\nPARIS\n</answer> and more", "Paris", 1),
        ("<answer>a</answer><answer>b</answer>", "b", 1),
        ("The capital is Paris", "Paris", 0),
        ("new   york", ["NYC", "New York"], 1),
        ("42", 42, 1),
        ("ﬁne", "fine", 1),
    ],
)
def test_exact_match(make_task, response, label, score):
    assert score_exact_match(make_task(response, label)) == score


def test_exact_match_by_pattern_and_case(make_task):
    assert score_exact_match(make_task("Answer: A\nAnswer: B", "b"), pattern=r"Answer: (\w)") == 1
    assert score_exact_match(make_task("so it is b", "b"), pattern=r"Answer: (\w)") == 0
    assert score_exact_match(make_task("B", "b"), ignore_case=False) == 0


@pytest.mark.parametrize("label", [None, "", [], [""], {"a": 1}, True])
def test_exact_match_refuses_labels_that_nothing_equals(label):
    with pytest.raises(LabelError):
        accepted_labels(label)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"$x^2 + 2x + 1$", "(x+1)^2", 1),
        (r"\boxed{3\sqrt{2}}", r"\sqrt{18}", 1),
        (r"\boxed{3}", r"3\sqrt{2}", 0),
        (r"\boxed{(1, 2)}", "(1, 2)", 1),
        (r"\boxed{2}", "(1, 2)", 0),
        ("The answer is 72", "72", 1),
        ("no idea", "72", 0),
        (r"\boxed{72}", "$72$", 1),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1),
    ],
)
def test_math_verify(make_task, response, label, score):
    assert score_math_verify(make_task(response, label)) == score


@pytest.mark.parametrize("label", ["", "   ", None, ["1"], True, "$$", r"\boxed{}"])
def test_math_verify_refuses_labels_without_an_expression(label):
    with pytest.raises(LabelError):
        check_math_verify(label, "own")


def test_data_sources_and_their_scorers():
    assert scorer_for("openai/gsm8k") == "gsm8k"
    assert scorer_for("reasoning_gym/countdown") == "reasoning_gym"
    with pytest.raises(LabelError, match=r"set reward.name"):
        scorer_for("somebody/else")
