"""Recommendations: from results made by hand, and from simulations of tails that are long, short, or no use."""

from collections import Counter
from dataclasses import replace

import pytest

from protocol.errors import SettingsError
from rollout_service.tuning.closed_forms import draw_prompts, full_engine
from rollout_service.tuning.engine_model import EngineModel
from rollout_service.tuning.length_specs import parse_lengths
from rollout_service.tuning.lengths import FlatLengths, SpecLengths
from rollout_service.tuning.plots import html_page, write_png
from rollout_service.tuning.recommend import UserLimits, base_of, recommend
from rollout_service.tuning.report import OUTCOME, PRICE, cells, notes, point_row, share_sentences
from rollout_service.tuning.simulation import TrainerModel
from rollout_service.tuning.student import t_95
from rollout_service.tuning.sweep import PartResult, Point, PointResult, Scenario, half_band, speed_up, sweep


def part(rate: float, off_policy: float, lag: int = 1, **changes) -> PartResult:
    """One second of a point."""
    values = dict.fromkeys(PartResult.__dataclass_fields__, 0) | {
        "wall_s": 1.0,
        "num_rounds": 10,
        "trained_tokens": int(rate),
        "trained_samples": 100,
        "tokens_by_lag": Counter({0: round(rate * (1 - off_policy)), lag: round(rate * off_policy)}),
        "slot_s": 1.0,
        "idle_slot_s": 0.4,
        "seed": 0,
    }
    return PartResult(**(values | changes))


def point(ratio: float, rate: float, off_policy: float, lag: int = 1, lookahead: int = 0, **changes) -> PointResult:
    """Four parts that differ by a hair."""
    parts = tuple(part(rate * (1 + 0.001 * k), off_policy, lag, **changes) for k in range(4))
    return PointResult(Point(ratio, lookahead=lookahead), 16, parts)


TABLE = (point(1, 1000, 0), point(1.25, 1300, 0.3), point(1.5, 1400, 0.5, 2), point(2, 1420, 0.75, 3))


def test_the_least_off_policy_of_the_fast_ones() -> None:
    found = recommend(TABLE, UserLimits(), 1500)
    assert found.point.ratio == 1.5, "2 is faster by less than is worth it"
    assert found.gain == pytest.approx(1.4, rel=1e-3)
    assert found.gain_low <= found.gain <= found.gain_high
    assert found.reason.count(". ") == 1
    assert found.reason.endswith(".")
    assert "40%" in found.reason


def test_limits_are_kept_and_named() -> None:
    assert recommend(TABLE, UserLimits(max_off_policy_share=0.4), 1500).point.ratio == 1.25
    assert "over your limit of 40.0%" in recommend(TABLE, UserLimits(max_off_policy_share=0.4), 1500).reason
    assert recommend(TABLE, UserLimits(max_lag=1), 1500).point.ratio == 1.25
    only_one = recommend(TABLE, UserLimits(max_off_policy_share=0.1), 1500)
    assert only_one.point.ratio == 1
    assert "breaks your limits" in only_one.reason


def test_a_limit_that_no_point_meets_is_named_with_its_distance() -> None:
    ahead = [point(1, 1000, 0.98, lookahead=1), point(1.5, 1200, 0.99, 2, lookahead=1)]
    with pytest.raises(
        SettingsError, match=r"ratio 1 .*off-policy share of 98.0% is over your limit of 50.0%"
    ) as raised:
        recommend(ahead, UserLimits(max_off_policy_share=0.5), 1500)
    assert raised.value.exit_code == 2


def test_preemptions_are_refused_unless_they_are_allowed() -> None:
    greedy = (*TABLE[:2], point(3, 1600, 0.9, 4, num_preemptions=50))
    assert recommend(greedy, UserLimits(), 1700).point.ratio == 1.25
    assert recommend(greedy, UserLimits(kv_room=False), 1700).point.ratio == 3


