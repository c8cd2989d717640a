"""The answers that maj@k counts are those that the scorers look at."""

import pytest

from protocol.settings import RunSettings
from protocol.states import FinishReason
from rollout_service.evaluation_answers import AnswerReader, read_answer, vote
from rollout_service.rewards.interface import ScoringTask


def task(response, data_source="d", ground_truth="1"):
    return ScoringTask("s", data_source, "q", response, ground_truth, {}, FinishReason.STOP, 1)


@pytest.mark.parametrize(
    ("scorer", "response", "answer"),
    [
        ("gsm8k", "1 + 1 = 2\n#### 1,000.0", "1000"),
        ("gsm8k", "so it is $1000", "1000"),
        ("gsm8k", "2 or 3? -0.50", "-0.5"),
        ("gsm8k", "no idea", None),
        ("exact_match", "<answer> A  b. </answer> bye", "a b"),
        ("reasoning_gym", "<answer>1</answer> <answer>2</answer>", "2"),
        ("math_verify", "thus \\boxed{\\frac12}", "1/2"),
        ("math_verify", "it is $1/2$", "1/2"),
        ("math_verify", "nothing here", None),
        ("own:score", "x <answer>Seven</answer>", "seven"),
        ("own:score", "first \\boxed{1} then \\boxed{a{b}c} end", "a{b}c"),
        ("own:score", "just text", None),
    ],
)
def test_answers_of_scorers(scorer, response, answer):
    assert read_answer(task(response), scorer, {}, None) == answer


def test_auto_chooses_by_data_source():
    assert read_answer(task("1 #### 7 8", "openai/gsm8k"), "auto", {}, None) == "7"
    assert read_answer(task("<answer>x</answer>", "reasoning_gym/chain_sum"), "auto", {}, None) == "x"
    assert read_answer(task("7", "unheard of"), "auto", {}, None) is None


def test_options_of_the_scorer_hold():
    assert read_answer(task("5"), "gsm8k", {"only_marked": True}, None) is None
    assert read_answer(task("Ab"), "exact_match", {"ignore_case": False}, None) == "Ab"
    assert read_answer(task("x=3; y=4"), "exact_match", {"pattern": r"x=(\d)"}, None) == "3"


def test_a_pattern_of_the_evaluation_goes_before_all():
    assert read_answer(task("#### 7, or rather: 8"), "gsm8k", {}, r"rather: (\d)") == "8"
    assert not read_answer(task("#### 7"), "gsm8k", {}, r"rather: (\d)")


def test_votes_are_equal_for_equal_answers_only():
    options = {"scorer": "gsm8k", "options": {}, "pattern": None}
    same = {vote(task(text), **options) for text in ("#### 18", "18.0", "it is 18")}
    assert len(same) == 1
    assert vote(task("19"), **options) not in same
    assert vote(task("none"), **options) == -1
    assert float(int(same.pop())) == vote(task("18"), **options)


async def test_answers_are_read_in_a_process_that_may_hang():
    settings = RunSettings(
        reward={"name": "own:score", "timeout_s": 0.5}, evaluation={"n": 2, "answer_pattern": "(a|a)*b"}
    )
    reader = AnswerReader(settings)
    try:
        await reader.start()
        await reader.start()
        assert await reader.vote(task("a" * 40 + "!")) is None, "catastrophic backtracking ends by the time-out"
        first, second = await reader.vote(task("xab")), await reader.vote(task("ab"))
        assert first is not None
        assert first == second
    finally:
        await reader.close()
