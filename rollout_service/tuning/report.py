"""What a sweep found, as rows for JSON and as sentences for people.

Always true: a number in a row is a measured sum over the counted rounds, never a rounded one; rounding is for tables.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_service.tuning.closed_forms import FullEngine, mean_start_age
from rollout_service.tuning.sweep import Point, PointResult, Scenario, round_limits, speed_up

Row = Mapping[str, Any]

# Columns of the tables for people: title, key of the row, format. Three tables, so that each fits 80 characters.
OUTCOME: tuple[tuple[str, str, str], ...] = (
    ("ratio", "ratio", "g"),
    ("policy", "policy", "s"),
    ("ahead", "lookahead", "d"),
    ("useful\ntok/s", "tokens_per_s", ".0f"),
    ("speed\nup", "speed_up", ".2f"),
    ("of\nceiling", "share_of_ceiling", ".0%"),
    ("bubble", "bubble_share", ".0%"),
    ("off-\npolicy", "off_policy_share", ".0%"),
    ("mean\nlag", "mean_lag", ".2f"),
    ("max\nlag", "largest_lag", "d"),
)
PRICE: tuple[tuple[str, str, str], ...] = (
    ("ratio", "ratio", "g"),
    ("policy", "policy", "s"),
    ("ahead", "lookahead", "d"),
    ("N-th\nfinish", "round_s", ".3g"),
    ("tail\nsaved", "tail_saved_s", ".3g"),
    ("pre-\nfilled\nagain", "reprefilled_tokens", ".0f"),
    ("pre-\nempted", "num_preemptions", ".1f"),
    ("surplus\ngroups", "surplus_groups", ".1f"),
    ("parked\ngroups", "parked_groups", ".1f"),
    ("mixed\nsamples", "mixed_share", ".0%"),
)
BY_LAG: tuple[tuple[str, str, str], ...] = (
    ("ratio", "ratio", "g"),
    ("policy", "policy", "s"),
    ("ahead", "lookahead", "d"),
    ("lag 0, 1, 2, …", "lags", "s"),
)
SAME_SHARE = 0.05  # of a batch: what stayed over differs by as much in a few hundred rounds
MOSTLY_FULL = 0.15  # of slot time idle, at most: then little is left for a ratio to fill
MAX_LAGS_SHOWN = 5  # of the histogram; the last takes the rest


def point_row(result: PointResult, base: PointResult, scenario: Scenario, ceiling: float) -> dict[str, Any]:
    """Everything about one point. Times in seconds, counts a round on average, shares of 1."""
    gain, error = speed_up(result, base)
    fresh = result.total("num_fresh")
    return {
        "ratio": result.point.ratio,
        "policy": policy_name(result.point),
        "admission": result.point.admission.value,
        "order": result.point.order.value,
        "lookahead": result.point.lookahead,
        "max_lag": scenario.max_lag,
        "num_rounds": int(result.total("num_rounds")),
        "tokens_per_s": result.tokens_per_s,
        "speed_up": gain,
        "speed_up_standard_error": None if math.isnan(error) else error,
        "share_of_ceiling": result.tokens_per_s / ceiling,
        "bubble_share": result.bubble_share,
        "off_policy_share": result.off_policy_share,
        "mixed_share": result.mixed_share,
        "mean_lag": result.mean_lag,
        "largest_lag": result.largest_lag,
        "tokens_by_lag": {str(lag): count for lag, count in sorted(result.lags.items())},
        "reprefilled_tokens": result.per_round("reprefilled_tokens"),
        "num_resumes": result.per_round("num_resumes"),
        "num_preemptions": result.per_round("num_preemptions"),
        "surplus_groups": result.per_round("surplus_groups"),
        "parked_groups": result.per_round("parked_groups"),
        "parked_samples": result.per_round("parked_samples"),
        "parked_tokens": result.per_round("parked_tokens"),
        "fresh_prompts": result.per_round("num_fresh"),
        "round_s": result.per_round("generated_s"),
        "tail_saved_s": result.per_round("tail_saved_s"),
        "mean_start_age": result.per_round("start_age"),
        "mean_start_age_closed_form": _start_age_expected(result, scenario),
        "trained_mean_length": result.total("trained_tokens") / result.total("trained_samples"),
        "dispatched_mean_length": (
            result.total("dispatched_tokens") / (fresh * scenario.group_samples) if fresh else None
        ),
    }


def _start_age_expected(result: PointResult, scenario: Scenario) -> float | None:
    """The closed form; None where it does not hold, since fewer or more than N' were in flight as rounds ended."""
    groups = scenario.batch_groups
    target = math.ceil(result.point.ratio * groups)
    stayed = result.per_round("parked_groups") + result.per_round("surplus_groups")
    return mean_start_age(target, groups) if abs(stayed - (target - groups)) <= SAME_SHARE * groups else None


