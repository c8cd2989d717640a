"""The frozen reference policy of the KL term."""

from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.errors import SettingsError
from protocol.settings import RunSettings
from trainer.model import load_policy
from trainer.packing import MicroBatch


class ReferencePolicy:
    """A copy of the policy as it started, whole on every rank; on the CPU between uses with `ref.param_offload`."""

    def __init__(self, settings: RunSettings, device: torch.device) -> None:
        path = settings.ref.path or settings.model.path
        if path is None:
            raise SettingsError("the KL term needs a reference policy: set ref.path or model.path")
        self._policy = load_policy(settings, path, device).requires_grad_(False).eval()
        self._device = device
        self._offload = settings.ref.param_offload
        if not self._offload:
            self._policy.to(device)

    @torch.no_grad()
    def logprobs(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs [R] of the response tokens of each micro-batch."""
        if self._offload:
            self._policy.to(self._device)
        outputs = [self._policy(micro).logprobs for micro in micros]
        if self._offload:
            self._policy.to("cpu")
        return outputs
