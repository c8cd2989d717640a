"""What the samples of an evaluation come to: mean@k, pass@k, maj@k, lengths; over all prompts and by data source."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from protocol.messages import EvaluationScores

MAX_SOURCES = 32  # data sources that are reported by name; a report of thousands of lines is read by nobody
OTHER_SOURCES = "other"


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One scored sample. `answer`: what it votes for in a majority, None if it has no answer."""

    reward: float
    num_tokens: int
    truncated: bool
    answer: int | None = None


@dataclass(slots=True)
class PromptResults:
    """The samples of one prompt, as far as there are any."""

    data_source: str
    samples: list[SampleResult] = field(default_factory=list[SampleResult])
    num_failed: int = 0


def score(prompts: Sequence[PromptResults], k: int, pass_reward: float) -> EvaluationScores | None:
    """The scores over `prompts` with `k` samples each; None if no sample could be scored.

    A prompt counts with the samples that could be scored; one with fewer than j of them does not count for pass@j.
    """
    scored = [prompt for prompt in prompts if prompt.samples]
    if not scored:
        return None
    samples = [sample for prompt in scored for sample in prompt.samples]
    lengths = np.asarray([sample.num_tokens for sample in samples])
    means = np.asarray([np.mean([sample.reward for sample in prompt.samples]) for prompt in scored])
    return EvaluationScores(
        num_prompts=len(scored),
        num_samples=len(samples),
        num_failed=sum(prompt.num_failed for prompt in prompts),
        mean=float(means.mean()),
        mean_stderr=float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None,
        pass_at=_pass_at(scored, k, pass_reward),
        majority=_majority(scored) if k > 1 else None,
        truncated_share=sum(sample.truncated for sample in samples) / len(samples),
        mean_tokens=float(lengths.mean()),
        p50_tokens=float(np.percentile(lengths, 50)),
        p99_tokens=float(np.percentile(lengths, 99)),
        max_tokens=int(lengths.max()),
    )


def score_by_source(prompts: Sequence[PromptResults], k: int, pass_reward: float) -> dict[str, EvaluationScores]:
    """The scores of each data source; beyond MAX_SOURCES, by name, the rest together as `other`."""
    sources: dict[str, list[PromptResults]] = {}
    names = sorted({prompt.data_source for prompt in prompts})
    named = frozenset(names if len(names) <= MAX_SOURCES else names[: MAX_SOURCES - 1])
    for prompt in prompts:
        name = prompt.data_source if prompt.data_source in named else OTHER_SOURCES
        sources.setdefault(name, []).append(prompt)
    scores = {name: score(members, k, pass_reward) for name, members in sorted(sources.items())}
    return {name: found for name, found in scores.items() if found is not None}


def pass_at(num_samples: int, num_passed: int, j: int) -> float:
    """Probability that at least one of j samples passes, estimated without bias from `num_samples` ≥ j of them.

    1 − C(n − c, j) / C(n, j): Chen et al., Evaluating Large Language Models Trained on Code (2021), equation 1.
    """
    return 1.0 - math.comb(num_samples - num_passed, j) / math.comb(num_samples, j)


def majority_reward(samples: Sequence[SampleResult]) -> float:
    """Reward of the answer that most samples give, averaged over the samples that give it, and over answers that tie.

    Samples without an answer don't vote; if none has one, the prompt counts with the mean of its rewards.
    """
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        if sample.answer is not None:
            rewards.setdefault(sample.answer, []).append(sample.reward)
    if not rewards:
        return _mean(sample.reward for sample in samples)
    most = max(len(votes) for votes in rewards.values())
    return _mean(_mean(votes) for votes in rewards.values() if len(votes) == most)


def _pass_at(prompts: Sequence[PromptResults], k: int, pass_reward: float) -> dict[int, float]:
    """pass@j for j = 1, 2, 4, … and k."""
    found: dict[int, float] = {}
    for j in sorted({*(1 << i for i in range(k.bit_length()) if 1 << i <= k), k}):
        counts = [
            (len(p.samples), sum(s.reward >= pass_reward for s in p.samples)) for p in prompts if len(p.samples) >= j
        ]
        if counts:
            found[j] = _mean(pass_at(n, c, j) for n, c in counts)
    return found


def _majority(prompts: Sequence[PromptResults]) -> float | None:
    """maj@k over the prompts of which at least one sample has an answer; None if there are none."""
    voted = [p for p in prompts if any(sample.answer is not None for sample in p.samples)]
    # Where no answer can be told at all, the mean of the rewards would pass for a majority; a prompt of a source that
    # has answers, and whose samples all lack one, does count.
    sources = {prompt.data_source for prompt in voted}
    counted = [prompt for prompt in prompts if prompt.data_source in sources]
    return _mean(majority_reward(prompt.samples) for prompt in counted) if counted else None


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)
