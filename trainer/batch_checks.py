"""What a batch must be like to be trained on."""

from typing import Protocol

import numpy as np

from protocol.batch import Batch
from protocol.errors import DataError
from protocol.settings.algorithm import Correction
from trainer.packing import trainable_tokens


class Limits(Protocol):
    """What a policy can take."""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that the model knows."""
        ...

    @property
    def context_length(self) -> int | None:
        """Longest sequence, if the model says so."""
        ...


def check_batch(batch: Batch, policy: Limits, correction: Correction) -> None:
    """Raise `DataError` if `batch` was made for another model, or lacks the log-probs that `correction` needs."""
    if len(batch.tokens) and (batch.tokens.min() < 0 or batch.tokens.max() >= policy.vocabulary_size):
        raise DataError(
            f"the batch has token id {batch.tokens.max()} and the model knows {policy.vocabulary_size}: "
            "the service runs another model, or the simulated engine without one; give both the same model.path"
        )
    longest = int(np.diff(batch.sample_offsets).max(initial=0))
    if policy.context_length is not None and longest > policy.context_length:
        raise DataError(
            f"a sample has {longest} tokens and the model's context is {policy.context_length}: "
            "lower data.max_prompt_length or data.max_response_length"
        )
    if correction is not Correction.NONE:
        _check_logprobs(batch, correction)


def _check_logprobs(batch: Batch, correction: Correction) -> None:
    """One broken log-prob is left out of the loss; a batch without any was sampled without asking for them."""
    logprobs = batch.logprobs[trainable_tokens(batch)]
    if len(logprobs) == 0:
        return
    if not np.isfinite(logprobs).any() or not logprobs.any():
        raise DataError(
            f"the batch has no behaviour log-probs and algorithm.correction = '{correction}' needs them: sample with "
            "an engine that reports them, or set algorithm.correction = 'none'"
        )
