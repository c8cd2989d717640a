"""Rules that tie the algorithm to other sections; each is one sentence that says what to do."""

from protocol.settings.algorithm import GROUP_ESTIMATORS, AlgorithmSettings


def check_algorithm(algorithm: AlgorithmSettings, num_samples: int, max_response_length: int) -> None:
    """Raise `ValueError` for an algorithm that can't work with `num_samples` a prompt or this length."""
    estimator = algorithm.adv_estimator
    if num_samples < 2 and estimator in GROUP_ESTIMATORS:
        raise ValueError(
            f"rollout.n must be at least 2 with algorithm.adv_estimator = {estimator!r}: one sample has no group; "
            "with 'gae' or 'reinforce_plus_plus' it may be 1"
        )
    if num_samples < 2 and algorithm.groups_without_spread == "filter":
        raise ValueError("algorithm.groups_without_spread = 'filter' needs rollout.n >= 2: one sample has no spread")
    if algorithm.overlong_buffer_len > max_response_length:
        raise ValueError(
            f"algorithm.overlong_buffer_len = {algorithm.overlong_buffer_len} is more than data.max_response_length = "
            f"{max_response_length}: the buffer is the last part of it"
        )
    if algorithm.mask_truncated and algorithm.use_kl_in_reward and estimator in GROUP_ESTIMATORS:
        raise ValueError(
            f"algorithm.mask_truncated leaves samples without the KL that algorithm.use_kl_in_reward puts into the "
            f"baseline of {estimator!r}: use actor.use_kl_loss, or an overlong penalty"
        )
