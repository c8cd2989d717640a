"""Which ratio, policy and lookahead to take, and why.

Always true:
- only points that keep the user's limits are recommended; if none does, the limit that is missed by least is named;
- ratio 1 is recommended unless something is faster by more than noise and by more than is worth its price;
- among points that are about as fast, the one with the least off-policy share is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import SettingsError
from protocol.settings import smallest_max_lag
from rollout_service.tuning.report import policy_name
from rollout_service.tuning.sweep import Point, PointResult, half_band, speed_up

WORTH = 0.03  # a gain below this is not worth off-policy data: runs differ by as much from day to day
AS_FAST = 0.02  # points within this of the fastest count as fast
FULL_ENGINE = 0.93  # of the ceiling: ratio 1 leaves nothing to gain
MAX_PREEMPTED_SHARE = 0.01  # of samples: beyond this the KV cache, not the slots, bounds the engine


@dataclass(frozen=True, slots=True)
class UserLimits:
    """What the user bears; None is no limit. `kv_room`: refuse what makes the engine preempt."""

    max_off_policy_share: float | None = None
    max_mean_lag: float | None = None
    max_lag: int | None = None
    kv_room: bool = True


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A point, what it gains over ratio 1 without lookahead (band of 95 %, over what), and two sentences."""

    point: Point
    gain: float
    gain_low: float
    gain_high: float
    over: str
    off_policy_share: float
    reason: str
    base: str


def base_of(results: Sequence[PointResult]) -> PointResult:
    """What gains are against: ratio 1, the plainest policy, the least lookahead."""
    return min(results, key=lambda r: (r.point.ratio, r.point.lookahead, r.point.admission != "fixed"))


def recommend(results: Sequence[PointResult], limits: UserLimits, ceiling: float) -> Recommendation:
    """The best point within the limits. Raises SettingsError that names the limit which no point meets."""
    base = base_of(results)
    allowed = [result for result in results if not _excess(result, limits)]
    if not allowed:
        raise SettingsError(_nothing_fits(results, limits))
    plain = min(allowed, key=lambda r: (r.point.ratio, r.off_policy_share, -r.tokens_per_s))
    fastest = max(allowed, key=lambda r: r.tokens_per_s)
    as_fast = [r for r in allowed if r.tokens_per_s >= (1 - AS_FAST) * fastest.tokens_per_s]
    best = min(as_fast, key=lambda r: (round(r.off_policy_share, 3), r.mean_lag, r.point.ratio))
    gain, _ = speed_up(best, plain)
    if best is not plain and gain - 1 < max(WORTH, half_band(best, plain)):
        best = plain
    return _recommendation(best, plain, base, results, limits, ceiling)


def _recommendation(
    best: PointResult,
    plain: PointResult,
    base: PointResult,
    results: Sequence[PointResult],
    limits: UserLimits,
    ceiling: float,
) -> Recommendation:
    gain, _ = speed_up(best, base)
    band = half_band(best, base)
    why = (
        _why_plain(best, results, limits, ceiling)
        if best is plain and best.point.ratio == 1
        else _why(best, base, results, limits)
    )
    against = f"ratio {base.point.ratio:g} with lookahead {base.point.lookahead}"
    over = "prompts drawn again" if best.drawn_again else "other random numbers"
    return Recommendation(best.point, gain, gain - band, gain + band, over, best.off_policy_share, why, against)


def _why(best: PointResult, base: PointResult, results: Sequence[PointResult], limits: UserLimits) -> str:
    first = (
        f"At ratio 1 the engine's slots are idle for {base.bubble_share:.0%} of the time, waiting for the tail; ratio "
        f"{best.point.ratio:g} with {policy_name(best.point)} and lookahead {best.point.lookahead} leaves "
        f"{best.bubble_share:.0%}, for {best.off_policy_share:.0%} off-policy tokens."
    )
    if best.point.ratio == 1:
        first = (
            f"1.0 is best here: lookahead {best.point.lookahead} lets rounds go on while the trainer works, for "
            f"{best.off_policy_share:.0%} off-policy tokens, and over-provisioning on top is not worth its price."
        )
    faster = max(results, key=lambda r: r.tokens_per_s)
    gain, _ = speed_up(faster, best)
    if gain - 1 < AS_FAST:
        second = "Nothing that was tried is faster by more than noise."
    elif excess := _excess(faster, limits):
        second = f"Ratio {faster.point.ratio:g} would be {gain - 1:.0%} faster, but {excess[0][1]}."
    else:
        second = (
            f"Ratio {faster.point.ratio:g} is only {gain - 1:.0%} faster, for {faster.off_policy_share:.0%} off-policy."
        )
    return f"{first} {second}"