def test_noise_is_no_gain() -> None:
    noisy = point(1.5, 1050, 0.5)
    parts = tuple(replace(p, wall_s=w) for p, w in zip(noisy.parts, (0.8, 1.2, 0.7, 1.3), strict=True))
    assert recommend((TABLE[0], replace(noisy, parts=parts)), UserLimits(), 1500).point.ratio == 1


def test_a_band_is_students_and_draws_of_prompts_are_not_averaged() -> None:
    base = point(1, 1000, 0)
    rates = (1100, 1200, 1300, 1400)
    seeds = PointResult(Point(1.5), 16, tuple(part(rate, 0.5) for rate in rates))
    base = replace(base, parts=tuple(part(1000, 0) for _ in rates))
    spread = 0.12909944  # of 1.1, 1.2, 1.3, 1.4
    assert speed_up(seeds, base)[1] == pytest.approx(spread / 2)
    assert half_band(seeds, base) == pytest.approx(3.182 * spread / 2, rel=1e-3)
    drawn = replace(seeds, drawn_again=True)
    assert speed_up(drawn, base)[1] == pytest.approx(spread)
    assert half_band(drawn, base) == pytest.approx(3.182 * spread, rel=1e-3)
    assert recommend((base, seeds), UserLimits(), 1500).point.ratio == 1.5
    unsure = recommend((base, drawn), UserLimits(), 1500)
    assert unsure.point.ratio == 1, "a gain of 25 % with a band of 41 % to each side may be none"
    assert "by no more than noise" in unsure.reason
    assert half_band(replace(seeds, parts=seeds.parts[:1]), replace(base, parts=base.parts[:1])) == 0


def test_students_quantile_falls_to_the_normal_ones() -> None:
    widths = [t_95(num) for num in range(2, 40)]
    assert widths == sorted(widths, reverse=True)
    assert t_95(4) == 3.182
    assert 1.96 < widths[-1] < 2.14
    with pytest.raises(ValueError, match="not known"):
        t_95(1)


def test_only_observed_prompts_are_drawn_again() -> None:
    spec = SpecLengths("x", parse_lengths("lognormal:median=30,sigma=0.8"))
    observed = FlatLengths("x", (10, 20, 400), (0,))
    for lengths, bootstrap, expected in ((spec, True, False), (observed, True, True), (observed, False, False)):
        scenario = Scenario(lengths, EngineModel(8), TrainerModel(), 2, 2, bootstrap=bootstrap)
        (found,) = sweep(scenario, [Point(1.0)], 8, num_processes=1)
        assert found.drawn_again is expected


def test_no_lag_bound_never_binds() -> None:
    spec = "0.97*lognormal:median=20,sigma=0.1+0.03*lognormal:median=3000,sigma=0"
    scenario = Scenario(SpecLengths(spec, parse_lengths(spec)), EngineModel(64), TrainerModel(), 2, 2)
    (found,) = sweep(scenario, [Point(2.0)], 400, num_processes=1)
    assert found.largest_lag > 16, "responses that take many rounds are waited for by nobody"
    row = point_row(found, found, scenario, 1.0)
    assert row["max_lag"] is None
    assert not any("reaches max_lag" in note for note in notes([found], scenario))


def test_the_mean_start_age_has_a_closed_form_only_where_all_groups_start() -> None:
    spec = "lognormal:median=50,between=0.8,within=0.6,max=1000"
    lengths = SpecLengths(spec, parse_lengths(spec))
    for slots, holds in ((4, False), (64, True)):
        scenario = Scenario(lengths, EngineModel(slots), TrainerModel(), 8, 4)
        (found,) = sweep(scenario, [Point(2.0)], 120, num_processes=1)
        row = point_row(found, found, scenario, 1.0)
        assert (row["mean_start_age_closed_form"] is not None) == holds
        assert (row["mean_start_age"] == pytest.approx(1, abs=0.1)) == holds


