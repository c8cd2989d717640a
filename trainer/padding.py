"""The padded form of a micro-batch: one row a sample, each as long as the longest.

Always true: rows are filled up on the right, so with causal attention no token sees padding, and the hidden states of
real tokens are those of the packed form. It costs a forward and backward pass over the padding; it is there to be held
against, and for models whose layers can't be packed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.packing import MicroBatch


def padded_states(decoder: Any, micro: MicroBatch) -> Tensor:
    """Hidden states [R, H] that the response tokens of `micro` are predicted from, by way of the padded form."""
    rows = pad_sequence(list(micro.tokens.split(micro.lengths)), batch_first=True)  # [S, L]
    num_rows, longest = rows.shape
    positions = torch.arange(longest, device=rows.device).expand(num_rows, longest)
    hidden = decoder(input_ids=rows, position_ids=positions, use_cache=False).last_hidden_state  # [S, L, H]
    lengths = torch.tensor(micro.lengths, device=rows.device)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)  # [T]
    row_starts = (torch.arange(num_rows, device=rows.device) * longest).repeat_interleave(lengths)
    place = row_starts + torch.arange(len(micro.tokens), device=rows.device) - starts
    return hidden.flatten(0, 1)[place[micro.predictors]]
