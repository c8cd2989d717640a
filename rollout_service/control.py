"""What an operator or a client changes while the service runs.

Always true: a change takes effect at the next decision, is in the audit record if it changed a setting, and drops
nothing.
"""

import time

from buffer.interface import ContinuationBuffer
from protocol.errors import ConflictError, SettingsError
from protocol.messages import LiveSettings, SettingsChange, SettingsView
from protocol.settings import smallest_max_lag
from protocol.settings.rollout import RolloutSettings
from rollout_service.events import Changed, Mailbox


class Control:
    """Pause, drain, and the settings that may change live."""

    def __init__(self, rollout: RolloutSettings, buffer: ContinuationBuffer, mailbox: Mailbox) -> None:
        self._buffer = buffer
        self._mailbox = mailbox
        self.ratio = rollout.ratio
        self.lookahead = rollout.lookahead
        self.max_lag = rollout.max_lag
        self.paused = False
        self.draining = False

    @property
    def generation_allowed(self) -> bool:
        """Neither paused nor draining."""
        return not (self.paused or self.draining)

    def pause(self) -> None:
        """Park what runs and start nothing; installs, leases and acks go on."""
        self.paused = True
        self._mailbox.post(Changed())

    def resume(self) -> None:
        """Generate again. Raises ConflictError while draining: the service is about to stop."""
        if self.draining:
            raise ConflictError("the service is draining; start it again instead of resuming it")
        self.paused = False
        self._mailbox.post(Changed())

    def drain(self) -> None:
        """Park everything so that the service may be stopped."""
        self.draining = True
        self._mailbox.post(Changed())

    async def change(self, wanted: LiveSettings, by: str) -> None:
        """Change settings, with an audit record. Raises SettingsError if they could not keep `max_lag`."""
        ratio = self.ratio if wanted.ratio is None else wanted.ratio
        lookahead = self.lookahead if wanted.lookahead is None else wanted.lookahead
        needed = smallest_max_lag(ratio, lookahead)
        if needed > self.max_lag:
            raise SettingsError(
                f"ratio {ratio:g} with lookahead {lookahead} needs rollout.max_lag >= {needed}, and it is "
                f"{self.max_lag} in this run: choose a smaller ratio or lookahead"
            )
        changes = {
            name: (old, new)
            for name, old, new in (("ratio", self.ratio, ratio), ("lookahead", self.lookahead, lookahead))
            if old != new
        }
        if changes:
            await self._buffer.record_change(SettingsChange(at=time.time(), changes=changes, by=by))
        self.ratio, self.lookahead = ratio, lookahead
        self._mailbox.post(Changed())

    async def view(self) -> SettingsView:
        """Live settings in force and how they came about."""
        return SettingsView(
            ratio=self.ratio,
            lookahead=self.lookahead,
            max_lag=self.max_lag,
            audit=await self._buffer.changes(),
        )
