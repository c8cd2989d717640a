"""Settings of the trainer process, with verl's names where verl has them."""

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from protocol.settings.base import Section

Tracker = Literal["console", "jsonl", "tensorboard"]


class Correction(StrEnum):
    """How the loss corrects for tokens that an older policy wrote."""

    NONE = "none"
    BEHAVIOUR = "behaviour"
    DECOUPLED = "decoupled"


class AlgorithmSettings(Section):
    """Advantages and off-policy correction."""

    adv_estimator: Literal["grpo"] = "grpo"
    """Advantage estimator: `grpo` (rewards normalised within the group)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (off: Dr.GRPO)."""
    correction: Correction = Correction.DECOUPLED
    """`decoupled`: PPO around proximal log-probs, weighted by min(p/b, C); `behaviour`: ratio to the behaviour policy;
    `none`: biased once lag > 0."""
    correction_cap: float = Field(default=2.0, gt=0)
    """C, the cap of the token-level truncated importance weight."""


class OptimSettings(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""


class ActorSettings(Section):
    """One update of the policy."""

    optim: OptimSettings = Field(default_factory=OptimSettings)
    """The optimizer."""
    ppo_mini_batch_size: int | None = Field(default=None, ge=1)
    """Prompts in one optimizer step; by default the whole batch. Must divide `data.train_batch_size`."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over one batch."""
    ppo_max_token_len_per_gpu: int = Field(default=16_384, ge=1)
    """Tokens of one packed micro-batch (a longer sample makes a micro-batch of its own)."""
    ppo_micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """Samples of one micro-batch at the most, besides the bound in tokens."""
    logits_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at once; the full logits never do."""
    clip_ratio_low: float = Field(default=0.2, ge=0, lt=1)
    """Lower clip of the ratio."""
    clip_ratio_high: float = Field(default=0.2, ge=0)
    """Upper clip of the ratio."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Dual clip for negative advantages."""
    loss_agg_mode: Literal["token-mean"] = "token-mean"
    """How token losses become one number, exact over micro-batches and ranks."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Its coefficient; 0 loads no reference policy."""
    kl_loss_type: Literal["low_var_kl"] = "low_var_kl"
    """Its estimator (k3)."""
    entropy_coeff: float = 0.0
    """Coefficient of the entropy bonus."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Gradient norm above which gradients are scaled down."""


class ModelSettings(Section):
    """The policy as it starts."""

    path: Path | None = None
    """Folder of a Hugging Face causal LM with its tokenizer. Nothing is ever downloaded."""
    tokenizer_path: Path | None = None
    """Folder of the tokenizer, if it is not the model's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the trained weights."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    use_remove_padding: Literal[True] = True
    """Sequences are always packed without padding."""


class RefSettings(Section):
    """The reference policy of the KL term."""

    path: Path | None = None
    """Folder of the reference policy; by default the model as it starts."""
    param_offload: bool = False
    """Keep the reference policy on the CPU when it is not used."""


class DeepSpeedSettings(Section):
    """DeepSpeed."""

    zero_stage: int = Field(default=0, ge=0, le=3)
    """ZeRO stage."""
    offload_optimizer: bool = False
    """Keep the optimizer's state on the CPU."""
    offload_param: bool = False
    """Keep parameters on the CPU (ZeRO 3)."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Merged over the DeepSpeed configuration that is made from these settings."""


class TrainerSettings(Section):
    """Steps, checkpoints, evaluations and reports."""

    service_url: str = "http://127.0.0.1:8040"
    """Where the rollout service answers."""
    token: str | None = Field(default=None, repr=False)
    """Its bearer token, if not the one in `service.token`."""
    total_training_steps: int | None = Field(default=None, ge=1)
    """Steps to train; by default `total_epochs` over the data."""
    total_epochs: int = Field(default=1, ge=1)
    """Epochs over the data, if `total_training_steps` is not set."""
    save_freq: int = Field(default=20, ge=1)
    """Steps between two checkpoints; a batch is durable when one holds its step."""
    num_checkpoints_kept: int = Field(default=2, ge=1)
    """Checkpoints kept; older ones are deleted."""
    test_freq: int = Field(default=0, ge=0)
    """Steps between two evaluations; 0 is never."""
    val_before_train: bool = False
    """Evaluate before the first step and after the last."""
    logger: list[Tracker] = Field(default_factory=lambda: list[Tracker](get_args(Tracker)))
    """Where step metrics go besides the service."""
    default_local_dir: Path | None = None
    """Checkpoints and logs; by default `trainer` in the run's folder."""
    project_name: str = "april"
    """Name of the project, for trackers."""
    experiment_name: str | None = None
    """Name of the experiment, for trackers; by default `run.name`."""
    wait_timeout_s: float = Field(default=1800.0, gt=0)
    """Give up after the service has given no batch and no answer for this long."""
    nnodes: int = Field(default=1, ge=1)
    """Machines."""
    n_gpus_per_node: int = Field(default=1, ge=1)
    """Ranks on each machine."""
