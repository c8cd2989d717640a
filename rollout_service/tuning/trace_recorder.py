"""What the service tells of itself, put together into the lines of a trace.

Always true:
- it only watches: nothing that the service does depends on it, and none of its methods waits or raises;
- all of them run in the event loop's thread, so its state needs no lock;
- every line goes to all sinks, which neither wait nor raise, and is not changed afterwards;
- without a sink it keeps nothing, so that a service that nobody watches pays one comparison a call.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from buffer.interface import Snapshot
from protocol.samples import Prompt
from protocol.states import FinishReason, SampleState
from protocol.watching import Cause
from rollout_service.engines.interface import EngineStats
from rollout_service.events import Event, GroupClosed, InstallEnded, SampleLost, SampleParked
from rollout_service.scheduler.decisions import Admit, BeginRound, Decision, Install, OfferBatch, Park
from rollout_service.watch.curves import KvWatch, RunningCurve
from rollout_service.watch.spending import Spending

Line = dict[str, Any]  # as `trace_records` describes it; checking each on its way out would cost more than writing it
LineSink = Callable[[Line], None]
End = Literal["stop", "length", "parked", "lost", "running"]

MOMENT_S = 1.0  # between two moments at first; people who follow a run's start look at seconds
LONGEST_MOMENT_S = 10.0  # later: some megabytes of trace a day
MOMENT_SHARE = 1e-3  # of the service's age
RUNNING_SHARE = 0.1  # of the service's age between two lines of what runs: a first round that is long is told of
RUNNING_SAMPLE_S = 0.5  # between two such lines for each sample in them, at most: some 20 MB of trace a day


def group_of(sample_id: str) -> str:
    """The group that a sample is of, whatever its id looks like: a trace checks nothing."""
    return sample_id.rpartition(".")[0]


class AttemptTrace:
    """One attempt at one sample, from its start to the line that tells of it."""

    __slots__ = (
        "_before",
        "_recorder",
        "_runs",
        "_started_s",
        "attempt",
        "continued_from",
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
        continued_from: str | None,
    ) -> None:
        self._recorder = recorder
        self.sample_id = sample_id
        self.attempt = attempt
        self.prompt = prompt
        self.waited_s = waited_s
        self.continued_from = continued_from
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
        self._recorder.attempt_ended(self, end)

    def standing(self) -> list[Any]:
        """What a line of what runs has of it."""
        about = (self.sample_id, self.prompt.prompt_id, self.prompt.data_source, len(self.prompt.token_ids))
        return [*about, self._before + sum(int(run[1]) for run in self._runs), self.continued_from]

    def line(self, end: End, round_number: int, offset_s: float) -> Line:
        """What there is to say of it by now."""
        return {
            "kind": "attempt",
            "sample": self.sample_id,
            "group": group_of(self.sample_id),
            "prompt": self.prompt.prompt_id,
            "source": self.prompt.data_source,
            "prompt_tokens": len(self.prompt.token_ids),
            "attempt": self.attempt,
            "worker": self.worker,
            "round": round_number,
            "waited_s": self.waited_s,
            "started_at": round(self._started_s + offset_s, 4),
            "ended_at": round(time.monotonic() + offset_s, 4),
            "before": self._before,
            "segments": [[v, n, round(a + offset_s, 4), round(b + offset_s, 4)] for v, n, a, b in self._runs],
            "end": end,
            "continued_from": self.continued_from,
        }


class TraceRecorder:
    """Of one service. `batch_groups`: N, of which the surplus is told."""

    def __init__(
        self, sinks: Iterable[LineSink] = (), batch_groups: int = 1, close: Callable[[], None] = lambda: None
    ) -> None:
        self._sinks = list(sinks)
        self._close = close
        self.batch_groups = batch_groups
        self._offset_s = time.time() - time.monotonic()  # times are the wall clock's, but never run backwards
        self._born_at = self._moment_at = self._running_at = self.now()
        self._waiting: dict[str, dict[str, float]] = {}  # group -> sample ("": all of it) -> since when
        self._live: dict[int, AttemptTrace] = {}
        self._scoring: Counter[str] = Counter()  # group -> samples that wait for their scores
        self._num_scoring = 0
        self._spending = Spending()
        self._round: int = 0
        self._round_started_at = 0.0
        self._filling = False
        self._cut_at: float | None = None
        self._kv = KvWatch()
        self._ready_s: list[float] = []
        self._num_fresh = 0
        self._num_dropped = 0
        self._curve = RunningCurve()
        self._snapshot: Snapshot | None = None
        self._trained_step: int | None = None
        self._install: tuple[int, float] | None = None

    @property
    def round(self) -> int:
        """The round that fills, or the last one."""
        return self._round

    @property
    def num_scoring(self) -> int:
        """Finished samples that wait for their scores."""
        return self._num_scoring

    def add_sink(self, sink: LineSink) -> None:
        """Have every later line handed to `sink`, too."""
        self._sinks.append(sink)

    def close(self) -> None:
        """Write what waits, and record nothing more."""
        if self._sinks:
            self._sinks.clear()
            self._close()

    def _tell(self, line: Line) -> None:
        for sink in self._sinks:
            sink(line)

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.monotonic() + self._offset_s

    # Samples

    def admitted(self, group_ids: Iterable[str]) -> None:
        """New groups wait for their first slots."""
        if self._sinks:
            now = self.now()
            self._waiting.update({group_id: {"": now} for group_id in group_ids})

    def attempt(
        self, sample_id: str, attempt: int, prompt: Prompt, before: int, continued_from: str | None = None
    ) -> AttemptTrace:
        """A sample starts to run; `continued_from` is its id in the group that was READY without it."""
        waiting = self._waiting.get(group_of(sample_id), {})
        since = waiting.pop(sample_id, None) or waiting.get("")
        waited_s = None if since is None else round(self.now() - since, 4)
        trace = AttemptTrace(self, sample_id, attempt, prompt, before, waited_s, continued_from)
        if self._sinks:
            self._live[id(trace)] = trace
        return trace

    def attempt_ended(self, attempt: AttemptTrace, end: End) -> None:
        """A sample does not run any more."""
        self._live.pop(id(attempt), None)
        if not self._sinks:
            return
        if end in ("stop", "length"):
            self._scoring[group_of(attempt.sample_id)] += 1
            self._num_scoring += 1
        self._tell(attempt.line(end, self._round, self._offset_s))

    def scored(self, sample_id: str, reward: float | None, failed: str | None = None) -> None:
        """A sample has its reward, or will never have one."""
        if not self._sinks:
            return
        self.not_scored(sample_id)
        line = {"kind": "score", "sample": sample_id, "reward": reward, "failed": failed, "at": round(self.now(), 4)}
        self._tell(line)

    def spent_now(self) -> dict[Cause, float]:
        """Seconds by cause since the last offer."""
        self._spending.pass_to(self.now())
        return dict(self._spending.spent)

    def not_scored(self, sample_id: str) -> None:
        """A finished sample waits for no score any more: its group went on without it."""
        group_id = group_of(sample_id)
        if self._scoring.get(group_id):
            self._scoring[group_id] -= 1
            self._num_scoring -= 1
            if not self._scoring[group_id]:
                del self._scoring[group_id]

    def running(self) -> list[Line]:
        """Lines of what runs now, as if it had left its engine now."""
        return [attempt.line("running", self._round, self._offset_s) for attempt in self._live.values()]

    # Rounds

    def saw(self, snapshot: Snapshot, num_running: int, replicas: Callable[[], Sequence[EngineStats]]) -> None:
        """The buffer's counts before a decision, how many samples run, and how to ask the engines."""
        if not self._sinks:
            return
        now, self._snapshot = self.now(), snapshot
        self._curve.add(now - self._round_started_at, num_running)
        self._kv.look(now, replicas)
        if self._trained_step is not None and snapshot.trained_step > self._trained_step:
            self._tell({"kind": "trained", "step": snapshot.trained_step, "at": round(now, 4)})
        self._trained_step = snapshot.trained_step

    def stands(
        self, cause: Cause, num_running: int, slots: int, redis_s: float, more: Callable[[], Mapping[str, float]]
    ) -> None:
        """What was decided is done, and this is what the time goes to from now on.

        `redis_s`: how long the counts were waited for; `more`: values of a moment that cost something to ask for.
        """
        if not self._sinks:
            return
        now = self.now()
        self._spending.look(now, cause, num_running, slots, self._num_scoring, redis_s)
        if now - self._moment_at >= min(LONGEST_MOMENT_S, max(MOMENT_S, MOMENT_SHARE * (now - self._born_at))):
            self._moment_at = now
            self._tell({"kind": "moment", "at": round(now, 3), "values": {**self._counts(num_running), **more()}})
            self._tell_running(now)

    def _tell_running(self, now: float) -> None:
        pause_s = min(RUNNING_SAMPLE_S * len(self._live), RUNNING_SHARE * (now - self._born_at))
        if self._live and now - self._running_at >= pause_s:
            self._running_at = now
            samples = [attempt.standing() for attempt in self._live.values()]
            self._tell({"kind": "running", "at": round(now, 3), "samples": samples})

    def _counts(self, num_running: int) -> dict[str, float]:
        seen = self._snapshot
        assert seen is not None, "decisions follow a snapshot"
        return {
            "running": num_running,
            "scoring": self._num_scoring,
            "parked": seen.samples.get(SampleState.PARKED, 0),
            "queued": seen.samples.get(SampleState.QUEUED, 0),
            **seen.ledger.model_dump(),
            "ledger_error": seen.ledger.error,
            "held_bytes": seen.held_bytes,
            "offered": seen.offered,
            "active_version": seen.active_version,
            "newest_version": seen.newest_version,
            "trained_step": seen.trained_step,
        }

    def decided(self, decision: Decision) -> None:
        """A decision is about to be carried out."""
        if not self._sinks:
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
                self._tell(self._round_line())
                self._filling = False
            case _:
                pass

    def happened(self, event: Event) -> None:
        """An event has reached the round loop."""
        if not self._sinks:
            return
        match event:
            case SampleParked(sample_id) | SampleLost(sample_id):
                self._waiting.setdefault(group_of(sample_id), {})[sample_id] = self.now()
            case GroupClosed(group_id, ready):
                self._waiting.pop(group_id, None)
                self._num_scoring -= self._scoring.pop(group_id, 0)
                if ready:
                    self._ready_s.append(round(self.now() - self._round_started_at, 4))
                else:
                    self._num_dropped += 1
            case InstallEnded():
                if self._install is not None:
                    version, started_at = self._install
                    line = {"kind": "install", "version": version, "started_at": started_at, "ended_at": self.now()}
                    self._tell(line)
                    self._install = None
            case _:
                pass

    def _begin(self, number: int) -> None:
        self._filling = True
        if number == self._round:
            return  # a suspended round goes on
        self._round, self._round_started_at, self._cut_at = number, self.now(), None
        self._ready_s, self._num_fresh, self._num_dropped = [], 0, 0
        self._curve = RunningCurve()
        self._spending.pass_to(self._round_started_at)
        self._spending.begin()

    def round_so_far(self) -> Line | None:
        """The line of the round that fills, as it is now; None between two rounds."""
        if not self._sinks or not self._filling or self._snapshot is None:
            return None
        return self._round_fields(self._snapshot) | {"offered_at": None, "spent": dict(self._spending.spent)}

    def _round_line(self) -> Line:
        seen = self._snapshot
        assert seen is not None, "decisions follow a snapshot"
        fields = self._round_fields(seen)
        spent = {cause.value: round(seconds, 4) for cause, seconds in self._spending.take().items()}
        return fields | self._kv.take() | {"offered_at": round(self.now(), 4), "spent": spent}

    def _round_fields(self, seen: Snapshot) -> Line:
        spending = self._spending
        spending.pass_to(self.now())
        bubble = spending.idle_slot_s / spending.slot_s if spending.slot_s > 0 else None
        return {
            "kind": "round",
            "round": self._round,
            "started_at": round(self._round_started_at, 4),
            "cut_at": None if self._cut_at is None else round(self._cut_at, 4),
            "active_version": seen.active_version,
            "ready_s": list(self._ready_s),
            "num_fresh": self._num_fresh,
            "num_dropped": self._num_dropped,
            "surplus_groups": max(0, seen.ledger.ready - (seen.offered + 1) * self.batch_groups),
            "open_groups": seen.ledger.open,
            "parked_samples": seen.samples.get(SampleState.PARKED, 0),
            "running": list(self._curve.points),
            "slots": spending.slots,
            "bubble_share": None if bubble is None else round(bubble, 5),
        }
