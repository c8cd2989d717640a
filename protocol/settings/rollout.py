"""Settings of rounds, engines and what surrounds them."""

import re
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from protocol.messages import MAX_EVALUATION_SAMPLES
from protocol.settings.base import Section


class Cut(StrEnum):
    """What happens to stragglers when a batch is full."""

    ABORT = "abort"
    CONTINUE = "continue"


class Admission(StrEnum):
    """How many groups a round starts."""

    FIXED = "fixed"
    REFILL = "refill"
    BUDGET = "budget"
    TAPER = "taper"


class RoundOrder(StrEnum):
    """Which of the waiting samples with equally old tokens runs first."""

    FIFO = "fifo"
    FEWEST_OPEN = "fewest_open_groups"
    LONGEST_FIRST = "longest_first"


class AutotuneMode(StrEnum):
    """What the controller of the ratio may do."""

    OFF = "off"
    SHADOW = "shadow"
    ON = "on"


class OnInstall(StrEnum):
    """What happens to running samples when a policy version is installed."""

    PARK = "park"
    KEEP = "keep"


class EngineBackend(StrEnum):
    """Where the engine runs."""

    LOCAL = "local"
    RAY = "ray"
    SIMULATED = "simulated"


class RolloutSettings(Section):
    """What a round starts, stops and keeps."""

    n: int = Field(default=8, ge=1)
    """Samples of a prompt (the group that the advantage is computed over)."""
    ratio: float = Field(default=1.25, ge=1.0, le=1000.0)
    """Over-provisioning N'/N, counted in groups. 1 starts only what the batch needs."""
    samples_ratio: float = Field(default=1.0, ge=1.0, le=1000.0)
    """Over-provisioning n'/n inside a group: of n' samples the first n that are scored make the group, the others go on
    when their prompt comes up again. Above 1 it favours short responses (docs/samples_ratio.md)."""
    allow_epoch_lag: bool = False
    """I know that samples which go on in a later epoch have tokens older than `max_lag`; otherwise those start anew."""
    admission: Admission = Admission.FIXED
    """`fixed`: N' groups a round, what finishes is not replaced; `refill`: N' groups always in flight; `budget`: as
    many as the engine has slots and KV room for; `taper`: of N' only those that are predicted to end
    before the cut."""
    order: RoundOrder = RoundOrder.LONGEST_FIRST
    """Which waiting samples run first, after those with older tokens: `fifo`, `fewest_open_groups` (of the group that
    lacks fewest), or `longest_first` (predicted from the prompt's history, else from its data source's)."""
    autotune: AutotuneMode = AutotuneMode.OFF
    """Once a round, `shadow` says which ratio it would set and why, `on` sets it."""
    autotune_min_ratio: float = Field(default=1.0, ge=1.0, le=1000.0)
    """Autotune goes no lower."""
    autotune_max_ratio: float = Field(default=3.0, ge=1.0, le=1000.0)
    """Autotune goes no higher, nor to where `max_lag` could not be kept."""
    autotune_max_off_policy_share: float = Field(default=1.0, ge=0.0, le=1.0)
    """Autotune lowers the ratio while the trainer reports a larger `off_policy/token_share`; with a lookahead nearly
    every token is off-policy whatever the ratio is, so this is for lookahead 0."""
    autotune_min_ess: float = Field(default=0.5, ge=0.0, le=1.0)
    """Autotune lowers the ratio while the trainer reports a smaller `importance/ess`."""
    lookahead: int = Field(default=1, ge=0)
    """Batches that may be offered or leased but untrained when a round starts; 0 is the paper's synchronous form."""
    max_lag: int = Field(default=4, ge=0)
    """No trained token is older than this many policy versions."""
    cut: Cut = Cut.ABORT
    """`abort` parks the stragglers when the batch is full; `continue` lets them run on if no policy waits."""
    on_install: OnInstall = OnInstall.PARK
    """`park` aborts running samples for an install; `keep` freezes them and keeps their KV cache."""
    min_group_samples: int = Field(default_factory=lambda given: min(2, given.get("n", 2)), ge=1)
    """A group with fewer scored samples than this is dropped; by default 2, or 1 where `n` is 1."""
    max_sample_failures: int = Field(default=3, ge=1)
    """Engine failures after which a sample is FAILED and its group goes on without it."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 it biases the importance ratios: needs `allow_truncated_sampling`."""
    top_k: int = Field(default=-1, ge=-1)
    """Top-k sampling; -1 is off. Above 0 it needs `allow_truncated_sampling`."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Min-p sampling. Above 0 it needs `allow_truncated_sampling`."""
    allow_truncated_sampling: bool = False
    """I know that truncated sampling makes the importance ratios biased."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Token ids that end a response, besides the model's end of sequence."""
    checkpoint_interval_s: float = Field(default=5.0, gt=0)
    """Seconds between two checkpoints of a running sample; the most that a crash costs."""


