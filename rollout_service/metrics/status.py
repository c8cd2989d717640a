"""Metrics that are read at the scrape: the service's status, its engines, what waits.

Always true: a scrape is answered within SCRAPE_PATIENCE_S, whatever Redis does; while Redis is away the values are the
last known, `april_redis_waiting_seconds` says for how long, and `april_ready` is 0. Counts are those of the buffer, so
they survive a restart of the service.
"""

import asyncio
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from buffer.interface import Snapshot
from protocol.errors import UnavailableError
from protocol.messages import Status
from protocol.states import FailReason, SampleState
from rollout_service.engines.interface import EngineStats
from rollout_service.events import Event
from rollout_service.metrics.catalogue import SERVICE_CATALOGUE
from rollout_service.metrics.lines import LineMetrics
from rollout_service.parts import ServiceParts
from rollout_service.rewards.measured import MeasuredScorer
from rollout_service.rewards.pool import ScorerPool
from rollout_service.status import StatusBoard

SCRAPE_PATIENCE_S = 2.0  # Prometheus waits ten seconds; an answer with the last known values is better than none
BYTES_A_TOKEN = 8  # an int32 id and a float32 log-prob
COUNTERS = (
    "samples_scored",
    "samples_failed",
    "samples_resumed",
    "samples_multi_version",
    "resumes",
    "tokens_appended",
    "surplus_groups_kept",
    "raced_samples_trained",
    "raced_samples_left",
    "raced_tokens_trained",
    "raced_tokens_left",
    "leases_expired",
    "fenced_writes",
)
"""Counters of the buffer that have a metric of their own; `failed:REASON` share one."""
PACKAGE = "april-rollout"

EVENT_KINDS = tuple(kind.__name__ for kind in get_args(Event))
CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")

Values = Mapping[tuple[str, ...], float] | float


@dataclass(slots=True)
class Seen:
    """What one look at a running service gave. `moment`: values of the last moment line of the trace."""

    status: Status
    snapshot: Snapshot | None
    engines: list[EngineStats]
    moment: Mapping[str, float]
    num_scoring: int
    num_restarts: int
    events: Mapping[str, int]
    at_s: float = field(default_factory=time.monotonic)


class StatusMetrics(Collector):
    """Families of the last look; before the first, only that the process is up and not ready."""

    def __init__(self, run: str, lines: LineMetrics) -> None:
        self._info = {(run, version(PACKAGE)): 1.0}
        self._lines = lines
        self._seen: Seen | None = None
        self._ready = False
        self._away_since_s: float | None = None
        self._waiting_since: float | None = None
        self._num_outages = 0

    async def look(self, running: tuple[ServiceParts, StatusBoard] | None) -> None:
        """Ask the service how it is, for at most SCRAPE_PATIENCE_S; None: it is starting or stopping."""
        if running is None:
            self._ready, self._waiting_since, self._away_since_s = False, None, None
            return
        (parts, board), asked_s = running, time.monotonic()
        self._waiting_since = parts.sample_parts.buffer.waiting_since
        try:
            async with asyncio.timeout(SCRAPE_PATIENCE_S):
                status = await board.make()
        except (UnavailableError, TimeoutError):
            if self._away_since_s is None:
                self._away_since_s = asked_s
                self._num_outages += 1
            self._ready = False
            return
        self._away_since_s = None
        self._ready = self._waiting_since is None and parts.delivery.trouble is None
        self._seen = _look(parts, status, self._lines.moment)

    @property
    def redis_waiting_s(self) -> float:
        """For how long Redis has not answered, as calls that wait for it know it, or the scrapes."""
        waits = 0.0 if self._waiting_since is None else max(0.0, time.time() - self._waiting_since)
        return waits if self._away_since_s is None else max(waits, time.monotonic() - self._away_since_s)

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        values = dict(self._always())
        if self._seen is not None:
            values |= dict(_service(self._seen))
            values |= dict(_buffer(self._seen))
            values |= dict(_round(self._seen.status))
            values |= dict(_delivery(self._seen.status))
            values |= dict(_engines(self._seen.engines))
        for name, value in values.items():
            yield SERVICE_CATALOGUE.family(name, value)

    def _always(self) -> Iterator[tuple[str, Values]]:
        waiting_s = self.redis_waiting_s
        yield "april_up", 1
        yield "april_run_info", self._info
        yield "april_ready", float(self._ready)
        yield "april_redis_waiting_seconds", waiting_s
        yield "april_redis_outages_total", self._num_outages
        yield "april_status_age_seconds", 0.0 if self._seen is None else time.monotonic() - self._seen.at_s


def snake_case(name: str) -> str:
    """`SampleParked` as `sample_parked`."""
    return CAPITAL.sub("_", name).lower()


