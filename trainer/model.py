"""The policy: a Hugging Face causal LM that takes packed samples and gives log-probs instead of logits.

Always true: weights come from a local folder and no code does; a sample's log-probs do not depend on its neighbours
in the pack; parameters keep their Hugging Face names behind the prefix `lm.`; a model whose logits are more than one
linear layer is refused, because its log-probs would be silently wrong.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from protocol.errors import SettingsError
from protocol.settings import RunSettings
from trainer.attention import attention_arguments, attention_name
from trainer.logprobs import LogprobHead, TokenLogprobs
from trainer.packing import MicroBatch

LM_PREFIX = "lm."
# Set by Gemma 2, Cohere, Granite and others: their logits are scaled or capped after the output layer.
LOGIT_SETTINGS: Mapping[str, Any] = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


class PolicyModel(nn.Module):
    """Packed samples in, log-probs and entropy of their response tokens out."""

    def __init__(self, lm: PreTrainedModel, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        check_architecture(lm.config)
        output_layer = lm.get_output_embeddings()
        if not isinstance(output_layer, nn.Linear):
            raise SettingsError(f"{type(lm).__name__} has no linear output layer; train a causal language model")
        lm.set_output_embeddings(LogprobHead(output_layer, temperature, chunk_tokens))
        self.lm = lm

    def forward(self, micro: MicroBatch) -> TokenLogprobs:
        """Log-probs [R] and entropy [R] of the response tokens of `micro`."""
        decoder: Any = self.lm.get_decoder()
        outputs = decoder(
            input_ids=micro.tokens[None],
            position_ids=micro.positions[None],
            use_cache=False,
            **attention_arguments(micro.lengths, micro.tokens.device),
        )
        hidden = outputs.last_hidden_state[0]  # [T, H]
        head: Any = self.lm.get_output_embeddings()
        return head(hidden[micro.predictors], micro.targets)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that the model knows."""
        return self.lm.config.get_text_config().vocab_size

    @property
    def context_length(self) -> int | None:
        """Longest sequence, if the model says so."""
        return getattr(self.lm.config.get_text_config(), "max_position_embeddings", None)


def load_policy(settings: RunSettings, path: Path, device: torch.device) -> PolicyModel:
    """The model in `path`, in the dtype of the settings, on the CPU; `device` is where it is going to run."""
    dtype = torch.bfloat16 if settings.model.dtype == "bfloat16" else torch.float32
    if not (path / "config.json").is_file():
        raise SettingsError(
            f"{path} holds no Hugging Face model (no config.json); set model.path to a folder that does"
        )
    disable_progress_bar()
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            dtype=dtype,
            attn_implementation=attention_name(device, dtype),
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise SettingsError(f"the model in {path} can't be loaded: {error}") from error
    if settings.model.enable_gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(lm, settings.rollout.temperature, settings.actor.logits_chunk_tokens)


def check_architecture(config: PreTrainedConfig) -> None:
    """Raise `SettingsError` for a model that can't be packed or whose logits are scaled or capped."""
    text = config.get_text_config()
    for name, neutral in LOGIT_SETTINGS.items():
        if getattr(text, name, None) not in (None, neutral):
            raise SettingsError(
                f"{config.model_type} sets {name}, which the trainer does not apply; train another model"
            )
    other = set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS
    if other:
        raise SettingsError(
            f"{config.model_type} has layers ({', '.join(sorted(other))}) that would mix packed samples; "
            "train a model with attention layers only"
        )
