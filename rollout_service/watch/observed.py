"""What a verdict is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.watching import Cause, RoundSpan


@dataclass(frozen=True, slots=True)
class Choices:
    """The settings that advice speaks of, as they are in force."""

    ratio: float
    lookahead: int
    max_lag: int
    train_batch_size: int
    max_num_seqs: int
    num_reward_workers: int
    recommended: float | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """What is judged. `spent_now`: since the last offer; `steps`: the trainer's metrics of its last steps.

    `trainer_silent_s`: for how long it has neither called nor waited for an answer.
    `scores`: responses of the rounds and since, by the reason that they failed for, "" for those with a reward;
    `num_ready_now`, `num_dropped_now`: groups since the last offer.
    `install_s` and `reward_s`: how long one install and one score took lately; None if there was none.
    """

    choices: Choices
    rounds: Sequence[RoundSpan] = ()
    scores: Mapping[str, int] = field(default_factory=dict[str, int])
    num_ready_now: int = 0
    num_dropped_now: int = 0
    spent_now: Mapping[Cause, float] = field(default_factory=dict[Cause, float])
    steps: Sequence[Mapping[str, float]] = ()
    paused: bool = False
    redis_away_s: float | None = None
    trainer_connected: bool = True
    trainer_silent_s: float = 0.0
    starting_for: str = "the first round to be offered"
    install_s: float | None = None
    reward_s: float | None = None
