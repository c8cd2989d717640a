"""How long responses will be: from the prompt's own history, else from those of its data source, else from all.

Always true:
- a forecast is a function of the lengths that it was told of, unfinished ones counted as longer than they are;
- it follows drift: a prompt's history and a source's lengths forget what is old;
- while nothing has finished it says nothing (0), never a guess.

Lengths of a prompt's samples are lognormal around a level of the prompt, and levels are normal around that of its data
source. With k lengths seen, the level is their mean logarithm, drawn towards the source's by its uncertainty:

    level = (k mean / within + source / between) / (k / within + 1 / between)

with the variances `within` prompts and `between` them estimated from the same lengths.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from rollout_service.scheduler.admission import UNKNOWN, Outlook
from rollout_service.tuning.survival import Survival, kaplan_meier

NUM_RECENT = 4096  # lengths of a source: the p99 of so many has an error of a few percent
NUM_FOR_ESTIMATE = 16  # finished responses of a source before it is trusted rather than the whole
NUM_NEW_FOR_ESTIMATE = 256  # the estimate is made again after so many: it takes a millisecond
HISTORY_GROUPS = 4  # a prompt's history counts at most as so many groups, so that it follows a changing policy
MIN_VARIANCE = 1e-4  # of log lengths: 1 %; less is a task with one length only
ALL_SOURCES = ""
STANDARD = NormalDist()


class _Estimate:
    """The survival estimate of one source, with the expected remainder at every length ready to look up."""

    def __init__(self, survival: Survival) -> None:
        self.survival = survival
        edges = np.concatenate([survival.lengths, [max(survival.longest, int(survival.lengths[-1]))]])
        areas = np.diff(edges) * survival.survival
        self._lengths: list[int] = survival.lengths.tolist()
        self._shares: list[float] = survival.survival.tolist()
        self._areas: list[float] = np.cumsum(areas[::-1])[::-1].tolist()
        self.mean = survival.mean()

    def remaining(self, tokens: int) -> float:
        """Tokens that a response with `tokens` is expected to get; at least one."""
        index = bisect_right(self._lengths, tokens) - 1
        if index < 0:
            return max(1.0, self.mean - tokens)
        alive = self._shares[index]
        if alive <= 0:
            return 1.0
        return max(1.0, self._areas[index] / alive - (tokens - self._lengths[index]))

    def longest_of(self, count: int) -> float:
        """Median of the longest of `count` responses."""
        length = self.survival.quantile(0.5 ** (1 / count))
        return float(self.survival.longest if length is None else length)


@dataclass(slots=True)
class _History:
    """Log lengths of one prompt: their number, sum, and sum of squares; the old ones fade."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, log_length: float, most: float) -> None:
        self.count, self.total = self.count + 1, self.total + log_length
        self.squares += log_length * log_length
        if self.count > most:
            self.count, self.total, self.squares = self.count / 2, self.total / 2, self.squares / 2

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def scatter(self) -> float:
        """Sum of squared distances from the mean."""
        return max(0.0, self.squares - self.total * self.total / self.count)


@dataclass(slots=True)
class _Source:
    """What is known of one data source."""

    lengths: deque[int] = field(default_factory=lambda: deque[int](maxlen=NUM_RECENT))
    unfinished: list[int] = field(default_factory=list[int])
    estimate: _Estimate | None = None
    num_new: int = 0