def policy_name(point: Point) -> str:
    """Admission, with the order if it is not the usual one."""
    return point.admission.value if point.order.value == "fifo" else f"{point.admission.value}, {point.order.value}"


def cells(row: Row, columns: Sequence[tuple[str, str, str]]) -> list[str]:
    """One line of a table."""
    counts = {int(lag): count for lag, count in row["tokens_by_lag"].items()}
    total = max(1, sum(counts.values()))
    shares = [counts.get(lag, 0) / total for lag in range(min(MAX_LAGS_SHOWN, max(counts, default=0) + 1))]
    if shares:
        shares[-1] += 1 - sum(shares)
    shown = {
        **row,
        "lags": " ".join(f"{share:.0%}" for share in shares),
    }
    return [format(shown[key], kind) for _, key, kind in columns]


def scenario_row(scenario: Scenario, full: FullEngine) -> dict[str, Any]:
    """What was given, and what holds of a full engine."""
    engine = scenario.engine
    return {
        "lengths": scenario.lengths.name,
        "batch_groups": scenario.batch_groups,
        "group_samples": scenario.group_samples,
        "max_lag": scenario.max_lag,
        "trainer_step_s": scenario.trainer.step_s,
        "install_s": scenario.trainer.install_s,
        "engine": engine.to_json(),
        "full_engine": {
            "slots_per_sample": full.slots_per_sample,
            "rounds_in_engine": full.rounds_in_engine,
            "off_policy_share": full.off_policy_share,
            "mean_lag": full.mean_lag,
            "tokens_per_s": full.ceiling_tokens_per_s,
        },
    }


def share_sentences(scenario: Scenario, full: FullEngine, results: Sequence[PointResult] = ()) -> list[str]:
    """The number that decides how off-policy a full engine is, and what was measured without over-provisioning."""
    samples = scenario.batch_groups * scenario.group_samples
    share = full.slots_per_sample
    sentences = [
        f"Slots / samples in a batch = {scenario.engine.slots} / {samples} = {share:.2f}; the ceiling, an engine fed "
        f"without end, is {full.ceiling_tokens_per_s:.0f} tok/s.",
        f"While the engine is full, a group is in it for {full.rounds_in_engine:.2f} rounds: "
        f"{full.off_policy_share:.0%} of the trained tokens are then off-policy, with a mean lag of "
        f"{full.mean_lag:.2f} (closed form for lookahead 0 and a trainer that takes no time).",
    ]
    if share >= 1:
        sentences.append(
            "All samples of a batch run at once: fewer slots or a larger batch lower the off-policy share of a full "
            "engine, another ratio only trades it for idle slots."
        )
    sentences += [_idle_sentence(result, share) for result in results if result.point.ratio == 1]
    return sentences


def _idle_sentence(result: PointResult, share: float) -> str:
    """What was measured of a batch that nothing is started on top of."""
    idle, point = result.bubble_share, result.point
    passes = f"a batch passes through the slots {1 / share:.1f} times, and " if share < 1 else ""
    where = (
        f"At ratio 1 with {policy_name(point)} and lookahead {point.lookahead} {passes}{idle:.0%} of slot time idles"
    )
    if idle <= MOSTLY_FULL:
        return f"{where}: the engine is full for most of a round without over-provisioning."
    return f"{where} while rounds fill: that is what over-provisioning can win."


def notes(results: Sequence[PointResult], scenario: Scenario) -> list[str]:
    """What a reader of the table should know."""
    found: list[str] = []
    for result in results:
        if result.total("num_preemptions") > 0:
            found.append(
                f"ratio {result.point.ratio:g} ({policy_name(result.point)}) fills the KV cache: "
                f"{result.per_round('num_preemptions'):.1f} preemptions a round"
            )
        if round_limits(scenario, result.point).max_lag <= result.largest_lag and result.largest_lag:
            found.append(
                f"ratio {result.point.ratio:g} ({policy_name(result.point)}) reaches max_lag, groups must finish"
            )
    return found