def _look(parts: ServiceParts, status: Status, moment: Mapping[str, float]) -> Seen:
    measured, posted = parts.sample_parts.scorer, parts.sample_parts.mailbox.num_posted
    scorer = measured.inner if isinstance(measured, MeasuredScorer) else measured
    return Seen(
        status=status,
        snapshot=parts.loop.snapshot,
        engines=parts.pool.stats(),
        moment=moment,
        num_scoring=measured.num_waiting if isinstance(measured, MeasuredScorer) else 0,
        num_restarts=scorer.num_restarts if isinstance(scorer, ScorerPool) else 0,
        events={kind: posted[kind] for kind in EVENT_KINDS},
    )


def _service(seen: Seen) -> Iterator[tuple[str, Values]]:
    status = seen.status
    yield "april_service_epoch", status.service_epoch
    yield "april_uptime_seconds", status.uptime_s
    yield "april_paused", float(status.paused or status.draining)
    yield "april_waits", len(status.waits)
    yield "april_events_total", {(snake_case(kind),): count for kind, count in seen.events.items()}
    yield "april_reward_waiting", seen.num_scoring
    yield "april_reward_worker_restarts_total", seen.num_restarts


def _buffer(seen: Seen) -> Iterator[tuple[str, Values]]:
    status, counters = seen.status, seen.status.counters
    yield "april_groups", {(state,): count for state, count in status.ledger.model_dump().items()}
    yield "april_ledger_error", status.ledger_error
    dropped = {name: count for name, count in counters.items() if name.startswith("dropped:")}
    yield "april_groups_dropped_total", {(name.partition(":")[2],): count for name, count in dropped.items()}
    yield "april_samples", {(state.value,): status.samples.get(state, 0) for state in SampleState}
    yield "april_sample_failures_total", {(r.value,): counters.get(f"failed:{r.value}", 0) for r in FailReason}
    for name in COUNTERS:
        yield f"april_{name}_total", counters.get(name, 0)
    yield "april_oldest_waiting_seconds", status.oldest_waiting_s
    yield from _moment(seen.moment, status.active_version)
    if seen.snapshot is not None:
        yield "april_held_groups", seen.snapshot.held_groups
        yield "april_held_bytes", seen.snapshot.held_bytes
    pool = status.pool
    expired = {(f"expired_{reason.value}",): float(count) for reason, count in pool.expired.items()}
    yield "april_pool_samples_total", {("entered",): pool.entered, ("continued",): pool.continued} | expired
    yield "april_pool_bytes", pool.num_bytes
    yield "april_pool_ledger_error", pool.error


def _moment(moment: Mapping[str, float], active_version: int) -> Iterator[tuple[str, Values]]:
    """What the round loop told some seconds ago; without a moment (metrics are off) there are no values."""
    known = bool(moment)
    parked_bytes = moment.get("parked_bytes", 0)
    lag = max(0, active_version - moment.get("oldest_version", active_version))
    yield "april_parked_bytes", {(): parked_bytes} if known else {}
    yield "april_parked_tokens", {(): parked_bytes // BYTES_A_TOKEN} if known else {}
    yield "april_oldest_lag", {(): lag} if known else {}


def _round(status: Status) -> Iterator[tuple[str, Values]]:
    now = status.round
    yield "april_round", now.round if now else 0
    yield "april_round_target_groups", now.target_groups if now else 0
    yield "april_round_ready_groups", now.num_ready if now else 0
    yield "april_round_must_finish_groups", now.num_must_finish if now else 0
    for name in ("ratio", "samples_ratio", "lookahead", "max_lag"):
        yield f"april_{name}", float(status.settings[name])
    wanted = status.autotune.ratio
    yield "april_ratio_wanted", {} if wanted is None else {(): wanted}
    bias = status.length_bias
    means = {} if bias is None else {("trained",): bias.trained_tokens, ("started",): bias.started_tokens}
    yield "april_raced_mean_tokens", means


def _delivery(status: Status) -> Iterator[tuple[str, Values]]:
    yield "april_policy_active_version", status.active_version
    yield "april_policy_newest_version", status.newest_version
    yield "april_batches_offered", status.offered
    yield "april_batches_leased", len(status.leased_steps)
    yield "april_trained_step", status.trained_step
    yield "april_durable_step", status.durable_step
    yield "april_trainer_connected", float(status.trainer_connected)
    yield "april_trainer_epoch", status.trainer_epoch


def _engines(engines: list[EngineStats]) -> Iterator[tuple[str, Values]]:
    yield "april_engine_alive", {(e.worker,): float(e.alive) for e in engines}
    yield "april_engine_slots", {(e.worker,): e.slots for e in engines}
    yield "april_engine_running", {(e.worker,): e.num_running for e in engines}
    yield "april_engine_version", {(e.worker,): e.version for e in engines}
    yield "april_engine_tokens_total", {(e.worker,): e.tokens_generated for e in engines}
    yield "april_engine_restarts_total", {(e.worker,): e.num_restarts for e in engines}
    yield "april_engine_kv_use", {(e.worker,): e.kv_use for e in engines if e.kv_use is not None}
    yield (
        "april_engine_preemptions_total",
        {(e.worker,): e.num_preemptions for e in engines if e.num_preemptions is not None},
    )
