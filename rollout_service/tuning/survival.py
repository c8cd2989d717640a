"""How long responses are, counted with those that are not finished.

A parked response is known to be longer than what it has (right-censored). Leaving it out makes long responses look
rarer than they are. The estimate of Kaplan and Meier (J. Am. Stat. Assoc. 53, 1958) uses both: with d(t) responses that
finished with t tokens and n(t) that had at least t,

    S(t) = product over u <= t of (1 - d(u) / n(u))      share of responses longer than t tokens

Bands are on the log(-log) scale, which keeps them between 0 and 1. The variance of log S is Greenwood's where samples
are independent. Those of one prompt are alike, so where the prompts are known it is the sum over prompts of the squared
sum of the influences of their samples (Williams, Biometrics 51, 1995; Ying and Wei, J. Multivar. Anal. 50, 1994). With
A(t) = sum over u <= t of d(u) / (n(u) (n(u) - d(u))), a response of length x has on log S(t) the influence

    A(t)                  if it is longer than t
    A(x)                  if it was last seen with x <= t tokens
    A(x-) - 1 / n(x)      if it finished with x <= t tokens,        A(x-): A just before x

and the squares of single samples add up to Greenwood's variance exactly.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.errors import DataError

Z_95 = 1.959964  # quantile of the normal distribution for two-sided bands of 95 %

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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


def kaplan_meier(
    lengths: Sequence[int], finished: Sequence[bool], prompts: Sequence[Hashable] | None = None
) -> Survival:
    """The estimate from `lengths` [S] in tokens, and whether each finished. Raises DataError if none did.

    `prompts` [S]: which samples are alike; None: they are independent.
    """
    tokens = np.asarray(lengths, np.int64)
    done = np.asarray(finished, bool)
    if not done.any():
        raise DataError("no response has finished: lengths can't be estimated from unfinished ones alone")
    distinct, deaths = np.unique(tokens[done], return_counts=True)
    ordered = np.sort(tokens)
    at_risk = len(ordered) - np.searchsorted(ordered, distinct, side="left")
    survival: Floats = np.cumprod(1 - deaths / at_risk, dtype=np.float64)
    variance = _greenwood(deaths, at_risk)
    if prompts is not None:
        variance = _clustered(tokens, done, _numbered(prompts), distinct, at_risk, variance)
    lower, upper = _bands(survival, variance)
    return Survival(distinct, survival, lower, upper, int(done.sum()), int((~done).sum()), int(ordered[-1]))


def _greenwood(deaths: Ints, at_risk: Ints) -> Floats:
    """Variance of log S of independent samples [K]: A above, up to where nobody is left."""
    return np.cumsum(deaths / (at_risk * np.maximum(at_risk - deaths, 1)), dtype=np.float64)


def _numbered(prompts: Sequence[Hashable]) -> Ints:
    numbers: dict[Hashable, int] = {}
    return np.asarray([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], np.int64)


def _clustered(
    tokens: Ints, done: npt.NDArray[np.bool_], prompts: Ints, distinct: Ints, at_risk: Ints, summed: Floats
) -> Floats:
    """Variance of log S [K] with samples of one prompt alike; `summed` [K]: A at the distinct lengths.

    A prompt's influence at t is m A(t) + B, with m of its samples longer than t and B from the others. So the sum of
    squares is A(t)^2 P + 2 A(t) Q + R, where P, Q, R sum m^2, m B and B^2 over prompts, and each sample changes them
    once: at its own length.
    """
    before = np.concatenate([[0.0], summed])  # A before each distinct length, and after the last
    where = np.searchsorted(distinct, tokens, side="left")  # of a finished one: its own length
    ended = np.where(
        done,
        before[where] - 1 / at_risk[np.minimum(where, len(at_risk) - 1)],
        before[np.searchsorted(distinct, tokens, side="right")],
    )
    order = np.lexsort((tokens, prompts))
    sizes = np.bincount(prompts)
    firsts = np.repeat(np.cumsum(sizes) - sizes, sizes)  # [S], in `order`: where the prompt's samples begin
    longer = np.repeat(sizes, sizes) - (np.arange(len(tokens)) - firsts)  # m before each sample ends
    own = ended[order]
    running = np.concatenate([[0.0], np.cumsum(own)])
    others = running[:-1] - running[firsts]  # B before each sample ends
    changes = np.stack(
        [1.0 - 2.0 * longer, (longer - 1) * (others + own) - longer * others, own * (2 * others + own)]
    )  # of P, Q, R [3, S]
    in_time = np.argsort(tokens[order], kind="stable")
    start = np.array([[float(np.sum(sizes.astype(np.float64) ** 2))], [0.0], [0.0]])
    sums = np.concatenate([start, start + np.cumsum(changes[:, in_time], axis=1)], axis=1)
    squared, mixed, rest = sums[:, np.searchsorted(tokens[order][in_time], distinct, side="right")]
    return np.maximum(summed**2 * squared + 2 * summed * mixed + rest, 0.0)


def _bands(survival: Floats, variance: Floats) -> tuple[Floats, Floats]:
    """Lower and upper [K], from the variance of log S."""
    inside = (survival > 0) & (survival < 1)
    safe = np.where(inside, survival, 0.5)
    width = Z_95 * np.sqrt(variance) / np.abs(np.log(safe))
    lower = np.where(inside, safe ** np.exp(width), survival)
    upper = np.where(inside, safe ** np.exp(-width), survival)
    return lower, upper
