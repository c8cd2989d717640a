"""The frozen reference policy of the KL term: a model of its own, or the trained one with its adapters off."""

from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.errors import SettingsError
from protocol.settings import RunSettings
from trainer.adapters import adapters_off
from trainer.engine import PolicyEngine
from trainer.model import load_policy
from trainer.packing import MicroBatch
from trainer.sequence_parallel import SequenceGroup


def make_reference(
    settings: RunSettings, engine: PolicyEngine, device: torch.device, group: SequenceGroup | None = None
) -> "AdaptersOffReference | ReferenceModel":
    """Without `ref.path` and with LoRA the trained model itself, which costs no memory; else a model of its own."""
    if settings.model.lora_rank and settings.ref.path is None:
        return AdaptersOffReference(engine)
    return ReferenceModel(settings, device, group)


class AdaptersOffReference:
    """The policy as it started: what trains are its adapters, and they can be switched off."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine

    def logprobs(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs [R] of the response tokens of each micro-batch."""
        self._engine.train(False)
        with adapters_off(self._engine.policy.lm):
            outputs = [self._engine.logprobs(micro) for micro in micros]
        self._engine.train(True)
        return outputs


class ReferenceModel:
    """A copy of the policy as it started, whole on every rank; on the CPU between uses with `ref.param_offload`."""

    def __init__(self, settings: RunSettings, device: torch.device, group: SequenceGroup | None = None) -> None:
        path = settings.ref.path or settings.model.path
        if path is None:
            raise SettingsError("the KL term needs a reference policy: set ref.path or model.path")
        self._policy = load_policy(settings, path, device, group=group).requires_grad_(False).eval()
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
