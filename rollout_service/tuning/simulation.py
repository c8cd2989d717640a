"""Rounds in virtual time: the service's own scheduler over an engine that is a model and a trainer that is a duration.

Always true:
- every decision is the scheduler's; what this world does is carry them out, and let time pass to the next event;
- all running sequences write a token in each decode step, so a sample that runs is known by the step at which it will
  finish, and time between two events is a closed form of what runs;
- nothing is random: the same workload, model and limits give the same rounds.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import SettingsError
from rollout_service.scheduler.admission import UNKNOWN
from rollout_service.scheduler.decisions import (
    Admit,
    BeginRound,
    Decision,
    Install,
    Observation,
    OfferBatch,
    Park,
    RoundLimits,
    Start,
)
from rollout_service.scheduler.rounds import RoundScheduler
from rollout_service.tuning.engine_model import EngineModel
from rollout_service.tuning.forecast import LengthForecast
from rollout_service.tuning.results import BatchResult, RoundResult
from rollout_service.tuning.simulated_forecast import SimulatedForecast
from rollout_service.tuning.workload import PromptLengths, Workload

NEVER = float("inf")
MAX_LEASES = 2  # the batch that is trained on, and the next, which the trainer fetches meanwhile


@dataclass(frozen=True, slots=True)
class TrainerModel:
    """Seconds of a trainer's step, publishing included, and of an install of its weights."""

    step_s: float = 0.0
    install_s: float = 0.0


@dataclass(slots=True)
class SimulatedSample:
    """One response. `remaining` is right while it does not run; `finish_step` while it does."""

    sample_id: str
    group: "SimulatedGroup"
    length: int
    remaining: int
    written: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    finish_step: int = 0
    started_step: int = 0
    started_version: int = 0
    attempt: int = 0

    @property
    def num_tokens(self) -> int:
        """Response tokens up to its last stop."""
        return self.length - self.remaining


@dataclass(slots=True)
class SimulatedGroup:
    """The samples of one prompt."""

    group_id: str
    seq: int
    round: int
    prompt: PromptLengths
    samples: list[SimulatedSample]
    num_left: int
    oldest: int | None = None


