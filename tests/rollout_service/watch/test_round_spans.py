"""Rounds as they are drawn: bubble, tail, and the time of older traces."""

import pytest

from protocol.watching import Cause
from rollout_service.watch.round_spans import bubble_share, span_of, tail_s, with_spent
from tests.rollout_service.tuning.records import limits
from tests.rollout_service.watch.lines import round_line


@pytest.mark.parametrize(
    ("running", "duration_s", "slots", "expected"),
    [
        ([(0.0, 8)], 2.0, 8, 0.0),
        ([(0.0, 8), (1.0, 0)], 2.0, 8, 0.5),
        ([(0.0, 8), (1.0, 4)], 2.0, 8, 0.25),
        ([(0.5, 8)], 2.0, 8, 0.0),  # what ran before the first look ran until it
        ([(0.0, 12)], 2.0, 8, 0.0),  # a replica died: more run than there are slots
        ([(0.0, 4), (3.0, 0)], 2.0, 8, 0.5),  # the curve ends after the round
        ([], 2.0, 8, None),
        ([(0.0, 4)], 0.0, 8, None),
        ([(0.0, 4)], 2.0, 0, None),
    ],
)
def test_bubble_share(running: list, duration_s: float, slots: int, expected: float | None) -> None:
    found = bubble_share(running, duration_s, slots)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("batch", "ready", "surplus", "cut", "expected"),
    [
        (10, [i / 10 for i in range(1, 11)], 0, None, 0.1),  # 90 % at 0.9 s of 1 s
        (10, [0.1] * 9 + [0.8], 0, None, 0.9),
        (10, [0.1] * 9 + [0.8], 0, 0.85, 0.75),  # until its cut
        (10, [0.5, 0.6], 0, None, 0.5),  # eight were surplus of the round before: 90 % are ready with the first
        (10, [], 0, None, 1.0),  # all were: the round had nothing to wait for
        (10, [0.1] * 8 + [0.5] * 4, 2, None, 0.5),
        (0, [0.5], 0, None, None),
    ],
)
def test_tail(batch: int, ready: list, surplus: int, cut: float | None, expected: float | None) -> None:
    cut_at = None if cut is None else 101.0 + cut
    line = round_line(1, ready_s=ready, surplus_groups=surplus, cut_at=cut_at, started_at=101.0, offered_at=102.0)
    found = tail_s(line, batch)
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_round_that_fills_has_no_tail_yet() -> None:
    span = span_of(round_line(1, offered_at=None, cut_at=None), limits())
    assert (span.offered_at, span.tail_s, span.bubble_share) == (None, None, None)


def test_older_lines_do_not_say_their_slots_nor_their_time() -> None:
    line = round_line(1)
    for name in ("slots", "bubble_share", "spent"):
        del line[name]
    span = span_of(line, limits(slots=8))
    assert span.slots == 8
    assert span.bubble_share == pytest.approx((0.25 * 4 + 0.25 * 6) / 8)
    assert span.spent == {}


def test_time_of_older_rounds_is_told_from_installs_and_gaps() -> None:
    old = [
        span_of(round_line(n, spent={}, started_at=100.0 + 3 * n, offered_at=101.0 + 3 * n), limits()) for n in (1, 2)
    ]
    first, second = with_spent(old, [(1, 104.5, 105.0)])
    bubble = (0.25 * 4 + 0.25 * 6) / 8
    assert first.spent == {Cause.GENERATING: pytest.approx(1 - bubble), Cause.TAIL: pytest.approx(bubble)}
    assert second.spent[Cause.WEIGHT_SYNC] == pytest.approx(0.5)
    assert second.spent[Cause.TRAINER] == pytest.approx(1.5)


def test_rounds_that_say_it_stay_as_they_are() -> None:
    span = span_of(round_line(1), limits())
    assert with_spent([span], []) == [span]
