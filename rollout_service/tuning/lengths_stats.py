"""What a trace says about lengths: with the unfinished ones counted as what they are, longer than what they have."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from protocol.watching import LengthBin, Straggler
from rollout_service.tuning.lengths import survival_of_trace
from rollout_service.tuning.survival import Survival
from rollout_service.tuning.trace_reader import Trace, TracedSample

QUANTILES = (0.5, 0.9, 0.95, 0.99)
NUM_BINS = 5  # of rewards by length: as many responses in each
STRAGGLER_SHARE = 0.9  # a straggler's longest response is longer than those of so many groups
MAX_STRAGGLERS = 20


@dataclass(frozen=True, slots=True)
class Quantile:
    """A length that `share` of the responses don't pass, with its band of 95 %; None: too many are unfinished."""

    share: float
    length: int | None
    lower: int | None
    upper: int | None


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """All of it. Lengths in tokens, times in seconds, None where the trace has nothing to say."""

    run: str
    num_finished: int
    num_unfinished: int
    quantiles: tuple[Quantile, ...]
    tail: float | None
    mean_length: float
    mean_finished: float
    trained_mean: float | None
    dispatched_mean: float
    bins: tuple[LengthBin, ...]
    stragglers: tuple[Straggler, ...]
    num_rounds: int
    round_s: float | None
    cut_to_offer_s: float | None
    waited_s: float | None
    parked_s: float | None
    trainer_step_s: float | None
    install_s: float | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        bins, slow = ([picture.model_dump() for picture in pictures] for pictures in (self.bins, self.stragglers))
        return asdict(replace(self, bins=(), stragglers=())) | {"bins": bins, "stragglers": slow}


def trace_statistics(trace: Trace) -> TraceStatistics:
    """Everything that can be said. Raises DataError if no sample has finished."""
    survival = survival_of_trace(trace)
    finished = trace.finished
    whole = [s for group in _groups(trace.samples).values() if all(s.finished for s in group) for s in group]
    middle, last = survival.quantile(0.5), survival.quantile(0.99)
    return TraceStatistics(
        run=trace.run,
        num_finished=survival.num_finished,
        num_unfinished=survival.num_censored,
        quantiles=tuple(quantile_of(survival, share) for share in QUANTILES),
        tail=last / middle if middle and last else None,
        mean_length=survival.mean(),
        mean_finished=fmean(s.num_tokens for s in finished),
        trained_mean=fmean(s.num_tokens for s in whole) if whole else None,
        dispatched_mean=survival.mean(),
        bins=tuple(reward_bins(finished)),
        stragglers=tuple(stragglers(trace.samples)),
        num_rounds=len(trace.rounds),
        round_s=_median([r.offered_at - r.started_at for r in trace.rounds]),
        cut_to_offer_s=_median([r.offered_at - r.cut_at for r in trace.rounds if r.cut_at is not None]),
        waited_s=_median([a.waited_s for s in trace.samples for a in s.attempts if a.waited_s is not None]),
        parked_s=_median(_parked(trace.samples)),
        trainer_step_s=trainer_step_s(trace),
        install_s=install_s(trace),
        notes=(*trace.notes, *_remarks(trace, survival)),
    )


def quantile_of(survival: Survival, share: float) -> Quantile:
    """With the band that inverts the survival curve's own: where its lower and upper curves reach the share."""

    def reached(curve: Sequence[float]) -> int | None:
        found = np.flatnonzero(np.asarray(curve) <= 1 - share + 1e-12)
        return int(survival.lengths[found[0]]) if len(found) else None

    return Quantile(share, survival.quantile(share), reached(survival.lower.tolist()), reached(survival.upper.tolist()))


def reward_bins(finished: Sequence[TracedSample]) -> list[LengthBin]:
    """Finished responses in bins of equal number, shortest first."""
    ordered = sorted(finished, key=lambda s: s.num_tokens)
    bins: list[LengthBin] = []
    for part in np.array_split(np.arange(len(ordered)), NUM_BINS):
        samples = [ordered[int(i)] for i in part]
        if samples:
            rewards = [s.reward for s in samples if s.reward is not None]
            ends = [s.attempts[-1].end == "stop" for s in samples if s.attempts]
            lengths = [s.num_tokens for s in samples]
            mean = fmean(rewards) if rewards else None
            bins.append(
                LengthBin(
                    shortest=lengths[0],
                    longest=lengths[-1],
                    num_samples=len(samples),
                    mean_reward=mean,
                    stop_share=fmean(ends) if ends else None,
                )
            )
    return bins


def stragglers(samples: Sequence[TracedSample]) -> list[Straggler]:
    """Prompts seen at least twice, and slow each time; the slowest first."""
    groups = _groups(samples)
    longest = {group: max(s.num_tokens for s in members) for group, members in groups.items()}
    if not longest:
        return []
    slow = float(np.quantile(list(longest.values()), STRAGGLER_SHARE))
    of_prompt: dict[str, list[str]] = {}
    for group, members in groups.items():
        of_prompt.setdefault(members[0].prompt_id, []).append(group)
    found = [
        Straggler(
            prompt=prompt,
            source=groups[of[0]][0].source,
            times_seen=len(of),
            mean_longest=fmean(longest[group] for group in of),
            num_parks=sum(a.end == "parked" for group in of for s in groups[group] for a in s.attempts),
        )
        for prompt, of in of_prompt.items()
        if len(of) > 1 and all(longest[group] > slow for group in of)
    ]
    return sorted(found, key=lambda s: -s.mean_longest)[:MAX_STRAGGLERS]


def trainer_step_s(trace: Trace) -> float | None:
    """Median time of a trainer's step: from when it could begin, its batch offered and the step before done."""
    offered = {line.round: line.offered_at for line in trace.rounds}
    trained = {line.step: line.at for line in trace.trained}
    return _median(
        [
            at - max(offered[step], trained[step - 1])
            for step, at in trained.items()
            if step in offered and step - 1 in trained and at >= max(offered[step], trained[step - 1])
        ]
    )


def install_s(trace: Trace) -> float | None:
    """Median time of an install."""
    return _median([line.ended_at - line.started_at for line in trace.installs])


def _groups(samples: Sequence[TracedSample]) -> dict[str, list[TracedSample]]:
    groups: dict[str, list[TracedSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return groups


def _parked(samples: Sequence[TracedSample]) -> list[float]:
    return [
        later.started_at - earlier.ended_at
        for s in samples
        for earlier, later in pairwise(s.attempts)
        if earlier.end == "parked"
        and later.continued_from == earlier.continued_from  # else it was in no group meanwhile
    ]


def _remarks(trace: Trace, survival: Survival) -> list[str]:
    remarks: list[str] = []
    if not trace.rounds:
        remarks.append("the trace has no finished round: times of rounds and of the trainer are not known")
    if len(survival.lengths) == 1 and not survival.num_censored:
        remarks.append(f"every response has {survival.longest} tokens: there is no tail, and ratio 1 wastes nothing")
    if survival.quantile(0.99) is None:
        remarks.append(
            f"{survival.num_censored} of {survival.num_censored + survival.num_finished} responses are unfinished: the "
            "99th percentile can't be known yet"
        )
    return remarks


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
