"""Pictures as pure functions of what is remembered."""

import json
import math
import random

import pytest

from protocol.watching import Steps, Tail, Timeline
from rollout_service.watch import steps as steps_module
from rollout_service.watch.as_trace import trace_of
from rollout_service.watch.moments import moments
from rollout_service.watch.steps import StepHistory
from rollout_service.watch.tail import MAX_CURVE, curve, tail
from rollout_service.watch.timeline import timeline, timeline_json
from tests.rollout_service.watch.lines import attempt, moment, round_line, score, watch_of


def resumed_run():
    """Two rounds; g1.000 was parked after the first and finished by another version in the second."""
    return watch_of(
        attempt("g0.000", 7, started_at=101.1, ended_at=101.4),
        score("g0.000", 1.0),
        attempt("g1.000", 10, end="parked", started_at=101.2, ended_at=102.0),
        round_line(1),
        {"kind": "install", "version": 1, "started_at": 102.0, "ended_at": 102.1},
        {"kind": "trained", "step": 1, "at": 102.0},
        attempt("g1.000", 5, before=10, round_number=2, started_at=102.2, ended_at=102.9, version=1),
        round_line(2),
    )


def test_timeline_shows_a_resumed_sample_as_one_bar_of_two_versions() -> None:
    picture = timeline(resumed_run().view(105.0))
    by_name = {bar.sample: bar for bar in picture.samples}
    stays = by_name["g1.000"].attempts
    assert [(stay.how, stay.before, [s.version for s in stay.segments]) for stay in stays] == [
        ("parked", 0, [0]),
        ("stop", 10, [1]),
    ]
    assert by_name["g0.000"].reward == 1.0
    assert [span.round for span in picture.rounds] == [1, 2]
    assert [(i.version, i.start) for i in picture.installs] == [(1, 102.0)]
    assert picture.trained == [(1, 102.0)]


def test_timeline_shows_what_runs_now() -> None:
    view = resumed_run().view(
        105.0,
        round_line(3, offered_at=None, bubble_share=None),
        (
            attempt("g1.000", 2, before=15, end="running", started_at=104.0, ended_at=105.0, version=2),
            attempt("g7.000", 0, end="running", started_at=104.5, ended_at=105.0),
        ),
    )
    picture = timeline(view)
    assert picture.rounds[-1].offered_at is None
    running = {bar.sample: bar.attempts[-1] for bar in picture.samples if bar.attempts[-1].how == "running"}
    assert set(running) == {"g1.000", "g7.000"}
    assert running["g7.000"].segments == []
    assert len(next(bar for bar in picture.samples if bar.sample == "g1.000").attempts) == 3


def test_timeline_is_bounded_by_rounds_and_by_samples() -> None:
    view = resumed_run().view(105.0)
    last = timeline(view, num_rounds=1)
    assert [bar.sample for bar in last.samples] == ["g1.000"]  # g0 had ended before the second round began
    few = timeline(view, max_samples=1)
    assert [bar.sample for bar in few.samples] == ["g1.000"]
    assert few.num_left_out == 1
    assert timeline(view, max_samples=0).samples == []


def test_an_empty_run_has_empty_pictures() -> None:
    view = watch_of().view(105.0)
    assert timeline(view).samples == []
    empty = tail(view)
    assert (empty.num_finished, empty.tokens.p50, empty.survival, empty.dispatched_tokens) == (0, None, [], None)
    assert moments(view).series == {}
    assert StepHistory().picture() == Steps(steps=[], series={})


def test_pictures_read_back_from_their_json() -> None:
    view = resumed_run().view(105.0)
    for kind, picture in ((Timeline, timeline(view)), (Tail, tail(view))):
        text = picture.model_dump_json(warnings=False)
        assert kind.model_validate_json(text).model_dump_json() == text
        assert not any(isinstance(v, float) and math.isnan(v) for v in json.loads(text).values())


def test_json_in_slices_is_the_same_json() -> None:
    watch = watch_of(
        *(attempt(f"g{i}.000", i, source="<b>&\u0000ü") for i in range(1300)), round_line(1, started_at=1.0)
    )
    for most in (0, 1, 500, 1300):
        picture = timeline(watch.view(105.0), max_samples=most)
        assert json.loads(timeline_json(picture)) == json.loads(picture.model_dump_json(warnings=False))
        assert len(Timeline.model_validate_json(timeline_json(picture)).samples) == most


def lognormal_run(num_samples: int = 3000, cap: int = 400):
    """Samples of lognormal length, of which those that reach `cap` are parked there."""
    rng = random.Random(3)
    lengths = [max(1, round(math.exp(rng.gauss(4, 1)))) for _ in range(num_samples)]
    return lengths, watch_of(
        *(
            attempt(f"g{i // 2}.{i % 2:03d}", min(length, cap), end="stop" if length < cap else "parked")
            for i, length in enumerate(lengths)
        ),
        n=2,
    )


