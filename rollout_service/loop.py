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

from buffer.interface import CursorMove, SampleLease, Snapshot
from buffer.open import limits_of
from protocol.errors import BufferFullError, FencedError
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import RoundStatus
from protocol.samples import Prompt
from protocol.states import DropReason, FailReason, SampleState
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
from rollout_service.failing import fail_waiting
from rollout_service.policies import PolicyRegistry
from rollout_service.pools import PooledSamples, begun_of, unscored_of, waiting_of
from rollout_service.prompts.interface import START_CURSOR, PromptOrder
from rollout_service.recovery import EngineRecovery
from rollout_service.restore import restore
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
        self._prompts = prompts
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
        self._quarantined: set[str] = set()
        self._waiting = WaitingSamples()
        self._full_until_s = 0.0
        self.scheduler = RoundScheduler(limits_of_run(settings))
        self.autotune = Autotune(settings, control)
        self._forecast = LiveForecast(settings.rollout.n, self._running, self._prompt_of, self._upcoming)
        self._fail = partial(fail_waiting, parts, self.scheduler)
        self._recovery = EngineRecovery(parts, self.scheduler, self._running, self._spawn)
        self.snapshot: Snapshot | None = None
        self._service_epoch = service_epoch
        self._caps = limits_of(settings)
        self._pools = PooledSamples(settings, parts.buffer)
        self._kv_tokens = kv_tokens_of(settings)

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
        await self._restore()
        self._parts.mailbox.post(Changed())
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
            self.snapshot = await self._parts.buffer.snapshot()
            self._check_owner(self.snapshot)
            await self._pools.clear(self.snapshot)
            self._parts.trace.saw(self.snapshot, len(self._running), self._parts.pool.stats)
            await self._evaluations.version_is(self.snapshot.active_version)
            seen = self._observe(self.snapshot)
            decisions = self.scheduler.decide(seen)
            filling = self.scheduler.phase is Phase.FILLING
            self.autotune.meter.saw(seen.now_s, len(self._running), seen.slots, filling)
            if not decisions:
                return
            for decision in decisions:
                await self._carry_out(decision)

    def _check_owner(self, snapshot: Snapshot) -> None:
        if snapshot.service_epoch != self._service_epoch:
            raise FencedError(
                f"another service has taken over the run {self._parts.settings.run.name} (its epoch is "
                f"{snapshot.service_epoch}, ours {self._service_epoch}); this one stops"
            )

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
            admission_room=self._admission_room(snapshot),
            kv_tokens=self._kv_tokens,
            forecast=self._forecast,
            num_pooled=snapshot.samples.get(SampleState.POOLED, 0),
        )

    def _admission_room(self, snapshot: Snapshot) -> int:
        if time.monotonic() < self._full_until_s:
            return 0
        return self._caps.room(snapshot, self.scheduler.limits.started_samples)

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
        return self._prompts.take(self.snapshot.cursor or START_CURSOR, count)[0]

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
        match decision:
            case BeginRound(number, target):
                log.info("round %d: filling the batch, %d groups in flight at most", number, target)
                self._forecast.new_round()
            case Admit(num_groups, oldest_version):
                await self._admit(num_groups, oldest_version)
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
                log.info("round %d: batch offered", number)

    async def _admit(self, num_groups: int, oldest_version: int) -> None:
        assert self.snapshot is not None, "decisions follow a snapshot"
        cursor = self.snapshot.cursor
        prompts, after = self._prompts.take(cursor or START_CURSOR, num_groups)
        groups = self._pools.new_groups(prompts, self.scheduler.limits, oldest_version)
        version = self.snapshot.active_version
        try:
            admitted = await self._parts.buffer.admit(groups, version, CursorMove(cursor, after))
        except BufferFullError as error:
            log.warning("no new prompts for now: %s", error)
            self._full_until_s = time.monotonic() + WATCH_INTERVAL_S
            self.scheduler.not_admitted(num_groups)
            return
        self._parts.trace.admitted(group.group_id for group in admitted)
        self._forecast.restored(begun_of(admitted))
        for group in admitted:
            self._prompt_of[group.group_id] = group.prompt
            outlook, age = self._forecast.outlook(group.prompt), self._pools.age_of(group)
            self.scheduler.admitted(group.group_id, group.seq, waiting_of(group), outlook, age)
            for sample in unscored_of(group):
                self._spawn(score_sample(self._parts, sample.sample_id, group.prompt))
            if group.prompt.prompt_id in self._quarantined:
                await self._parts.buffer.drop(group.group_id, DropReason.QUARANTINED)
                self._parts.mailbox.post(GroupClosed(group.group_id, ready=False))

    async def _give_up(self, group_id: str, sample_ids: tuple[str, ...]) -> None:
        prompt_id = self._prompt_of[group_id].prompt_id
        self._quarantined.add(prompt_id)
        log.error("the prompt %s kills engines, the last time alone: no engine is given it any more", prompt_id)
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
