"""What a simulation generates: prompts with the lengths that their samples will have.

Always true: what prompt number i is, is a function of the seed and i alone, so that every ratio and policy of a sweep
meets the same prompts with the same lengths.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

SPREAD = 0x9E3779B97F4A7C15  # seeds of neighbouring prompts are far apart; hashing a string costs three times as much


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """One prompt: the tokens that each of its samples will have, the prompt's own, where it comes from, which it is."""

    lengths: tuple[int, ...]
    prompt_tokens: int
    data_source: str = ""
    prompt_id: str = ""


class Workload(Protocol):
    """An endless sequence of prompts."""

    def prompt(self, index: int, num_samples: int) -> PromptLengths:
        """Prompt number `index`, with `num_samples` samples."""
        ...


def _rng(seed: int, index: int) -> random.Random:
    return random.Random(seed * SPREAD + index)  # noqa: S311  a simulation


class DrawnWorkload:
    """Lengths drawn one by one from those that were observed: samples of one prompt are as different as any two."""

    def __init__(self, lengths: Sequence[int], prompt_tokens: Sequence[int], seed: int) -> None:
        self._lengths = lengths
        self._prompt_tokens = prompt_tokens
        self._seed = seed

    def prompt(self, index: int, num_samples: int) -> PromptLengths:
        """Prompt number `index`."""
        rng = _rng(self._seed, index)
        chosen = tuple(rng.choices(self._lengths, k=num_samples))
        return PromptLengths(chosen, rng.choice(self._prompt_tokens), prompt_id=str(index))


class GroupedWorkload:
    """Whole prompts drawn from those that were observed, so that long ones stay together.

    A prompt with an id comes again under it, so that forecasts may learn its lengths; without one it is always new.
    """

    def __init__(self, prompts: Sequence[PromptLengths], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed

    def prompt(self, index: int, num_samples: int) -> PromptLengths:
        """Prompt number `index`; lengths are drawn again where it has fewer samples than are asked for."""
        rng = _rng(self._seed, index)
        prompt = rng.choice(self._prompts)
        lengths = rng.sample(prompt.lengths, num_samples) if len(prompt.lengths) >= num_samples else None
        chosen = tuple(lengths or rng.choices(prompt.lengths, k=num_samples))
        return PromptLengths(chosen, prompt.prompt_tokens, prompt.data_source, prompt.prompt_id or str(index))
