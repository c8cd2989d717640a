"""How long responses are, counted with those that are not finished.

A parked response is known to be longer than what it has (right-censored). Leaving it out makes long responses look
rarer than they are. The estimate of Kaplan and Meier (J. Am. Stat. Assoc. 53, 1958) uses both: with d(t) responses that
finished with t tokens and n(t) that had at least t,

    S(t) = product over u <= t of (1 - d(u) / n(u))      share of responses longer than t tokens

Bands are Greenwood's variance on the log(-log) scale, which keeps them between 0 and 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.errors import DataError

Z_95 = 1.959964  # quantile of the normal distribution for two-sided bands of 95 %

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Survival:
    """S at the lengths at which responses finished; it is constant between them, and 1 before the first.

    lengths [K] i64, ascending; survival, lower, upper [K] f64: S there and its band of 95 %.
    """

    lengths: npt.NDArray[np.int64]
    survival: Floats
    lower: Floats
    upper: Floats
    num_finished: int
    num_censored: int
    longest: int

    def at(self, tokens: int) -> float:
        """Share of responses longer than `tokens`."""
        index = int(np.searchsorted(self.lengths, tokens, side="right")) - 1
        return 1.0 if index < 0 else float(self.survival[index])

    def quantile(self, share: float) -> int | None:
        """Length that `share` of the responses don't pass; None if too many are unfinished to know."""
        reached = np.flatnonzero(self.survival <= 1 - share + 1e-12)
        return int(self.lengths[reached[0]]) if len(reached) else None

    def mean(self) -> float:
        """Mean length, as if no response were longer than the longest that was seen."""
        return self._area(0)

    def expected_remaining(self, tokens: int) -> float:
        """Tokens that a response with `tokens` is expected to get, up to the longest that was seen; at least one."""
        alive = self.at(tokens)
        return max(1.0, self._area(tokens) / alive) if alive > 0 else 1.0

    def _area(self, start: int) -> float:
        """Integral of S from `start` to the longest response seen."""
        later = self.lengths > start
        edges = np.concatenate([[start], self.lengths[later], [max(self.longest, start)]])
        heights = np.concatenate([[self.at(start)], self.survival[later]])
        return float(np.sum(np.diff(edges) * heights))


def kaplan_meier(lengths: Sequence[int], finished: Sequence[bool]) -> Survival:
    """The estimate from `lengths` [S] in tokens, and whether each finished. Raises DataError if none did."""
    tokens = np.asarray(lengths, np.int64)
    done = np.asarray(finished, bool)
    if not done.any():
        raise DataError("no response has finished: lengths can't be estimated from unfinished ones alone")
    distinct, deaths = np.unique(tokens[done], return_counts=True)
    ordered = np.sort(tokens)
    at_risk = len(ordered) - np.searchsorted(ordered, distinct, side="left")
    survival: Floats = np.cumprod(1 - deaths / at_risk, dtype=np.float64)
    lower, upper = _bands(survival, deaths, at_risk)
    return Survival(distinct, survival, lower, upper, int(done.sum()), int((~done).sum()), int(ordered[-1]))


def _bands(survival: Floats, deaths: npt.NDArray[np.int64], at_risk: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    left = at_risk - deaths
    greenwood: Floats = np.cumsum(deaths / (at_risk * np.maximum(left, 1)), dtype=np.float64)
    inside = (survival > 0) & (survival < 1)
    safe = np.where(inside, survival, 0.5)
    width = Z_95 * np.sqrt(greenwood) / np.abs(np.log(safe))
    lower = np.where(inside, safe ** np.exp(width), survival)
    upper = np.where(inside, safe ** np.exp(-width), survival)
    return lower, upper