class Simulation:
    """One service and one trainer, from an empty buffer on."""

    def __init__(
        self,
        limits: RoundLimits,
        engine: EngineModel,
        trainer: TrainerModel,
        workload: Workload,
        forecast: LengthForecast | None = None,
    ) -> None:
        self.limits = limits
        self.scheduler = RoundScheduler(limits)
        self.engine = engine
        self.trainer = trainer
        self.workload = workload
        self.on_round: Callable[[RoundResult], None] | None = None
        self._forecast = SimulatedForecast(forecast, self._progress, self._upcoming) if forecast else None
        self.now_s = 0.0
        self.rounds: list[RoundResult] = []
        self.batches: list[BatchResult] = []
        self._step = 0  # decode steps taken
        self._running: dict[str, SimulatedSample] = {}
        self._finishing: list[tuple[int, str, int]] = []  # a heap of (step, sample, attempt); old attempts are skipped
        self._preempted: list[SimulatedSample] = []
        self._context = 0
        self._prefill_s = 0.0
        self._groups: dict[str, SimulatedGroup] = {}
        self._ready: list[tuple[int, int, SimulatedGroup]] = []
        self._leases: list[list[SimulatedGroup]] = []
        self._seq = 0
        self._ready_seq = 0
        self._offered = 0
        self._last_leased = 0
        self._trained = 0
        self._active = 0
        self._pending: int | None = None
        self._trained_at_s = NEVER
        self._installed_at_s = NEVER
        self._round = RoundResult(0, 0.0)

    def _sample(self, sample_id: str) -> SimulatedSample:
        group_id, _, index = sample_id.rpartition(".")
        return self._groups[group_id].samples[int(index)]

    def _progress(self, sample_id: str) -> tuple[PromptLengths, int]:
        sample = self._sample(sample_id)
        written = self._step - sample.started_step if sample_id in self._running else 0
        return sample.group.prompt, sample.num_tokens + written

    def _upcoming(self, count: int) -> list[PromptLengths]:
        return [self.workload.prompt(self._seq + k, self.limits.group_samples) for k in range(count)]

    def run(self, num_rounds: int) -> None:
        """Until so many batches are offered and trained on."""
        while len(self.batches) < num_rounds:
            self._settle()
            self._pass_time()

    # Decisions

    def _settle(self) -> None:
        while True:
            self._train()
            decisions = self.scheduler.decide(self._observe())
            if not decisions:
                return
            for decision in decisions:
                self._carry_out(decision)

    def _observe(self) -> Observation:
        return Observation(
            now_s=self.now_s,
            slots=self.engine.slots,
            ready=len(self._ready),
            offered=self._offered,
            leased_untrained=len(self._leases),
            last_leased_step=self._last_leased,
            trained_step=self._trained,
            active_version=self._active,
            newest_version=self._trained,
            newest_step=self._trained,
            pending_version=self._pending,
            kv_tokens=self.engine.kv_tokens,
            forecast=self._forecast,
        )

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case BeginRound(number, _):
                self._round = RoundResult(number, self.now_s)
            case Admit(count):
                for _ in range(count):
                    self._admit()
            case Start(sample_ids):
                for sample_id in sample_ids:
                    self._start(self._sample(sample_id))
            case Park(sample_ids, cut):
                if cut:
                    self._round.tail_saved_s += self._tail_s()
                for sample_id in sample_ids:
                    self._park(sample_id)
            case Install(version, _):
                self._installed_at_s = self.now_s + self.trainer.install_s
                self._pending = version
            case OfferBatch(_):
                self._offer()
            case _:
                raise AssertionError(f"nobody dies in a simulation, and {decision} was decided")

    def _admit(self) -> None:
        n = self.limits.group_samples
        prompt = self.workload.prompt(self._seq, n)
        group_id = f"g{self._seq}"
        group = SimulatedGroup(group_id, self._seq, self.scheduler.round, prompt, [], n)
        group.samples = [
            SimulatedSample(f"{group_id}.{i}", group, length, length) for i, length in enumerate(prompt.lengths)
        ]
        self._groups[group_id] = group
        outlook = self._forecast.outlook(prompt) if self._forecast else UNKNOWN
        self._round.num_fresh += 1
        self._round.dispatched_tokens += sum(prompt.lengths)
        self.scheduler.admitted(group_id, self._seq, [(s.sample_id, i) for i, s in enumerate(group.samples)], outlook)
        self._seq += 1

    def _offer(self) -> None:
        this = self._round
        this.ended_s = self.now_s
        this.surplus_groups = len(self._ready) - (self._offered + 1) * self.limits.batch_groups
        this.parked_groups = len(self._groups)
        this.parked_samples = sum(g.num_left for g in self._groups.values()) - len(self._running)
        this.parked_tokens = sum(s.num_tokens for g in self._groups.values() for s in g.samples if s.remaining)
        self.rounds.append(this)
        if self.on_round:
            self.on_round(this)
        self._round = RoundResult(this.number + 1, self.now_s)
        self._offered += 1
        self.scheduler.offered()

    # The engine

    def _start(self, sample: SimulatedSample) -> None:
        prefilled = sample.group.prompt.prompt_tokens + sample.num_tokens
        if sample.num_tokens:
            self._round.reprefilled_tokens += prefilled
            self._round.num_resumes += 1
        self._enter(sample, prefilled)

    def _enter(self, sample: SimulatedSample, context: int) -> None:
        self._prefill_s += context * self.engine.prefill_per_token_s
        self._context += context
        sample.attempt += 1
        sample.started_step, sample.started_version = self._step, self._active
        sample.finish_step = self._step + sample.remaining
        self._running[sample.sample_id] = sample
        heapq.heappush(self._finishing, (sample.finish_step, sample.sample_id, sample.attempt))

    def _stop(self, sample: SimulatedSample) -> None:
        """It leaves the engine, with what it has written."""
        count = self._step - sample.started_step
        if count:
            group, version = sample.group, sample.started_version
            sample.written.append((version, count))
            group.oldest = version if group.oldest is None else min(group.oldest, version)
            sample.remaining -= count
        self._context -= sample.group.prompt.prompt_tokens + sample.num_tokens
        del self._running[sample.sample_id]
        sample.attempt += 1

    def _park(self, sample_id: str) -> None:
        sample = self._running.get(sample_id)
        if sample is not None:
            self._stop(sample)
        else:
            self._preempted = [s for s in self._preempted if s.sample_id != sample_id]
        self.scheduler.parked(sample_id)

    def _preempt(self) -> None:
        """The KV cache is full: the sequence that came last waits, and will be prefilled again, as in vLLM."""
        sample = max(self._running.values(), key=lambda s: (s.started_step, s.sample_id))
        self._stop(sample)
        self._preempted.append(sample)
        self._round.num_preemptions += 1

    def _readmit(self) -> None:
        while self._preempted:
            sample = self._preempted[-1]
            needed = sample.group.prompt.prompt_tokens + sample.num_tokens
            if self._running and self._context + needed + len(self._running) >= self.engine.kv_tokens:
                return
            self._preempted.pop()
            self._round.reprefilled_tokens += needed
            self._enter(sample, needed)

    # Time

    def _pass_time(self) -> None:
        """To the next event: a finish, a full KV cache, a trained step, an installed version."""
        other_s = min(self._trained_at_s, self._installed_at_s)
        finish = self._next_finish()
        if finish is None:
            if other_s == NEVER:
                raise SettingsError(f"the simulated run stands still, waiting for: {'; '.join(self.scheduler.waits)}")
            self._idle_until(other_s)
        else:
            running = len(self._running)
            steps = finish - self._step
            room = self.engine.steps_to_full(running, self._context)
            full = room is not None and room < steps and running > 1
            if full and room is not None:
                steps = room
            took_s = self._prefill_s + self.engine.steps_s(steps, running, self._context)
            if self.now_s + took_s > other_s:
                self._step_until(other_s)
            else:
                self._advance(steps, took_s)
                if full:
                    self._preempt()
        self._happen()

    def _next_finish(self) -> int | None:
        while self._finishing:
            step, sample_id, attempt = self._finishing[0]
            sample = self._running.get(sample_id)
            if sample is not None and sample.attempt == attempt:
                return step
            heapq.heappop(self._finishing)
        return None

    def _step_until(self, until_s: float) -> None:
        available = until_s - self.now_s
        prefill = min(self._prefill_s, available)
        steps = self.engine.steps_within(available - prefill, len(self._running), self._context)
        prefill_left = self._prefill_s - prefill
        self._advance(steps, available)
        self._prefill_s = prefill_left

    def _advance(self, steps: int, took_s: float) -> None:
        running = len(self._running)
        self._round.account(took_s, running, self.engine.slots)
        self.now_s += took_s
        self._prefill_s = 0.0
        self._step += steps
        self._context += steps * running

    def _idle_until(self, until_s: float) -> None:
        self._round.account(until_s - self.now_s, 0, self.engine.slots)
        self.now_s = until_s

    def _happen(self) -> None:
        """What is due now."""
        while (step := self._next_finish()) is not None and step <= self._step:
            _, sample_id, _ = heapq.heappop(self._finishing)
            self._finish(self._running[sample_id])
        self._readmit()
        if self._trained_at_s <= self.now_s:
            self._trained_at_s = NEVER
            self._trained += 1
            self._pending = self._trained
            self.batches.append(self._result(self._leases.pop(0)))
        if self._installed_at_s <= self.now_s:
            self._installed_at_s = NEVER
            self._active, installed = self._pending or self._active, self._pending
            self._pending = None if self._trained == installed else self._trained
            self.scheduler.installed()

    def _finish(self, sample: SimulatedSample) -> None:
        self._stop(sample)
        group = sample.group
        group.num_left -= 1
        self.scheduler.ended(sample.sample_id)
        if self._forecast:
            self._forecast.finished(group.prompt, sample.length)
        if group.num_left == 0:
            del self._groups[group.group_id]
            self._ready_seq += 1
            heapq.heappush(self._ready, (group.oldest or 0, self._ready_seq, group))
            self.scheduler.closed(group.group_id, ready=True)

    def _tail_s(self) -> float:
        """How long what runs now would still take if nothing were started any more: what a cut saves."""
        remaining = sorted(s.finish_step - self._step for s in self._running.values())
        tail_s, done, context = 0.0, 0, self._context
        for index, steps in enumerate(remaining):
            running = len(remaining) - index
            tail_s += self.engine.steps_s(steps - done, running, context)
            context += (steps - done) * running
            done = steps
        return tail_s

    # The trainer

    def _train(self) -> None:
        while self._offered and len(self._leases) < MAX_LEASES:
            self._offered -= 1
            self._last_leased += 1
            groups = [heapq.heappop(self._ready)[2] for _ in range(self.limits.batch_groups)]
            self._leases.append(groups)
        if self._leases and self._trained_at_s == NEVER:
            self._trained_at_s = self.now_s + self.trainer.step_s

    def _result(self, groups: list[SimulatedGroup]) -> BatchResult:
        step = self._trained
        held = step - 1  # the version that the trainer had when the step began
        lags: Counter[int] = Counter()
        mixed_samples = num_samples = 0
        for group in groups:
            for sample in group.samples:
                num_samples += 1
                mixed_samples += len({version for version, _ in sample.written}) > 1
                for version, count in sample.written:
                    lags[held - version] += count
        ages = [step - group.round for group in groups]
        lengths = [sample.length for group in groups for sample in group.samples]
        return BatchResult(step, self.now_s, lags, sum(ages) / len(ages), lengths, mixed_samples, num_samples)
