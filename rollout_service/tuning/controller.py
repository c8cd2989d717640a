"""The ratio, once a round, from what the last rounds measured.

Always true:
- it is a function of its state and of what it is shown: no clock, no task, no randomness;
- the ratio it names lies within the user's bounds and moves by at most `STEP` of itself at once;
- between its targets it stays: noise that crosses a limit for a round moves nothing, since limits have a dead band and
  the rounds since the last change are averaged, at least `SETTLING_ROUNDS` of them;
- it does not oscillate: a ratio that was left because it was too small is a floor, one that was too large a ceiling,
  and later moves go at most half the way to them, until a move would be smaller than `SMALLEST_STEP`. They are
  forgotten when the ratio has been right, no limit near, for `CALM_ROUNDS`, or when the reason to move is stronger by
  `DRIFT` than the one that made them: what is measured is not what it was then;
- a limit wins over a floor: while one is passed the ratio goes down, to the floor and below it, and the floor is
  forgotten. What then rests below a limit with idle slots says that there is no ratio which has both.

Over-provisioning buys a full engine (a small bubble) with off-policy tokens, prefills and KV cache. So the ratio goes
up while slots idle in the tail of rounds, and down when a limit is passed, or when the slots are full anyway.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

AVERAGED_ROUNDS = 8  # time constant of the averages: a heavy-tailed round says little alone
SETTLING_ROUNDS = 4  # after a change, before the next: what was parked before it is trained within about so many
CALM_ROUNDS = 20  # in which nothing was wrong: what goes wrong then is news
STEP = 0.25  # of the ratio
SMALLEST_STEP = 0.03  # below this a change is lost in the noise of rounds
BUBBLE_HIGH = 0.15  # of slot time idle while a batch fills: more is worth starting more
BUBBLE_LOW = 0.03  # less: the engine is full, and a smaller ratio costs nothing
REPREFILL_HIGH = 0.15  # of the tokens that the engines process: prefills of resumed samples
PREEMPTIONS_HIGH = 0.05  # for each sample that is started: the KV cache is too small for what runs
GROWTH_HIGH = 0.1  # of a batch that the buffer grows by in each round: what is started is not used up
DEAD_BAND = 0.1  # a limit counts as passed by this share of it or more, and as near from this share below it on
DRIFT = 0.5  # of a limit: more than the averages of a noisy run wander


class Direction(StrEnum):
    """Which way the ratio goes."""

    UP = "up"
    DOWN = "down"
    STAY = "stay"


@dataclass(frozen=True, slots=True)
class TuneBounds:
    """What the user allows. `max_ratio` also keeps the lag bound."""

    min_ratio: float = 1.0
    max_ratio: float = 3.0
    max_off_policy: float = 1.0
    min_ess: float = 0.5


@dataclass(frozen=True, slots=True)
class RoundMeasures:
    """One round. `ess` and `off_policy` are the trainer's of the last step it reported, None while it reports none.

    `bubble`: share of slot time idle while the batch filled; `reprefill`: share of processed tokens that were prefills
    of resumed samples; `preemptions`: for each sample started; `growth`: of groups in the buffer, in batches.
    """

    bubble: float
    reprefill: float = 0.0
    preemptions: float = 0.0
    growth: float = 0.0
    ess: float | None = None
    off_policy: float | None = None

    def __str__(self) -> str:
        known = {name: getattr(self, name) for name in self.__slots__}
        return ", ".join(f"{name} {value:.3g}" for name, value in known.items() if value is not None)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is decided: the ratio from the next round on, and why, in a sentence."""

    ratio: float
    direction: Direction
    reason: str
    measured: RoundMeasures


