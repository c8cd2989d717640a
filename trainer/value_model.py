"""The critic's network: a Hugging Face decoder with a value head instead of its output layer.

Always true: what it says of a token is the value of the state before that token, from the hidden state that predicts
it; packed samples do not see each other, as in the policy; a fresh head says 0 everywhere, on every rank.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from protocol.settings import RunSettings
from trainer.model import load_lm, predictor_states
from trainer.packing import MicroBatch
from trainer.sequence_parallel import SequenceGroup, share_sequences


class ValueModel(nn.Module):
    """Packed samples in, one value for each response token out."""

    def __init__(self, lm: PreTrainedModel, group: SequenceGroup | None = None) -> None:
        super().__init__()
        self._group = group
        decoder: Any = lm.get_decoder()
        self.decoder = decoder
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1, dtype=lm.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Values [R] f32 of the states at `micro.predictors`."""
        part = micro if self._group is None else self._group.part(micro)
        values = self.value_head(predictor_states(self.decoder, part)).squeeze(-1).float()
        return values if self._group is None else self._group.gather(values, micro)


def load_value_model(
    settings: RunSettings, path: Path, device: torch.device, group: SequenceGroup | None = None
) -> ValueModel:
    """A critic on the model in `path`, on the CPU; `device` is where it is going to run, `group` shares its packs."""
    lm = load_lm(settings.model.dtype, path, device, settings.critic.model.enable_gradient_checkpointing)
    share_sequences(lm, group)
    return ValueModel(lm, group)
