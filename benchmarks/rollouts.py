"""Responses of the demo's policy in this process, begun by one set of weights and finished by another.

Token ids in and out: a response that is resumed goes on from the ids that were sampled, whatever text they make.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM

from deploy.demo.byte_model import end_of_sequence_id, make_tokenizer


@dataclass(slots=True)
class Rollout:
    """A response as it grows; `versions` and `logprobs` of each of its `tokens`."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    ended: bool = False


class Sampler:
    """Continues rollouts with whatever weights it holds, at temperature 1, in float32."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._model = model.eval()
        self._end = end_of_sequence_id(make_tokenizer())
        self._version = -1

    def hold(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with `weights` (Hugging Face names, tied ones once) from now on."""
        missing, unexpected = self._model.load_state_dict(dict(weights), strict=False)
        assert not unexpected, "the weights are this model's"
        assert set(missing) <= {"lm_head.weight"}, "a tied output layer is the only one that may be missing"
        self._version = version

    @torch.inference_mode()
    def extend(self, rollouts: Sequence[Rollout], lengths: Sequence[int], generator: torch.Generator) -> None:
        """Sample on each of `rollouts` until it ends or has its number of `lengths` tokens."""
        rows = [i for i, r in enumerate(rollouts) if not r.ended and len(r.tokens) < lengths[i]]
        if not rows:
            return
        step, mask = _left_padded([rollouts[i].prompt + rollouts[i].tokens for i in rows], self._end)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        cache = DynamicCache(config=self._model.config)
        while True:
            logits = self._model(
                input_ids=step, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            ).logits[:, -1]
            logprobs = torch.log_softmax(logits, -1)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)  # [B, 1]
            self._append([rollouts[i] for i in rows], chosen[:, 0], logprobs.gather(1, chosen)[:, 0])
            alive = [j for j, i in enumerate(rows) if not rollouts[i].ended and len(rollouts[i].tokens) < lengths[i]]
            if not alive:
                return
            kept = torch.tensor(alive)
            if len(alive) < len(rows):
                cache.batch_select_indices(kept)
            rows = [rows[j] for j in alive]
            step = chosen[kept]
            mask = torch.cat([mask[kept], mask.new_ones(len(rows), 1)], -1)
            positions = positions[kept][:, -1:] + 1

    def _append(self, rollouts: Sequence[Rollout], tokens: Tensor, logprobs: Tensor) -> None:
        for rollout, token, logprob in zip(rollouts, tokens.tolist(), logprobs.tolist(), strict=True):
            rollout.tokens.append(token)
            rollout.logprobs.append(logprob)
            rollout.versions.append(self._version)
            rollout.ended = token == self._end


def _left_padded(rows: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, [B, T]."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), padding)
    mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :] = torch.tensor(row)
        mask[i, longest - len(row) :] = 1
    return ids, mask
