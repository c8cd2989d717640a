"""The round scheduler (DESIGN.md, "A round").

Always true:
- it decides and never acts: it owns no task, client, socket or clock, and the same object runs on vLLM, on the
  simulated engine and inside the simulator;
- what it decided counts as done at once, so deciding twice in a row decides nothing twice; the caller carries out every
  decision and reports what came of it;
- at most one round fills at a time, and it ends when N groups are READY and none in flight must finish before;
- round r fills the batch of step r;
- nothing starts while a policy is being installed or stragglers are being parked;
- a new group is admitted only if it can be trained within `max_lag` versions even when it is consumed last.
"""

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum

from protocol.settings.rollout import Admission, Cut, OnInstall, RoundOrder
from rollout_service.scheduler.admission import (
    EVENTS_A_FORECAST,
    PROMPTS_A_LOOK,
    UNKNOWN,
    Demand,
    Outlook,
    fitting,
    fixed,
    refill,
    tapered,
)
from rollout_service.scheduler.decisions import (
    NO_CAP,
    Admit,
    BeginRound,
    Decision,
    GiveUp,
    Install,
    Observation,
    OfferBatch,
    Park,
    RoundLimits,
    Start,
)
from rollout_service.scheduler.groups import GroupTable
from rollout_service.scheduler.quarantine import Quarantine


class Phase(StrEnum):
    """Where the scheduler is between two rounds."""

    IDLE = "idle"
    FILLING = "filling"
    CUTTING = "cutting"
    OFFERING = "offering"


