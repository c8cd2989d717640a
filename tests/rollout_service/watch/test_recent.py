"""What is remembered: bounded, whole samples, and never changed under a reader."""

import sys
import time

import pytest

from rollout_service.watch import recent
from rollout_service.watch.recent import Watch
from tests.rollout_service.watch.lines import attempt, moment, round_line, score, watch_of


def test_a_sample_is_its_stays_and_its_score() -> None:
    watch = watch_of(
        attempt("g1.000", 10, end="parked", ended_at=101.0),
        attempt("g1.000", 5, before=10, round_number=2, started_at=103.0, ended_at=104.0, version=1),
        score("g1.000", 0.5, at=104.25),
        score("g9.000", 1.0),  # of a sample whose stays are not known
    )
    (held,) = watch.view(110.0).samples
    assert (held.num_tokens, held.finished, held.reward, held.finished_at, held.scored_at) == (
        15,
        True,
        0.5,
        104,
        104.25,
    )
    assert [bar.how for bar in held.attempts] == ["parked", "stop"]
    assert held.first_at == 99.5  # it had waited for half a second
    assert watch.mean_reward_s() == pytest.approx(0.25)


def test_a_view_does_not_change_with_what_comes_later() -> None:
    watch = watch_of(attempt("g1.000", 10, end="parked"), round_line(1))
    view = watch.view(102.0)
    watch.put(attempt("g1.000", 5, before=10, round_number=2))
    watch.put(score("g1.000"))
    watch.put(attempt("g2.000", 5))
    watch.put(round_line(2))
    assert [(held.sample, len(held.attempts), held.reward) for held in view.samples] == [("g1.000", 1, None)]
    assert [span.round for span in view.rounds] == [1]


def test_whole_samples_seen_longest_ago_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MAX_ATTEMPTS", 10)
    watch = Watch()
    for number in range(6):
        watch.put(attempt(f"g{number}.000", 1, end="parked"))
    for number in (0, 1, 2, 3, 4):  # ten stays, and an eleventh
        watch.put(attempt(f"g{number}.000", 1, before=1, round_number=2))
    view = watch.view(0.0)
    assert sum(len(held.attempts) for held in view.samples) <= 10
    assert [held.sample for held in view.samples] == [f"g{number}.000" for number in (0, 1, 2, 3, 4)]
    assert view.num_left_out == 1


def test_samples_of_rounds_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "KEPT_ROUNDS", 3)
    watch = Watch()
    for number in range(1, 11):
        watch.put(attempt(f"g{number}.000", 1, round_number=number))
        watch.put(round_line(number))
    assert {held.attempts[0].round for held in watch.view(0.0).samples} == {8, 9, 10}
    assert watch.view(0.0).num_left_out == 7


def test_rounds_moments_and_marks_are_thinned_and_the_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MAX_ROUNDS", 20), ("KEPT_ROUNDS", 10), ("MAX_MOMENTS", 16), ("MAX_MARKS", 12)):
        monkeypatch.setattr(recent, name, most)
    watch = Watch()
    for number in range(1, 501):
        watch.put(round_line(number))
        watch.put(moment(float(number), running=number))
        watch.put({"kind": "trained", "step": number, "at": float(number)})
    view = watch.view(0.0)
    assert len(view.rounds) <= 20
    assert [span.round for span in view.rounds[-10:]] == list(range(491, 501))
    assert view.rounds[0].round < 100  # the run's start is still there
    assert len(view.moments) < 16
    assert view.moments[0].at == 1.0
    assert view.moments[-1].at > 400
    assert [step for step, _ in view.trained[-6:]] == [495, 496, 497, 498, 499, 500]
    assert len(view.trained) <= 12


def test_a_trainer_that_went_back_makes_its_rounds_again() -> None:
    watch = watch_of(*(round_line(number) for number in (1, 2, 3, 4)), round_line(3, active_version=9))
    assert [(span.round, span.active_version) for span in watch.rounds] == [(1, 1), (2, 2), (3, 9)]


def test_pictures_change_with_what_they_show() -> None:
    watch = Watch()
    watch.put(attempt("g1.000", 3))
    assert not any(watch.changes.values())  # a page is not to ask again for every sample
    watch.put(moment(1.0, running=1))
    assert {name for name, number in watch.changes.items() if number} == {"moments", "tail"}
    before = dict(watch.changes)
    watch.put(round_line(1))
    assert {name for name, number in watch.changes.items() if number != before[name]} == {"timeline", "tail"}


def test_memory_is_bounded_and_a_line_costs_microseconds(capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch()
    num_lines, spent_s = 0, 0.0
    for number in range(150):
        lines = [attempt(f"g{number}-{i}.000", 40, round_number=number) for i in range(700)]
        lines += [score(line["sample"]) for line in lines] + [round_line(number)]
        began_s = time.process_time()
        for line in lines:
            watch.put(line)
        spent_s += time.process_time() - began_s
        num_lines += len(lines)
    view = watch.view(0.0)
    assert sum(len(held.attempts) for held in view.samples) <= recent.MAX_ATTEMPTS
    assert view.num_left_out == 150 * 700 - len(view.samples)
    size = sum(sys.getsizeof(held) + sum(map(sys.getsizeof, held.attempts)) for held in view.samples)
    assert size < 100 << 20
    with capsys.disabled():
        print(f"\n  a line costs {spent_s / num_lines * 1e6:.2f} µs; {len(view.samples)} samples in {size >> 20} MiB")
