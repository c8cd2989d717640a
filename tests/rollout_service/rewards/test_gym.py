"""Every reasoning-gym generator judges its own answers after its entries have been through JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import DataError
from rollout_service.rewards.gym import check_reasoning_gym, score_reasoning_gym
from rollout_service.rewards.gym_library import generator_names, make_generator
from rollout_service.rewards.plain import from_plain, to_plain
from rollout_service.rewards.scorer import LabelError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner, max_size=4)
    ),
)


@given(PLAIN)
def test_plain_data_comes_back_as_it_was(value):
    back = from_plain(json.loads(json.dumps(to_plain(value))))
    assert back == value
    assert repr(back) == repr(value)  # which tells 1 from 1.0 and True, and a list from a tuple


def test_what_has_no_json_form_is_refused():
    with pytest.raises(TypeError, match="set has no JSON form"):
        to_plain({"a": {1, 2}})


@pytest.mark.filterwarnings("ignore")  # some generators use what their own dependencies deprecate
def test_the_right_answer_of_every_generator_scores_as_it_does_there(make_task):
    names = generator_names()
    assert len(names) > 90
    for name in names:
        generator = make_generator(name, {"seed": 11, "size": 1})
        entry = generator[0]
        if entry["answer"] is None:
            continue
        answer = str(entry["answer"])
        label = json.loads(json.dumps(to_plain({**entry})))
        check_reasoning_gym(label, f"reasoning_gym/{name}")
        task = make_task(f"thinking <answer>{answer}</answer>", label, f"reasoning_gym/{name}")
        assert score_reasoning_gym(task) == generator.score_answer(answer.strip(), entry), name


def test_wrong_answers_and_patterns(make_task):
    entry = {**make_generator("chain_sum", {"seed": 1, "size": 1})[0]}
    source = "reasoning_gym/chain_sum"
    assert score_reasoning_gym(make_task("<answer>123456</answer>", entry, source)) == 0
    assert score_reasoning_gym(make_task(entry["answer"], entry, source)) == 1
    assert score_reasoning_gym(make_task(f"a=1#{entry['answer']}", entry, source), pattern=r"#(-?\d+)$") == 1
    assert score_reasoning_gym(make_task(f"a=1#{entry['answer']}.", entry, source), pattern=r"#(-?\d+)$") == 0


@pytest.mark.parametrize(
    ("label", "source", "words"),
    [
        ("7", "reasoning_gym/chain_sum", "must be a reasoning-gym entry with question, answer, metadata"),
        ({"question": "", "answer": ""}, "reasoning_gym/chain_sum", "must be a reasoning-gym entry"),
        ({"question": "", "answer": "", "metadata": {}}, "reasoning_gym/chain_sun", "near names: chain_sum"),
        ({"question": "", "answer": "", "metadata": {}}, "own", "data_source must be reasoning_gym/GENERATOR"),
    ],
)
def test_labels_that_are_no_entries(label, source, words):
    with pytest.raises(LabelError, match=words):
        check_reasoning_gym(label, source)


def test_bad_settings_of_a_generator():
    with pytest.raises(DataError, match=r"refuses the settings of chain_sum: .*'foo'"):
        make_generator("chain_sum", {"foo": 1})
    with pytest.raises(DataError, match="max_terms must be >= min_terms"):
        make_generator("chain_sum", {"min_terms": 9, "max_terms": 2})
    with pytest.raises(DataError, match="no generator 'composite'"):
        make_generator("composite", {})
