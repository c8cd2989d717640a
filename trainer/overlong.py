"""Responses that ran long, and groups that teach nothing: what their reward loses, and what is left out of the update.

DAPO, arXiv 2503.14476, section 3.4: either a soft penalty before the maximum length, or truncated samples masked.
Samples that are left out still count in their group's baseline.
"""

import numpy as np
import numpy.typing as npt

from protocol.batch import Batch
from protocol.settings import RunSettings
from protocol.states import FinishReason


def soft_penalty(
    lengths: npt.NDArray[np.int64], max_length: int, buffer_len: int, factor: float
) -> npt.NDArray[np.float64]:
    """What to add to each reward: 0 up to `max_length - buffer_len` tokens, then linearly down to −`factor`; [S].

    Equation 13 there, for responses that generation ends at `max_length`.
    """
    if buffer_len == 0:
        return np.zeros(len(lengths))
    beyond = lengths - (max_length - buffer_len)
    return np.minimum(-beyond / buffer_len * factor, 0.0)


def overlong_penalties(batch: Batch, settings: RunSettings) -> npt.NDArray[np.float64]:
    """Of each sample of `batch`, [S]; zero or negative."""
    lengths = (np.diff(batch.sample_offsets) - batch.prompt_lengths).astype(np.int64)
    algorithm = settings.algorithm
    return soft_penalty(
        lengths, settings.data.max_response_length, algorithm.overlong_buffer_len, algorithm.overlong_penalty_factor
    )


def is_without_spread(scores: npt.NDArray[np.floating]) -> bool:
    """Whether one group's `scores` [n] are all the same number, so that comparing them teaches nothing.

    What is not a finite number must be noticed later: it is never "without spread".
    """
    return bool(np.isfinite(scores).all()) and bool((scores == scores[:1]).all())


def kept_samples(batch: Batch, scores: npt.NDArray[np.float64], settings: RunSettings) -> npt.NDArray[np.bool_]:
    """Which samples [S] the update is made from, given their scores [S]."""
    keep = np.ones(batch.num_samples, dtype=bool)
    if settings.algorithm.mask_truncated:
        keep &= np.asarray([s.finish_reason is not FinishReason.LENGTH for s in batch.header.samples], dtype=bool)
    if settings.algorithm.groups_without_spread == "filter":
        for group in np.unique(batch.group_index):
            members = batch.group_index == group
            keep[members] &= not is_without_spread(scores[members])
    return keep
