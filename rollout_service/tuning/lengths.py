"""What lengths are known of, from a trace, a CSV column, a list, or a distribution, and the workload they make.

Always true: a length that is not known whole is completed from the survival estimate before it is simulated, so that a
workload is not biased short; drawing prompts again (the bootstrap) keeps the samples of a prompt together.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from protocol.errors import DataError
from rollout_service.tuning.length_specs import Mixture
from rollout_service.tuning.survival import Survival, kaplan_meier
from rollout_service.tuning.trace_reader import Trace, TracedSample
from rollout_service.tuning.workload import DrawnWorkload, GroupedWorkload, PromptLengths, Workload

T = TypeVar("T")


class LengthSource(Protocol):
    """Something that a simulation can be made of."""

    @property
    def name(self) -> str:
        """What it is, for a report."""
        ...

    def workload(self, seed: int, bootstrap: bool) -> Workload:
        """Prompts without end. `bootstrap`: of observed prompts drawn again with replacement, by the seed."""
        ...


@dataclass(frozen=True, slots=True)
class SpecLengths:
    """A distribution."""

    name: str
    mixture: Mixture

    def workload(self, seed: int, bootstrap: bool) -> Workload:
        """Drawn from the distribution; there is nothing to bootstrap."""
        return Mixture(self.mixture.parts, self.mixture.weights, seed)


@dataclass(frozen=True, slots=True)
class FlatLengths:
    """Lengths without a word on which are of one prompt."""

    name: str
    lengths: tuple[int, ...]
    prompt_tokens: tuple[int, ...]

    def workload(self, seed: int, bootstrap: bool) -> Workload:
        """Every sample for itself."""
        lengths = _again(self.lengths, seed) if bootstrap else self.lengths
        return DrawnWorkload(lengths, self.prompt_tokens, seed)


@dataclass(frozen=True, slots=True)
class GroupedLengths:
    """Prompts with the lengths of their samples."""

    name: str
    prompts: tuple[PromptLengths, ...]

    def workload(self, seed: int, bootstrap: bool) -> Workload:
        """Whole prompts."""
        return GroupedWorkload(_again(self.prompts, seed) if bootstrap else self.prompts, seed)


def can_draw_again(lengths: LengthSource) -> bool:
    """Whether a bootstrap of it differs from what was observed: a distribution is known, and no sample of one."""
    return not isinstance(lengths, SpecLengths)


def _again(items: Sequence[T], seed: int) -> tuple[T, ...]:
    return tuple(random.Random(~seed).choices(items, k=len(items)))  # noqa: S311  a simulation


def lengths_of_trace(trace: Trace, seed: int = 0) -> GroupedLengths | FlatLengths:
    """Lengths of a trace, unfinished ones completed. Raises DataError if nothing has finished."""
    samples = [s for s in trace.samples if s.num_tokens or s.finished]
    survival = survival_of_trace(trace)
    rng = random.Random(seed)  # noqa: S311  a simulation
    groups: dict[str, list[int]] = {}
    about: dict[str, tuple[int, str, str]] = {}
    for sample in samples:
        whole = sample.num_tokens if sample.finished else completed(survival, sample.num_tokens, rng)
        groups.setdefault(sample.group_id, []).append(max(1, whole))
        about[sample.group_id] = (sample.prompt_tokens, sample.source, sample.prompt_id)
    if all(len(lengths) == 1 for lengths in groups.values()):
        flat = tuple(lengths[0] for lengths in groups.values())
        return FlatLengths(trace.name, flat, tuple(tokens for tokens, _, _ in about.values()))
    # Drawn again and again, prompts would be foreseen better than in the run, unless they came again there, too.
    recur = len({prompt_id for _, _, prompt_id in about.values()}) < len(groups)
    prompts = tuple(
        PromptLengths(tuple(lengths), about[group][0], about[group][1], about[group][2] if recur else "")
        for group, lengths in groups.items()
    )
    return GroupedLengths(trace.name, prompts)


def survival_of_trace(trace: Trace) -> Survival:
    """The survival estimate of all samples that have a token. Raises DataError with what is missing."""
    samples = [s for s in trace.samples if s.num_tokens or s.finished]
    if not samples:
        raise DataError(f"{trace.name} has no sample yet: let the run finish a round")
    if not any(s.finished for s in samples):
        raise DataError(
            f"no sample of {trace.name} has finished, {len(samples)} are unfinished: let the run go on until some have"
        )
    return survival_of(samples)


def survival_of(samples: Sequence[TracedSample]) -> Survival:
    """The survival estimate of these samples, those of one prompt taken as alike. Raises DataError if none finished."""
    prompts = [s.prompt_id for s in samples]
    return kaplan_meier([s.num_tokens for s in samples], [s.finished for s in samples], prompts)


def completed(survival: Survival, tokens: int, rng: random.Random) -> int:
    """A whole length for a response that was last seen with `tokens`, drawn from those that get so far."""
    alive = survival.at(tokens)
    left = survival.survival / alive if alive > 0 else np.zeros(len(survival.lengths))
    reached = np.flatnonzero((survival.lengths > tokens) & (left <= rng.random()))
    if len(reached):
        return int(survival.lengths[reached[0]])
    return max(tokens, survival.longest)
