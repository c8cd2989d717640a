"""What the routes work on: a service that may still be starting.

Always true: `parts` is None until every part has started, and routes that need it answer 503 with what is waited for.
"""

from dataclasses import dataclass, field

from protocol.errors import UnavailableError
from protocol.settings import RunSettings
from rollout_service.metrics import ServiceMetrics
from rollout_service.parts import ServiceParts
from rollout_service.sessions import TrainerSessions
from rollout_service.status import StatusBoard


@dataclass(frozen=True, slots=True)
class Running:
    """A service whose parts have all started."""

    parts: ServiceParts
    board: StatusBoard
    sessions: TrainerSessions


@dataclass(slots=True)
class Host:
    """One for each process."""

    settings: RunSettings
    metrics: ServiceMetrics = field(init=False)
    waits_for: str = "the engines to start"
    _running: Running | None = None

    def __post_init__(self) -> None:
        self.metrics = ServiceMetrics(self.settings)

    @property
    def running(self) -> Running:
        """The running service. Raises UnavailableError while it starts or stops."""
        if self._running is None:
            raise UnavailableError(
                f"the service is not ready: it waits for {self.waits_for}; try again in a few seconds"
            )
        return self._running

    def started(self, parts: ServiceParts) -> None:
        """All parts have started."""
        board = StatusBoard(parts)
        self._running = Running(parts, board, TrainerSessions(parts, board))
        self.metrics.attach(parts, board)

    def stopping(self) -> None:
        """From now on routes answer 503, and event streams end."""
        if self._running is not None:
            self._running.board.stop()
        self._running = None
        self.metrics.detach()
        self.waits_for = "everything to be parked before it stops"
