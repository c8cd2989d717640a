"""Installs of policy versions, and what came of them."""

from prometheus_client import CollectorRegistry

from protocol.messages import Policy, PolicyState
from rollout_service.metrics.catalogue import SERVICE_CATALOGUE


class PolicyMetrics:
    """Of one service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = SERVICE_CATALOGUE.histogram("april_policy_install_seconds", registry)
        installs = SERVICE_CATALOGUE.counter("april_policy_installs_total", registry)
        self._by_state = {state: installs.labels(state.value) for state in (PolicyState.ACTIVE, PolicyState.FAILED)}

    def installed(self, policy: Policy) -> None:
        """An install is over: the version is ACTIVE, or FAILED."""
        self._by_state[policy.state].inc()
        if policy.install_s is not None:
            self._seconds.observe(policy.install_s)
