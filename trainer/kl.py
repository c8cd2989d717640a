"""Estimators of the KL divergence from samples, by the name of `actor.kl_loss_type`.

Each takes log-probs of the sampled tokens under the policy that is held against the other, both [T], and gives one
estimate a token, [T], in their dtype.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

MAX_LOG_RATIO = 20.0  # as in the losses
MAX_KL = 10.0  # as in verl: one token of a degenerate policy may not drown the batch


def low_var_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """k3: r - log r - 1 with r = reference/policy, clamped to ±10; never negative, unbiased before the clamp.

    Schulman, "Approximating KL divergence" (2020). `logprobs`, `reference` [T]; returns [T].
    """
    log_ratio = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.exp() - log_ratio - 1).clamp(-MAX_KL, MAX_KL)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"low_var_kl": low_var_kl}
