"""The order of prompts is a pure function of the prompts, the seed and the cursor."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import DataError
from protocol.samples import Prompt
from rollout_service.prompts.interface import START_CURSOR
from rollout_service.prompts.order import ShuffledOrder

PINNED = ["p:3", "p:2", "p:0", "p:1", "p:5", "p:4", "p:0", "p:1"]


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p:{i}", (i,), "", "p") for i in range(count)]


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


@given(st.integers(1, 40), st.integers(0, 5), st.booleans(), st.lists(st.integers(0, 17), max_size=30))
def test_every_epoch_serves_every_prompt_once_however_it_is_taken(count, seed, shuffle, sizes):
    prompts = make_prompts(count)
    order, cursor, taken = ShuffledOrder(prompts, seed, shuffle), START_CURSOR, []
    for size in sizes:
        piece, cursor = order.take(cursor, size)
        assert len(piece) == size
        taken += ids(piece)
        assert cursor == f"{len(taken) // count}:{len(taken) % count}"
    for start in range(0, len(taken) - count + 1, count):
        assert sorted(taken[start : start + count]) == sorted(ids(prompts))


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 100), st.integers(0, 50))
def test_a_new_object_goes_on_where_the_cursor_is(count, seed, before, size):
    prompts = make_prompts(count)
    whole, _ = ShuffledOrder(prompts, seed, shuffle=True).take(START_CURSOR, before + size)
    _, cursor = ShuffledOrder(prompts, seed, shuffle=True).take(START_CURSOR, before)
    rest, _ = ShuffledOrder(prompts, seed, shuffle=True).take(cursor, size)
    assert ids(rest) == ids(whole)[before:]


@given(st.integers(2, 40), st.randoms(use_true_random=False))
def test_the_order_of_loading_does_not_matter(count, rng: random.Random):
    prompts = make_prompts(count)
    shuffled = list(prompts)
    rng.shuffle(shuffled)
    orders = [ids(ShuffledOrder(p, 3, shuffle=True).take("1:0", count)[0]) for p in (prompts, shuffled)]
    assert orders[0] == orders[1]


def test_the_order_never_changes_between_versions():
    """A run that is continued after an upgrade must find the same order: these values may not be edited."""
    taken, cursor = ShuffledOrder(make_prompts(6), 7, shuffle=True).take("0:0", 8)
    assert ids(taken) == PINNED
    assert cursor == "1:2"


def test_epochs_and_seeds_differ_and_shuffle_can_be_off():
    prompts = make_prompts(30)
    first, second = (ids(ShuffledOrder(prompts, 0, shuffle=True).take(f"{e}:0", 30)[0]) for e in (0, 1))
    other = ids(ShuffledOrder(prompts, 1, shuffle=True).take("0:0", 30)[0])
    assert len({tuple(first), tuple(second), tuple(other), tuple(ids(prompts))}) == 4
    assert ids(ShuffledOrder(prompts, 0, shuffle=False).take("5:28", 4)[0]) == ["p:28", "p:29", "p:0", "p:1"]


def test_shuffles_are_uniform():
    counts = [0, 0, 0]
    for seed in range(600):
        taken, _ = ShuffledOrder(make_prompts(3), seed, shuffle=True).take("0:0", 1)
        counts[taken[0].token_ids[0]] += 1
    assert min(counts) > 150


@pytest.mark.parametrize(
    "cursor", ["", "0", "0:", ":0", "a:0", "0:-1", "-1:0", "0:0:0", " 0:0", "0:0\n", "00:0", "٣:0"]
)
def test_malformed_cursors(cursor):
    with pytest.raises(DataError, match="is not EPOCH:POSITION"):
        ShuffledOrder(make_prompts(3), 0, shuffle=True).take(cursor, 1)


def test_a_cursor_of_other_data():
    with pytest.raises(DataError, match="0:3 is beyond the 3 prompts there are; bring back the data"):
        ShuffledOrder(make_prompts(3), 0, shuffle=True).take("0:3", 1)


def test_no_prompts():
    with pytest.raises(DataError, match="no training prompts"):
        ShuffledOrder([], 0, shuffle=True)


def test_only_neighbouring_epochs_are_kept():
    order = ShuffledOrder(make_prompts(5), 0, shuffle=True)
    order.take("0:0", 100)
    assert len(order._epochs) == 2
