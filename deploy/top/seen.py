"""What `april top` remembers of a service.

Always true: it holds the last status whole, and of the past only what is bounded (a value a second, the last events);
times are given, none is read here; a clock that jumps back shortens an age to 0 and makes nothing negative.
"""

from collections import deque
from dataclasses import dataclass, field

from deploy.top.changes import changes
from protocol.messages import Status
from protocol.watching import Moments, Tail

MAX_EVENTS = 200  # more than any terminal has lines
MAX_HISTORY = 600  # seconds of the curves; wider terminals than this have no use for more
LEAST_WINDOW_S = 0.9  # statuses come once a second; two that are closer than this tell of one step of the engine
RATE_WINDOW_S = 10.0  # tokens/s are averaged over this: shorter, and the steps of the engine show


@dataclass(frozen=True, slots=True)
class Happened:
    """Something happened at a time, in seconds since the epoch."""

    at: float
    text: str


@dataclass(slots=True)
class Seen:
    """Of one service. `away_since`: since when it gives no status, and `away_why`."""

    status: Status | None = None
    status_at: float = 0.0
    tail: Tail | None = None
    moments: Moments | None = None
    away_since: float | None = None
    away_why: str = ""
    events: deque[Happened] = field(default_factory=lambda: deque[Happened](maxlen=MAX_EVENTS))
    running: deque[int] = field(default_factory=lambda: deque[int](maxlen=MAX_HISTORY))
    rates: deque[float] = field(default_factory=lambda: deque[float](maxlen=MAX_HISTORY))
    _tokens: deque[tuple[float, dict[str, int]]] = field(default_factory=deque[tuple[float, dict[str, int]]])

    def took(self, status: Status, now: float) -> None:
        """A status came."""
        if self.away_since is not None:
            if self.status is not None:
                self._say(now, f"the service answers again, after {max(0.0, now - self.away_since):.0f} s")
            self.away_since = None
        if self.status is not None:
            for text in changes(self.status, status):
                self._say(now, text)
            if status.service_epoch != self.status.service_epoch:
                self._tokens.clear()
        self.status, self.status_at = status, now
        self._measure(status, now)

    def lost(self, why: str, now: float) -> None:
        """No status came, for this reason."""
        if self.away_since is None:
            self.away_since = now
            self._tokens.clear()
            if self.status is not None:
                self._say(now, f"the service is away: {why}")
        self.away_why = why

    def tokens_per_s(self, worker: str) -> float | None:
        """What a replica wrote lately; None if that is not known yet."""
        if len(self._tokens) < 2:
            return None
        (began, first), (ended, last) = self._tokens[0], self._tokens[-1]
        if ended - began < LEAST_WINDOW_S or worker not in first or worker not in last:
            return None
        return max(0, last[worker] - first[worker]) / (ended - began)

    def _measure(self, status: Status, now: float) -> None:
        """Replicas count since their own start: one that was restarted counts anew, and so does its rate."""
        known = {engine.worker: engine.tokens_generated for engine in status.engines}
        if self._tokens and (now < self._tokens[-1][0] or _fell(self._tokens[-1][1], known)):
            self._tokens.clear()
        self._tokens.append((now, known))
        while now - self._tokens[0][0] > RATE_WINDOW_S:
            self._tokens.popleft()
        self.running.append(sum(engine.running for engine in status.engines))
        known_rates = [rate for rate in map(self.tokens_per_s, known) if rate is not None]
        if known_rates:
            self.rates.append(sum(known_rates))

    def _say(self, now: float, text: str) -> None:
        self.events.append(Happened(now, text))


def _fell(before: dict[str, int], now: dict[str, int]) -> bool:
    return any(now.get(worker, 0) < tokens for worker, tokens in before.items())
