"""Data sources served by weight: exact shares, passes without repeats, and the same after any restart."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.interface import CursorMove, NewGroup
from buffer.memory import MemoryBuffer
from buffer.memory_store import MemoryStore
from protocol.errors import ConflictError, DataError
from protocol.samples import Prompt
from rollout_service.prompts.apportion import apportion, representative
from rollout_service.prompts.interface import START_CURSOR
from rollout_service.prompts.load import load_prompts
from rollout_service.prompts.order import MixedOrder, ShuffledOrder, build_order, source_quotas

# A run that is continued after an upgrade must find the same order: these values may not be edited.
PINNED = ["a:0", "b:0", "a:2", "b:1", "a:1", "a:1", "a:2", "b:0", "b:1"]
PINNED_CURSOR = "1:4"

sizes_and_weights = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.integers(1, 12), st.floats(0, 10)), min_size=1
).filter(lambda sources: any(weight > 0 for _, weight in sources.values()))


def make_prompts(**sizes: int) -> list[Prompt]:
    return [Prompt(f"{name}:{i}", (i,), "", name, i) for name, size in sizes.items() for i in range(size)]


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


def mixed(prompts, weights, seed=0, shuffle=True):
    return MixedOrder(prompts, seed, shuffle, weights)


def order_of(sources, seed=0, shuffle=True):
    prompts = make_prompts(**{name: size for name, (size, _) in sources.items()})
    return prompts, mixed(prompts, {name: weight for name, (_, weight) in sources.items()}, seed, shuffle)


@given(sizes_and_weights, st.integers(0, 3), st.booleans(), st.integers(1, 4))
def test_every_epoch_serves_every_source_by_its_weight(sources, seed, shuffle, num_epochs):
    prompts, order = order_of(sources, seed, shuffle)
    taken, cursor = order.take(START_CURSOR, num_epochs * len(prompts))
    assert cursor == f"{num_epochs}:0"
    total = sum(weight for _, weight in sources.values())
    for epoch in range(num_epochs):
        served = Counter(p.data_source for p in taken[epoch * len(prompts) : (epoch + 1) * len(prompts)])
        assert served == order.quotas
        for name, (_, weight) in sources.items():
            assert served[name] >= (weight > 0), "a rare source is never rounded away"
            assert not served[name] or weight > 0
            if len(prompts) * weight / total >= len(sources):
                assert abs(served[name] - len(prompts) * weight / total) <= len(sources)


@given(sizes_and_weights, st.integers(0, 3), st.booleans(), st.integers(1, 4))
def test_no_prompt_comes_again_before_all_others_of_its_source(sources, seed, shuffle, num_epochs):
    prompts, order = order_of(sources, seed, shuffle)
    passes = defaultdict(list)
    taken, _ = order.take(START_CURSOR, num_epochs * len(prompts))
    for prompt in taken:
        passes[prompt.data_source].append(prompt.prompt_id)
    for name, served in passes.items():
        size = sources[name][0]
        for start in range(0, len(served) - size + 1, size):
            assert sorted(served[start : start + size]) == sorted(f"{name}:{i}" for i in range(size))


@given(sizes_and_weights, st.lists(st.integers(0, 9), max_size=12))
def test_a_new_object_goes_on_where_the_cursor_is(sources, sizes):
    whole, _ = order_of(sources)[1].take(START_CURSOR, sum(sizes))
    cursor, taken = START_CURSOR, []
    for size in sizes:
        piece, cursor = order_of(sources)[1].take(cursor, size)
        taken += piece
    assert ids(taken) == ids(whole)


@given(sizes_and_weights, st.randoms(use_true_random=False))
def test_the_order_of_loading_does_not_matter(sources, rng):
    prompts, order = order_of(sources)
    shuffled = list(prompts)
    rng.shuffle(shuffled)
    other = mixed(shuffled, {name: weight for name, (_, weight) in sources.items()})
    assert ids(order.take("1:0", len(prompts))[0]) == ids(other.take("1:0", len(prompts))[0])


def test_the_order_never_changes_between_versions():
    taken, cursor = mixed(make_prompts(a=3, b=2), {"a": 1, "b": 1}, seed=7).take("0:0", 9)
    assert (ids(taken), cursor) == (PINNED, PINNED_CURSOR)


def test_a_rare_source_is_raised_and_spread_over_the_epoch():
    prompts = make_prompts(common=990, rare=10)
    order = mixed(prompts, {"common": 3, "rare": 1})
    assert order.quotas == {"common": 750, "rare": 250}
    taken, _ = order.take(START_CURSOR, 1000)
    per_batch = [sum(p.data_source == "rare" for p in taken[i : i + 40]) for i in range(0, 1000, 40)]
    assert min(per_batch) >= 8
    assert max(per_batch) <= 12
    assert set(Counter(p.prompt_id for p in taken if p.data_source == "rare").values()) == {25}


def test_without_shuffle_the_sources_keep_their_order_and_take_turns():
    order = mixed(make_prompts(a=4, b=2), {"a": 2, "b": 1}, shuffle=False)
    assert ids(order.take(START_CURSOR, 6)[0]) == ["a:0", "b:0", "a:1", "a:2", "b:1", "a:3"]


def test_seeds_and_epochs_differ():
    prompts, weights = make_prompts(a=20, b=20), {"a": 1, "b": 2}
    orders = [ids(mixed(prompts, weights, seed).take(f"{epoch}:0", 40)[0]) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_weights_may_change_at_any_cursor():
    """The cursor keeps its meaning, and what follows it has the new shares."""
    prompts = make_prompts(a=80, b=20)
    first, cursor = mixed(prompts, {"a": 4, "b": 1}).take(START_CURSOR, 50)
    rest, after = mixed(prompts, {"a": 1, "b": 1}).take(cursor, 50)
    assert Counter(p.data_source for p in first) == pytest.approx({"a": 40, "b": 10}, abs=3)
    assert Counter(p.data_source for p in rest) == pytest.approx({"a": 25, "b": 25}, abs=3)
    assert after == "1:0"
    whole, _ = ShuffledOrder(prompts, 0, shuffle=True).take(after, 100)
    assert sorted(ids(whole)) == sorted(ids(prompts)), "without weights, from there on, each once an epoch again"


def test_a_source_of_weight_0_is_left_out_and_the_epoch_keeps_its_length():
    prompts = make_prompts(a=3, b=5)
    taken, cursor = mixed(prompts, {"a": 1, "b": 0}).take(START_CURSOR, 8)
    assert {p.data_source for p in taken} == {"a"}
    assert cursor == "1:0"


@pytest.mark.parametrize("weights", [{}, {"a": 1, "b": 3}])
async def test_a_service_that_dies_between_any_two_calls_skips_and_repeats_nothing(make_settings, weights):
    """Cursor and groups change in one transaction: what was admitted is what an undisturbed run admits."""
    prompts, settings = make_prompts(a=5, b=4), make_settings(source_weights=weights)
    store, admitted = MemoryStore(), []
    for life in range(24):
        buffer = MemoryBuffer(store)
        await buffer.claim_service(f"life {life}")
        snapshot = await buffer.snapshot()
        taken, after = build_order(prompts, settings).take(snapshot.cursor or START_CURSOR, 1 + life % 3)
        if life % 4 == 3:
            continue  # it died before the groups were admitted
        groups = [NewGroup(prompt, 2) for prompt in taken]
        admitted += await buffer.admit(groups, 0, CursorMove(snapshot.cursor, after))
        with pytest.raises(ConflictError):
            await buffer.admit(groups, 0, CursorMove(snapshot.cursor, after))
    whole, _ = build_order(prompts, settings).take(START_CURSOR, len(admitted))
    assert len(admitted) == 36
    assert [group.prompt.prompt_id for group in admitted] == ids(whole)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": 1, "bb": 1}, r"names 'bb', but no training prompt has that data_source \(there are 'a', 'b'\)"),
        ({"a": 1}, r"has no weight for 'b'; give it one \(0 leaves it out\)"),
    ],
)
def test_weights_that_do_not_fit_the_data(make_settings, write_lines, weights, words):
    rows = [{"prompt": "x", "ground_truth": 1, "data_source": name} for name in "ab"]
    with pytest.raises(DataError, match=words):
        load_prompts(make_settings(train_files=[write_lines(*rows)], source_weights=weights))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": 0}, "every weight is 0"),
        ({"a": -1}, "the weight of 'a' is -1; give it one from 0 to 1e"),
        ({"a": "x"}, "valid number"),
    ],
)
def test_weights_that_are_none(make_settings, weights, words):
    with pytest.raises(ValueError, match=words):
        make_settings(source_weights=weights)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8).filter(any), st.integers(0, 500), st.booleans())
def test_parts_add_up(weights, count, at_least_one):
    parts = apportion(weights, count, at_least_one)
    assert sum(parts) == count
    assert min(parts) >= 0
    if at_least_one and count >= sum(weight > 0 for weight in weights):
        assert all(part > 0 for part, weight in zip(parts, weights, strict=True) if weight > 0)


def test_quotas_name_only_what_is_served():
    assert source_quotas({"b": 0, "a": 1e-9, "c": 5}, 10) == {"a": 1, "c": 9}


def test_a_part_of_the_prompts_keeps_every_source():
    prompts = make_prompts(big=90, small=9, one=1)
    assert Counter(p.data_source for p in representative(prompts, 10)) == {"big": 8, "small": 1, "one": 1}
    assert ids(representative(prompts, 10))[:2] == ["big:0", "big:1"]
    assert representative(prompts, 500) == tuple(prompts)
    assert len(representative(prompts, 2)) == 2
