"""Does the engine sample with the log-probabilities that the trainer computes? Run before a long run, not in one."""

import torch
from transformers import AutoModelForCausalLM

from protocol.settings import RunSettings
from rollout_service.engines.interface import GenerationRequest, SamplingParameters
from rollout_service.engines.pool import build_pool
from rollout_service.prompts.load import load_prompts

NUM_TOKENS = 64  # enough for a mean, quick on any model


async def logprob_difference(settings: RunSettings) -> float:
    """Mean absolute difference of sampled-token log-probs, engine against a transformers forward pass."""
    prompt = load_prompts(settings).train[0].token_ids
    num_tokens = min(NUM_TOKENS, settings.data.max_response_length)
    pool = build_pool(settings)
    tokens: list[int] = []
    logprobs: list[float] = []
    try:
        await pool.start()
        sampling = SamplingParameters(max_tokens=num_tokens, temperature=settings.rollout.temperature)
        async for chunk in pool.generate(GenerationRequest("doctor@1", prompt, 0, sampling)):
            tokens += chunk.tokens.tolist()
            logprobs += chunk.logprobs.tolist()
    finally:
        await pool.close()
    expected = _forward(settings, [*prompt, *tokens])[len(prompt) - 1 :]
    return float((torch.tensor(logprobs) - expected).abs().mean())


def _forward(settings: RunSettings, tokens: list[int]) -> torch.Tensor:
    """Log-prob of each token after the first [T-1], in the trainer's dtype."""
    path = settings.model.path
    assert path is not None, "the engine has started from it"
    dtype = getattr(torch, settings.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float() / settings.rollout.temperature  # [T-1, V]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
