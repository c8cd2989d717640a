"""Length distributions in a line of text.

    lognormal:median=200,sigma=1                       every sample for itself
    lognormal:median=200,between=0.8,within=0.6        prompts differ, and so do the samples of each (two levels)
    0.9*lognormal:median=100,sigma=0.5+0.1*lognormal:median=2000,sigma=0.3        a mixture: each prompt is of one kind

With `max=N` lengths are cut there, as a response budget does; `prompt=N` is the prompt's own length.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import SettingsError
from rollout_service.tuning.trace_records import MAX_TOKENS
from rollout_service.tuning.workload import PromptLengths

EXAMPLE = "lognormal:median=200,sigma=1"
NO_MAX = MAX_TOKENS  # longer than any context


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp(ln median + between * z_prompt + within * z_sample), at least one token."""

    median: float
    between: float
    within: float
    max_tokens: int = NO_MAX
    prompt_tokens: int = 0

    def draw(self, rng: random.Random, num_samples: int) -> tuple[int, ...]:
        """Lengths of the samples of one prompt."""
        centre = math.log(self.median) + self.between * rng.gauss(0, 1)
        lengths = (math.exp(min(centre + self.within * rng.gauss(0, 1), 30.0)) for _ in range(num_samples))
        return tuple(min(self.max_tokens, max(1, round(length))) for length in lengths)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Each prompt is of one of the parts, by their weights. A workload: prompt i depends on the seed and i alone."""

    parts: tuple[Lognormal, ...]
    weights: tuple[float, ...]
    seed: int = 0

    def prompt(self, index: int, num_samples: int) -> PromptLengths:
        """Prompt number `index`."""
        rng = random.Random(self.seed * 0x9E3779B97F4A7C15 + index)  # noqa: S311  a simulation
        (part,) = rng.choices(self.parts, self.weights)
        return PromptLengths(part.draw(rng, num_samples), part.prompt_tokens, prompt_id=str(index))


def parse_lengths(text: str, seed: int = 0) -> Mixture:
    """The distribution that `text` describes. Raises SettingsError with an example."""
    parts: list[Lognormal] = []
    weights: list[float] = []
    for term in text.replace(" ", "").split("+"):
        weight, star, rest = term.partition("*")
        parts.append(_part(rest if star else term, text))
        weights.append(_number(weight, text) if star else 1.0)
    if min(weights) < 0 or sum(weights) <= 0:
        raise SettingsError(f"the weights of {text!r} must not be negative and not all zero")
    return Mixture(tuple(parts), tuple(weights), seed)


def _part(term: str, text: str) -> Lognormal:
    name, _, rest = term.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    values = {key: _number(value, text) for key, _, value in pairs}
    known = {"median", "sigma", "between", "within", "max", "prompt"}
    if name != "lognormal" or "median" not in values or set(values) - known:
        raise SettingsError(f"{text!r} is no length distribution: write it like {EXAMPLE}")
    if "sigma" in values and {"between", "within"} & set(values):
        raise SettingsError(f"{text!r} has sigma and between or within: give one sigma, or the two levels")
    within = values.get("within", values.get("sigma", 0.0))
    between = values.get("between", 0.0)
    if len(values) < len(pairs):
        raise SettingsError(f"{text!r} names something twice: give each once")
    if values["median"] <= 0 or min(within, between, values.get("prompt", 0)) < 0 or values.get("max", 1) < 1:
        raise SettingsError(
            f"{text!r}: the median and max must be positive, sigma, between, within and prompt not negative"
        )
    if max(values["median"], values.get("max", 0), values.get("prompt", 0)) > MAX_TOKENS:
        raise SettingsError(f"{text!r}: no response or prompt has more than {MAX_TOKENS} tokens; give smaller numbers")
    return Lognormal(values["median"], between, within, int(values.get("max", NO_MAX)), int(values.get("prompt", 0)))


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SettingsError(f"{text!r} in {whole!r} is no number: write it like {EXAMPLE}")
    return value


def is_spec(texts: Sequence[str]) -> bool:
    """Whether this looks like a distribution and not like a path."""
    return all("lognormal:" in text for text in texts)
