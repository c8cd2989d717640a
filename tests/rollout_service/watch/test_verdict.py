"""The rules of the verdict, one row a rule; the runs that make them so are in test_verdict_runs.py."""

from dataclasses import replace

import pytest

from protocol.watching import Cause, Limit
from rollout_service.watch.advice import next_ratio
from rollout_service.watch.observed import Choices, Observed
from rollout_service.watch.round_spans import span_of
from rollout_service.watch.verdict import judge
from tests.rollout_service.tuning.records import limits
from tests.rollout_service.watch.lines import round_line

CHOICES = Choices(
    ratio=1.25, lookahead=1, max_lag=4, train_batch_size=4, max_num_seqs=8, num_reward_workers=2, recommended=None
)


def observed(spent: dict[str, float], num_rounds: int = 5, **changes) -> Observed:
    """Rounds that spent their time so; keys that Observed doesn't have are the round's."""
    own = {name: changes.pop(name) for name in list(changes) if name not in Observed.__slots__}
    rounds = [span_of(round_line(n, spent=spent, **own), limits(train_batch_size=4)) for n in range(1, num_rounds + 1)]
    return Observed(choices=changes.pop("choices", CHOICES), rounds=rounds, **changes)


@pytest.mark.parametrize(
    ("seen", "limit", "says", "advises"),
    [
        (observed({"generating": 0.62, "tail": 0.38}), Limit.TAIL, "38% of the last 5 rounds", "from 1.25 to 1.5"),
        (
            observed({"generating": 0.6, "tail": 0.4}, choices=replace(CHOICES, recommended=2.5)),
            Limit.TAIL,
            "40%",
            "from 1.25 to 2.5",
        ),
        (
            observed({"generating": 0.6, "tail": 0.4}, choices=replace(CHOICES, ratio=1.0, max_lag=1)),
            Limit.TAIL,
            "40%",
            "Raise rollout.max_lag from 1 to 2",
        ),
        (observed({"generating": 0.9, "tail": 0.1}), Limit.GENERATION, "busy for 90%", "engine.num_replicas"),
        (
            observed({"generating": 0.98, "tail": 0.02}, choices=replace(CHOICES, ratio=1.0)),
            Limit.GENERATION,
            "busy for 98%",
            "rollout.ratio = 1 is enough",
        ),
        (
            observed({"generating": 1.0}, steps=[{"timing_s/wait": 0.02, "timing_s/step": 1.0}]),
            Limit.GENERATION,
            "the trainer waited for 2% of its steps",
            "keep pace",
        ),
        (observed({"generating": 1.0}, num_preemptions=12), Limit.GENERATION, "busy", "12 requests a round"),
        (observed({"generating": 1.0}, running=[(0.0, 2)]), Limit.GENERATION, "busy", "uses 25% of the slots"),
        (
            observed({"generating": 0.5, "engines": 0.5}),
            Limit.GENERATION,
            "no engine was alive for 50%",
            "log says why",
        ),
        (observed({"generating": 0.5, "trainer": 0.5}), Limit.TRAINER, "50%", "rollout.ratio = 1 is enough"),
        (
            observed({"generating": 0.5, "trainer": 0.5}, choices=replace(CHOICES, ratio=2.0, lookahead=0, max_lag=1)),
            Limit.TRAINER,
            "50%",
            "Set rollout.lookahead = 1 and rollout.max_lag = 2",
        ),
        (observed({"trainer": 1.0}, trainer_connected=False), Limit.TRAINER, "No trainer is connected", "april train"),
        (observed({"trainer": 1.0}, num_rounds=0, trainer_connected=False), Limit.STARTING, "just started", "Nothing"),
        (
            observed({}, num_rounds=0, spent_now={Cause.TRAINER: 9.0}, trainer_connected=False),
            Limit.TRAINER,
            "No trainer is connected",
            "april train",
        ),
        (
            observed({"generating": 0.4, "rewards": 0.6}, reward_s=1.25),
            Limit.REWARDS,
            "1.25 s each",
            "reward.num_workers from 2 to 4",
        ),
        (
            observed({"generating": 0.6, "weight_sync": 0.4}, install_s=2.1),
            Limit.WEIGHT_SYNC,
            "2.1 s each",
            "weights.root",
        ),
        (observed({"generating": 0.6, "caps": 0.4}), Limit.BUFFER, "no room for new groups", "buffer.max_groups"),
        (observed({"generating": 0.6, "lag": 0.4}), Limit.BUFFER, "max_lag held", "rollout.max_lag from 4 to 5"),
        (observed({"generating": 0.6, "redis": 0.4}), Limit.BUFFER, "Redis was slow or away for 40%", "AOF"),
        (observed({"generating": 0.6, "cut": 0.4}), Limit.BUFFER, "parking stragglers", "rollout.cut"),
        # Three losses to the buffer that are each smaller than the tail add up to more.
        (observed({"generating": 0.5, "tail": 0.2, "caps": 0.15, "redis": 0.15}), Limit.BUFFER, "15%", "buffer.max"),
        (observed({"generating": 1.0}, redis_away_s=12.0), Limit.BUFFER, "hasn't answered for 12 s", "nothing is lost"),
        (observed({"generating": 1.0}, paused=True, redis_away_s=12.0), Limit.PAUSED, "paused", "/v1/resume"),
        (observed({}, num_rounds=0, starting_for="4 groups"), Limit.STARTING, "it waits for 4 groups", "Nothing"),
        # A trainer that has died, and one whose steps take as long as it is silent.
        (observed({"trainer": 1.0}, trainer_silent_s=601.0), Limit.TRAINER, "not called for 601 s", "still runs"),
        (
            observed({"trainer": 1.0}, trainer_silent_s=601.0, steps=[{"timing_s/step": 300.0}]),
            Limit.TRAINER,
            "waited for a trained step.",
            "steps faster",
        ),
        (observed({"trainer": 1.0}, trainer_silent_s=59.0), Limit.TRAINER, "a trained step.", "steps faster"),
        # What fails is no tail: the scorer raises, now or from the first response on; engines fail; few fail.
        (
            observed({"generating": 0.5, "tail": 0.5}, scores={"": 8, "reward_error": 72}, num_dropped_now=18),
            Limit.FAILURES,
            "72 of 80 responses failed (reward_error), and 18 of 38 groups were dropped in the last 5 rounds",
            "reward.name",
        ),
        (
            observed({}, 0, spent_now={Cause.TAIL: 9.0}, scores={"reward_timeout": 9}, num_dropped_now=4),
            Limit.FAILURES,
            "9 of 9 responses failed (reward_timeout), and 4 of 4 groups were dropped in the time so far",
            "reward.timeout_s",
        ),
        (
            observed({"tail": 1.0}, scores={"": 20, "engine_error": 30}),
            Limit.FAILURES,
            "30 of 50 responses failed (engine_error) in the last 5 rounds",
            "engine raises",
        ),
        (observed({"tail": 1.0}, num_dropped=8), Limit.FAILURES, "40 of 60 groups were dropped", "service's log"),
        (observed({"tail": 1.0}, scores={"": 90, "reward_error": 10}), Limit.TAIL, "100%", "rollout.ratio"),
        (observed({"tail": 1.0}, scores={"": 1, "reward_error": 3}), Limit.TAIL, "100%", "rollout.ratio"),
        (observed({"trainer": 0.8, "tail": 0.2}, scores={"reward_error": 9}), Limit.TRAINER, "80%", "steps faster"),
        # What goes on now counts: a trainer that has been stuck for ten minutes.
        (observed({"generating": 1.0}, spent_now={Cause.TRAINER: 600.0}), Limit.TRAINER, "99%", "steps faster"),
    ],
)
def test_verdict(seen: Observed, limit: Limit, says: str, advises: str) -> None:
    verdict = judge(seen)
    assert verdict.limit is limit
    assert says in verdict.sentence
    assert advises in verdict.advice
    assert verdict.sentence.endswith(".")
    assert verdict.advice.endswith(".")


