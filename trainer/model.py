"""The policy: a Hugging Face causal LM that takes packed samples and gives log-probs instead of logits.

Always true: weights come from a local folder and no code does; a sample's log-probs do not depend on its neighbours
in the pack; parameters keep their Hugging Face names behind the prefix `lm.`; a model whose logits are more than one
linear layer is refused, because its log-probs would be silently wrong.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from protocol.errors import SettingsError
from protocol.settings import RunSettings
from trainer.adapters import add_adapters
from trainer.attention import PADDED_ATTENTION, attention_arguments, attention_name
from trainer.kernels import apply_kernels
from trainer.logprobs import LogprobHead, TokenLogprobs
from trainer.packing import MicroBatch
from trainer.padding import padded_states
from trainer.sequence_parallel import SequenceGroup, share_sequences

LM_PREFIX = "lm."
# Set by Gemma 2, Cohere, Granite and others: their logits are scaled or capped after the output layer.
LOGIT_SETTINGS: Mapping[str, Any] = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


class PolicyModel(nn.Module):
    """Packed samples in, log-probs and entropy of their response tokens out."""

    def __init__(
        self, lm: PreTrainedModel, temperature: float, chunk_tokens: int, group: SequenceGroup | None = None
    ) -> None:
        super().__init__()
        check_architecture(lm.config)
        output_layer = lm.get_output_embeddings()
        if not isinstance(output_layer, nn.Linear):
            raise SettingsError(f"{type(lm).__name__} has no linear output layer; train a causal language model")
        lm.set_output_embeddings(LogprobHead(output_layer, temperature, chunk_tokens))
        self.lm = lm
        self._group = group

    def forward(self, micro: MicroBatch) -> TokenLogprobs:
        """Log-probs [R] and entropy [R] of the response tokens of `micro`."""
        head: Any = self.lm.get_output_embeddings()
        part = micro if self._group is None else self._group.part(micro)
        out = head(predictor_states(self.lm.get_decoder(), part), part.targets)
        return out if self._group is None else TokenLogprobs(*(self._group.gather(o, micro) for o in out))

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that the model knows."""
        return self.lm.config.get_text_config().vocab_size

    @property
    def context_length(self) -> int | None:
        """Longest sequence, if the model says so."""
        return getattr(self.lm.config.get_text_config(), "max_position_embeddings", None)


def predictor_states(decoder: Any, micro: MicroBatch) -> Tensor:
    """Hidden states [R, H] that the response tokens of `micro` are predicted from."""
    if decoder.config._attn_implementation == PADDED_ATTENTION:
        return padded_states(decoder, micro)
    outputs = decoder(
        input_ids=micro.tokens[None],
        position_ids=micro.positions[None],
        use_cache=False,
        **attention_arguments(micro.lengths, micro.tokens.device),
    )
    return outputs.last_hidden_state[0][micro.predictors]


def load_policy(
    settings: RunSettings,
    path: Path,
    device: torch.device,
    adapters: bool = False,
    group: SequenceGroup | None = None,
) -> PolicyModel:
    """The model in `path`, in the dtype of the settings, on the CPU; `device` is where it is going to run.

    `adapters`: with those that the settings ask for, in the same random state on every rank. `group`: the ranks that
    share its micro-batches.
    """
    lm = load_lm(settings.model.dtype, path, device, settings.model.enable_gradient_checkpointing)
    apply_kernels(lm, settings.model, device)
    share_sequences(lm, group)
    if adapters and settings.model.lora_rank:
        with same_on_all_ranks(settings.run.seed):
            add_adapters(lm, settings.model)
    return PolicyModel(lm, settings.rollout.temperature, settings.actor.logits_chunk_tokens, group)


def load_lm(dtype_name: str, path: Path, device: torch.device, gradient_checkpointing: bool) -> PreTrainedModel:
    """The Hugging Face causal LM in `path`, on the CPU, with the attention that keeps packed samples apart."""
    dtype = torch.bfloat16 if dtype_name == "bfloat16" else torch.float32
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
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return lm


@contextmanager
def same_on_all_ranks(seed: int) -> Generator[None]:
    """Within the block random weights come from `seed` alone: under ZeRO-3 each rank keeps a part of its own copy."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


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
