"""What the service tells of itself, put together into the lines of a trace.

Always true:
- it only watches: nothing that the service does depends on it, and none of its methods waits or raises;
- all of them run in the event loop's thread, so its state needs no lock;
- without a sink it keeps nothing, so that a service without a trace pays one comparison a call.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from buffer.interface import Snapshot
from protocol.samples import Prompt
from protocol.states import FinishReason, SampleState
from rollout_service.engines.interface import EngineStats
from rollout_service.events import Event, GroupClosed, InstallEnded, SampleLost, SampleParked
from rollout_service.scheduler.decisions import Admit, BeginRound, Decision, Install, OfferBatch, Park

Line = dict[str, Any]  # as `trace_records` describes it; checking each on its way out would cost more than writing it
Sink = Callable[[Line], None]
End = Literal["stop", "length", "parked", "lost"]

KV_INTERVAL_S = 0.1  # asking costs some microseconds, and an event comes every few
MAX_POINTS = 128  # of one round's curve of running samples; thinned to half when it is full


def group_of(sample_id: str) -> str:
    """The group that a sample is of, whatever its id looks like: a trace checks nothing."""
    return sample_id.rpartition(".")[0]


class RunningCurve:
    """Samples in the engines over time, with at most MAX_POINTS points however long the round is."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int]] = []
        self._gap_s = 0.0

    def add(self, at_s: float, running: int) -> None:
        """So many run now, `at_s` seconds after the round began."""
        points = self.points
        if points and (at_s - points[-1][0] < self._gap_s or points[-1][1] == running):
            return
        points.append((round(at_s, 4), running))
        if len(points) >= MAX_POINTS:
            self.points = points[::2]
            self._gap_s = max(2 * self._gap_s, at_s / MAX_POINTS)


class KvWatch:
    """How full the KV caches were at the most in a round, and how many requests the engines preempted."""

    def __init__(self) -> None:
        self._looked_at = 0.0
        self._peak: float | None = None
        self._preempted_before: dict[tuple[str, int], int] = {}
        self._preempted: dict[tuple[str, int], int] = {}

    def look(self, now: float, replicas: Callable[[], Sequence[EngineStats]]) -> None:
        """Ask the engines, unless they were asked just now."""
        if now - self._looked_at < KV_INTERVAL_S:
            return
        self._looked_at = now
        for replica in replicas():
            if replica.kv_use is not None:
                self._peak = max(self._peak or 0.0, replica.kv_use)
            if replica.num_preemptions is not None:
                self._preempted[(replica.worker, replica.epoch)] = replica.num_preemptions

    def take(self) -> Line:
        """Fields of the round that ends; the next one begins."""
        fields: Line = {}
        if self._peak is not None:
            fields["kv_use"] = round(self._peak, 4)
        if self._preempted:
            before = sum(self._preempted_before.values())
            fields["num_preemptions"] = sum(self._preempted.values()) - before
        self._peak, self._preempted_before = None, dict(self._preempted)
        return fields


class AttemptTrace:
    """One attempt at one sample, from its start to the line that tells of it."""

    __slots__ = (
        "_before",
        "_recorder",
        "_runs",
        "_started_s",
        "attempt",
        "parked",
        "prompt",
        "sample_id",
        "waited_s",
        "worker",
    )

    def __init__(
        self,
        recorder: "TraceRecorder",
        sample_id: str,
        attempt: int,
        prompt: Prompt,
        before: int,
        waited_s: float | None,
    ) -> None:
        self._recorder = recorder
        self.sample_id = sample_id
        self.attempt = attempt
        self.prompt = prompt
        self.waited_s = waited_s
        self.worker: str | None = None
        self.parked = False
        self._before = before
        self._started_s = time.monotonic()
        self._runs: list[list[float]] = []  # version, tokens, first and last chunk

    def wrote(self, num_tokens: int, version: int) -> None:
        """A chunk came."""
        if not num_tokens:
            return
        now, runs = time.monotonic(), self._runs
        if runs and (last := runs[-1])[0] == version:
            last[1] += num_tokens
            last[3] = now
        else:
            runs.append([version, num_tokens, now, now])

    def ended(self, finished: FinishReason | None) -> None:
        """The sample left the engine: for good, or `parked`, or else with its engine or its lease."""
        end: End = finished.value if finished is not None else "parked" if self.parked else "lost"
        self._recorder.attempt_ended(self, self._started_s, self._before, self._runs, end)


