"""All settings of one run, and the rules that tie sections together."""

import math
from pathlib import Path

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from protocol.samples import MAX_GROUP_SAMPLES
from protocol.settings.algorithm import AlgorithmSettings
from protocol.settings.algorithm_rules import check_algorithm
from protocol.settings.base import Section
from protocol.settings.data import DataSettings, RewardSettings
from protocol.settings.observing import LogSettings, TracingSettings
from protocol.settings.rollout import EngineBackend, EngineSettings, EvaluationSettings, OnInstall, RolloutSettings
from protocol.settings.service import (
    BufferSettings,
    DeliverySettings,
    ServiceSettings,
    TraceSettings,
    WeightsSettings,
)
from protocol.settings.trainer import (
    ActorSettings,
    CriticSettings,
    DeepSpeedSettings,
    ModelSettings,
    RefSettings,
    TrainerSettings,
)
from protocol.settings.trainer_rules import critic_problem, deepspeed_problem, lora_problem, optim_problem

MAX_SEED = 2**63 - 1  # generators take 64 bits, and ranks add their number
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


class RunSection(Section):
    """What names the run."""

    name: str = Field(default="april", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the run: its folder, and its hash tag in Redis."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Seed of shuffles and of everything that is sampled from a seed."""
    dir: Path | None = None
    """Folder of everything this run writes; by default `runs/NAME`."""


class RunSettings(BaseSettings):
    """One TOML file describes a run; both processes read it, each its own sections."""

    model_config = SettingsConfigDict(
        extra="forbid",
        env_prefix="APRIL_",
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
        validate_default=True,
        nested_model_default_partial_update=True,
    )

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    service: ServiceSettings = Field(default_factory=ServiceSettings)
    buffer: BufferSettings = Field(default_factory=BufferSettings)
    weights: WeightsSettings = Field(default_factory=WeightsSettings)
    delivery: DeliverySettings = Field(default_factory=DeliverySettings)
    trace: TraceSettings = Field(default_factory=TraceSettings)
    logs: LogSettings = Field(default_factory=LogSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    actor: ActorSettings = Field(default_factory=ActorSettings)
    critic: CriticSettings = Field(default_factory=CriticSettings)
    ref: RefSettings = Field(default_factory=RefSettings)
    deepspeed: DeepSpeedSettings = Field(default_factory=DeepSpeedSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)

    @property
    def run_dir(self) -> Path:
        """Folder of everything this run writes."""
        return self.run.dir or Path("runs") / self.run.name

    @property
    def weights_root(self) -> Path:
        """Folder that published weights must lie under."""
        return self.weights.root or self.run_dir / "weights"

    @property
    def spool_dir(self) -> Path:
        """Folder of encoded batches."""
        return self.delivery.spool_dir or self.run_dir / "spool"

    @property
    def trainer_dir(self) -> Path:
        """Folder of checkpoints and logs of the trainer."""
        return self.trainer.default_local_dir or self.run_dir / "trainer"

    @property
    def max_model_len(self) -> int:
        """Context that prompt and response need together, unless the engine is given its own."""
        return self.engine.max_model_len or self.data.max_prompt_length + self.data.max_response_length

    @model_validator(mode="after")
    def _check_group_size(self) -> "RunSettings":
        check_algorithm(self.algorithm, self.rollout.n, self.data.max_response_length)
        if self.rollout.min_group_samples > self.rollout.n:
            raise ValueError("rollout.min_group_samples is larger than rollout.n: every group would be dropped")
        mini = self.actor.ppo_mini_batch_size
        if mini and self.data.train_batch_size % mini:
            raise ValueError(
                f"actor.ppo_mini_batch_size = {mini} must divide data.train_batch_size = {self.data.train_batch_size}"
            )
        return self

    @model_validator(mode="after")
    def _check_samples_ratio(self) -> "RunSettings":
        started = started_samples(self.rollout.n, self.rollout.samples_ratio)
        if started > MAX_GROUP_SAMPLES:
            raise ValueError(
                f"rollout.n = {self.rollout.n} with rollout.samples_ratio = {self.rollout.samples_ratio:g} starts "
                f"{started} samples of a prompt, the most is {MAX_GROUP_SAMPLES}: lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_lag(self) -> "RunSettings":
        smallest = smallest_max_lag(self.rollout.ratio, self.rollout.lookahead)
        if self.rollout.max_lag < smallest:
            raise ValueError(
                f"rollout.ratio = {self.rollout.ratio:g} with rollout.lookahead = {self.rollout.lookahead} needs "
                f"rollout.max_lag >= {smallest}: raise it, or lower the ratio or the lookahead"
            )
        return self

    @model_validator(mode="after")
    def _check_autotune(self) -> "RunSettings":
        lowest, highest = self.rollout.autotune_min_ratio, self.rollout.autotune_max_ratio
        if lowest > highest:
            raise ValueError(
                f"rollout.autotune_min_ratio = {lowest:g} is above rollout.autotune_max_ratio = {highest:g}: swap them"
            )
        return self

    @model_validator(mode="after")
    def _check_micro_batches(self) -> "RunSettings":
        actor = self.actor
        if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
            raise ValueError(
                "actor.use_dynamic_bsz = false needs actor.ppo_micro_batch_size_per_gpu: set it, or leave "
                "use_dynamic_bsz on to bound micro-batches in tokens"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> "RunSettings":
        rollout = self.rollout
        truncated = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
        if truncated and not rollout.allow_truncated_sampling:
            raise ValueError(
                "top_p < 1, top_k > 0 and min_p > 0 bias the importance ratios: leave them off, or say "
                "rollout.allow_truncated_sampling = true"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> "RunSettings":
        if self.rollout.on_install is OnInstall.KEEP and self.engine.enable_prefix_caching:
            raise ValueError(
                "rollout.on_install = 'keep' needs engine.enable_prefix_caching = false: old KV blocks would be reused"
            )
        needed = self.data.max_prompt_length + self.data.max_response_length
        if self.engine.max_model_len and self.engine.max_model_len < needed:
            raise ValueError(
                f"engine.max_model_len = {self.engine.max_model_len} is less than data.max_prompt_length + "
                f"data.max_response_length = {needed}: raise it or shorten them"
            )
        if self.engine.backend is EngineBackend.SIMULATED and self.rollout.on_install is OnInstall.KEEP:
            raise ValueError("the simulated engine has no KV cache: rollout.on_install must be 'park'")
        return self

    @model_validator(mode="after")
    def _check_trainer(self) -> "RunSettings":
        for problem in (deepspeed_problem(self), critic_problem(self), optim_problem(self), lora_problem(self)):
            if problem:
                raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _check_bind(self) -> "RunSettings":
        if self.service.host not in LOOPBACK_HOSTS and self.service.token is None:
            raise ValueError(
                f"service.host = {self.service.host} can be reached from other machines: set a token "
                "(APRIL_SERVICE__TOKEN) or bind 127.0.0.1"
            )
        return self


def started_samples(num_samples: int, samples_ratio: float) -> int:
    """n' = ceil(samples_ratio * n): samples of a prompt that are started."""
    return math.ceil(samples_ratio * num_samples)


def smallest_max_lag(ratio: float, lookahead: int) -> int:
    """Versions behind in steady state: ceil(ratio) - 1 rounds in the buffer, and lookahead batches ahead of it."""
    return math.ceil(ratio) - 1 + lookahead