class LengthForecast:
    """Predictions in tokens; told of every finished response, and once a round of the unfinished ones."""

    def __init__(self, group_samples: int) -> None:
        self._group_samples = group_samples
        self._most_history = float(HISTORY_GROUPS * group_samples)
        self._longest_z = STANDARD.inv_cdf(0.5 ** (1 / group_samples))
        self._prompts: dict[str, _History] = {}
        self._sources: dict[str, _Source] = {ALL_SOURCES: _Source()}
        self._logs = _History()
        self._scatter = 0.0  # within prompts, over those with two lengths or more
        self._freedom = 0.0

    def finished(self, prompt_id: str, data_source: str, num_tokens: int) -> None:
        """A response finished."""
        for name in {data_source, ALL_SOURCES}:
            source = self._sources.setdefault(name, _Source())
            source.lengths.append(num_tokens)
            source.num_new += 1
        log_length = math.log(max(1, num_tokens))
        self._logs.add(log_length, NUM_RECENT)
        history = self._prompts.setdefault(prompt_id, _History())
        before = history.scatter if history.count else 0.0
        fresh = _History(history.count, history.total, history.squares)
        fresh.add(log_length, math.inf)
        if history.count:
            self._scatter += max(0.0, fresh.scatter - before)
            self._freedom += 1
            if self._freedom > NUM_RECENT:
                self._scatter, self._freedom = self._scatter / 2, self._freedom / 2
        history.add(log_length, self._most_history)

    def unfinished(self, lengths: Iterable[tuple[str, int]]) -> None:
        """All unfinished responses with tokens, as (data source, tokens): they replace those told of before."""
        for source in self._sources.values():
            source.unfinished = []
        for data_source, num_tokens in lengths:
            for name in {data_source, ALL_SOURCES}:
                self._sources.setdefault(name, _Source()).unfinished.append(num_tokens)

    def outlook(self, prompt_id: str, data_source: str, prompt_tokens: int) -> Outlook:
        """What a new group of this prompt is expected to be; `UNKNOWN` while nothing has finished."""
        level = self._level(prompt_id)
        if level is not None:
            within = self._within()
            longest = math.exp(level + self._longest_z * math.sqrt(within))
            return Outlook(longest, prompt_tokens + math.exp(level + within / 2))
        estimate = self._estimate(data_source)
        if estimate is None:
            return UNKNOWN
        return Outlook(estimate.longest_of(self._group_samples), prompt_tokens + estimate.mean)

    def remaining(self, prompt_id: str, data_source: str, num_tokens: int) -> float:
        """Tokens that an unfinished response with `num_tokens` is expected to get; 0 while nothing has finished."""
        level = self._level(prompt_id)
        if level is not None:
            return _lognormal_remaining(level, math.sqrt(self._within()), num_tokens)
        estimate = self._estimate(data_source)
        return estimate.remaining(num_tokens) if estimate else 0.0

    def _within(self) -> float:
        """Variance of log lengths within a prompt; of all while no prompt has two."""
        if self._freedom >= 1:
            return max(MIN_VARIANCE, self._scatter / self._freedom)
        return max(MIN_VARIANCE, self._logs.scatter / self._logs.count)

    def _level(self, prompt_id: str) -> float | None:
        history = self._prompts.get(prompt_id)
        if history is None or not history.count:
            return None
        within = self._within()
        between = self._logs.scatter / self._logs.count - within
        if between <= MIN_VARIANCE:
            return self._logs.mean
        own, others = history.count / within, 1 / between
        return (history.mean * own + self._logs.mean * others) / (own + others)

    def _estimate(self, data_source: str) -> _Estimate | None:
        source = self._sources.get(data_source)
        if source is None or len(source.lengths) < NUM_FOR_ESTIMATE:
            source = self._sources[ALL_SOURCES]
        if not source.lengths:
            return None
        if source.estimate is None or source.num_new >= min(NUM_NEW_FOR_ESTIMATE, len(source.lengths) // 2):
            lengths = [*source.lengths, *source.unfinished]
            finished = [True] * len(source.lengths) + [False] * len(source.unfinished)
            source.estimate, source.num_new = _Estimate(kaplan_meier(lengths, finished)), 0
        return source.estimate


def _lognormal_remaining(level: float, sigma: float, num_tokens: int) -> float:
    """Median of what is left of a lognormal length that is known to be above `num_tokens`; at least one."""
    passed = STANDARD.cdf((math.log(num_tokens) - level) / sigma) if num_tokens > 0 else 0.0
    share = passed + (1 - passed) / 2
    if share >= 1.0:
        return max(1.0, float(num_tokens))  # beyond what the model knows: as long again
    return max(1.0, math.exp(level + sigma * STANDARD.inv_cdf(share)) - num_tokens)
