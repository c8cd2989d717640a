"""What limits the run, from where the time of its last rounds went. docs/watching.md has the rules as a table.

The limit is what most time was lost to, if that is worth a change (MIN_LOSS); if nothing is, the engines are busy and
generation is the limit. A run that is paused, or whose Redis is away, is limited by that alone. Of the time in which a
batch fills, the share of what was made for nothing is lost to failures, and to no tail or reward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from protocol.watching import Cause, Limit, Verdict
from rollout_service.watch.advice import advice_of
from rollout_service.watch.observed import Observed
from rollout_service.watch.waste import waste_of

NUM_ROUNDS = 5  # one round is noise, ten are the past
MIN_LOSS = 0.15  # of the time: what is lost to less is not worth changing a setting for
LIMIT_OF: Mapping[Cause, Limit] = {
    Cause.TAIL: Limit.TAIL,
    Cause.REWARDS: Limit.REWARDS,
    Cause.WEIGHT_SYNC: Limit.WEIGHT_SYNC,
    Cause.TRAINER: Limit.TRAINER,
    Cause.CAPS: Limit.BUFFER,
    Cause.LAG: Limit.BUFFER,
    Cause.REDIS: Limit.BUFFER,
    Cause.CUT: Limit.BUFFER,
    Cause.ENGINES: Limit.GENERATION,
    Cause.PAUSED: Limit.PAUSED,
}
WASTABLE = (Cause.GENERATING, Cause.TAIL, Cause.REWARDS)  # what filling a batch is made of


def judge(seen: Observed) -> Verdict:
    """One sentence on what limits the run, one on what to change, and the numbers."""
    seen = replace(seen, rounds=seen.rounds[-NUM_ROUNDS:], steps=seen.steps[-NUM_ROUNDS:])
    measured, wasted = measure(seen), waste_of(seen).share
    if seen.paused:
        return _verdict(Limit.PAUSED, Cause.PAUSED, seen, measured)
    if seen.redis_away_s is not None:
        return _verdict(Limit.BUFFER, Cause.REDIS, seen, measured)
    losses = {cause: measured[f"{cause.value}_share"] for cause in LIMIT_OF}
    lost_to_failures = wasted * sum(measured[f"{cause.value}_share"] for cause in WASTABLE)
    losses |= {cause: losses[cause] * (1 - wasted) for cause in WASTABLE if cause in losses}
    worst = max(losses, key=lambda cause: losses[cause])
    no_trainer = worst is Cause.TRAINER and not seen.trainer_connected
    if not seen.rounds and lost_to_failures < MIN_LOSS and not (no_trainer and losses[worst] >= MIN_LOSS):
        return _verdict(Limit.STARTING, Cause.GENERATING, seen, measured)
    limits = {Limit.FAILURES: lost_to_failures}
    for cause, share in losses.items():
        limits[LIMIT_OF[cause]] = limits.get(LIMIT_OF[cause], 0.0) + share
    limit = max(limits, key=lambda one: limits[one])
    if limits[limit] < MIN_LOSS:
        return _verdict(Limit.GENERATION, Cause.GENERATING, seen, measured)
    if limit is Limit.FAILURES:
        return _verdict(limit, Cause.GENERATING, seen, measured)
    causes = [cause for cause in LIMIT_OF if LIMIT_OF[cause] is limit]
    return _verdict(limit, max(causes, key=lambda cause: losses[cause]), seen, measured)


def measure(seen: Observed) -> dict[str, float]:
    """Shares of the time of the last rounds, and what else sentences rest on."""
    rounds, waste = seen.rounds, waste_of(seen)
    spent = dict(seen.spent_now)
    for span in rounds:
        for cause, seconds in span.spent.items():
            spent[cause] = spent.get(cause, 0.0) + seconds
    total = sum(spent.values())
    measured = {f"{cause.value}_share": spent.get(cause, 0.0) / total if total else 0.0 for cause in Cause}
    measured |= {"num_rounds": float(len(rounds)), "seconds": total}
    whole = [(span, (span.offered_at or span.started_at) - span.started_at) for span in rounds]
    known: dict[str, list[float]] = {
        "bubble_share": [span.bubble_share for span in rounds if span.bubble_share is not None],
        "last_tenth_share": [s.tail_s / took for s, took in whole if s.tail_s is not None and took > 0],
        "kv_use": [span.kv_use for span in rounds if span.kv_use is not None],
        "preemptions_per_round": [float(s.num_preemptions) for s in rounds if s.num_preemptions is not None],
        "used_slots_share": [max((n for _, n in s.running), default=0) / s.slots for s in rounds if s.slots],
        "round_s": [took for _, took in whole],
        "trainer_wait_share": _trainer_waits(seen.steps),
    }
    measured |= {name: fmean(values) for name, values in known.items() if values}
    measured |= {"failed_share": waste.failed_share} if waste.num_failed else {}
    measured |= {"dropped_share": waste.dropped_share} if waste.num_dropped else {}
    lately = {"install_s": seen.install_s, "reward_s": seen.reward_s, "redis_away_s": seen.redis_away_s}
    return measured | {name: value for name, value in lately.items() if value is not None}


def _trainer_waits(steps: Sequence[Mapping[str, float]]) -> list[float]:
    shares = [(step.get("timing_s/wait"), step.get("timing_s/step")) for step in steps]
    return [min(1.0, wait / whole) for wait, whole in shares if wait is not None and whole]


def _verdict(limit: Limit, cause: Cause, seen: Observed, measured: Mapping[str, float]) -> Verdict:
    sentence, advice = advice_of(limit, cause, seen, measured)
    rounded = {name: round(value, 4) for name, value in measured.items()}
    return Verdict(limit=limit, sentence=sentence, advice=advice, measured=rounded)
