"""Plans and packs: nothing lost, nothing twice, bounds kept, ranks equal."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.trainer.factory import make_batch
from trainer.packing import Bounds, mini_batches, num_trained_tokens, pack, plan_ranks

UNTIMED = hypothesis_settings(deadline=None)  # the machine may be busy

LENGTHS = st.lists(st.integers(1, 300), max_size=40)


@UNTIMED
@given(LENGTHS, st.integers(1, 400), st.none() | st.integers(1, 8), st.integers(1, 5))
def test_plan(lengths: list[int], max_tokens: int, max_samples: int | None, num_ranks: int) -> None:
    plan = plan_ranks(lengths, Bounds(max_tokens, max_samples), num_ranks)
    bins = [b for rank in plan for b in rank]
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    for b in bins:
        assert len(b) <= 1 or sum(lengths[i] for i in b) <= max_tokens
        assert max_samples is None or len(b) <= max_samples
    assert plan == plan_ranks(lengths, Bounds(max_tokens, max_samples), num_ranks)


@UNTIMED
@given(st.lists(st.integers(1, 100), min_size=8, max_size=40), st.integers(2, 4))
def test_ranks_get_similar_work(lengths: list[int], num_ranks: int) -> None:
    plan = plan_ranks(lengths, Bounds(10_000), num_ranks)
    loads = [sum(lengths[i] for b in rank for i in b) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths)


def test_packing_wastes_no_micro_batch() -> None:
    plan = plan_ranks([60, 50, 40, 30, 20], Bounds(100), 1)
    assert len(plan[0]) == 2


@UNTIMED
@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(1, 6))
def test_mini_batches_hold_whole_prompts(groups: list[int], num_prompts: int) -> None:
    index = np.asarray(sorted(groups), np.int32)
    minis = mini_batches(index, num_prompts)
    assert [i for m in minis for i in m] == list(range(len(index)))
    seen = [set(index[m].tolist()) for m in minis]
    assert all(len(s) <= num_prompts for s in seen)
    assert sum(len(s) for s in seen) == len(set(groups)), "no prompt is in two"


def test_pack_points_each_response_token_at_the_one_before() -> None:
    batch = make_batch(version=3)
    advantages = np.arange(batch.num_samples, dtype=np.float32)
    micro = pack(batch, [4, 9], advantages)
    ends = batch.sample_offsets[1:]
    assert micro.lengths == tuple(int(ends[i] - batch.sample_offsets[i]) for i in (4, 9))
    assert torch.equal(micro.tokens[micro.predictors + 1], micro.targets)
    start = torch.tensor([0, micro.lengths[0]])
    assert micro.positions[start].tolist() == [0, 0]
    responses = [np.arange(batch.sample_offsets[i] + batch.prompt_lengths[i], ends[i]) for i in (4, 9)]
    where = np.concatenate(responses)
    assert micro.targets.tolist() == batch.tokens[where].tolist()
    assert micro.behaviour.tolist() == batch.logprobs[where].tolist()
    assert micro.versions.tolist() == batch.versions[where].tolist()
    assert set(micro.advantages[micro.samples == 9].tolist()) == {9.0}
    assert len(micro.targets) == num_trained_tokens(batch, [4, 9])


def test_a_first_token_is_not_predicted_from_a_neighbour() -> None:
    batch = make_batch()
    start = int(batch.sample_offsets[1])
    batch.loss_mask[start : start + int(batch.prompt_lengths[1])] = 1
    micro = pack(batch, [0, 1], np.zeros(batch.num_samples, np.float32))
    assert micro.lengths[0] - 1 not in micro.predictors.tolist()
    assert len(micro.targets) == num_trained_tokens(batch, [0, 1])
