"""Bodies of the HTTP API. The routes are in docs/http.md and at `/openapi.json`."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from protocol.states import DropReason, ExpiryReason, FailReason, FinishReason, GroupState, SampleState
from protocol.watching import Verdict, Wait

TRAINER_EPOCH_HEADER = "April-Trainer-Epoch"
BATCH_SHA256_HEADER = "April-Batch-SHA256"
PROBLEM_MEDIA_TYPE = "application/problem+json"
MAX_STEP = (1 << 31) - 1  # Lua counts exactly up to 2^53; no run takes more steps than this
MAX_EVALUATION_SAMPLES = 1024  # of one prompt; pass@k needs no more


class Message(BaseModel):
    """A request or response body; unknown fields and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
TrainedStep = Annotated[int, Field(ge=1, le=MAX_STEP)]


class Problem(BaseModel):
    """An RFC 9457 problem document. `detail` is one sentence that says what to do."""

    type: str
    title: str
    status: int
    detail: str


class OpenTrainer(Message):
    """`durable_step`: the last step in the checkpoint that the trainer restored; 0 if it starts anew.

    `accept_lost_buffer`: go on although the run's buffer lacks steps up to that one.
    """

    durable_step: Step
    accept_lost_buffer: bool = False


class TrainerSession(Message):
    """`trainer_epoch` goes into the header of every later call; `policy_version` is the newest version there is."""

    trainer_epoch: int
    durable_step: int
    policy_version: int
    run: str
    num_train_prompts: int


class LeaseBatch(Message):
    """Ask for the batch of `step`, waiting up to `wait_s` seconds for it."""

    step: TrainedStep
    wait_s: float = Field(default=0.0, ge=0)


class StepTrained(Message):
    """Answer to a report that a step is trained."""

    step: int
    trained_step: int


class Acked(Message):
    """`durable_step` is the last step that is acknowledged; `num_groups` were released by this call."""

    durable_step: int
    num_groups: int


class PublishPolicy(Message):
    """Weights of the policy after `step`, in a folder under the weights root."""

    step: Step
    path: str = Field(max_length=4096)


class PolicyState(StrEnum):
    """Where a published version is."""

    QUEUED = "queued"
    INSTALLING = "installing"
    ACTIVE = "active"
    SUPERSEDED = "superseded"
    FAILED = "failed"


class Policy(Message):
    """One policy version. `error` says why it failed and on which replica."""

    version: int
    step: int
    trainer_epoch: int
    path: str
    state: PolicyState
    error: str | None = None
    install_s: float | None = None


class Ledger(Message):
    """Groups by state. `error` = admitted - (open + ready + leased + consumed + dropped); it must be 0."""

    admitted: int = 0
    open: int = 0
    ready: int = 0
    leased: int = 0
    consumed: int = 0
    dropped: int = 0

    @property
    def error(self) -> int:
        """Groups that are in no state or in two."""
        return self.admitted - (self.open + self.ready + self.leased + self.consumed + self.dropped)


class PoolLedger(Message):
    """Samples that their groups were READY without. `error` = entered - (pooled + continued + expired); it must be 0.

    `num_bytes`: what the pooled ones hold, counted against `buffer.max_pool_bytes`.
    """

    entered: int = 0
    pooled: int = 0
    continued: int = 0
    expired: dict[ExpiryReason, int] = Field(default_factory=lambda: dict.fromkeys(ExpiryReason, 0))
    num_bytes: int = 0

    @property
    def error(self) -> int:
        """Samples that are nowhere or in two places."""
        return self.entered - (self.pooled + self.continued + sum(self.expired.values()))


class LengthBias(Message):
    """Mean tokens in groups with `samples_ratio` > 1: of the samples that made the group, and of all that were started.

    The second is a lower bound, since those that left their group had not finished.
    """

    trained_tokens: float
    started_tokens: float


class RoundStatus(Message):
    """The round that runs now."""

    round: int
    started_s_ago: float
    target_groups: int
    num_ready: int
    num_must_finish: int


class EngineStatus(Message):
    """One replica. None: the engine doesn't say, or not yet."""

    worker: str
    epoch: int
    slots: int
    running: int
    version: int
    alive: bool
    tokens_generated: int
    num_restarts: int = 0
    kv_use: float | None = None
    num_preemptions: int | None = None
    tokens_per_s: float | None = None


class AutotuneStatus(Message):
    """The controller of the ratio: what it may do, the ratio it wants, why, and what it measured (averages)."""

    mode: Literal["off", "shadow", "on"]
    ratio: float | None = None
    reason: str | None = None
    measured: dict[str, float] = Field(default_factory=dict)


