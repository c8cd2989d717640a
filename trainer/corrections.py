"""Importance weights of off-policy tokens, and which tokens are left out of the loss.

Always true: a log-ratio, of a token or summed over a span, is clamped to ±20 before it is exponentiated; weights and
masks carry no gradient; a token whose behaviour log-prob is not finite is left out, and nothing is computed from it,
nor does it count among the tokens of a mean ratio; what is left out counts in every mean of the loss as before
(denominators are those of the original mask). A policy whose own log-probs are not finite is not hidden: its tokens
stay, so that the update is noticed and skipped.

Everything works on the response tokens [R] of one micro-batch, in the dtype of its log-probs.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from protocol.settings.algorithm import AlgorithmSettings, Correction, Level
from trainer.spans import Spans, make_spans

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far beyond any cap, and still finite in every dtype in use but float16


def ratio(log_numerator: Tensor, log_denominator: Tensor) -> Tensor:
    """exp(log_numerator - log_denominator), the difference clamped to ±20; all of one shape."""
    return exp_clamped(log_numerator - log_denominator)


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio, of a token or of a span, clamped to ±20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True, slots=True)
class Rejection:
    """Spans of `level` whose estimate of the KL, reduced over their tokens, is out of bounds are left out.

    `k1` bounds the ratio p/b by [lower, upper] (reduced in logarithms: the mean is the geometric mean); `k2` and `k3`
    bound the estimate by `upper`. Hard trust regions by estimator: Liu, Li et al., "When Speed Kills Stability" (2025).
    """

    estimator: Literal["k1", "k2", "k3"]
    level: Level
    reduce: Literal["mean", "sum", "max"]
    lower: float
    upper: float

    def rejected(self, log_ratio: Tensor, usable: Tensor, spans: Spans) -> Tensor:
        """Which tokens [R] are left out; `log_ratio` [R] is log(p/b), and 0 where not `usable`. What is NaN is not."""
        clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        estimate = {
            "k1": lambda: clamped,
            "k2": lambda: 0.5 * clamped.square(),
            "k3": lambda: clamped.exp() - 1 - clamped,
        }[self.estimator]()
        statistic = {
            "mean": lambda: spans.means_over(estimate, usable),
            "sum": lambda: spans.sums(estimate),
            "max": lambda: spans.maxima(estimate),
        }[self.reduce]()  # [K]
        if self.estimator != "k1":
            return spans.spread(statistic > self.upper)
        lower = self.lower or 1 / self.upper
        return spans.spread((statistic < math.log(lower)) | (statistic > math.log(self.upper)))


class Weights(NamedTuple):
    """`weight` [R] that the loss is multiplied by; `raw` [R] the same before cap and band.

    `cut` [R] says where cap or band decided the weight, `keep` [R] which tokens the loss is computed on, `usable` [R]
    whose behaviour log-prob is finite. `total` is the sum of the `num_weights` weights, one for each span, before they
    are normalised.
    """

    weight: Tensor
    raw: Tensor
    cut: Tensor
    keep: Tensor
    usable: Tensor
    total: Tensor
    num_weights: int


@dataclass(frozen=True, slots=True)
class Corrector:
    """Weights p/b at a level, capped (truncated importance sampling: Ionides 2008) or banded (IcePop), and masks.

    As the weight of a decoupled PPO objective: arXiv 2110.00641, and 2505.24298, equation 5. `cap` is infinite where
    nothing is cut; the geometric mean of a span's ratios takes the place of their product if `geometric`.
    """

    level: Level = "token"
    cap: float = math.inf
    band: tuple[float, float] | None = None
    geometric: bool = False
    rejection: Rejection | None = None
    veto: float = 0.0

    @torch.no_grad()
    def weigh(self, numerator: Tensor, behaviour: Tensor, samples: Tensor, versions: Tensor) -> Weights:
        """Weights of tokens from log-probs [R] under the policy to correct to and under that which wrote them."""
        usable = behaviour.isfinite()
        log_ratio = torch.where(usable, numerator - behaviour, torch.zeros_like(numerator))
        spans = make_spans(samples, versions, self.level)
        reduced = spans.means_over(log_ratio, usable) if self.geometric else spans.sums(log_ratio)
        raw = exp_clamped(reduced)  # [K]
        if self.band is None:
            cut = raw > self.cap
            weight = raw.clamp(max=self.cap)
        else:
            cut = (raw < self.band[0]) | (raw > self.band[1])
            weight = raw.masked_fill(cut, 0)
        keep = usable & ~self._left_out(log_ratio, usable, samples, versions)
        return Weights(
            spans.spread(weight), spans.spread(raw), spans.spread(cut), keep, usable, weight.sum(), len(weight)
        )

    def _left_out(self, log_ratio: Tensor, usable: Tensor, samples: Tensor, versions: Tensor) -> Tensor:
        out = torch.zeros_like(log_ratio, dtype=torch.bool)
        if self.rejection is not None:
            out |= self.rejection.rejected(log_ratio, usable, make_spans(samples, versions, self.rejection.level))
        if self.veto > 0:
            sequences = make_spans(samples, versions, "sequence")
            out |= sequences.spread(sequences.any(log_ratio < math.log(self.veto)))
        return out


def make_corrector(algorithm: AlgorithmSettings) -> Corrector:
    """What the settings ask for."""
    chosen = algorithm.rejection
    rejection = None
    if chosen != "none":
        bounds = (algorithm.rejection_lower, algorithm.rejection_upper)
        rejection = Rejection(chosen, algorithm.rejection_level, algorithm.rejection_reduce, *bounds)
    return Corrector(
        level=algorithm.correction_level,
        cap=algorithm.correction_cap or math.inf,
        band=algorithm.correction_band,
        geometric=algorithm.correction_geometric,
        rejection=rejection,
        veto=algorithm.veto,
    )


def interpolated_proximal(
    logprobs: Tensor, behaviour: Tensor, versions: Tensor, held_version: int, progress: float
) -> Tensor:
    """Proximal log-probs without a forward pass: log b + α (log π − log b), α = (v_p − v_b)/(v_π − v_b); all [R].

    AReaL's `loglinear` form (its documentation, "Proximal Log-Probability Approximation"; the decoupled objective is
    arXiv 2505.24298). Here v_p is the version that the trainer holds and v_π = v_p + `progress`, the share of the
    step's updates that are made. Before the first update π is p, and a token of lag 0 was written by p.
    """
    current = logprobs.detach()
    if progress == 0:
        return current
    lag = (held_version - versions).clamp(min=0).to(current.dtype)
    usable = torch.where(behaviour.isfinite(), behaviour, current)
    return usable + lag / (lag + progress) * (current - usable)


CORRECTS = frozenset({Correction.BEHAVIOUR, Correction.DECOUPLED})  # those that look at behaviour log-probs
