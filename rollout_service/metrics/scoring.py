"""How long scoring takes and what comes of it, by scorer."""

from prometheus_client import CollectorRegistry

from protocol.states import FailReason
from rollout_service.metrics.catalogue import SERVICE_CATALOGUE
from rollout_service.rewards.interface import ScoringTask
from rollout_service.rewards.registry import AUTO, BUILTIN, scorer_for
from rollout_service.rewards.scorer import LabelError

REASONS = (FailReason.REWARD_TIMEOUT, FailReason.REWARD_ERROR, FailReason.REWARD_NOT_FINITE)


class ScoringMetrics:
    """The label is `reward.name`, or with `auto` the built-in scorer that the data source has: a closed set."""

    def __init__(self, registry: CollectorRegistry, name: str) -> None:
        self._name = name
        names = (*BUILTIN, AUTO) if name == AUTO else (name,)
        seconds = SERVICE_CATALOGUE.histogram("april_reward_seconds", registry)
        failures = SERVICE_CATALOGUE.counter("april_reward_failures_total", registry)
        self._seconds = {scorer: seconds.labels(scorer) for scorer in names}
        self._failures = {
            (scorer, reason): failures.labels(scorer, reason.value) for scorer in names for reason in REASONS
        }

    def scored(self, task: ScoringTask, seconds: float, failed: FailReason | None) -> None:
        """One call has returned after `seconds`."""
        name = self._scorer_of(task)
        self._seconds[name].observe(seconds)
        if failed is not None:
            self._failures[name, failed].inc()

    def _scorer_of(self, task: ScoringTask) -> str:
        if self._name != AUTO:
            return self._name
        try:
            return scorer_for(task.data_source)
        except LabelError:  # the scorer refuses it, too, and says so
            return AUTO