def test_the_tail_counts_what_is_parked_as_longer() -> None:
    lengths, watch = lognormal_run()
    picture = tail(watch.view(200.0))
    ordered = sorted(lengths)
    assert picture.num_unfinished == sum(length >= 400 for length in lengths)
    assert picture.survival_tokens.p50 == pytest.approx(ordered[len(ordered) // 2], abs=1)
    assert picture.survival_tokens.p90 == pytest.approx(ordered[int(len(ordered) * 0.9)], rel=0.02)
    assert picture.tokens.p90 < picture.survival_tokens.p90  # finished ones alone look shorter than they are
    assert picture.dispatched_tokens > picture.trained_tokens
    for tokens, share, lower, upper in picture.survival:
        truth = sum(length > tokens for length in lengths) / len(lengths)
        assert share == pytest.approx(truth, abs=1e-3)
        assert lower <= share <= upper


def test_curves_are_thinned_on_a_log_grid_and_stay_complementary_distributions() -> None:
    _, watch = lognormal_run(20_000, cap=10**9)
    picture = tail(watch.view(200.0))
    for found in (picture.token_curve, picture.trained_curve, [(t, s) for t, s, _, _ in picture.survival]):
        assert 20 < len(found) <= MAX_CURVE
        assert [x for x, _ in found] == sorted({x for x, _ in found})
        shares = [share for _, share in found]
        assert shares == sorted(shares, reverse=True)
        assert shares[-1] == 0.0
    assert curve([5.0, 5.0, 5.0]) == [(5.0, 0.0)]
    assert curve([1.0, 2.0]) == [(1.0, 0.5), (2.0, 0.0)]


def test_the_tail_says_what_lengths_are_worth_and_who_is_always_slow() -> None:
    lines = []
    for group in range(40):
        slow = group % 20 == 0
        prompt = "p-slow" if slow else f"p{group}"
        for index in range(2):
            sample = f"g{group}.{index:03d}"
            tokens = 300 if slow else 10 + group
            lines.append(attempt(sample, tokens, prompt=prompt, end="length" if slow else "stop"))
            lines.append(score(sample, 0.0 if slow else 1.0))
    picture = tail(watch_of(*lines).view(200.0))
    (straggler,) = picture.stragglers
    assert (straggler.prompt, straggler.times_seen, straggler.mean_longest) == ("p-slow", 2, 300)
    assert sum(part.num_samples for part in picture.by_length) == 80
    assert picture.by_length[-1].stop_share < 1.0 == picture.by_length[0].stop_share
    assert picture.by_length[-1].mean_reward < 1.0


def test_what_runs_now_is_unfinished_at_its_length() -> None:
    watch = resumed_run()
    view = watch.view(
        105.0, None, (attempt("g8.000", 30, end="running"), attempt("g1.000", 4, before=15, end="running"))
    )
    trace = trace_of(view, "run")
    lengths = {s.sample_id: (s.num_tokens, s.finished) for s in trace.samples}
    assert lengths == {"g0.000": (7, True), "g1.000": (19, False), "g8.000": (30, False)}
    assert [line.round for line in trace.rounds] == [1, 2]
    assert [line.step for line in trace.trained] == [1]


def test_moments_have_rates_and_lags() -> None:
    view = watch_of(
        moment(1.0, tokens_generated=0, newest_version=3, oldest_version=1, active_version=3, running=4),
        moment(3.0, tokens_generated=500, newest_version=4, oldest_version=1, active_version=3),
        moment(4.0, tokens_generated=100, newest_version=4, active_version=4, running=6),
    ).view(5.0)
    picture = moments(view)
    assert picture.at == [1.0, 3.0, 4.0]
    assert picture.series["running"] == [4, None, 6]
    assert picture.series["tokens_per_s"] == [None, 250.0, None]  # the count began anew: no rate, not a negative one
    assert picture.series["oldest_lag"] == [2, 3, None]
    assert picture.series["active_lag"] == [0, 1, 0]
    assert {len(values) for values in picture.series.values()} == {3}


def test_steps_are_aligned_thinned_and_go_back_with_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "MAX_STEPS", 20)
    history = StepHistory()
    for step in range(1, 8):
        history.put(step, {"reward/mean": step / 10})
    history.put(7, {"eval/reward": 0.9})  # a second report of a step adds to the first
    history.put(5, {"reward/mean": 0.55})  # started again from an older checkpoint
    picture = history.picture()
    assert picture.steps == [1, 2, 3, 4, 5]
    assert picture.series == {"reward/mean": [0.1, 0.2, 0.3, 0.4, 0.55]}
    history.put(5, {"eval/reward": 0.8})
    assert history.picture().series["eval/reward"] == [None] * 4 + [0.8]
    for step in range(6, 500):
        history.put(step, {"reward/mean": 1.0})
    picture = history.picture()
    assert len(picture.steps) <= 20
    assert picture.steps[-10:] == list(range(490, 500))
    assert {len(values) for values in picture.series.values()} == {len(picture.steps)}


def test_a_flood_of_names_is_bounded() -> None:
    history = StepHistory()
    for step in range(1, 30):
        history.put(step, {"reward/mean": 1.0} | {f"made-up/{step}-{i}": 1.0 for i in range(100)})
    assert len(history.picture().series) <= steps_module.MAX_SERIES
    assert history.picture().series["reward/mean"] == [1.0] * 29