@dataclass(frozen=True, slots=True)
class Mark:
    """A ratio that was left, and how strong the reason was; `passed` says which limit was passed at it, if one was."""

    ratio: float
    strength: float
    passed: str = ""


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The ratio in force, averages over `num_rounds` rounds at it, how many of the last were calm, and the marks."""

    ratio: float
    averages: RoundMeasures | None = None
    num_rounds: int = 0
    num_calm: int = 0
    floor: Mark | None = None
    ceiling: Mark | None = None


@dataclass(frozen=True, slots=True)
class _Urge:
    """A reason to move; `strength` is by how much of its limit a limit is passed. `limit`: it is about one."""

    direction: Direction
    strength: float
    reason: str
    limit: bool = False


def step_controller(
    state: ControllerState, measured: RoundMeasures, bounds: TuneBounds
) -> tuple[ControllerState, Tuning]:
    """One round later."""
    num_rounds = state.num_rounds + 1
    averages = _averaged(state.averages, measured, 1 / min(num_rounds, AVERAGED_ROUNDS))
    state = replace(state, averages=averages, num_rounds=num_rounds)
    bounded = min(max(state.ratio, bounds.min_ratio), bounds.max_ratio)
    if bounded != state.ratio:
        reason = f"the ratio is brought within {bounds.min_ratio:g} to {bounds.max_ratio:g}"
        direction = Direction.UP if bounded > state.ratio else Direction.DOWN
        return ControllerState(bounded), Tuning(bounded, direction, reason, averages)
    urge = _strongest(averages, bounds)
    if num_rounds < SETTLING_ROUNDS:
        return state, _stay(state, f"waiting for {SETTLING_ROUNDS} rounds at this ratio ({urge.reason})")
    if urge.direction is Direction.STAY:
        calm = 0 if urge.limit else state.num_calm + 1
        if calm >= CALM_ROUNDS:
            state = replace(state, floor=None, ceiling=None)
        return replace(state, num_calm=calm), _stay(state, urge.reason)
    return _move(_without_old_marks(replace(state, num_calm=0), urge), urge, bounds)


def _without_old_marks(state: ControllerState, urge: _Urge) -> ControllerState:
    """The reason to move is much stronger than any that was met this way before: the marks tell of another run."""
    mark = state.floor if urge.direction is Direction.UP else state.ceiling
    if mark is not None and urge.strength > mark.strength + DRIFT:
        return replace(state, floor=None, ceiling=None)
    return state


def _move(state: ControllerState, urge: _Urge, bounds: TuneBounds) -> tuple[ControllerState, Tuning]:
    assert state.averages is not None, "a round was measured"
    up = urge.direction is Direction.UP
    wanted = state.ratio * (1 + STEP) if up else state.ratio / (1 + STEP)
    barrier = _barrier(state, up)
    if barrier is not None:
        half_way = math.sqrt(state.ratio * barrier.ratio)
        wanted = min(wanted, half_way) if up else max(wanted, half_way)
        if abs(wanted / state.ratio - 1) < SMALLEST_STEP:
            if not urge.limit:
                return _rest(state, urge, barrier)
            wanted = min(barrier.ratio, state.ratio / (1 + SMALLEST_STEP))
    ratio = round(min(max(wanted, bounds.min_ratio), bounds.max_ratio), 3)
    if ratio == state.ratio:
        end = "largest" if up else "smallest"
        return state, _stay(state, f"{urge.reason}, but {ratio:g} is the {end} ratio allowed")
    mark = Mark(state.ratio, urge.strength, urge.reason if urge.limit else "")
    if up:
        moved = ControllerState(ratio, floor=mark, ceiling=state.ceiling)
    else:
        floor = state.floor if state.floor is not None and state.floor.ratio < ratio else None
        moved = ControllerState(ratio, floor=floor, ceiling=mark)
    return moved, Tuning(ratio, urge.direction, urge.reason, state.averages)


def _barrier(state: ControllerState, up: bool) -> Mark | None:
    """What lies on the way: the floor that a rest leaves is where the ratio is, and stops nothing."""
    if up:
        return state.ceiling
    return state.floor if state.floor is not None and state.floor.ratio < state.ratio else None


def _rest(state: ControllerState, urge: _Urge, barrier: Mark) -> tuple[ControllerState, Tuning]:
    """Between a ratio that was too small and one that was too large there is no other."""
    if urge.direction is Direction.DOWN:
        reason = f"{urge.reason}, but {barrier.ratio:g} was too small: resting between the two"
        return state, _stay(state, reason)
    floor = state.floor or Mark(state.ratio, urge.strength)  # against which a stronger reason is seen
    if barrier.passed:
        reason = f"{urge.reason}, and no ratio has fewer within the limits: at {barrier.ratio:g} {barrier.passed}"
    else:
        reason = f"{urge.reason}, but {barrier.ratio:g} was too large: resting between the two"
    return replace(state, floor=floor), _stay(state, reason)


def _stay(state: ControllerState, reason: str) -> Tuning:
    assert state.averages is not None, "a round was measured"
    return Tuning(state.ratio, Direction.STAY, reason, state.averages)


def _averaged(before: RoundMeasures | None, now: RoundMeasures, weight: float) -> RoundMeasures:
    """The mean of few rounds, an exponential average of many; what the trainer reports no more is unknown again."""
    if before is None:
        return now

    def mix(old: float, new: float) -> float:
        return old + (new - old) * weight

    def known(old: float | None, new: float | None) -> float | None:
        return new if old is None or new is None else mix(old, new)

    return RoundMeasures(
        bubble=mix(before.bubble, now.bubble),
        reprefill=mix(before.reprefill, now.reprefill),
        preemptions=mix(before.preemptions, now.preemptions),
        growth=mix(before.growth, now.growth),
        ess=known(before.ess, now.ess),
        off_policy=known(before.off_policy, now.off_policy),
    )


def _strongest(seen: RoundMeasures, bounds: TuneBounds) -> _Urge:
    """Limits come before the bubble: a ratio that breaks one is lowered however empty the engine is."""
    broken = [urge for urge in _limits(seen, bounds) if urge.strength > DEAD_BAND]
    if broken:
        return max(broken, key=lambda urge: urge.strength)
    near = sorted((u for u in _limits(seen, bounds) if u.strength > -DEAD_BAND), key=lambda u: -u.strength)
    excess = seen.bubble / BUBBLE_HIGH - 1
    if excess > DEAD_BAND:
        idle = f"{seen.bubble:.0%} of slot time is idle while a batch fills"
        if near:
            return _Urge(Direction.STAY, 0.0, f"{idle}, but {near[0].reason}", limit=True)
        return _Urge(Direction.UP, excess, idle)
    slack = 1 - seen.bubble / BUBBLE_LOW
    if slack > DEAD_BAND:
        return _Urge(
            Direction.DOWN, slack, f"only {seen.bubble:.1%} of slot time is idle: a smaller ratio costs little"
        )
    idle = f"{seen.bubble:.0%} of slot time is idle"
    if near:
        within = f", by less than the dead band of {DEAD_BAND:.0%}" if near[0].strength > 0 else ""
        return _Urge(Direction.STAY, 0.0, f"{idle} and {near[0].reason}{within}", limit=True)
    return _Urge(Direction.STAY, 0.0, f"{idle} and no limit is passed")


def _limits(seen: RoundMeasures, bounds: TuneBounds) -> list[_Urge]:
    """How far each limit is passed; negative below it."""

    def above(value: float, limit: float, text: str) -> _Urge:
        return _Urge(Direction.DOWN, value / limit - 1 if limit > 0 else math.copysign(1, value - limit), text, True)

    urges = [
        above(seen.preemptions, PREEMPTIONS_HIGH, f"{seen.preemptions:.0%} of samples started are preempted"),
        above(seen.reprefill, REPREFILL_HIGH, f"{seen.reprefill:.0%} of processed tokens are prefilled again"),
        above(seen.growth, GROWTH_HIGH, f"the buffer grows by {seen.growth:.2f} batches a round"),
    ]
    if seen.off_policy is not None and bounds.max_off_policy < 1:
        text = f"{seen.off_policy:.0%} of trained tokens are off-policy, at most {bounds.max_off_policy:.0%} are wanted"
        urges.append(above(seen.off_policy, bounds.max_off_policy, text))
    if seen.ess is not None and bounds.min_ess > 0:
        text = f"the effective sample size is {seen.ess:.2f}, at least {bounds.min_ess:.2f} is wanted"
        urges.append(above(1 - seen.ess, 1 - bounds.min_ess, text))  # what is lost, against what may be
    return urges
