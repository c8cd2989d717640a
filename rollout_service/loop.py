"""The round loop: events in, the scheduler's decisions carried out.

Always true:
- it is the only task that asks the scheduler, and it carries out every decision before it asks again;
- before each decision it reads the buffer's counts, after the transitions that the events tell of;
- a sample runs in one task of its own; the loop waits for none of them but when it closes;
- when it ends, whatever the reason, nothing runs in the engines any more and everything generated is in the buffer
  or was refused by it.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from buffer.interface import SampleLease, Snapshot
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import RoundStatus
from protocol.samples import Prompt
from protocol.states import FailReason, SampleState
from rollout_service.admitting import GroupAdmission
from rollout_service.autotune import Autotune
from rollout_service.control import Control
from rollout_service.delivery import Delivery
from rollout_service.evaluation import Evaluations
from rollout_service.events import (
    Changed,
    EngineDied,
    Event,
    GroupClosed,
    InstallEnded,
    LeasesExpired,
    SampleEnded,
    SampleLost,
    SampleParked,
)
from rollout_service.failing import check_owner, fail_waiting
from rollout_service.policies import PolicyRegistry
from rollout_service.pools import PooledSamples
from rollout_service.prompts.interface import PromptOrder
from rollout_service.recovery import EngineRecovery
from rollout_service.restore import restore
from rollout_service.round_log import RoundLog
from rollout_service.samples import SampleParts, SampleRunner, score_sample
from rollout_service.scheduler.decisions import (
    Admit,
    BeginRound,
    Decision,
    GiveUp,
    Install,
    Observation,
    OfferBatch,
    Park,
    Start,
)
from rollout_service.scheduler.limits import kv_tokens_of, limits_of_run
from rollout_service.scheduler.rounds import Phase, RoundScheduler
from rollout_service.starting import start_samples
from rollout_service.tuning.live_forecast import LiveForecast
from rollout_service.waiting import WaitingSamples
from rollout_service.watch.spending import RedisAway, cause_of, moment_values, timed

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 2.0  # a death or a takeover is noticed within this; looking costs one round trip to Redis
PARK_TIMEOUT_S = 30.0  # an abort ends a stream in milliseconds; one that takes this long never ends


class RoundLoop:
    """Drives rounds until it is cancelled or drained."""

    def __init__(
        self,
        parts: SampleParts,
        prompts: PromptOrder,
        policies: PolicyRegistry,
        delivery: Delivery,
        evaluations: Evaluations,
        control: Control,
        service_epoch: int,
    ) -> None:
        settings = parts.settings
        self._parts = parts
        self._policies = policies
        self._delivery = delivery
        self._evaluations = evaluations
        self._control = control
        self._running: dict[str, tuple[SampleRunner, SampleLease]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._prompt_of: dict[str, Prompt] = {}
        self._end_of_group: list[str] = []
        self._worn_out: list[str] = []
        self._waiting = WaitingSamples()
        self.scheduler = RoundScheduler(limits_of_run(settings))
        self.autotune = Autotune(settings, control)
        self._round_log = RoundLog(settings.data.train_batch_size)
        self._forecast = LiveForecast(settings.rollout.n, self._running, self._prompt_of, self._upcoming)
        self._fail = partial(fail_waiting, parts, self.scheduler)
        self._recovery = EngineRecovery(parts, self.scheduler, self._running, self._spawn)
        self.snapshot: Snapshot | None = None
        self._service_epoch = service_epoch
        self._pools = PooledSamples(settings, parts.buffer)
        self._admission = GroupAdmission(parts, prompts, self.scheduler, self._pools, self._prompt_of, self._spawn)
        self._kv_tokens = kv_tokens_of(settings)
        self._redis_away = RedisAway(lambda: parts.buffer.waiting_since)

    @property
    def num_running(self) -> int:
        """Samples in the engines."""
        return len(self._running)

    @property
    def safe_to_stop(self) -> bool:
        """Nothing runs, nothing is being scored, nothing is being installed."""
        return not self._tasks and not self._recovery.restarting

    @property
    def oldest_waiting_s(self) -> float:
        """For how long the sample that waits longest to go on has waited."""
        return self._waiting.oldest_s(time.monotonic())

    def leases(self) -> list[SampleLease]:
        """Leases of what runs."""
        return [lease for _, lease in self._running.values()]

    def round_status(self) -> RoundStatus | None:
        """The round that fills now."""
        if self.scheduler.phase is Phase.IDLE or self.snapshot is None:
            return None
        seen = self._observe(self.snapshot)
        return RoundStatus(
            round=self.scheduler.round,
            started_s_ago=time.monotonic() - self.scheduler.round_started_s,
            target_groups=self.scheduler.target_groups(),
            num_ready=self.scheduler.unspoken(seen),
            num_must_finish=self.scheduler.num_must_finish(seen),
        )

    async def run(self) -> None:
        """Take up what the buffer holds, then decide on every event. Raises what a sample's task raised."""
        looking = asyncio.create_task(self._redis_away.keep_looking())
        try:
            await self._restore()
            self._parts.mailbox.post(Changed())
            await self._take_events()
        finally:
            looking.cancel()

    async def _take_events(self) -> None:
        while True:
            for event in await self._next_events():
                self._apply(event)
            if self._end_of_group:
                aborted, self._end_of_group = self._end_of_group, []
                await self._parts.pool.abort(aborted)
            if self._worn_out:
                worn_out, self._worn_out = self._worn_out, []
                await self._fail(worn_out, FailReason.LEASE_EXPIRED, "its lease expired again and again")
            await self._decide()

    async def watch(self) -> None:
        """Look for what tells nobody, for ever: a replica that died idle or hangs, a service that took over."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            await self._recovery.look()
            self._parts.mailbox.post(Changed())

    async def close(self) -> None:
        """Park what runs and wait for it; what is being scored is scored again after the next start."""
        await self._parts.pool.abort([runner.request_id for runner, _ in self._running.values()])
        parked = [asyncio.ensure_future(runner.generated.wait()) for runner, _ in self._running.values()]
        if parked:
            _, late = await asyncio.wait(parked, timeout=PARK_TIMEOUT_S)
            for waiting in late:
                waiting.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failure.done():
            self._failure.exception()  # whoever ran the loop has seen it, or ends for another reason

    async def _next_events(self) -> list[Event]:
        take = asyncio.ensure_future(self._parts.mailbox.take())
        try:
            await asyncio.wait({take, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            return await take
        finally:
            take.cancel()

    async def _decide(self) -> None:
        control = self._control
        self.scheduler.limits = replace(
            self.scheduler.limits,
            ratio=control.ratio,
            samples_ratio=control.samples_ratio,
            lookahead=control.lookahead,
        )
        while True:
            self.snapshot, redis_s = await timed(self._parts.buffer.snapshot())
            check_owner(self.snapshot, self._service_epoch, self._parts.settings.run.name)
            await self._pools.clear(self.snapshot)
            self._parts.trace.saw(self.snapshot, len(self._running), self._parts.pool.stats)
            await self._evaluations.version_is(self.snapshot.active_version)
            seen = self._observe(self.snapshot)
            decisions = self.scheduler.decide(seen)
            filling = self.scheduler.phase is Phase.FILLING
            self.autotune.meter.saw(seen.now_s, len(self._running), seen.slots, filling)
            for decision in decisions:
                await self._carry_out(decision)
            now_to = cause_of(self.scheduler, seen)
            redis_s = max(redis_s, self._redis_away.take())
            self._parts.trace.stands(now_to, len(self._running), seen.slots, redis_s, self._moment)
            self._round_log.stands(now_to, len(self._running), seen.slots)
            if not decisions:
                return

    def _moment(self) -> dict[str, float]:
        parked, waited_s = self._forecast.parked_tokens, self.oldest_waiting_s
        return moment_values(self.scheduler, self._parts.pool.stats(), parked, waited_s)

    def _observe(self, snapshot: Snapshot) -> Observation:
        pool = self._parts.pool
        held = self._evaluations.running or self._recovery.restarting
        pending = None if held else self._policies.pending
        return Observation(
            now_s=time.monotonic(),
            slots=max(0, pool.slots - self._evaluations.reserved_slots),
            ready=snapshot.ledger.ready,
            offered=snapshot.offered,
            leased_untrained=snapshot.outstanding - snapshot.offered,
            last_leased_step=max(snapshot.leased_steps, default=snapshot.durable_step),
            trained_step=snapshot.trained_step,
            active_version=snapshot.active_version,
            newest_version=snapshot.newest_version,
            newest_step=self._policies.newest.step,
            pending_version=pending.version if pending else None,
            generation_allowed=self._control.generation_allowed,
            admission_room=self._admission.room(snapshot),
            kv_tokens=self._kv_tokens,
            forecast=self._forecast,
            num_pooled=snapshot.samples.get(SampleState.POOLED, 0),
        )

    def _apply(self, event: Event) -> None:
        self._parts.trace.happened(event)
        match event:
            case SampleParked(sample_id):
                self._set_aside(sample_id)
                self.scheduler.parked(sample_id)
            case SampleLost(sample_id):
                self._set_aside(sample_id)
                self.scheduler.lost(sample_id)
            case SampleEnded(sample_id):
                self._forecast.finished(sample_id)
                self._forget(sample_id)
                self.scheduler.ended(sample_id)
            case LeasesExpired(sample_ids, worn_out):
                self._worn_out += [s for s in worn_out if s not in self._running]
                self._leases_expired(sample_ids)
            case GroupClosed(group_id, ready):
                self._prompt_of.pop(group_id, None)
                sample_ids = self.scheduler.table.sample_ids(group_id)
                self._waiting.discard(sample_ids)
                self._forecast.closed(sample_ids)
                self._end_of_group += [self._running[s][0].request_id for s in sample_ids if s in self._running]
                self.scheduler.closed(group_id, ready)
            case InstallEnded():
                self.scheduler.installed()
            case EngineDied(worker):
                self._recovery.died(worker)
            case Changed():
                pass

    def _upcoming(self, count: int) -> list[Prompt]:
        assert self.snapshot is not None, "decisions follow a snapshot"
        return self._admission.upcoming(self.snapshot, count)

    def _set_aside(self, sample_id: str) -> None:
        if self.scheduler.table.group_ids([sample_id]):  # else its group is closed, and nothing waits for it
            self._forecast.parked(sample_id)
            self._waiting.add(sample_id, time.monotonic())
        self._forget(sample_id)

    def _forget(self, sample_id: str) -> None:
        self._running.pop(sample_id, None)
        self._recovery.forget(sample_id)

    def _leases_expired(self, sample_ids: Sequence[str]) -> None:
        """Whoever runs here is aborted, since what it writes is refused now, and says itself that it ended."""
        for sample_id in sample_ids:
            if sample_id in self._running:
                self._end_of_group.append(self._running[sample_id][0].request_id)
            else:
                self.scheduler.parked(sample_id)

    async def _carry_out(self, decision: Decision) -> None:
        self._parts.trace.decided(decision)
        self._round_log.decided(decision, self.snapshot)
        match decision:
            case BeginRound():
                self._forecast.new_round()
            case Admit(num_groups, oldest_version):
                assert self.snapshot is not None, "decisions follow a snapshot"
                await self._admission.admit(self.snapshot, num_groups, oldest_version, self._forecast)
            case Start(sample_ids):
                await self._start(sample_ids)
            case Park(sample_ids, _):
                await self._park(sample_ids)
            case GiveUp(group_id, sample_ids):
                await self._give_up(group_id, sample_ids)
            case Install(version, _):
                self._evaluations.install_begins()
                self._spawn(self._install(version))
            case OfferBatch(number):
                failpoint(Failpoint.MID_OFFER)
                await self._parts.buffer.offer(self.scheduler.limits.batch_groups)
                self.scheduler.offered()
                await self._delivery.batch_offered()
                await self.autotune.round_ended(self.snapshot, self._parts.pool.stats())
                self._round_log.offered(number, self.scheduler.limits, self.autotune.status().ratio)

    async def _give_up(self, group_id: str, sample_ids: tuple[str, ...]) -> None:
        self._admission.quarantine(self._prompt_of[group_id].prompt_id)
        await self._fail(sample_ids, FailReason.ENGINE_DIED, "engines die of this prompt")

    async def _start(self, sample_ids: tuple[str, ...]) -> None:
        started = await start_samples(self._parts, sample_ids)
        self._waiting.discard(sample_ids)
        for gone in set(sample_ids).difference(lease.sample_id for lease, _ in started):
            self.scheduler.ended(gone)
        for lease, sample in started:
            runner = SampleRunner(self._parts, lease, sample, self._prompt_of[sample.group_id])
            self._running[sample.sample_id] = (runner, lease)
            self.autotune.meter.started(runner.num_prefilled)
            self._spawn(runner.run())

    async def _park(self, sample_ids: tuple[str, ...]) -> None:
        await self._parts.pool.abort([self._running[s][0].request_id for s in sample_ids if s in self._running])

    async def _install(self, version: int) -> None:
        try:
            await self._policies.install(version)
        finally:
            await self._evaluations.install_ended()
            self._parts.mailbox.post(InstallEnded())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._failure.done():
            self._failure.set_exception(error)
        elif not self._tasks:
            self._parts.mailbox.post(Changed())

    async def _restore(self) -> None:
        """Groups in flight come back as they are in the buffer; what finished unscored is scored now."""
        await self._policies.refresh()
        found = await restore(self._parts.buffer, self.scheduler)
        self._prompt_of.update(found.prompt_of)
        aside = [(s.sample_id, s.aside_s) for s in found.waiting if s.aside_s is not None]
        self._waiting.restore(aside, time.monotonic())
        self._forecast.restored((s.sample_id, s.num_tokens) for s in found.waiting)
        for sample in found.unscored:
            self._spawn(score_sample(self._parts, sample.sample_id, self._prompt_of[sample.group_id]))
