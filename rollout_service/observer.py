"""From a running service to what is judged and to the waits. It only reads, and none of it waits."""

import time
from collections.abc import Iterator

from buffer.interface import Snapshot
from protocol.states import SampleState
from protocol.watching import Verdict, Wait
from rollout_service.parts import ServiceParts
from rollout_service.rewards.measured import MeasuredScorer
from rollout_service.rewards.pool import ScorerPool
from rollout_service.watch.observed import Choices, Observed
from rollout_service.watch.recent import Watch
from rollout_service.watch.verdict import NUM_ROUNDS, judge
from rollout_service.watch.waits import LongPolls, Open, WaitBook, counted, scheduler_wait


class Observer:
    """Of one service that is watched."""

    def __init__(self, parts: ServiceParts, watch: Watch, polls: LongPolls) -> None:
        self._parts = parts
        self._watch = watch
        self._book = WaitBook()
        self._polls = polls

    def now(self) -> float:
        """The service's clock, which never runs backwards."""
        return self._parts.sample_parts.trace.now()

    def verdict(self, trainer_silent_s: float | None) -> Verdict:
        """What limits the run now. `trainer_silent_s`: since when the trainer has not called, None if it never did."""
        parts, trace = self._parts, self._parts.sample_parts.trace
        since = parts.sample_parts.buffer.waiting_since
        rounds, filling = self._watch.rounds[-NUM_ROUNDS:], trace.round_so_far()
        return judge(
            Observed(
                choices=self.choices(),
                rounds=rounds,
                scores=self._watch.scores_since(rounds[0].started_at if rounds else 0.0),
                num_ready_now=len(filling["ready_s"]) if filling else 0,
                num_dropped_now=filling["num_dropped"] if filling else 0,
                spent_now=trace.spent_now(),
                steps=self._watch.steps.last(NUM_ROUNDS),
                paused=not parts.control.generation_allowed,
                redis_away_s=None if since is None else max(0.0, time.time() - since),
                trainer_connected=trainer_silent_s is not None,
                trainer_silent_s=trainer_silent_s or 0.0,
                starting_for="; ".join(parts.loop.scheduler.waits) or "its first round to begin",
                install_s=self._watch.mean_install_s(),
                reward_s=self._watch.mean_reward_s(),
            )
        )

    def choices(self) -> Choices:
        """The settings in force."""
        settings, control, tuned = self._parts.settings, self._parts.control, self._parts.loop.autotune.last
        return Choices(
            ratio=control.ratio,
            lookahead=control.lookahead,
            max_lag=control.max_lag,
            train_batch_size=settings.data.train_batch_size,
            max_num_seqs=settings.engine.max_num_seqs,
            num_reward_workers=settings.reward.num_workers,
            recommended=tuned.ratio if tuned else None,
        )

    def waiting(self, snapshot: Snapshot, trainer_connected: bool) -> list[Wait]:
        """Every wait there is now, the oldest first."""
        now = self.now()
        return self._book.update(now, self._open(snapshot, trainer_connected, now))

    def _open(self, snapshot: Snapshot, trainer_connected: bool, now: float) -> Iterator[Open]:
        parts = self._parts
        away = parts.sample_parts.buffer.waiting_since
        if away is not None:
            yield Open("redis", "the service", "Redis to answer", now - max(0.0, time.time() - away))
        if not parts.control.generation_allowed:
            how = "it drains; start it again" if parts.control.draining else "the operator to resume"
            yield Open("paused", "generation", how)
        scheduler = parts.loop.scheduler
        yield from (scheduler_wait(text, scheduler.round) for text in scheduler.waits)
        yield from self._policies(snapshot)
        yield from self._polls.waits(now)
        if not trainer_connected and (snapshot.offered or parts.loop.scheduler.phase.value == "idle"):
            yield Open("no-trainer", counted(snapshot.offered, "batch"), "a trainer to connect")
        for replica in parts.pool.stats():
            if not replica.alive:
                yield Open(f"engine:{replica.worker}", replica.worker, "its restart")
        yield from self._rewards(snapshot, now)

    def _policies(self, snapshot: Snapshot) -> Iterator[Open]:
        parts, pending = self._parts, self._parts.policies.pending
        if pending is None:
            return
        if parts.loop.scheduler.installing:
            yield Open(f"install:{pending.version}", f"version {pending.version}", "every engine to load it")
        elif parts.evaluations.running:
            yield Open(f"held:{pending.version}", f"version {pending.version}", "the evaluation to end")
        else:
            yield Open(f"queued:{pending.version}", f"version {pending.version}", "the round to be offered")

    def _rewards(self, snapshot: Snapshot, now: float) -> Iterator[Open]:
        scorer = self._parts.sample_parts.scorer
        inner = scorer.inner if isinstance(scorer, MeasuredScorer) else scorer
        if isinstance(inner, ScorerPool) and (missing := self._parts.settings.reward.num_workers - len(inner.pids)) > 0:
            yield Open("scorers", counted(missing, "scorer"), "their restart")
        if finished := snapshot.samples.get(SampleState.FINISHED, 0):
            since = now - scorer.longest_wait_s if isinstance(scorer, MeasuredScorer) else None
            yield Open("scoring", counted(finished, "finished response"), "their scores", since)
