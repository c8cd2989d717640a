"""Ulysses sequence parallelism: the ranks of a group share one micro-batch, and each runs the model on a part of it.

Always true: ranks of a group are given the same micro-batches and say the same numbers of them; a rank holds an equal
run of the pack's tokens, and around each attention heads are exchanged for positions (DeepSpeed's exchange), so that
attention sees whole samples and keeps them apart as ever; what the model says of a rank's own tokens is gathered, and
the gradient of what was gathered goes back to the rank it came from and to no other. Each rank's gradient is therefore
that of its own tokens, and the sum over all ranks, which is what the optimizer is given, is the loss's, once.
"""

import importlib
import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from protocol.errors import SettingsError
from protocol.settings import RunSettings
from trainer.packing import MicroBatch

SIZE_NAME = "actor.ulysses_sequence_parallel_size"
# Rotary embeddings whose angles depend on the longest position that a rank sees, which is its part's, not the pack's.
LENGTH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope"})


def check_sequence_parallel(settings: RunSettings) -> None:
    """Raise `SettingsError` where one sequence can't be spread over ranks as the settings ask."""
    size = settings.actor.ulysses_sequence_parallel_size
    if size == 1:
        return
    if not torch.cuda.is_available():
        raise SettingsError(
            f"{SIZE_NAME} = {size} needs {size} GPUs and there is none here: set it to 1, and bound memory with "
            "actor.ppo_max_token_len_per_gpu, model.enable_gradient_checkpointing and deepspeed.zero_stage"
        )
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks % size:
        raise SettingsError(
            f"{SIZE_NAME} = {size} does not divide the number of ranks, which is {num_ranks}: start a multiple of it "
            "with `april train --nproc`, or change it"
        )
    if not settings.model.use_remove_padding:
        raise SettingsError(f"{SIZE_NAME} = {size} shares packed tokens: set model.use_remove_padding = true")


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share a micro-batch; `rank` is this one's place among `size`."""

    rank: int
    size: int
    process_group: dist.ProcessGroup

    def part(self, micro: MicroBatch) -> MicroBatch:
        """This rank's run of the tokens of `micro`, filled up so that all are equally long.

        Its `lengths` are those of the whole pack, the filling as a last sample: attention is over the whole.
        Predictors and targets are those of its own tokens; all that is only for the loss is the whole's.
        """
        filling = -len(micro.tokens) % self.size
        length = (len(micro.tokens) + filling) // self.size
        own = slice(self.rank * length, (self.rank + 1) * length)
        positions = torch.cat([micro.positions, torch.arange(filling, device=micro.positions.device)])
        counts = self._counts(micro)
        first = sum(counts[: self.rank])
        predicted = slice(first, first + counts[self.rank])
        return replace(
            micro,
            lengths=(*micro.lengths, filling) if filling else micro.lengths,
            tokens=pad(micro.tokens, (0, filling))[own],
            positions=positions[own],
            predictors=micro.predictors[predicted] - own.start,
            targets=micro.targets[predicted],
        )

    def gather(self, values: Tensor, micro: MicroBatch) -> Tensor:
        """[R] on each rank from the `values` of its own predictors; see the module for the gradient."""
        gathered: Any = _Gather.apply(values, self._counts(micro), self.rank, self.process_group)
        return gathered

    def _counts(self, micro: MicroBatch) -> list[int]:
        """How many of the predictors of `micro`, which are in order, lie in the part of each rank."""
        length = -(-len(micro.tokens) // self.size)
        bounds = torch.arange(self.size + 1, device=micro.predictors.device) * length
        return torch.searchsorted(micro.predictors.contiguous(), bounds).diff().tolist()


class _Gather(torch.autograd.Function):
    """Parts of unequal length, end to end on every rank."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: list[int], rank: int, group: dist.ProcessGroup) -> Tensor:
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        longest = max(counts)  # collectives take parts of one length
        if longest == 0:
            return values.clone()
        parts = [values.new_empty(longest) for _ in counts]
        dist.all_gather(parts, pad(values, (0, longest - len(values))), group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.own], None, None, None


def make_sequence_group(rank: int, num_ranks: int, size: int) -> SequenceGroup | None:
    """The group of this rank, of `size` neighbours; None where each has its own samples. Every rank calls it."""
    if size == 1:
        return None
    own: Any = None
    for start in range(0, num_ranks, size):
        group = dist.new_group(list(range(start, start + size)))
        if start <= rank < start + size:
            own = group
    return SequenceGroup(rank % size, size, own)


def share_sequences(lm: PreTrainedModel, group: SequenceGroup | None) -> None:
    """Let the attention of `lm` exchange heads for positions within `group`; raises `SettingsError` where it can't."""
    if group is None:
        return
    config: Any = lm.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % group.size or (kv_heads % group.size and group.size % kv_heads):
        raise SettingsError(
            f"{SIZE_NAME} = {group.size} does not divide the model's {heads} attention heads and {kv_heads} key-value "
            "heads: choose one that does"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in LENGTH_DEPENDENT_ROPES:
        raise SettingsError(f"{SIZE_NAME} needs positions that stand alone and the model has {rope} ones: set it to 1")
    own = [m for m in lm.modules() if hasattr(m, "layer_idx") and hasattr(m, "config")]
    assert all(m.config is config for m in own), "attention layers are told apart by their model's configuration"
    ulysses: Any = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    attention = _shared_attention(config._attn_implementation)
    exchange = ulysses.UlyssesSPAttentionHF(
        attn=attention.core,
        batch_size=1,
        attn_head_count=heads,
        attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        kv_head_count=kv_heads,
        num_hidden_layers=config.num_hidden_layers,
        process_group=group.process_group,
        seq_length_is_variable=True,
    )
    attention.sharing.append((config, exchange))


@dataclass(frozen=True, slots=True)
class _SharedAttention:
    """Stands under the name of `core`, which flash attention looks up in the model: that of every other model is as it
    was, and models in `sharing`, by their configurations, exchange heads for positions around it."""

    core: Any
    sharing: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])

    def __call__(self, module: Any, *arguments: Any, **options: Any) -> Any:
        """Attention of one layer."""
        exchange = next((e for config, e in self.sharing if config is module.config), self.core)
        return exchange(module, *arguments, **options)


def _shared_attention(name: str) -> _SharedAttention:
    """What stands under `name`, put there if it is not there yet."""
    found = AttentionInterface()[name]
    if isinstance(found, _SharedAttention):
        return found
    made = _SharedAttention(found)
    AttentionInterface.register(name, made)
    return made
