"""What happened lately, from the lines of the trace: of a run that runs, or from the files of one that has ended.

Always true:
- it holds at most MAX_ATTEMPTS stays of samples, of the last KEPT_ROUNDS rounds, and drops whole samples, those that
  were seen last the longest ago first; `num_left_out` counts them;
- rounds beyond MAX_ROUNDS, moments beyond MAX_MOMENTS, installs and steps beyond MAX_MARKS are thinned to every
  other one, the newest KEPT_ROUNDS rounds excepted;
- what it holds is made of tuples that are replaced and never changed, so `view` is a snapshot that a thread may read;
- a picture's number in `changes` grows when the picture would look different, at most once a round or a moment.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from protocol.watching import AttemptBar, RoundSpan
from rollout_service.tuning.trace_records import TracedLimits
from rollout_service.watch.round_spans import span_of
from rollout_service.watch.steps import StepHistory

Line = Mapping[str, Any]
T = TypeVar("T")

MAX_ATTEMPTS = 60_000  # some 40 MB; the timeline draws as many smoothly, and tails are known to a percent by far fewer
KEPT_ROUNDS = 100  # of whole samples: longer ago the policy was another, and so were its lengths
MAX_ROUNDS = 1_000  # spans, about 10 KB each at the most
MAX_MOMENTS = 2_000  # more than a chart has pixels
MAX_MARKS = 4_000  # installs and trained steps
TAIL_SHARE = 0.02  # of the samples held: a tail with fewer new ones looks the same
NUM_SCORES = 256  # whose waits are averaged
NUM_ENDS = 10_000  # responses whose end, a reward or a failure, is counted
NUM_LATELY = 5  # installs that are averaged
PICTURES = ("timeline", "tail", "moments", "steps", "ratio")


class Held(NamedTuple):
    """One sample. `num_tokens`: what it ended its last stay with; `finished`: by itself or at its full length."""

    sample: str
    group: str
    prompt: str
    source: str
    prompt_tokens: int
    num_tokens: int
    finished: bool
    reward: float | None
    failed: str | None
    finished_at: float | None
    scored_at: float | None
    attempts: tuple[AttemptBar, ...]

    @property
    def first_at(self) -> float:
        """When it was first in an engine, or admitted if that is known."""
        first = self.attempts[0]
        return first.start - (first.waited_s or 0.0)


class Moment(NamedTuple):
    """Counts at one time, by name."""

    at: float
    values: Mapping[str, float | None]


class View(NamedTuple):
    """All that pictures are made from, at one time. `running`: lines of samples that are in an engine."""

    now: float
    limits: TracedLimits | None
    samples: tuple[Held, ...]
    rounds: tuple[RoundSpan, ...]
    filling: RoundSpan | None
    installs: tuple[tuple[int, float, float], ...]
    trained: tuple[tuple[int, float], ...]
    moments: tuple[Moment, ...]
    num_left_out: int
    running: tuple[Line, ...] = ()


class Watch:
    """A sink of lines, and what is remembered of them."""

    def __init__(self, limits: TracedLimits | None = None) -> None:
        self.limits = limits
        self.steps = StepHistory()
        self.changes: Counter[str] = Counter(dict.fromkeys(PICTURES, 0))
        self._samples: dict[str, Held] = {}  # in the order in which they were last seen
        self._num_attempts = 0
        self._num_left_out = 0
        self._num_new = 0  # samples that finished since the tail's number grew
        self._rounds: list[RoundSpan] = []
        self._installs: list[tuple[int, float, float]] = []
        self._trained: list[tuple[int, float]] = []
        self._moments: list[Moment] = []
        self._moment_gap_s = 0.0
        self._reward_s: deque[float] = deque(maxlen=NUM_SCORES)
        self._ends: deque[tuple[float, str]] = deque(maxlen=NUM_ENDS)  # when, and why it failed
        self._last_at = 0.0
        self._take: dict[str, Callable[[Line], None]] = {
            "attempt": self._attempt,
            "score": self._score,
            "round": self._round,
            "install": self._install,
            "trained": self._train,
            "moment": self._moment,
        }

    @property
    def rounds(self) -> list[RoundSpan]:
        """Finished rounds, oldest first."""
        return self._rounds

    def mean_install_s(self) -> float | None:
        """Of the last installs; None if there was none."""
        lately = self._installs[-NUM_LATELY:]
        return fmean(end - start for _, start, end in lately) if lately else None

    def mean_reward_s(self) -> float | None:
        """How long the last finished samples waited for their scores; None if none has one."""
        return fmean(self._reward_s) if self._reward_s else None

    def scores_since(self, at: float) -> Counter[str]:
        """Responses that were scored or failed from `at` on, by the reason that they failed for, "" for none."""
        return Counter(failed for ended_at, failed in self._ends if ended_at >= at)

    @property
    def last_at(self) -> float:
        """Time of the newest line; 0 before the first."""
        return self._last_at

    def put(self, line: Line) -> None:
        """Remember a line. Lines of other kinds are passed over."""
        take = self._take.get(line["kind"])
        if take is not None:
            take(line)

    def view(self, now: float, filling: Line | None = None, running: tuple[Line, ...] = ()) -> View:
        """A snapshot; of a run that runs with its round so far and what is in the engines."""
        return View(
            now=now,
            limits=self.limits,
            samples=tuple(self._samples.values()),
            rounds=tuple(self._rounds),
            filling=span_of(filling, self.limits) if filling else None,
            installs=tuple(self._installs),
            trained=tuple(self._trained),
            moments=tuple(self._moments),
            num_left_out=self._num_left_out,
            running=running,
        )

    def _attempt(self, line: Line) -> None:
        end, ended_at = line["end"], line["ended_at"]
        bar = AttemptBar(
            line["worker"],
            line["round"],
            line["started_at"],
            ended_at,
            end,
            line["before"],
            line["waited_s"],
            line["segments"],
        )
        sample = line["sample"]
        held = self._samples.pop(sample, None)
        tokens = line["before"] + sum(segment[1] for segment in line["segments"])
        finished = end in ("stop", "length")
        self._samples[sample] = Held(
            sample,
            line["group"],
            line["prompt"],
            line["source"],
            line["prompt_tokens"],
            tokens,
            finished,
            held.reward if held else None,
            held.failed if held else None,
            ended_at if finished else None,
            held.scored_at if held else None,
            (*held.attempts, bar) if held else (bar,),
        )
        self._num_attempts += 1
        self._num_new += finished
        self._last_at = max(self._last_at, ended_at)
        while self._num_attempts > MAX_ATTEMPTS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        held = self._samples.pop(next(iter(self._samples)))
        self._num_attempts -= len(held.attempts)
        self._num_left_out += 1

    def _score(self, line: Line) -> None:
        held, at = self._samples.get(line["sample"]), line.get("at")
        self._ends.append((self._last_at if at is None else at, line["failed"] or ""))
        if held is None:
            return
        # By position: `_replace` takes three times as long.
        self._samples[held.sample] = Held(
            *held[:7], line["reward"], line["failed"], held.finished_at, at, held.attempts
        )
        if at is not None and held.finished_at is not None:
            self._reward_s.append(at - held.finished_at)

    def _round(self, line: Line) -> None:
        span = span_of(line, self.limits)
        while self._rounds and self._rounds[-1].round >= span.round:
            self._rounds.pop()  # a trainer that went back makes the same rounds again
        self._rounds.append(span)
        if len(self._rounds) > MAX_ROUNDS:
            old, new = self._rounds[:-KEPT_ROUNDS], self._rounds[-KEPT_ROUNDS:]
            self._rounds = old[::2] + new
        self._last_at = max(self._last_at, line["offered_at"])
        before = span.round - KEPT_ROUNDS
        while self._samples and next(iter(self._samples.values())).attempts[-1].round <= before:
            self._forget_oldest()
        self._num_new = 0
        self.changes.update(("timeline", "tail"))

    def _install(self, line: Line) -> None:
        self._installs = _thinned([*self._installs, (line["version"], line["started_at"], line["ended_at"])])
        self._last_at = max(self._last_at, line["ended_at"])
        self.changes.update(("timeline",))

    def _train(self, line: Line) -> None:
        self._trained = _thinned([*self._trained, (line["step"], line["at"])])
        self._last_at = max(self._last_at, line["at"])
        self.changes.update(("timeline",))

    def _moment(self, line: Line) -> None:
        moments, at = self._moments, line["at"]
        self._last_at = max(self._last_at, at)
        if moments and at - moments[-1].at < self._moment_gap_s:
            return
        moments.append(Moment(at, line["values"]))
        if len(moments) >= MAX_MOMENTS:
            self._moments = moments[::2]
            self._moment_gap_s = (at - moments[0].at) / MAX_MOMENTS * 2
        self.changes.update(("moments",))
        if self._num_new > TAIL_SHARE * len(self._samples):
            self._num_new = 0
            self.changes.update(("tail",))


def _thinned(marks: list[T]) -> list[T]:
    if len(marks) <= MAX_MARKS:
        return marks
    half = MAX_MARKS // 2
    return marks[:-half:2] + marks[-half:]
