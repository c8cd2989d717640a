"""Attention over packed samples: each token sees its own sample up to itself, and nothing of its neighbours.

A dense mask over a pack of T tokens costs T² memory and arithmetic, most of it for nothing. Here each sample is its
own causal attention, so a pack costs the sum of the squares of its samples' lengths. With flash-attn installed, half
precision and CUDA, its variable-length kernel does the same in one call (`attention_name`).
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from protocol.errors import SettingsError

PACKED_ATTENTION = "april_packed"
PADDED_ATTENTION = "april_padded"
FLASH_ATTENTION = "flash_attention_2"


def attention_name(device: torch.device, dtype: torch.dtype) -> str:
    """The attention implementation that a model is loaded with."""
    half = dtype in (torch.bfloat16, torch.float16)
    installed = importlib.util.find_spec("flash_attn") is not None
    return FLASH_ATTENTION if device.type == "cuda" and half and installed else PACKED_ATTENTION


def attention_arguments(lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a model's forward pass that carry the bounds of the packed samples to either kernel."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
        "sample_lengths": lengths,
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sample_lengths: tuple[int, ...],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample; `query` [1, heads, T, d], `key` and `value` [1, kv heads, T, d].

    Returns [1, T, heads, d]. Registered with transformers, whose attention layers call it. `attention_mask` is always
    None: bounds come as `sample_lengths`.
    """
    if softcap is not None or s_aux is not None:
        raise SettingsError("this model's attention has soft-capping or sinks: install flash-attn to train it packed")
    outputs = [
        scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_window_mask(q.shape[2], sliding_window, q.device),
            dropout_p=dropout,
            is_causal=not _is_windowed(q.shape[2], sliding_window),
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        for q, k, v in zip(*(t.split(sample_lengths, dim=2) for t in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def padded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention over rows that are padded on the right: `query` [S, heads, L, d]; no mask is needed for that."""
    options["sample_lengths"] = (query.shape[2],)
    return packed_attention(module, query, key, value, attention_mask, **options)


def _is_windowed(length: int, window: int | None) -> bool:
    return window is not None and length > window


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[length, length], true where attended; None where plain causal attention is the same."""
    if window is None or not _is_windowed(length, window):
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(PADDED_ATTENTION, padded_attention)
for _name in (PACKED_ATTENTION, PADDED_ATTENTION):
    AttentionMaskInterface.register(_name, _no_mask)