class SimulatedEngineSettings(Section):
    """The engine without a model: lengths and time from a model of both."""

    median_tokens: float = Field(default=100.0, gt=0)
    """Median of the lognormal response length."""
    sigma: float = Field(default=1.0, ge=0)
    """Sigma of the lognormal response length: p99/p50 = exp(2.33 sigma)."""
    step_base_s: float = Field(default=0.002, ge=0)
    """Seconds of a decode step with no sequence in it."""
    step_per_sequence_s: float = Field(default=0.0001, ge=0)
    """Seconds that each running sequence adds to a decode step."""
    prefill_per_token_s: float = Field(default=0.00001, ge=0)
    """Seconds that each prefilled token takes."""
    install_s: float = Field(default=0.0, ge=0)
    """Seconds that a weight install takes."""


class EngineSettings(Section):
    """The replicas that generate."""

    backend: EngineBackend = EngineBackend.LOCAL
    """`local`: vLLM in this process; `ray`: the same in Ray actors; `simulated`: no model, for tests and what-if."""
    num_replicas: int = Field(default=1, ge=1)
    """Engine replicas in the pool."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Slots of one replica: sequences it decodes at once."""
    dtype: str = "auto"
    """Dtype of the engine's weights. `auto`: float32 on CPU (bfloat16 is too noisy there), the model's own on GPU."""
    max_model_len: int | None = None
    """Context length; by default prompt and response length together."""
    kv_cache_memory_bytes: int | None = None
    """KV cache on CPU, in bytes; by default what the slots need at full length, at most 4 GiB."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes."""
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """GPUs of one replica."""
    enforce_eager: bool | None = None
    """No compilation. By default on for CPU, where compiling takes over a minute, and off for GPU."""
    enable_prefix_caching: bool = True
    """Keep the KV cache of shared prefixes; it is reset at every install."""
    max_num_batched_tokens: int | None = None
    """Tokens of one prefill step; vLLM's default if not set."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """An engine that writes no token for this long, with requests running, hangs: it is ended and started again."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine; by default all cores that it may use."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, passed as they are."""
    simulated: SimulatedEngineSettings = Field(default_factory=SimulatedEngineSettings)
    """The simulated engine's model of lengths and time."""


class EvaluationSettings(Section):
    """Held-out evaluations by the service, at the active version. Sampling is their own, with verl's names."""

    n: int = Field(default=1, ge=1, le=MAX_EVALUATION_SAMPLES)
    """k: samples of each held-out prompt, for mean@k, pass@k and maj@k."""
    do_sample: bool = True
    """Off: greedy, whatever `temperature` is."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of evaluations; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling of evaluations. Nothing is trained on them, so it biases nothing."""
    top_k: int = Field(default=-1, ge=-1)
    """Top-k sampling of evaluations; -1 is off."""
    pass_reward: float = 1.0
    """A response counts for pass@k with at least this reward."""
    answer_pattern: str | None = None
    """Regular expression whose last match is the answer that maj@k counts; by default what the scorer looks at."""
    max_concurrency: int = Field(default=16, ge=1)
    """Slots that an evaluation may hold; rounds keep the rest, which is half of all at the least."""
    hold_timeout_s: float = Field(default=600.0, gt=0)
    """An install waits at most this long for a running evaluation, which is then marked as failed."""

    @property
    def greedy(self) -> bool:
        """Whether every response to a prompt is the same."""
        return not self.do_sample or self.temperature == 0

    @field_validator("answer_pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression ({error})") from error
        return pattern

    @model_validator(mode="after")
    def _check_greedy(self) -> "EvaluationSettings":
        if self.greedy and self.n > 1:
            raise ValueError(
                f"evaluation.n = {self.n} greedy samples of a prompt would all be the same: set evaluation.n = 1, or "
                "evaluation.do_sample = true with evaluation.temperature above 0"
            )
        return self
