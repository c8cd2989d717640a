"""The lines of a trace: one JSON object each, the first of every file a header.

Always true:
- a file belongs to one run and one life of its service, which its header names with the schema's version;
- lines are only ever appended, so all but the last are whole; the last may be torn by a crash;
- times are seconds since the epoch, and never run backwards within a file.

A sample has one `attempt` line for each time it left an engine, and one `score` line when it was scored or failed. An
attempt names the tokens that the sample had before, so a reader knows of attempts whose line a crash took away.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from protocol.settings.rollout import Admission, RoundOrder

SCHEMA = "april-trace"
SCHEMA_VERSION = 1
MAX_TOKENS = 1 << 30  # of a response or prompt: longer than any context, and sums of a million of them fit 64 bits
MAX_COUNT = 1 << 30  # of anything else
MAX_RATIO = 1000.0  # as the settings have it

Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Line(BaseModel):
    """What all lines share: a version that adds a field is read by older readers, which pass it over."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class TracedLimits(Line):
    """The settings that shaped the run, under their own names."""

    train_batch_size: int = Field(ge=1, le=MAX_COUNT)
    n: int = Field(ge=1, le=MAX_COUNT)
    ratio: float = Field(ge=1, le=MAX_RATIO)
    samples_ratio: float = Field(default=1.0, ge=1, le=MAX_RATIO)
    lookahead: int = Field(ge=0)
    max_lag: int = Field(ge=0)
    admission: Admission
    order: RoundOrder
    cut: str
    slots: int = Field(ge=1, le=MAX_COUNT)
    num_replicas: int = Field(default=1, ge=1, le=MAX_COUNT)
    max_response_length: int = Field(ge=1)
    kv_tokens: int = Field(default=0, ge=0)


class Header(Line):
    """The first line of a file. `limits` is None where lengths came from elsewhere than a run."""

    kind: Literal["header"] = "header"
    schema_name: str = SCHEMA
    version: int = SCHEMA_VERSION
    run: str
    service_epoch: int = 0
    file: int = 0
    started_at: float = 0.0
    limits: TracedLimits | None = None


class TracedSegment(NamedTuple):
    """Tokens that one version wrote within one attempt; `start` and `end`: when its first and last chunk came.

    An array in the file, in this order.
    """

    version: int
    num_tokens: Tokens
    start: Finite
    end: Finite


class AttemptLine(Line):
    """A sample left an engine: finished (`stop`, `length`), `parked`, or `lost` with its engine, an error or a lease.

    `waited_s`: since it was admitted or parked; None if that was before the service started. `continued_from`: the id
    that it had in the group that was READY without it.
    """

    kind: Literal["attempt"] = "attempt"
    sample: str
    group: str
    prompt: str
    source: str
    prompt_tokens: Tokens
    attempt: int
    worker: str | None
    round: int
    waited_s: Finite | None
    started_at: Finite
    ended_at: Finite
    before: Tokens
    segments: tuple[TracedSegment, ...]
    end: Literal["stop", "length", "parked", "lost"]
    continued_from: str | None = None


class ScoreLine(Line):
    """A sample has a reward, or failed for a reason."""

    kind: Literal["score"] = "score"
    sample: str
    reward: Finite | None = None
    failed: str | None = None
    at: float | None = None


class RoundLine(Line):
    """A batch was offered. `spent`: seconds by cause (`protocol.watching.Cause`) since the offer before.

    `ready_s`: when each group became READY, in seconds since the start. `running`: (seconds since the start, samples in
    the engines), thinned out. `kv_use` (highest share) and `num_preemptions` are None if the engine doesn't say.
    """

    kind: Literal["round"] = "round"
    round: int
    started_at: Finite
    cut_at: Finite | None
    offered_at: Finite
    active_version: int
    ready_s: tuple[float, ...]
    num_fresh: int
    num_dropped: int
    surplus_groups: int
    open_groups: int
    parked_samples: int
    running: tuple[tuple[float, int], ...]
    kv_use: float | None = None
    num_preemptions: int | None = None
    slots: int | None = None
    bubble_share: float | None = None
    spent: dict[str, float] = Field(default_factory=dict[str, float])


class TrainedLine(Line):
    """The trainer reported a step as trained."""

    kind: Literal["trained"] = "trained"
    step: int
    at: Finite


class InstallLine(Line):
    """A policy version was installed, or failed to be; nothing was generated meanwhile."""

    kind: Literal["install"] = "install"
    version: int
    started_at: Finite
    ended_at: Finite


class MomentLine(Line):
    """Counts of the buffer and the engines at one moment, by name."""

    kind: Literal["moment"] = "moment"
    at: float
    values: dict[str, float | None]


class RunningSample(NamedTuple):
    """A sample in an engine, with the tokens that it has by now. `continued_from` as in an attempt.

    An array in the file, in this order.
    """

    sample: str
    prompt: str
    source: str
    prompt_tokens: Tokens
    num_tokens: Tokens
    continued_from: str | None


class RunningLine(Line):
    """What is in the engines: of samples that have not left one, nothing else is told."""

    kind: Literal["running"] = "running"
    at: Finite
    samples: tuple[RunningSample, ...]


class LostLine(Line):
    """Lines that were not written because the disk was too slow for them."""

    kind: Literal["lost"] = "lost"
    num_lines: int


class LengthLine(Line):
    """One response of which only the length is known, in a trace that was converted from elsewhere."""

    kind: Literal["length"] = "length"
    prompt: str
    source: str = ""
    prompt_tokens: Tokens = 0
    num_tokens: int = Field(ge=1, le=MAX_TOKENS)
    finished: bool = True


Record = (
    AttemptLine | ScoreLine | RoundLine | TrainedLine | InstallLine | MomentLine | RunningLine | LostLine | LengthLine
)
AnyLine = Annotated[Header | Record, Field(discriminator="kind")]

LINE: TypeAdapter[Header | Record] = TypeAdapter(AnyLine)
