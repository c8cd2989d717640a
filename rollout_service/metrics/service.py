"""Prometheus metrics of the service, in a registry of its own.

Always true: names, types, labels and texts are those of the catalogue; a scrape can be answered at any time, before the
parts have started and while Redis is away; the number of series doesn't depend on how long the run is.
"""

import time

from prometheus_client.exposition import choose_encoder

from protocol.collectors import process_registry
from protocol.settings import RunSettings
from rollout_service.metrics.catalogue import SERVICE_CATALOGUE
from rollout_service.metrics.delivery import DeliveryMetrics
from rollout_service.metrics.lines import LineMetrics
from rollout_service.metrics.policies import PolicyMetrics
from rollout_service.metrics.scoring import ScoringMetrics
from rollout_service.metrics.status import StatusMetrics
from rollout_service.parts import ServiceParts
from rollout_service.rewards.measured import MeasuredScorer
from rollout_service.status import StatusBoard


class ServiceMetrics:
    """What is observed as it happens, and what is read at the scrape. With `service.metrics` off only the latter."""

    def __init__(self, settings: RunSettings) -> None:
        self.registry = process_registry()
        self._observes = settings.service.metrics
        self._lines = LineMetrics(self.registry, settings.data.train_batch_size, settings.rollout.n)
        self._scoring = ScoringMetrics(self.registry, settings.reward.name)
        self._policies = PolicyMetrics(self.registry)
        self.delivery = DeliveryMetrics(self.registry)
        self._status = StatusMetrics(settings.run.name, self._lines)
        self.registry.register(self._status)
        self._took_s = SERVICE_CATALOGUE.gauge("april_scrape_seconds", self.registry)
        self._running: tuple[ServiceParts, StatusBoard] | None = None

    def attach(self, parts: ServiceParts, board: StatusBoard) -> None:
        """The parts have started: observe them from now on."""
        self._running = (parts, board)
        if not self._observes:
            return
        parts.sample_parts.trace.add_sink(self._lines)
        parts.policies.installed = self._policies.installed
        parts.delivery.told = self.delivery
        if isinstance(scorer := parts.sample_parts.scorer, MeasuredScorer):
            scorer.told = self._scoring.scored

    def detach(self) -> None:
        """The parts are being taken apart: `april_ready` is 0 from now on."""
        self._running = None

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """(text, media type): OpenMetrics if `accept` prefers it, else Prometheus' own format."""
        began_s = time.perf_counter()
        await self._status.look(self._running)
        encode, media_type = choose_encoder(accept)
        text = encode(self.registry)
        self._took_s.set(time.perf_counter() - began_s)
        return text, media_type
