"""The two sentences of a verdict: what limits the run, with numbers, and which setting to change to which value."""

import math
from collections.abc import Callable, Mapping

from protocol.settings import smallest_max_lag
from protocol.watching import Cause, Limit
from rollout_service.watch.observed import Choices, Observed
from rollout_service.watch.waste import failures_text

RATIOS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)  # steps that are worth a look each
FEW_SLOTS = 0.5  # a round that never uses half of the slots could be larger
PREEMPTED = 1.0  # requests a round: below, nothing is lost
LONG_TENTH = 0.1  # of its round: the last tenth of a batch that takes less is no tail to speak of
KEEPS_PACE = 0.1  # of the trainer's step: waiting less, it is as much the limit as generation is
SILENT_S = 60.0  # a trainer calls several times a step
SILENT_STEPS = 3.0  # of its own: a checkpoint or a slow step takes less
Measured = Mapping[str, float]
Text = tuple[str, str]


def advice_of(limit: Limit, cause: Cause, seen: Observed, measured: Measured) -> Text:
    """(what limits the run, what to change)."""
    return _TEXTS[limit](cause, seen, measured)


def next_ratio(choices: Choices) -> float | None:
    """The ratio to try: what is recommended if it is larger, else the next step; None if `max_lag` allows none."""
    highest = float(choices.max_lag - choices.lookahead + 1)
    wanted = choices.recommended
    if wanted is None or wanted <= choices.ratio:
        wanted = next((ratio for ratio in RATIOS if ratio > choices.ratio), choices.ratio + 1)
    return wanted if math.ceil(wanted) <= highest else None


def _lately(measured: Measured) -> str:
    count = int(measured["num_rounds"])
    return "the time so far" if not count else "the last round" if count == 1 else f"the last {count} rounds"


def _tail(cause: Cause, seen: Observed, measured: Measured) -> Text:
    share, choices = measured["tail_share"], seen.choices
    sentence = f"The tail limits the run: {share:.0%} of {_lately(measured)} went to slots that waited for the last"
    last = measured.get("last_tenth_share", 0.0)
    sentence += " responses" + (
        f"; the last tenth of a batch took {last:.0%} of its round." if last >= LONG_TENTH else "."
    )
    ratio = next_ratio(choices)
    if ratio is None:
        needed = smallest_max_lag(choices.ratio + 1, choices.lookahead)
        return sentence, (
            f"Raise rollout.max_lag from {choices.max_lag} to {needed}, which a ratio above {choices.ratio:g} needs, "
            "or shorten data.max_response_length."
        )
    return sentence, (
        f"Raise rollout.ratio from {choices.ratio:g} to {ratio:g}: more groups keep the slots full until the batch is "
        "ready."
    )


def _generation(cause: Cause, seen: Observed, measured: Measured) -> Text:
    if cause is Cause.ENGINES:
        share = measured["engines_share"]
        sentence = f"Generation limits the run: no engine was alive for {share:.0%} of {_lately(measured)}."
        return sentence, "The service's log says why engines die; they are started again by themselves."
    busy, waits = measured["generating_share"], measured.get("trainer_wait_share")
    sentence = f"Generation limits the run: the slots in use were busy for {busy:.0%} of {_lately(measured)}"
    if waits is not None:
        sentence += f", and the trainer waited for {waits:.0%} of its steps"
    return sentence + ".", _more_generation(seen, measured)


def _more_generation(seen: Observed, measured: Measured) -> str:
    choices = seen.choices
    if measured.get("preemptions_per_round", 0.0) >= PREEMPTED:
        return (
            f"The engines set aside {measured['preemptions_per_round']:.0f} requests a round for want of KV cache: "
            f"lower engine.max_num_seqs from {choices.max_num_seqs}, or give the KV cache more memory."
        )
    used = measured.get("used_slots_share", 1.0)
    if used < FEW_SLOTS:
        return (
            f"A round uses {used:.0%} of the slots: raise rollout.ratio from {choices.ratio:g} or "
            f"data.train_batch_size from {choices.train_batch_size}."
        )
    if measured.get("trainer_wait_share", 1.0) < KEEPS_PACE:
        return "Generation and the trainer keep pace: only more of both makes the run faster."
    enough = f"; rollout.ratio = {choices.ratio:g} is enough" if measured["tail_share"] < KEEPS_PACE else ""
    return f"Add engine.num_replicas or faster engines{enough}."


