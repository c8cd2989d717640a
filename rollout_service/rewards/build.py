"""The scorer that the settings describe."""

from protocol.settings import RunSettings
from rollout_service.rewards.interface import Scorer
from rollout_service.rewards.pool import ScorerPool
from rollout_service.rewards.process import ScorerConfig


def build_scorer(settings: RunSettings) -> Scorer:
    """Scorer processes for `settings.reward`; `start()` loads them."""
    reward = settings.reward
    return ScorerPool(ScorerConfig(reward.name, reward.settings), reward.num_workers, reward.timeout_s)
