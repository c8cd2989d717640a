"""Estimators of the KL divergence from samples, and the controller of the KL in the reward.

Each estimator takes log-probs of the sampled tokens under the policy that is held against the other, both [T], and
gives one estimate a token, [T], in their dtype. Schulman, "Approximating KL divergence" (2020). As a loss, k1 has a
gradient of zero on average and pulls nowhere; k2's gradient is that of the KL, and k3's nearly so.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from protocol.settings.algorithm import KlCtrlSettings

MAX_LOG_RATIO = 20.0  # as in the losses
MAX_KL = 10.0  # as in verl: one token of a degenerate policy may not drown the batch
MAX_ERROR = 0.2  # as in Ziegler et al.: one step of a wild KL may not throw the coefficient


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log(policy/reference): unbiased, of either sign."""
    return logprobs - reference


def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """|log(policy/reference)|."""
    return (logprobs - reference).abs()


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Half the square of log(policy/reference)."""
    return 0.5 * (logprobs - reference).square()


def low_var_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """k3: r - log r - 1 with r = reference/policy, clamped to ±10; never negative, unbiased before the clamp."""
    log_ratio = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.exp() - log_ratio - 1).clamp(-MAX_KL, MAX_KL)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": low_var_kl,
    "k3": low_var_kl,
}


class KlController:
    """The coefficient β of the KL in the reward; an adaptive one must survive a checkpoint (`state`, `load_state`).

    Adaptive: β ← β · (1 + clip(KL/target − 1, ±0.2) · samples/horizon), Ziegler et al., arXiv 1909.08593, section 2.2.
    """

    def __init__(self, settings: KlCtrlSettings) -> None:
        self._settings = settings
        self.coefficient = settings.kl_coef

    def update(self, kl: float, num_samples: int) -> None:
        """Follow the mean `kl` a token that `num_samples` samples had."""
        if self._settings.type == "fixed":
            return
        error = min(MAX_ERROR, max(-MAX_ERROR, kl / self._settings.target_kl - 1))
        self.coefficient *= 1 + error * num_samples / self._settings.horizon

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"kl_coefficient": self.coefficient}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave; a fixed coefficient stays what the settings say."""
        if self._settings.type == "adaptive" and "kl_coefficient" in state:
            self.coefficient = state["kl_coefficient"]