class TraceRecorder:
    """Of one service."""

    def __init__(
        self, sink: Sink | None = None, batch_groups: int = 1, close: Callable[[], None] = lambda: None
    ) -> None:
        self._sink = sink
        self._close = close
        self._batch_groups = batch_groups
        self._offset_s = time.time() - time.monotonic()  # times are the wall clock's, but never run backwards
        self._waiting: dict[str, dict[str, float]] = {}  # group -> sample ("": all of it) -> since when
        self._round: int = 0
        self._round_started_at = 0.0
        self._cut_at: float | None = None
        self._kv = KvWatch()
        self._ready_s: list[float] = []
        self._num_fresh = 0
        self._num_dropped = 0
        self._curve = RunningCurve()
        self._snapshot: Snapshot | None = None
        self._trained_step: int | None = None
        self._install: tuple[int, float] | None = None

    def close(self) -> None:
        """Write what waits, and record nothing more."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._close()

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.monotonic() + self._offset_s

    # Samples

    def admitted(self, group_ids: Iterable[str]) -> None:
        """New groups wait for their first slots."""
        if self._sink is not None:
            now = self.now()
            self._waiting.update({group_id: {"": now} for group_id in group_ids})

    def attempt(self, sample_id: str, attempt: int, prompt: Prompt, before: int) -> AttemptTrace:
        """A sample starts to run."""
        waiting = self._waiting.get(group_of(sample_id), {})
        since = waiting.pop(sample_id, None) or waiting.get("")
        waited_s = None if since is None else round(self.now() - since, 4)
        return AttemptTrace(self, sample_id, attempt, prompt, before, waited_s)

    def attempt_ended(
        self, attempt: AttemptTrace, started_s: float, before: int, runs: list[list[float]], end: End
    ) -> None:
        """A sample does not run any more."""
        if self._sink is None:
            return
        offset_s = self._offset_s
        self._sink(
            {
                "kind": "attempt",
                "sample": attempt.sample_id,
                "group": group_of(attempt.sample_id),
                "prompt": attempt.prompt.prompt_id,
                "source": attempt.prompt.data_source,
                "prompt_tokens": len(attempt.prompt.token_ids),
                "attempt": attempt.attempt,
                "worker": attempt.worker,
                "round": self._round,
                "waited_s": attempt.waited_s,
                "started_at": round(started_s + offset_s, 4),
                "ended_at": round(self.now(), 4),
                "before": before,
                "segments": [[v, n, round(a + offset_s, 4), round(b + offset_s, 4)] for v, n, a, b in runs],
                "end": end,
            }
        )

    def scored(self, sample_id: str, reward: float | None, failed: str | None = None) -> None:
        """A sample has its reward, or will never have one."""
        if self._sink is not None:
            self._sink({"kind": "score", "sample": sample_id, "reward": reward, "failed": failed})

    # Rounds

    def saw(self, snapshot: Snapshot, num_running: int, replicas: Callable[[], Sequence[EngineStats]]) -> None:
        """The buffer's counts before a decision, how many samples run, and how to ask the engines."""
        if self._sink is None:
            return
        now, self._snapshot = self.now(), snapshot
        self._curve.add(now - self._round_started_at, num_running)
        self._kv.look(now, replicas)
        if self._trained_step is not None and snapshot.trained_step > self._trained_step:
            self._sink({"kind": "trained", "step": snapshot.trained_step, "at": round(now, 4)})
        self._trained_step = snapshot.trained_step

    def decided(self, decision: Decision) -> None:
        """A decision is about to be carried out."""
        if self._sink is None:
            return
        match decision:
            case BeginRound(number, _):
                self._begin(number)
            case Admit(num_groups):
                self._num_fresh += num_groups
            case Park(_, cut=True):
                self._cut_at = self._cut_at or self.now()
            case Install(version, _):
                self._install = (version, self.now())
            case OfferBatch():
                self._sink(self._round_line())
            case _:
                pass

    def happened(self, event: Event) -> None:
        """An event has reached the round loop."""
        if self._sink is None:
            return
        match event:
            case SampleParked(sample_id) | SampleLost(sample_id):
                self._waiting.setdefault(group_of(sample_id), {})[sample_id] = self.now()
            case GroupClosed(group_id, ready):
                self._waiting.pop(group_id, None)
                if ready:
                    self._ready_s.append(round(self.now() - self._round_started_at, 4))
                else:
                    self._num_dropped += 1
            case InstallEnded():
                if self._install is not None:
                    version, started_at = self._install
                    line = {"kind": "install", "version": version, "started_at": started_at, "ended_at": self.now()}
                    self._sink(line)
                    self._install = None
            case _:
                pass

    def _begin(self, number: int) -> None:
        if number == self._round:
            return  # a suspended round goes on
        self._round, self._round_started_at, self._cut_at = number, self.now(), None
        self._ready_s, self._num_fresh, self._num_dropped = [], 0, 0
        self._curve = RunningCurve()

    def _round_line(self) -> Line:
        seen = self._snapshot
        assert seen is not None, "decisions follow a snapshot"
        return {
            "kind": "round",
            "round": self._round,
            "started_at": round(self._round_started_at, 4),
            "cut_at": None if self._cut_at is None else round(self._cut_at, 4),
            "offered_at": round(self.now(), 4),
            "active_version": seen.active_version,
            "ready_s": self._ready_s,
            "num_fresh": self._num_fresh,
            "num_dropped": self._num_dropped,
            "surplus_groups": max(0, seen.ledger.ready - (seen.offered + 1) * self._batch_groups),
            "open_groups": seen.ledger.open,
            "parked_samples": seen.samples.get(SampleState.PARKED, 0),
            "running": self._curve.points,
            **self._kv.take(),
        }
