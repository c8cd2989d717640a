"""Sampling from the small policy in this process, to see where reinforcement learning starts from.

A batch decodes on one key-value cache and is compacted as responses end, so its cost follows the tokens and not the
longest response. No engine is needed: this is how the base policy is checked where it is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM

from deploy.demo.byte_model import end_of_sequence_id, make_tokenizer, one_thread
from deploy.demo.task import DATA_SOURCE, HELD_OUT_SEED, chain_sums, score
from protocol.states import FinishReason

BATCH_SIZE = 256  # sequences that decode together: larger ones are no faster on a few cores
MAX_RESPONSE_TOKENS = 256  # the longest worked solution has 240


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response; `tokens` includes the end of sequence if it ended by itself."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Measurement:
    """How a policy does on held-out expressions. Lengths are response tokens."""

    num_samples: int
    mean_reward: float
    right_share: float
    ended_share: float
    mean_tokens: float
    p50_tokens: float
    p99_tokens: float

    @property
    def tail(self) -> float:
        """p99 / p50 of the response length: what over-provisioning lives on."""
        return self.p99_tokens / self.p50_tokens


def measure_policy(folder: Path, num_samples: int = 512, seed: int = 0, temperature: float = 1.0) -> Measurement:
    """Sample held-out expressions once each from the policy in `folder`."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return measure_model(model, num_samples, seed, temperature)


def measure_model(
    model: Qwen3ForCausalLM, num_samples: int = 512, seed: int = 0, temperature: float = 1.0
) -> Measurement:
    """Sample held-out expressions once each from `model`; `temperature` 0 is greedy."""
    items = list(islice(chain_sums(HELD_OUT_SEED, held_out=True), num_samples))
    responses = sample(model, [item.prompt for item in items], temperature, torch.Generator().manual_seed(seed))
    scores = [
        score(DATA_SOURCE, r.text, str(item.answer), {"finish_reason": r.finish_reason})
        for item, r in zip(items, responses, strict=True)
    ]
    lengths = np.array([len(r.tokens) for r in responses])
    return Measurement(
        num_samples=num_samples,
        mean_reward=float(np.mean([s["score"] for s in scores])),
        right_share=float(np.mean([s["right"] for s in scores])),
        ended_share=float(np.mean([s["ended"] for s in scores])),
        mean_tokens=float(lengths.mean()),
        p50_tokens=float(np.percentile(lengths, 50)),
        p99_tokens=float(np.percentile(lengths, 99)),
    )


def sample(
    model: Qwen3ForCausalLM,
    prompts: Sequence[str],
    temperature: float,
    generator: torch.Generator,
    max_tokens: int = MAX_RESPONSE_TOKENS,
) -> list[Response]:
    """One response to each prompt, in order. `temperature` 0 is greedy."""
    starts = range(0, len(prompts), BATCH_SIZE)
    with one_thread():
        batches = [
            _sample_batch(model, prompts[start : start + BATCH_SIZE], temperature, generator, max_tokens)
            for start in starts
        ]
    return [response for batch in batches for response in batch]


@torch.inference_mode()
def _sample_batch(
    model: Qwen3ForCausalLM, prompts: Sequence[str], temperature: float, generator: torch.Generator, max_tokens: int
) -> list[Response]:
    tokenizer = make_tokenizer()
    end_id = end_of_sequence_id(tokenizer)
    inputs = tokenizer(
        list(prompts), padding=True, padding_side="left", return_tensors="pt", return_token_type_ids=False
    )
    step_ids, mask = inputs["input_ids"], inputs["attention_mask"]  # [B, T]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = DynamicCache(config=model.config)
    rows = torch.arange(len(prompts))  # which prompt each row of the batch belongs to
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for _ in range(max_tokens):
        logits = model(
            input_ids=step_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        chosen, chosen_logprobs = _choose(logits, temperature, generator)
        for row, token, logprob in zip(rows.tolist(), chosen.tolist(), chosen_logprobs.tolist(), strict=True):
            tokens[row].append(token)
            logprobs[row].append(logprob)
        alive = (chosen != end_id).nonzero().squeeze(-1)
        if not len(alive):
            break
        if len(alive) < len(rows):
            cache.batch_select_indices(alive)
            rows, chosen, mask, positions = rows[alive], chosen[alive], mask[alive], positions[alive]
        step_ids = chosen.unsqueeze(-1)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=-1)
        positions = positions[:, -1:] + 1
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    reasons = [FinishReason.STOP if t[-1] == end_id else FinishReason.LENGTH for t in tokens]
    return [Response(*parts) for parts in zip(tokens, logprobs, texts, reasons, strict=True)]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sampled tokens [B] and their log-probs [B], temperature applied."""
    logprobs = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
    if temperature > 0:
        chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
    else:
        chosen = logprobs.argmax(-1, keepdim=True)
    return chosen.squeeze(-1), logprobs.gather(-1, chosen).squeeze(-1)