class RoundScheduler:
    """Fills one batch a round: resume, admit, cut, offer."""

    def __init__(self, limits: RoundLimits) -> None:
        self.limits = limits
        self.table = GroupTable(limits.order)
        self.quarantine = Quarantine(limits.max_sample_failures)
        self.phase = Phase.IDLE
        self.round = 0
        self.round_started_s = 0.0
        self.waits: tuple[str, ...] = ()
        self._parking: set[str] = set()
        self._admitting = 0
        self._installing: int | None = None
        self._finish: list[float] = []  # of the groups in flight, as last forecast
        self._forecast_age = 0  # events since then

    @property
    def installing(self) -> bool:
        """A policy is being installed."""
        return self._installing is not None

    # What came of decisions

    def admitted(
        self,
        group_id: str,
        seq: int,
        samples: Sequence[tuple[str, int]],
        outlook: Outlook = UNKNOWN,
        oldest_version: int | None = None,
    ) -> None:
        """A group that was asked for is in the buffer, with tokens of samples that go on in it if it has a version."""
        self._admitting -= 1
        self.table.add(group_id, seq, samples, oldest_version, outlook)

    def not_admitted(self, num_groups: int) -> None:
        """Groups that were asked for are not in the buffer, which had no room."""
        self._admitting -= num_groups

    def restored(
        self,
        group_id: str,
        seq: int,
        samples: Sequence[tuple[str, int]],
        oldest_version: int | None,
        outlook: Outlook = UNKNOWN,
    ) -> None:
        """A group in flight that the buffer held when the service started."""
        self.table.add(group_id, seq, samples, oldest_version, outlook)

    def parked(self, sample_id: str) -> None:
        """A running sample is in the buffer again, and its engine lives."""
        self._acquit(sample_id)
        self.lost(sample_id)

    def lost(self, sample_id: str) -> None:
        """A running sample is in the buffer again, because its engine died."""
        self._parking.discard(sample_id)
        self.table.park(sample_id)

    def ended(self, sample_id: str) -> None:
        """A sample finished or failed: its slot, if it had one, is free."""
        self._acquit(sample_id)
        self._parking.discard(sample_id)
        self._forecast_age += 1
        self.table.end(sample_id)

    def engine_died(self, sample_ids: Iterable[str]) -> None:
        """An engine died while these samples, and no others, ran on it."""
        if groups := self.table.group_ids(sample_ids):
            self.quarantine.died(groups)

    def _acquit(self, sample_id: str) -> None:
        for group_id in self.table.group_ids([sample_id]):
            self.quarantine.survived(group_id)

    def restored_ready(self, oldest_version: int | None) -> None:
        """A READY group that the buffer held when the service started."""
        self.table.ages.add_ready(oldest_version)

    def closed(self, group_id: str, ready: bool) -> None:
        """A group in flight became READY, or else DROPPED."""
        self.table.close(group_id, ready)
        self.quarantine.closed(group_id)

    def installed(self) -> None:
        """An install is over, whether it succeeded or not."""
        self._installing = None

    def offered(self) -> None:
        """The batch of this round is offered."""
        self.phase = Phase.IDLE

    # Decisions

    def decide(self, seen: Observation) -> list[Decision]:
        """What to do now. Calling it again without news gives an empty list."""
        self.table.ages.keep_ready(seen.ready)
        if self._installing is not None or self._parking:
            return self._wait("a policy install" if self._installing is not None else "stragglers to be parked")
        if self.phase is Phase.OFFERING:
            return self._wait("the batch to be offered")
        if not seen.generation_allowed:
            return self._halt(seen, "the operator: generation is paused")
        if self.phase is Phase.IDLE:
            return self._between_rounds(seen)
        if self.phase is Phase.CUTTING or self._is_full(seen):
            return self._end_round(seen)
        if self._lag_wait(seen):
            return self._halt(seen, *self._lag_wait(seen))
        return self._fill(seen)

    def target_groups(self) -> int:
        """N' = ceil(ratio * N)."""
        return math.ceil(self.limits.ratio * self.limits.batch_groups)

    def unspoken(self, seen: Observation) -> int:
        """READY groups that no offered batch takes: at the start of a round, the surplus."""
        return seen.ready - seen.offered * self.limits.batch_groups

    def num_must_finish(self, seen: Observation) -> int:
        """Groups in flight that must finish before this round's batch may be offered."""
        limits = self.limits
        return self.table.ages.num_blocking(seen.fill_version, limits.max_lag, limits.batch_groups, seen.offered + 1)

    def _between_rounds(self, seen: Observation) -> list[Decision]:
        if seen.pending_version is not None:
            return self._install(seen, seen.pending_version)
        waits = self._gate(seen)
        if waits:
            if self.table.running:
                return self._park_running(cut=True)
            return self._wait(*waits)
        self.phase, self.round = Phase.FILLING, seen.last_leased_step + seen.offered + 1
        self.round_started_s = seen.now_s
        self._finish = []
        self.table.new_round()
        begun: list[Decision] = [BeginRound(self.round, self.target_groups())]
        return begun + self.decide(seen)

    def _gate(self, seen: Observation) -> list[str]:
        """Why the next round may not start."""
        lookahead = self.limits.lookahead
        waits: list[str] = []
        if seen.outstanding > lookahead:
            waits.append(f"the trainer: {seen.outstanding} batches are offered or leased, lookahead allows {lookahead}")
        return waits + self._lag_wait(seen)

    def _lag_wait(self, seen: Observation) -> list[str]:
        """What is written now would be older than `max_lag` when it is trained (failed installs, trainer rollback)."""
        lag = seen.fill_version - seen.active_version
        if lag <= self.limits.max_lag:
            return []
        return [
            f"a policy version: the active one is {lag} behind what the next batch is trained on, max_lag allows "
            f"{self.limits.max_lag}"
        ]

    def _install(self, seen: Observation, version: int) -> list[Decision]:
        keep = self.limits.on_install is OnInstall.KEEP
        if self.table.running and not keep:
            return self._park_running(cut=False)
        self._installing = version
        self.waits = (f"policy version {version} to be installed",)
        return [Install(version, keep)]

    def _halt(self, seen: Observation, *why: str) -> list[Decision]:
        """Nothing may be generated: the round is suspended, a full batch is still offered, installs go on."""
        if self.table.running:
            return self._park_running(cut=False)
        if self.phase is not Phase.IDLE and self._is_full(seen):
            return self._end_round(seen)
        self.phase = Phase.IDLE
        if seen.pending_version is not None:
            return self._install(seen, seen.pending_version)
        return self._wait(*why)

    def _is_full(self, seen: Observation) -> bool:
        return self.unspoken(seen) >= self.limits.batch_groups and not self.num_must_finish(seen)

    def _end_round(self, seen: Observation) -> list[Decision]:
        if self.table.running and not self._may_run_on(seen):
            self.phase = Phase.CUTTING
            return self._park_running(cut=True)
        self.phase = Phase.OFFERING
        self.waits = ()
        return [OfferBatch(self.round)]

    def _may_run_on(self, seen: Observation) -> bool:
        """Stragglers run into the next round: nothing to install, and that round may start at once."""
        return (
            self.limits.cut is Cut.CONTINUE
            and seen.pending_version is None
            and seen.outstanding + 1 <= self.limits.lookahead
        )

    def _fill(self, seen: Observation) -> list[Decision]:
        decisions: list[Decision] = self._give_up()
        free = self._free(seen)
        started = self._take(free, seen.active_version)
        if started:
            decisions.append(Start(started))
        free -= len(started) + self._admitting * self.limits.started_samples
        wanted = self._wanted(free, seen)
        if wanted > 0:
            self._admitting += wanted
            decisions.append(Admit(wanted, self._oldest_admissible(seen)))
        self.waits = self._fill_waits(seen)
        return decisions

    def _free(self, seen: Observation) -> int:
        """Samples that may start: by slots, and with `budget` by room in the KV cache too."""
        table = self.table
        free = seen.slots - len(table.running)
        if self.limits.admission is not Admission.BUDGET:
            return free
        room = fitting(seen.kv_tokens, table.running_context, table.mean_context)
        least = 0 if table.running else 1  # a sample that is larger than the cache is the engine's to refuse
        return free if room is None else min(free, max(room, least))

    def _wanted(self, free: int, seen: Observation) -> int:
        """New groups to ask for: what the slots can take, or the whole round if the longest are to be found in it."""
        whole_round = self.limits.order is RoundOrder.LONGEST_FIRST and self.limits.admission is Admission.FIXED
        if free <= 0 and not whole_round:
            return 0
        by_slots = NO_CAP if whole_round else math.ceil(free / self.limits.started_samples)
        return self._admissible(seen, by_slots)

    def _take(self, count: int, version: int) -> tuple[str, ...]:
        if (alone := self.quarantine.alone) is not None:
            return self.table.take_of(alone, count, version)
        return self.table.take(count, version, self.quarantine.held)

    def _give_up(self) -> list[Decision]:
        """Groups that kill engines, once none of their samples is still on its way back to the buffer."""
        table = self.table
        if not self.quarantine.condemned:
            return []
        condemned = [g for g in sorted(self.quarantine.condemned) if table.is_waiting(g) and table.waiting(g)]
        decisions: list[Decision] = []
        for group_id in condemned:
            samples = table.take_of(group_id, len(table.waiting(group_id)), 0)
            decisions.append(GiveUp(group_id, samples))
        return decisions

    def _admissible(self, seen: Observation, most: int) -> int:
        """Of `most` groups those that N' and max_lag allow: (w - v) + ceil((open + ready + 1)/N) - 1 <= max_lag."""
        in_flight = len(self.table.groups) + self._admitting
        batches = self.limits.max_lag - (seen.next_unleased_version - seen.active_version) + 1
        in_time = batches * self.limits.batch_groups - in_flight - seen.ready
        most = min(most, in_time, seen.admission_room - self._admitting)
        demand = Demand(self.limits.batch_groups, self.target_groups(), in_flight, self.unspoken(seen))
        match self.limits.admission:
            case Admission.FIXED:
                return min(most, fixed(demand))
            case Admission.REFILL:
                return min(most, refill(demand))
            case Admission.BUDGET:
                return most
            case Admission.TAPER:
                return self._tapered(min(most, fixed(demand)), demand, seen)

    def _oldest_admissible(self, seen: Observation) -> int:
        """For the groups that were just asked for: the oldest token with which `max_lag` can still be kept."""
        if not seen.num_pooled:
            return 0
        limits, versions = self.limits, (seen.active_version, seen.fill_version)
        return self.table.ages.oldest_admissible(
            self._admitting, *versions, limits.max_lag, limits.batch_groups, seen.offered
        )

    def _tapered(self, most: int, demand: Demand, seen: Observation) -> int:
        if seen.forecast is None or most <= 0:
            return most
        most = min(most, max(0, demand.missing - demand.in_flight) + PROMPTS_A_LOOK)
        if not self._finish or self._forecast_age * EVENTS_A_FORECAST >= len(self.table.running):
            self._finish = self.table.finish(seen.forecast.remaining)
            self._forecast_age = 0
        return tapered(demand, most, self._finish, seen.forecast.upcoming(most))

    def _fill_waits(self, seen: Observation) -> tuple[str, ...]:
        missing = self.limits.batch_groups - self.unspoken(seen)
        groups = "group" if missing == 1 else "groups"
        waits = [f"{missing} more {groups} to be ready, of {self.limits.batch_groups}"] if missing > 0 else []
        if missing > 0 and seen.admission_room <= 0:
            waits.append("room in the buffer: raise buffer.max_groups or buffer.max_bytes if nothing else moves")
        if missing <= 0:
            waits.append(f"{self.num_must_finish(seen)} groups that must finish to keep max_lag")
        return tuple(waits)

    def _park_running(self, cut: bool) -> list[Decision]:
        samples = tuple(self.table.running)
        self._parking.update(samples)
        self.waits = ("stragglers to be parked",)
        return [Park(samples, cut)]

    def _wait(self, *why: str) -> list[Decision]:
        self.waits = why
        return []