def _trainer(cause: Cause, seen: Observed, measured: Measured) -> Text:
    share, choices = measured["trainer_share"], seen.choices
    if not seen.trainer_connected:
        sentence = f"No trainer is connected: for {share:.0%} of {_lately(measured)} its batches waited."
        return sentence, "Start it with `april train RUN.toml`; what is ready is kept."
    sentence = (
        f"The trainer limits the run: for {share:.0%} of {_lately(measured)} the service waited for a trained step"
    )
    if is_silent(seen):
        return (
            f"{sentence}, and the trainer has not called for {seen.trainer_silent_s:.0f} s.",
            "See whether it still runs; started again by `april train RUN.toml`, it goes on from its checkpoint.",
        )
    sentence += "."
    if choices.lookahead == 0:
        needed = max(choices.max_lag, smallest_max_lag(choices.ratio, 1))
        lag = f" and rollout.max_lag = {needed}" if needed > choices.max_lag else ""
        return sentence, f"Set rollout.lookahead = 1{lag}: the next batch then fills while the trainer works."
    return sentence, (
        "Make its steps faster (more ranks, larger micro-batches, fewer actor.ppo_epochs); more generation gains "
        "nothing, " + ("and rollout.ratio = 1 is enough." if choices.ratio > 1 else "fewer engines would do.")
    )


def is_silent(seen: Observed) -> bool:
    """The trainer has not called for longer than its steps explain."""
    took_s = max((step.get("timing_s/step", 0.0) for step in seen.steps), default=0.0)
    return seen.trainer_silent_s > max(SILENT_S, SILENT_STEPS * took_s)


def _rewards(cause: Cause, seen: Observed, measured: Measured) -> Text:
    workers, took = seen.choices.num_reward_workers, measured.get("reward_s")
    each = f", {took:.3g} s each" if took is not None else ""
    sentence = (
        f"Rewards limit the run: for {measured['rewards_share']:.0%} of {_lately(measured)} slots were idle while "
        f"finished responses waited for their scores{each}."
    )
    return sentence, f"Raise reward.num_workers from {workers} to {2 * workers}, or make the scorer faster."


def _weight_sync(cause: Cause, seen: Observed, measured: Measured) -> Text:
    took = measured.get("install_s")
    each = f", {took:.3g} s each" if took is not None else ""
    sentence = (
        f"Weight sync limits the run: {measured['weight_sync_share']:.0%} of {_lately(measured)} went to installs of "
        f"policy versions{each}."
    )
    return sentence, (
        f"Put weights.root on a faster disk (memory, if it fits), or raise data.train_batch_size from "
        f"{seen.choices.train_batch_size}, so that there are fewer installs for as many tokens."
    )


def _buffer(cause: Cause, seen: Observed, measured: Measured) -> Text:
    share, lately, choices = measured[f"{cause.value}_share"], _lately(measured), seen.choices
    away_s = seen.redis_away_s
    match cause:
        case Cause.REDIS if away_s is not None:
            sentence = (
                f"The buffer limits the run: Redis hasn't answered for {away_s:.0f} s, and everything waits for it."
            )
            return sentence, "Bring Redis back; the service goes on by itself, and nothing is lost."
        case Cause.REDIS:
            sentence = f"The buffer limits the run: Redis was slow or away for {share:.0%} of {lately}."
            return sentence, "Look at Redis' own log and at the disk under its AOF."
        case Cause.CAPS:
            sentence = f"The buffer limits the run: for {share:.0%} of {lately} it had no room for new groups."
            return sentence, "Raise buffer.max_groups or buffer.max_bytes, or lower rollout.ratio."
        case Cause.LAG:
            sentence = f"The buffer limits the run: for {share:.0%} of {lately} max_lag held new groups back."
            advice = f"Raise rollout.max_lag from {choices.max_lag} to {choices.max_lag + 1}, or lower rollout.ratio."
            return sentence, advice
        case _:
            sentence = (
                f"The buffer limits the run: {share:.0%} of {lately} went to parking stragglers and offering batches."
            )
            return sentence, 'Let stragglers run on with rollout.cut = "continue", or lower rollout.ratio.'


def _failures(cause: Cause, seen: Observed, measured: Measured) -> Text:
    return failures_text(seen, _lately(measured))


def _starting(cause: Cause, seen: Observed, measured: Measured) -> Text:
    return f"The run has just started: it waits for {seen.starting_for}.", "Nothing to change yet."


def _paused(cause: Cause, seen: Observed, measured: Measured) -> Text:
    return (
        "The run is paused: nothing is generated.",
        "Go on with POST /v1/resume; a service that drains is started again.",
    )


_TEXTS: Mapping[Limit, Callable[[Cause, Observed, Measured], Text]] = {
    Limit.STARTING: _starting,
    Limit.TAIL: _tail,
    Limit.GENERATION: _generation,
    Limit.TRAINER: _trainer,
    Limit.REWARDS: _rewards,
    Limit.WEIGHT_SYNC: _weight_sync,
    Limit.BUFFER: _buffer,
    Limit.FAILURES: _failures,
    Limit.PAUSED: _paused,
}