def test_what_is_said_of_idle_slots_is_what_was_measured() -> None:
    for spec, slots, full in (
        ("lognormal:median=100,between=0.8,within=0.6,max=4096", 16, False),
        ("lognormal:median=100,sigma=0.1", 4, True),
    ):
        scenario, results, forms = swept(spec, slots)
        said = " ".join(share_sentences(scenario, forms, results))
        assert f"{results[0].bubble_share:.0%} of slot time" in said
        assert ("full for most of a round" in said) == full
        assert (results[0].bubble_share < 0.15) == full


def swept(spec: str, slots: int, ratios: tuple[float, ...] = (1, 1.25, 1.5, 2), groups: int = 8):
    """A small sweep in this process, and the scenario."""
    lengths = SpecLengths(spec, parse_lengths(spec))
    scenario = Scenario(lengths, EngineModel(slots), TrainerModel(), groups, 4)
    done = {r.point.ratio: r for r in sweep(scenario, [Point(ratio) for ratio in ratios], 80, num_processes=1)}
    prompts = draw_prompts(lengths.workload(0, bootstrap=False), 4, 500)
    return scenario, [done[ratio] for ratio in ratios], full_engine(scenario.engine, prompts, groups)


@pytest.mark.parametrize(
    ("spec", "slots", "reason"),
    [
        ("lognormal:median=100,sigma=0.02", 32, "1.0 is best here"),
        ("lognormal:median=100,sigma=0", 32, "1.0 is best here"),
        ("lognormal:median=60,sigma=0.4", 2, "of what it gives when fed without end"),
    ],
)
def test_a_short_tail_or_a_full_engine_wants_ratio_1(spec: str, slots: int, reason: str) -> None:
    _, results, full = swept(spec, slots)
    found = recommend(results, UserLimits(), full.ceiling_tokens_per_s)
    assert found.point.ratio == 1
    assert reason in found.reason


def test_a_long_tail_wants_more_and_reports_agree_with_each_other(tmp_path) -> None:
    scenario, results, full = swept("lognormal:median=60,sigma=1.2,max=2000", 32)
    found = recommend(results, UserLimits(), full.ceiling_tokens_per_s)
    assert found.point.ratio > 1
    assert found.gain > 1.1
    rows = [point_row(r, base_of(results), scenario, full.ceiling_tokens_per_s) for r in results]
    assert rows[0]["speed_up"] == 1
    for row, result in zip(rows, results, strict=True):
        assert row["speed_up"] == pytest.approx(row["tokens_per_s"] / rows[0]["tokens_per_s"])
        assert sum(row["tokens_by_lag"].values()) == result.total("trained_tokens")
        assert 0 <= row["bubble_share"] <= 1
        assert row["share_of_ceiling"] < 1.02
        assert len(cells(row, OUTCOME)) == len(OUTCOME)
        assert len(cells(row, PRICE)) == len(PRICE)
    assert rows[0]["off_policy_share"] == 0
    assert "= 1.00" in share_sentences(scenario, full)[0]
    page = html_page(rows, "a <b> title", ["x < y"])
    assert "a &lt;b&gt; title" in page
    assert "http" not in page, "the page loads nothing"
    assert page.count("<circle") == len(rows) + 1
    write_png(rows, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_processes_change_nothing_but_the_time() -> None:
    lengths = SpecLengths("x", parse_lengths("lognormal:median=30,sigma=0.8"))
    scenario = Scenario(lengths, EngineModel(16), TrainerModel(), 4, 2)
    points = [Point(1.0), Point(1.5)]
    alone = {r.point: r for r in sweep(scenario, points, 40, num_processes=1)}
    together = {r.point: r for r in sweep(scenario, points, 40, num_processes=2)}
    assert alone == together
    gain, error = speed_up(alone[points[1]], alone[points[0]])
    assert gain > 1
    assert error < 0.2