class Status(Message):
    """State of the service; `/v1/events` sends the same, once a second at most.

    `now` is the service's clock, in seconds since the epoch, which the times in `waiting` and in pictures are of.
    """

    run: str
    service_epoch: int
    pid: int
    uptime_s: float
    paused: bool
    draining: bool
    waits: list[str]
    active_version: int
    newest_version: int
    trainer_epoch: int
    trainer_connected: bool
    offered: int
    leased_steps: list[int]
    trained_step: int
    durable_step: int
    samples: dict[SampleState, int]
    oldest_waiting_s: float
    ledger: Ledger
    ledger_error: int
    round: RoundStatus | None
    engines: list[EngineStatus]
    counters: dict[str, int]
    settings: dict[str, Any]
    trainer_metrics: dict[str, float]
    num_train_prompts: int
    redis_pid: int | None
    autotune: AutotuneStatus = Field(default_factory=lambda: AutotuneStatus(mode="off"))
    pool: PoolLedger = Field(default_factory=PoolLedger)
    pool_error: int = 0
    length_bias: LengthBias | None = None
    now: float = 0.0
    verdict: Verdict | None = None
    waiting: list[Wait] = Field(default_factory=list[Wait])


class LiveSettings(Message):
    """What may change while the service runs; a field that is left out stays."""

    ratio: float | None = Field(default=None, ge=1, le=1000, strict=True)
    samples_ratio: float | None = Field(default=None, ge=1, le=1000, strict=True)
    lookahead: int | None = Field(default=None, ge=0, le=1000, strict=True)
    autotune: Literal["off", "shadow", "on"] | None = None


class SettingsChange(Message):
    """One line of the audit record."""

    at: float
    changes: dict[str, tuple[Any, Any]]
    by: str


class SettingsView(Message):
    """Live settings in force and how they came about."""

    ratio: float
    lookahead: int
    max_lag: int
    samples_ratio: float = 1.0
    autotune: Literal["off", "shadow", "on"] = "off"
    audit: list[SettingsChange]


class Control(Message):
    """Answer to pause, resume and drain. `safe_to_stop`: nothing runs and everything is in the buffer."""

    paused: bool
    draining: bool
    safe_to_stop: bool


class StartEvaluation(Message):
    """Evaluate the held-out set at the active version, or at `version` as soon as it (or a newer one) is active."""

    version: Step | None = None
    num_prompts: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MAX_EVALUATION_SAMPLES)
    temperature: float | None = Field(default=None, ge=0, le=100)


class EvaluationScores(Message):
    """Results over some held-out prompts, of their scored samples; k is the number of samples of a prompt.

    `mean`: mean@k; `mean_stderr`: its standard error over prompts; `pass_at`: pass@j for some j up to k; `majority`:
    maj@k. What has no value is left out.
    """

    num_prompts: int
    num_samples: int
    num_failed: int
    mean: float
    mean_stderr: float | None = None
    pass_at: dict[int, float] = Field(default_factory=dict)
    majority: float | None = None
    truncated_share: float
    mean_tokens: float
    p50_tokens: float
    p99_tokens: float
    max_tokens: int


class Evaluation(Message):
    """A version-pinned evaluation; its samples take no part in rounds and are never cut.

    Of `num_samples`, `num_done` are scored and `num_failed` could not be, up to now. `scores` and, by data source,
    `sources` are there when it is done; the single numbers beside them are those of `scores`.
    """

    id: str
    version: int
    state: Literal["running", "done", "failed"]
    num_samples: int
    num_done: int
    num_failed: int
    mean_reward: float | None = None
    mean_tokens: float | None = None
    p50_tokens: float | None = None
    p99_tokens: float | None = None
    max_tokens: int | None = None
    truncated_share: float | None = None
    error: str | None = None
    n: int = 1
    temperature: float | None = None
    scores: EvaluationScores | None = None
    sources: dict[str, EvaluationScores] = Field(default_factory=dict)


MetricName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./:@+ -]{1,120}$")]


class TrainerMetrics(Message):
    """Metrics of one step, shown beside the service's own."""

    step: Step
    metrics: dict[MetricName, float]


class SegmentView(Message):
    """Response tokens of one version."""

    start: int
    version: int
    kv_kept: bool
    tokens: list[int]
    logprobs: list[float]


class SampleView(Message):
    """One sample with its provenance."""

    sample_id: str
    state: SampleState
    num_tokens: int
    num_resumes: int
    num_failures: int
    finish_reason: FinishReason | None
    fail_reason: FailReason | None
    error: str | None
    reward: float | None
    reward_parts: dict[str, float]
    segments: list[SegmentView]
    text: str | None
    continued_from: str | None = None


class GroupView(Message):
    """One group with its samples."""

    group_id: str
    state: GroupState
    prompt_id: str
    data_source: str
    prompt: str
    prompt_token_ids: list[int]
    admitted_version: int
    step: int | None
    drop_reason: DropReason | None
    samples: list[SampleView]
