"""Attention over a pack equals dense attention with a block-diagonal causal mask, values and gradients."""

import pytest
import torch
from torch import Tensor, nn

from protocol.errors import SettingsError
from trainer.attention import attention_arguments, packed_attention, padded_attention

LENGTHS = (5, 1, 9, 3)


def inputs(num_heads: int, num_kv_heads: int, rows: int = 1, length: int = sum(LENGTHS)) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(rows, heads, length, 8, dtype=torch.float64, requires_grad=True)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


def dense(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """[1, T, heads, d], written out: scores, mask, softmax."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    sample = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(len(sample))
    distance = place[:, None] - place[None, :]
    seen = (sample[:, None] == sample[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    scores = query @ key.transpose(-1, -2) * 0.3
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_packed_is_block_diagonal(heads: tuple[int, int], window: int | None) -> None:
    tensors = inputs(*heads)
    weights = torch.randn(1, sum(LENGTHS), heads[0], 8, dtype=torch.float64)
    results = []
    packed, _ = packed_attention(
        nn.Module(), *tensors, None, sample_lengths=LENGTHS, scaling=0.3, sliding_window=window
    )
    for output in (packed, dense(*tensors, window)):
        results.append((output, *torch.autograd.grad((output * weights).sum(), tensors)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


def test_a_neighbour_gets_no_gradient() -> None:
    tensors = inputs(2, 2)
    output, _ = packed_attention(nn.Module(), *tensors, None, sample_lengths=LENGTHS)
    output[:, LENGTHS[0] : LENGTHS[0] + LENGTHS[1]].sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None
        touched = tensor.grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist()
        assert set(touched) <= set(range(LENGTHS[0], LENGTHS[0] + LENGTHS[1]))


def test_padding_on_the_right_is_never_seen() -> None:
    query, key, value = inputs(2, 2, rows=3, length=6)
    before, _ = padded_attention(nn.Module(), query, key, value, None)
    with torch.no_grad():
        for tensor in (query, key, value):
            tensor[:, :, 4:] = 1e6
    after, _ = padded_attention(nn.Module(), query, key, value, None)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)


def test_bounds_for_variable_length_kernels() -> None:
    arguments = attention_arguments(LENGTHS, torch.device("cpu"))
    assert arguments["cu_seq_lens_q"].tolist() == [0, 5, 6, 15, 18]
    assert arguments["cu_seq_lens_q"].dtype == torch.int32
    assert arguments["max_length_q"] == 9


def test_soft_capping_is_refused() -> None:
    with pytest.raises(SettingsError, match="soft-capping"):
        packed_attention(nn.Module(), *inputs(2, 2), None, sample_lengths=LENGTHS, softcap=30.0)
