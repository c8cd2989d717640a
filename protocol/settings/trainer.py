"""Settings of the trainer process, with verl's names where verl has them."""

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from protocol.masking import mask_text
from protocol.settings.algorithm import KlType
from protocol.settings.base import Section

Tracker = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow"]
LrScheduler = Literal["constant", "cosine", "linear"]
PolicyLoss = Literal["ppo_clip", "gspo", "cispo", "reinforce"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
DEFAULT_TRACKERS: tuple[Tracker, ...] = ("console", "jsonl", "tensorboard")  # those that come with the trainer


def is_http_address(url: str) -> bool:
    """Whether `url` has http or https, a host, and a port that there can be, and nothing that is no part of one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # brackets that don't match; a port that is no number or too large
        return False
    plain = url.isprintable() and " " not in url and not parts.query and not parts.fragment
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0


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
    lr_warmup_steps_ratio: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of all steps, if `lr_warmup_steps` is 0."""
    lr_scheduler_type: LrScheduler = "constant"
    """The rate after the warm-up: `constant`, or falling to `min_lr_ratio` as a `cosine` or a `linear` curve."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where a falling rate ends, as a share of `lr`."""

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{list(betas)} must be two numbers from 0 to below 1, such as [0.9, 0.999]")
        return betas


class ActorSettings(Section):
    """One update of the policy."""

    optim: OptimSettings = Field(default_factory=OptimSettings)
    """The optimizer."""
    ppo_mini_batch_size: int | None = Field(default=None, ge=1)
    """Prompts in one optimizer step; by default the whole batch. Must divide `data.train_batch_size`."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over one batch."""
    use_dynamic_bsz: bool = True
    """Micro-batches bounded in tokens and balanced over ranks. Off: of `ppo_micro_batch_size_per_gpu` samples each."""
    ppo_max_token_len_per_gpu: int = Field(default=16_384, ge=1)
    """Tokens of one micro-batch with `use_dynamic_bsz` (a longer sample makes a micro-batch of its own)."""
    ppo_micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """Samples of one micro-batch: their number without `use_dynamic_bsz`, and with it the most besides the tokens."""
    logits_chunk_tokens: int = Field(default=512, ge=1)
    """Tokens whose logits exist at once; the full logits never do."""
    policy_loss: PolicyLoss = "ppo_clip"
    """`ppo_clip`; `gspo`: one ratio a sequence; `cispo`: the clipped ratio is a weight, so no token loses its gradient;
    `reinforce`: no ratio but the correction's weight."""
    clip_ratio_low: float = Field(default=0.2, ge=0, le=1)
    """Lower clip of the ratio; 1 is none."""
    clip_ratio_high: float = Field(default=0.2, ge=0)
    """Upper clip of the ratio."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Dual clip for negative advantages."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number, exact over micro-batches and ranks."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """What `seq-mean-token-sum-norm` divides by; by default `data.max_response_length`."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Its coefficient; 0 loads no reference policy."""
    kl_loss_type: KlType = "low_var_kl"
    """Its estimator: `kl` (k1), `abs`, `mse` (k2) or `low_var_kl` (k3). The gradient of k1 is zero on average."""
    entropy_coeff: float = 0.0
    """Coefficient of the entropy bonus."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Gradient norm above which gradients are scaled down."""
    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each micro-batch, with a part of its tokens each (Ulysses); needs as many GPUs."""


class CriticModelSettings(Section):
    """The network under the value head."""

    path: Path | None = None
    """Folder of the Hugging Face model that the critic starts from; by default the policy's."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""


class CriticOptimSettings(OptimSettings):
    """The critic's AdamW and its schedule."""

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate."""


class CriticSettings(Section):
    """The value network of PPO (`algorithm.adv_estimator = "gae"`). It trains on the actor's micro-batches, and its
    dtype and ZeRO stage are the policy's."""

    model: CriticModelSettings = Field(default_factory=CriticModelSettings)
    """The network."""
    optim: CriticOptimSettings = Field(default_factory=CriticOptimSettings)
    """The optimizer."""
    cliprange_value: float = Field(default=0.5, gt=0)
    """How far a value may move from the one at the start of the step before the loss stops pulling it."""
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
    use_remove_padding: bool = True
    """Pack the samples of a micro-batch end to end. Off: each is padded to the longest, the same loss for more work."""
    use_liger: bool = False
    """Liger kernels for norms, MLPs and rotary embeddings (CUDA only; needs liger-kernel)."""
    lora_rank: int = Field(default=0, ge=0)
    """Train adapters of this rank (LoRA) instead of the weights; 0 trains the weights."""
    lora_alpha: int = Field(default=16, ge=1)
    """The adapters' output is scaled by `lora_alpha / lora_rank`."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get an adapter: `all-linear` (all but the output layer), or names such as `["q_proj"]`."""


class RefSettings(Section):
    """The reference policy of the KL term."""

    path: Path | None = None
    """Folder of the reference policy; by default the model as it starts (with LoRA: the adapters switched off)."""
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
    critic_warmup: int = Field(default=0, ge=0)
    """First steps, in which only the critic trains."""
    save_freq: int = Field(default=20, ge=1)
    """Steps between two checkpoints; a batch is durable when one holds its step."""
    num_checkpoints_kept: int = Field(default=2, ge=1)
    """Newest checkpoints kept; older ones are deleted, save the best by evaluation reward."""
    resume_from_path: Path | None = None
    """Checkpoint (`…/checkpoints/step-NNNNNN`) to go on from instead of the newest; those after it are put aside. The
    service must not have acknowledged later steps, or have a new buffer (docs/training.md)."""
    accept_lost_buffer: bool = False
    """I know that the service's buffer lacks steps of the checkpoint, because it is new or was set back: what was in
    flight is gone, and the order of prompts begins where the buffer has it."""
    test_freq: int = Field(default=0, ge=0)
    """Steps between two evaluations; 0 is never."""
    val_before_train: bool = False
    """Evaluate before the first step and after the last."""
    logger: list[Tracker] = Field(default_factory=lambda: list(DEFAULT_TRACKERS))
    """Where step metrics go besides the service; `wandb` and `mlflow` need the extra `trackers`."""
    log_samples: int = Field(default=2, ge=0)
    """Samples of each step that trackers get as text: prompt, response, reward, versions. 0 is none."""
    default_local_dir: Path | None = None
    """Checkpoints and logs; by default `trainer` in the run's folder."""
    project_name: str = "april"
    """Name of the project, for trackers."""
    experiment_name: str | None = None
    """Name of the experiment, for trackers; by default `run.name`."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port at which rank 0 serves its own Prometheus metrics at `/metrics`; 0 is none."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """Address to bind for them. They have no token: beyond loopback everyone who gets there can read them."""
    wait_timeout_s: float = Field(default=1800.0, gt=0)
    """Give up after the service has given no batch and no answer for this long."""
    nnodes: int = Field(default=1, ge=1)
    """Machines."""
    n_gpus_per_node: int = Field(default=1, ge=1)
    """Ranks on each machine."""

    @field_validator("service_url")
    @classmethod
    def _check_service_url(cls, url: str) -> str:
        if not is_http_address(url):
            raise ValueError(f"{mask_text(url)!r} must be a whole http(s) address, such as http://127.0.0.1:8040")
        return url