def _why_plain(best: PointResult, results: Sequence[PointResult], limits: UserLimits, ceiling: float) -> str:
    fastest = max(results, key=lambda r: r.tokens_per_s)
    gain, _ = speed_up(fastest, best)
    share = best.tokens_per_s / ceiling
    if share >= FULL_ENGINE:
        first = (
            f"1.0 is best here: at ratio 1 the engine already gives {share:.0%} of what it gives when fed without end."
        )
    elif gain - 1 < WORTH:
        first = (
            f"1.0 is best here: no ratio is faster by {WORTH:.0%} or more, since idle slots "
            f"({best.bubble_share:.0%} of the time) are not what bounds this run."
        )
    elif all(_excess(r, limits) for r in results if speed_up(r, best)[0] - 1 >= WORTH):
        first = "1.0 is best here: all that is faster breaks your limits."
    else:
        first = "1.0 is best here: what is faster within your limits is so by no more than noise."
    if fastest is best:
        return f"{first} Nothing that was tried is faster."
    second = f"The fastest that was tried, ratio {fastest.point.ratio:g}, gains {gain - 1:+.1%} for "
    return f"{first} {second}{fastest.off_policy_share:.0%} off-policy tokens."


def recommendation_json(found: Recommendation) -> dict[str, Any]:
    """As plain data."""
    return {
        "ratio": found.point.ratio,
        "admission": found.point.admission.value,
        "order": found.point.order.value,
        "lookahead": found.point.lookahead,
        "gain": found.gain,
        "gain_95_percent": [found.gain_low, found.gain_high],
        "off_policy_share": found.off_policy_share,
        "reason": found.reason,
    }


def recommendation_sentences(found: Recommendation) -> list[str]:
    """The settings to write down, what they gain, and why."""
    point = found.point
    needed = smallest_max_lag(point.ratio, point.lookahead)
    return [
        f'Recommended: rollout.ratio = {point.ratio:g}, rollout.admission = "{point.admission.value}", rollout.order = '
        f'"{point.order.value}", rollout.lookahead = {point.lookahead} (needs rollout.max_lag >= {needed}).',
        f"Expected: {found.gain:.2f} times the throughput of {found.base} (95 % band {found.gain_low:.2f} to "
        f"{found.gain_high:.2f}, over {found.over}), {found.off_policy_share:.0%} off-policy tokens.",
        found.reason,
    ]


def _excess(result: PointResult, limits: UserLimits) -> list[tuple[float, str]]:
    """Limits that a point breaks: by how much in units of the limit, and in words."""
    broken: list[tuple[float, str]] = []
    bounds = (
        (limits.max_off_policy_share, result.off_policy_share, "off-policy share", ".1%"),
        (limits.max_mean_lag, result.mean_lag, "mean lag", ".2f"),
        (limits.max_lag, result.largest_lag, "largest lag", ".0f"),
    )
    for bound, value, name, kind in bounds:
        if bound is not None and value > bound:
            text = f"its {name} of {value:{kind}} is over your limit of {bound:{kind}}"
            broken.append(((value - bound) / max(bound, 1e-9), text))
    preempted = result.total("num_preemptions") / result.total("trained_samples")
    if limits.kv_room and preempted > MAX_PREEMPTED_SHARE:
        text = f"it preempts {preempted:.1%} of the samples for want of KV cache (at most {MAX_PREEMPTED_SHARE:.0%})"
        broken.append((preempted / MAX_PREEMPTED_SHARE - 1, text))
    return broken


def _nothing_fits(results: Sequence[PointResult], limits: UserLimits) -> str:
    nearest = min(results, key=lambda r: max(excess for excess, _ in _excess(r, limits)))
    _, text = max(_excess(nearest, limits))
    point = nearest.point
    return (
        f"no ratio that was tried keeps your limits: the nearest is ratio {point.ratio:g} with {policy_name(point)} "
        f"and lookahead {point.lookahead}, and {text}; raise that limit, or lower the lookahead"
    )
