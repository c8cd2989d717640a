"""Whole numbers that follow weights, and a part of the held-out prompts in which every data source keeps its share."""

from collections import Counter
from collections.abc import Sequence

from protocol.samples import Prompt


def apportion(weights: Sequence[float], count: int, at_least_one: bool = False) -> list[int]:
    """`count` split by weight; rests go to the largest remainders.

    `at_least_one`: nothing with a weight above 0 goes empty, as long as there are that many to give.
    """
    total = sum(weights)
    exact = [count * weight / total for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: count - sum(whole)]:
        whole[i] += 1
    empty = [i for i, weight in enumerate(weights) if weight > 0 and not whole[i]]
    if at_least_one and count >= sum(weight > 0 for weight in weights):
        for i in empty:
            richest = max(range(len(whole)), key=whole.__getitem__)
            whole[richest] -= 1
            whole[i] += 1
    return whole


def representative(prompts: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
    """`count` of the prompts, in their order: the first ones of each data source, each source by its share."""
    if count >= len(prompts):
        return tuple(prompts)
    sizes = Counter(prompt.data_source for prompt in prompts)
    left = dict(zip(sizes, apportion(list(sizes.values()), count, at_least_one=True), strict=True))
    chosen: list[Prompt] = []
    for prompt in prompts:
        if left[prompt.data_source]:
            left[prompt.data_source] -= 1
            chosen.append(prompt)
    return tuple(chosen)