def test_only_the_last_rounds_count() -> None:
    rounds = observed({"trainer": 1.0}, num_rounds=20).rounds
    recent = observed({"generating": 0.5, "tail": 0.5}).rounds
    assert judge(Observed(CHOICES, rounds=[*rounds, *recent])).limit is Limit.TAIL


def test_shares_add_up_and_are_what_the_sentence_says() -> None:
    measured = judge(observed({"generating": 1.2, "tail": 0.5, "trainer": 0.3}, num_rounds=3)).measured
    assert sum(measured[f"{cause.value}_share"] for cause in Cause) == pytest.approx(1, abs=1e-3)
    assert measured["tail_share"] == pytest.approx(0.25)
    assert (measured["num_rounds"], measured["seconds"]) == (3, pytest.approx(6.0))


@pytest.mark.parametrize(
    ("ratio", "lookahead", "max_lag", "recommended", "expected"),
    [
        (1.0, 0, 4, None, 1.25),
        (1.3, 1, 4, None, 1.5),
        (4.0, 0, 8, None, 5.0),
        (2.0, 1, 4, 1.5, 2.5),  # what is recommended is less: the tail is there all the same
        (1.0, 1, 1, None, None),
        (1.0, 0, 1, 1.75, 1.75),
        (1.0, 0, 1, 3.0, None),
    ],
)
def test_next_ratio_keeps_max_lag(
    ratio: float, lookahead: int, max_lag: int, recommended: float | None, expected: float | None
) -> None:
    choices = replace(CHOICES, ratio=ratio, lookahead=lookahead, max_lag=max_lag, recommended=recommended)
    assert next_ratio(choices) == expected
