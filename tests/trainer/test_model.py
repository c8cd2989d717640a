"""Packing changes nothing, chunking changes nothing, and log-probs are those of the plain model."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from protocol.errors import SettingsError
from tests.trainer.factory import make_batch, make_settings
from trainer.attention import PACKED_ATTENTION, attention_name
from trainer.logprobs import LogprobHead
from trainer.model import PolicyModel, load_policy
from trainer.packing import pack

CPU = torch.device("cpu")


@pytest.fixture
def policy(tiny_model_dir: Path, tmp_path: Path) -> PolicyModel:
    settings = make_settings(tiny_model_dir, tmp_path, rollout={"temperature": 0.7})
    return load_policy(settings, tiny_model_dir, CPU).double()


def reference_logprobs(lm: torch.nn.Module, tokens: torch.Tensor, prompt: int, temperature: float) -> torch.Tensor:
    """Of the tokens after `prompt`, one sample alone through the plain model with the full logits."""
    logits = lm(input_ids=tokens[None]).logits[0, prompt - 1 : -1].double() / temperature
    return torch.log_softmax(logits, -1).gather(1, tokens[prompt:, None])[:, 0]


def test_logprobs_are_those_of_the_plain_model(policy: PolicyModel, tiny_model_dir: Path) -> None:
    batch = make_batch()
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64, attn_implementation="eager")
    indices = [3, 0, 7, 12]
    actual = policy(pack(batch, indices, np.zeros(batch.num_samples, np.float32))).logprobs
    expected = [
        reference_logprobs(
            plain,
            torch.from_numpy(batch.tokens[batch.sample_offsets[i] : batch.sample_offsets[i + 1]].astype(np.int64)),
            int(batch.prompt_lengths[i]),
            0.7,
        )
        for i in indices
    ]
    torch.testing.assert_close(actual, torch.cat(expected), rtol=0, atol=1e-6)


def test_a_neighbour_in_the_pack_changes_nothing(policy: PolicyModel) -> None:
    batch, other = make_batch(), make_batch(seed=99)
    advantages = np.zeros(batch.num_samples, np.float32)
    alone = policy(pack(batch, [5], advantages))
    for indices in ([5, 1], [2, 5], [0, 5, 9, 10]):
        micro = pack(batch, indices, advantages)
        packed = policy(micro)
        mine = micro.samples == 5
        torch.testing.assert_close(packed.logprobs[mine], alone.logprobs, rtol=0, atol=1e-10)
        torch.testing.assert_close(packed.entropy[mine], alone.entropy, rtol=0, atol=1e-10)
    assert not torch.allclose(policy(pack(other, [5], advantages)).logprobs[:2], alone.logprobs[:2]), (
        "the comparison can tell samples apart"
    )


def test_an_empty_micro_batch_gives_zero_gradients(policy: PolicyModel) -> None:
    out = policy(pack(make_batch(), [], np.zeros(16, np.float32)))
    out.logprobs.sum().backward()
    assert len(out.logprobs) == 0
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_sliding_window_is_kept_within_each_sample() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = MistralConfig(**shape, num_attention_heads=4, num_key_value_heads=2, sliding_window=4)
    plain = MistralForCausalLM._from_config(config, attn_implementation="eager").double()
    packed = MistralForCausalLM._from_config(copy.deepcopy(config), attn_implementation=PACKED_ATTENTION).double()
    packed.load_state_dict(plain.state_dict())
    batch = make_batch()
    actual = PolicyModel(packed, 1.0, 64)(pack(batch, [1, 4], np.zeros(16, np.float32))).logprobs
    expected = [
        reference_logprobs(
            plain,
            torch.from_numpy(batch.tokens[batch.sample_offsets[i] : batch.sample_offsets[i + 1]].astype(np.int64)),
            int(batch.prompt_lengths[i]),
            1.0,
        )
        for i in (1, 4)
    ]
    torch.testing.assert_close(actual, torch.cat(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_logprobs_equal_full_logits(chunk: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 50, bias=with_bias, dtype=torch.float64)
    hidden = torch.randn(23, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 50, (23,))
    weights = torch.randn(2, 23, dtype=torch.float64)

    log_p = torch.log_softmax(layer(hidden) / 0.8, -1)
    expected = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    leaves = [hidden, *layer.parameters()]
    expected_grads = torch.autograd.grad((weights[0] * expected + weights[1] * entropy).sum(), leaves)

    actual = LogprobHead(layer, 0.8, chunk)(hidden, targets)
    grads = torch.autograd.grad((weights[0] * actual.logprobs + weights[1] * actual.entropy).sum(), leaves)
    torch.testing.assert_close(actual.logprobs, expected)
    torch.testing.assert_close(actual.entropy, entropy)
    torch.testing.assert_close(grads, expected_grads)


def test_an_impossible_word_gives_finite_entropy_and_gradients() -> None:
    layer = torch.nn.Linear(2, 3)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([0.0, 1.0, -torch.inf]))
    out = LogprobHead(layer, 1.0, 8)(torch.randn(4, 2, requires_grad=True), torch.tensor([0, 1, 0, 1]))
    (out.logprobs + out.entropy).sum().backward()
    assert out.entropy.isfinite().all()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_tied_weights_stay_one_parameter(policy: PolicyModel) -> None:
    names = [name for name, _ in policy.named_parameters()]
    assert "lm.model.embed_tokens.weight" in names
    assert "lm.lm_head.weight" not in names


def test_models_with_scaled_logits_are_refused() -> None:
    config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.final_logit_softcapping = 30.0
    with pytest.raises(SettingsError, match="final_logit_softcapping"):
        PolicyModel(LlamaForCausalLM(config), 1.0, 8)


def test_missing_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"holds no Hugging Face model"):
        load_policy(make_settings(tmp_path, tmp_path), tmp_path, CPU)


def test_half_precision_on_cpu_keeps_the_packed_attention() -> None:
    assert attention_name(CPU, torch.bfloat16) == PACKED_ATTENTION
