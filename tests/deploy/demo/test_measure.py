"""The sampler: its log-probs are the model's own, and compacting the batch changes no response."""

from itertools import islice

import pytest
import torch
from transformers import Qwen3ForCausalLM

from deploy.demo.byte_model import make_model, make_tokenizer
from deploy.demo.measure import measure_model, sample
from deploy.demo.task import chain_sums
from protocol.states import FinishReason

PROMPTS = ["a3b-5\n", "a1b+2c+3d-4e+5f+6g-7h+8\n", "a9b+9c-1\n"]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """Random, with an end of sequence that comes at many different steps."""
    made = make_model(seed=0).eval()
    with torch.no_grad():
        made.model.embed_tokens.weight[made.config.eos_token_id] *= 4
    return made


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(model: Qwen3ForCausalLM, temperature: float) -> None:
    for prompt, response in zip(PROMPTS, sample(model, PROMPTS, temperature, _generator(), 40), strict=True):
        prompt_ids = make_tokenizer()(prompt)["input_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt_ids + response.tokens])).logits[0, len(prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(response.tokens)[:, None])
        torch.testing.assert_close(torch.tensor(response.logprobs), expected.squeeze(-1), atol=1e-4, rtol=1e-4)


def test_responses_end_at_different_steps_and_greedy_ones_do_not_depend_on_the_batch(model: Qwen3ForCausalLM) -> None:
    prompts = [item.prompt for item in islice(chain_sums(0, held_out=True), 24)]
    sampled = sample(model, prompts, 1.0, _generator(), 60)
    assert len({len(r.tokens) for r in sampled}) > 3  # rows were dropped one after the other
    together = sample(model, prompts, 0.0, _generator(), 20)
    alone = [sample(model, [prompt], 0.0, _generator(), 20)[0].tokens for prompt in prompts]
    assert [r.tokens for r in together] == alone


def test_a_response_says_how_it_ended(model: Qwen3ForCausalLM) -> None:
    for response in sample(model, PROMPTS * 8, 1.0, _generator(), 12):
        ended = response.tokens[-1] == model.config.eos_token_id
        assert response.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(response.tokens) == 12
        assert "<|end|>" not in response.text


def test_a_measurement_is_the_same_for_the_same_seed(model: Qwen3ForCausalLM) -> None:
    first, again = (measure_model(model, num_samples=2, seed=3) for _ in range(2))
    assert first == again
    assert first.tail == first.p99_tokens / first.p50_tokens
