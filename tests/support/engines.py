"""What tests of real engines share: varied policies, requests, and a transformers forward pass to compare with."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from deploy.demo.byte_model import make_model, save_policy
from protocol.manifest import write_manifest
from protocol.settings.run import RunSettings
from rollout_service.engines.interface import Engine, GenerationRequest, SamplingParameters
from tests.support.simulated import Collected, collect, until

__all__ = [
    "Collected",
    "Reference",
    "collect",
    "engine_settings",
    "generate_all",
    "make_policy",
    "random_prompts",
    "request",
    "until",
]

# With its small random weights the model repeats one token for ever; scaled up, every token depends on all before.
WEIGHT_SCALE = 4.0


def make_policy(folder: Path, seed: int, max_shard_size: str | None = None, num_layers: int = 2) -> Path:
    """A random policy with tied embeddings whose greedy output is varied; published with a manifest of step `seed`."""
    model = make_model(seed=seed, num_layers=num_layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed_tokens" not in name:
                weight.mul_(WEIGHT_SCALE)
    save_policy(model, folder)
    if max_shard_size is not None:
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_manifest(folder, step=seed)
    return folder


def engine_settings(model: Path | None, **engine: Any) -> RunSettings:
    """Settings for a small engine: a context of 256 tokens."""
    kept = engine.pop("on_install", "park")
    return RunSettings.model_validate(
        {
            "model": {"path": model},
            "data": {"max_prompt_length": 160, "max_response_length": 96},
            "rollout": {"on_install": kept},
            "engine": {"num_threads": 1} | engine,
        }
    )


def request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 96,
    temperature: float = 1.0,
    prefix: Sequence[int] = (),
    **sampling: Any,
) -> GenerationRequest:
    """A request whose prompt is followed by the response so far."""
    tokens = (*prompt, *prefix)
    return GenerationRequest(name, tokens, len(prefix), SamplingParameters(max_tokens, temperature, **sampling))


async def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Collected]:
    """Run requests together."""
    return list(await asyncio.gather(*(collect(engine.generate(item)) for item in requests)))


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of byte tokens."""
    generator = np.random.default_rng(seed)
    return [[int(token) for token in generator.integers(0, 256, length)] for _ in range(count)]


class Reference:
    """The same weights in transformers, float32."""

    def __init__(self, folder: Path) -> None:
        self._model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> np.ndarray:
        """Log-probability of each response token [T] at this temperature."""
        logits = self._model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits / temperature, dim=-1)
        return table.gather(1, torch.tensor(response)[:, None])[:, 0].numpy()

    @torch.no_grad()
    def gap_of_best_two(self, context: Sequence[int]) -> float:
        """Difference between the two best next tokens' log-probs."""
        best = torch.log_softmax(self._model(torch.tensor([list(context)])).logits[0, -1], -1).topk(2).values
        return float(best[0] - best[1])
