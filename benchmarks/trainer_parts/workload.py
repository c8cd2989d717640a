"""What every contestant trains: one model, and batches with a long tail of response lengths."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from deploy.demo.byte_model import make_tokenizer
from protocol.batch import Batch, build_batch
from protocol.samples import Group, Prompt, Reward, Sample, Segment
from protocol.settings import RunSettings
from protocol.states import FinishReason, GroupState, SampleState

PROMPT_TOKENS = (20, 60)  # uniform between the two
LEARNING_RATE = 1e-5


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes. Response lengths are lognormal, cut at `max_response`: p99/p50 = exp(2.33 sigma), 6.4 with sigma 0.8."""

    num_prompts: int = 4
    n: int = 8
    median_response: float = 64.0
    sigma: float = 0.8
    max_response: int = 768
    vocabulary: int = 8192
    hidden_size: int = 256
    num_layers: int = 6
    samples_at_once: int = 8  # TRL's per_device_train_batch_size, whose default this is
    threads: int = 1

    @property
    def num_samples(self) -> int:
        """Of one batch."""
        return self.num_prompts * self.n

    @property
    def micro_tokens(self) -> int:
        """Bound of our micro-batches: about the tokens that `samples_at_once` samples have, without padding."""
        return int(self.samples_at_once * 2 * self.median_response)

    def as_dict(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)


def write_model(work: Workload, folder: Path) -> None:
    """A Qwen3-shaped model with random weights and tied embeddings in float32, and a tokenizer beside it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=work.vocabulary,
        hidden_size=work.hidden_size,
        intermediate_size=3 * work.hidden_size,
        num_hidden_layers=work.num_layers,
        num_attention_heads=work.hidden_size // 32,
        num_key_value_heads=work.hidden_size // 64,
        head_dim=32,
        max_position_embeddings=PROMPT_TOKENS[1] + work.max_response,
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_batch(work: Workload, step: int) -> Batch:
    """The batch of `step`: the same tokens, lengths and rewards for whoever asks."""
    rng = np.random.default_rng((7, step))
    groups = [_group(work, rng, f"{step}-{g}", g, step) for g in range(work.num_prompts)]
    return build_batch("bench", step, 0, groups)


def run_settings(work: Workload, model_dir: Path, folder: Path, **sections: dict[str, Any]) -> RunSettings:
    """Our trainer's settings for the workload; `sections` are merged over."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "bench", "dir": folder},
        "model": {"path": model_dir},
        "data": {
            "train_batch_size": work.num_prompts,
            "max_prompt_length": PROMPT_TOKENS[1],
            "max_response_length": work.max_response,
        },
        "rollout": {"n": work.n},
        # TRL without an engine's log-probs corrects nothing either: both then minimise the same number.
        "algorithm": {"correction": "none"},
        "actor": {"ppo_max_token_len_per_gpu": work.micro_tokens, "optim": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
        "trainer": {"logger": [], "total_training_steps": 1000},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return RunSettings(**values)  # pyright: ignore[reportArgumentType]


def _group(work: Workload, rng: np.random.Generator, name: str, index: int, step: int) -> Group:
    prompt = Prompt(name, tuple(rng.integers(0, work.vocabulary, rng.integers(*PROMPT_TOKENS)).tolist()), "?", "bench")
    samples = tuple(_sample(work, rng, name, i) for i in range(work.n))
    return Group(name, index, prompt, GroupState.LEASED, 0, samples, step)


def _sample(work: Workload, rng: np.random.Generator, group: str, index: int) -> Sample:
    length = int(np.clip(rng.lognormal(np.log(work.median_response), work.sigma), 1, work.max_response))
    tokens = rng.integers(0, work.vocabulary, length).astype(np.int32)
    segment = Segment(0, 0, tokens, np.full(length, -np.log(work.vocabulary), np.float32))
    return Sample(
        sample_id=f"{group}/{index}",
        group_id=group,
        index=index,
        state=SampleState.SCORED,
        segments=(segment,),
        num_resumes=0,
        finish_reason=FinishReason.STOP,
        reward=Reward(float(rng.random()), {}),
    )
