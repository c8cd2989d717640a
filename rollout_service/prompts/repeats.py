"""Prompts that occur more than once: in training, with two right answers, or in training and held out."""

import json
from dataclasses import dataclass

from rollout_service.prompts.interface import PromptSet


@dataclass(frozen=True, slots=True)
class Repeats:
    """Counts of prompts with the same token ids.

    `num_repeated`: training prompts that repeat an earlier one, `num_contradictory` of them with another label;
    `num_held_out`: held-out prompts that also occur in training.
    """

    num_repeated: int
    num_contradictory: int
    num_held_out: int


def count_repeats(prompts: PromptSet) -> Repeats:
    """Compare all prompts by what the model sees of them."""
    labels: dict[tuple[int, ...], str] = {}
    num_repeated = num_contradictory = 0
    for prompt in prompts.train:
        label = json.dumps(prompt.ground_truth, sort_keys=True)
        if prompt.token_ids in labels:
            num_repeated += 1
            num_contradictory += labels[prompt.token_ids] != label
        else:
            labels[prompt.token_ids] = label
    return Repeats(num_repeated, num_contradictory, sum(p.token_ids in labels for p in prompts.validation))
