"""What people watch: the verdict, what waits for what, and the pictures that the page and the report draw.

A picture is data, not a drawing: `GET /v1/pictures/NAME` answers it, the page draws it live and the report from the
run's folder. Times are seconds since the epoch, durations and names that end in `_s` are seconds, shares are of 1.
"""

from enum import StrEnum
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class Picture(BaseModel):
    """Immutable; unknown fields are passed over, so that an older reader reads a newer service."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Limit(StrEnum):
    """What a run's speed is limited by now."""

    STARTING = "starting"
    TAIL = "tail"
    GENERATION = "generation"
    TRAINER = "trainer"
    REWARDS = "rewards"
    WEIGHT_SYNC = "weight_sync"
    BUFFER = "buffer"
    FAILURES = "failures"
    PAUSED = "paused"


class Cause(StrEnum):
    """What the time of a round goes to, or is lost to.

    `generating`: slots of the round in use; `tail`: idle, waiting for the last responses; `rewards`: idle, waiting for
    scores; `weight_sync`: a policy version waits or is installed; `trainer`: batches wait for it; `caps`: the buffer is
    full; `lag`: `max_lag` holds new groups back; `redis`: it doesn't answer; `cut`: stragglers are parked and the batch
    is offered; `engines`: none is alive; `paused`: by the operator.
    """

    GENERATING = "generating"
    TAIL = "tail"
    REWARDS = "rewards"
    WEIGHT_SYNC = "weight_sync"
    TRAINER = "trainer"
    CAPS = "caps"
    LAG = "lag"
    REDIS = "redis"
    CUT = "cut"
    ENGINES = "engines"
    PAUSED = "paused"


class Verdict(Picture):
    """One sentence on what limits the run, one on what to change, and the numbers that both rest on.

    `measured`: by name; over the last rounds, unless the name says otherwise.
    """

    limit: Limit
    sentence: str
    advice: str
    measured: dict[str, float] = Field(default_factory=dict)


class Wait(Picture):
    """Somebody waits. `since`: seconds since the epoch, None if it isn't known."""

    who: str
    waits_for: str
    since: float | None


class SegmentBar(NamedTuple):
    """Tokens that one version wrote in one stretch, from its first chunk to its last."""

    version: int
    num_tokens: int
    start: float
    end: float


class AttemptBar(NamedTuple):
    """A stay in an engine. `before`: tokens that the sample had; `waited_s`: since it was admitted or parked."""

    worker: str | None
    round: int
    start: float
    end: float
    how: Literal["stop", "length", "parked", "lost", "running"]
    before: int
    waited_s: float | None
    segments: list[SegmentBar]


class SampleBar(NamedTuple):
    """One sample with its stays, oldest first. `reward`, `failed`: None until it has the one or the other."""

    sample: str
    group: str
    prompt: str
    reward: float | None
    failed: str | None
    attempts: list[AttemptBar]


class RoundSpan(Picture):
    """A round from its begin to its offer; `offered_at` is None while it fills.

    `ready_s`: when each of its groups became READY, seconds after the begin; `running`: (seconds after the begin,
    samples in the engines); `bubble_share`: idle slots x time / all slots x time; `tail_s`: from the time at which 90 %
    of the batch was READY to its cut. `num_fresh` and `num_dropped` groups came and went in it; the last three counts
    are what the buffer held at its end. `spent`: seconds by cause since the offer before.
    """

    round: int
    started_at: float
    cut_at: float | None
    offered_at: float | None
    active_version: int
    slots: int
    ready_s: list[float]
    running: list[tuple[float, int]]
    bubble_share: float | None
    tail_s: float | None
    kv_use: float | None
    num_preemptions: int | None
    num_fresh: int
    num_dropped: int
    surplus_groups: int
    open_groups: int
    parked_samples: int
    spent: dict[Cause, float] = Field(default_factory=dict)


class InstallSpan(Picture):
    """A version was installed; nothing was generated meanwhile."""

    version: int
    start: float
    end: float


class Timeline(Picture):
    """The last rounds, every sample that ran in them, the installs and the trained steps (step, when)."""

    now: float
    rounds: list[RoundSpan]
    samples: list[SampleBar]
    installs: list[InstallSpan]
    trained: list[tuple[int, float]]
    num_left_out: int = 0


class Quantiles(Picture):
    """Of finished responses; None where there is nothing to say."""

    p50: float | None
    p90: float | None
    p99: float | None
    largest: float | None


class LengthBin(Picture):
    """Finished responses of `shortest` to `longest` tokens. `stop_share`: of them, those that ended by themselves."""

    shortest: int
    longest: int
    num_samples: int
    mean_reward: float | None
    stop_share: float | None


class Straggler(Picture):
    """A prompt whose groups were among the slowest every time they were seen."""

    prompt: str
    source: str
    times_seen: int
    mean_longest: float
    num_parks: int


class Tail(Picture):
    """How long responses are and take. Curves are complementary distributions: (value, share that is larger).

    `survival`: Kaplan-Meier with its band of 95 %, which counts what isn't finished: (tokens, share, lower, upper).
    `trained_tokens`, `dispatched_tokens`: mean length of what was trained, and of what was started (by `survival`).
    """

    num_finished: int
    num_unfinished: int
    tokens: Quantiles
    survival_tokens: Quantiles
    finish_s: Quantiles
    token_curve: list[tuple[float, float]]
    finish_curve: list[tuple[float, float]]
    trained_curve: list[tuple[float, float]]
    survival: list[tuple[float, float, float, float]]
    trained_tokens: float | None
    dispatched_tokens: float | None
    by_length: list[LengthBin]
    stragglers: list[Straggler]


class Steps(Picture):
    """The trainer's metrics by step: `series` has, for each name, one value a step, None where it had none."""

    steps: list[int]
    series: dict[str, list[float | None]]


class Moments(Picture):
    """The buffer and the engines over time: one value a moment for each name; thinned out as the run goes on."""

    at: list[float]
    series: dict[str, list[float | None]]


class Predicted(Picture):
    """What the simulator expects of one ratio, with the run's own lengths."""

    ratio: float
    speed_up: float
    tokens_per_s: float
    off_policy_share: float
    bubble_share: float
    mean_lag: float


class RatioPicture(Picture):
    """The ratio in force, what is recommended and why, and what other ratios would do.

    `note` says why there is no prediction yet, or how old it is.
    """

    ratio: float
    lookahead: int
    max_lag: int
    recommended: float | None
    reason: str | None
    predicted: list[Predicted]
    note: str | None


class RunReport(Picture):
    """All of a run in one: what `april report` draws and its `--json` writes. `settings`: without secrets."""

    run: str
    made_at: float
    versions: dict[str, str]
    settings: dict[str, object]
    verdict: Verdict
    facts: dict[str, float]
    timeline: Timeline
    tail: Tail
    moments: Moments
    steps: Steps
    ratio: RatioPicture | None
    notes: list[str]
