"""What an operator or a client changes while the service runs.

Always true: a change takes effect at the next decision, is in the audit record if it changed a setting, and drops
nothing.
"""

import logging
import time

from buffer.interface import ContinuationBuffer
from protocol.errors import ConflictError, SettingsError
from protocol.messages import LiveSettings, SettingsChange, SettingsView
from protocol.samples import MAX_GROUP_SAMPLES
from protocol.settings import smallest_max_lag, started_samples
from protocol.settings.rollout import AutotuneMode, RolloutSettings
from rollout_service.events import Changed, Mailbox

log = logging.getLogger(__name__)


class Control:
    """Pause, drain, and the settings that may change live."""

    def __init__(self, rollout: RolloutSettings, buffer: ContinuationBuffer, mailbox: Mailbox) -> None:
        self._buffer = buffer
        self._mailbox = mailbox
        self.ratio = rollout.ratio
        self.samples_ratio = rollout.samples_ratio
        self.lookahead = rollout.lookahead
        self.max_lag = rollout.max_lag
        self.group_samples = rollout.n
        self.autotune = rollout.autotune
        self.paused = False
        self.draining = False

    @property
    def generation_allowed(self) -> bool:
        """Neither paused nor draining."""
        return not (self.paused or self.draining)

    def pause(self) -> None:
        """Park what runs and start nothing; installs, leases and acks go on."""
        self.paused = True
        log.info("paused", extra={"event": "paused"})
        self._mailbox.post(Changed())

    def resume(self) -> None:
        """Generate again. Raises ConflictError while draining: the service is about to stop."""
        if self.draining:
            raise ConflictError("the service is draining; start it again instead of resuming it")
        self.paused = False
        log.info("generation goes on", extra={"event": "resumed"})
        self._mailbox.post(Changed())

    def drain(self) -> None:
        """Park everything so that the service may be stopped."""
        self.draining = True
        log.info("draining", extra={"event": "draining"})
        self._mailbox.post(Changed())

    async def change(self, wanted: LiveSettings, by: str) -> None:
        """Change settings, with an audit record. Raises SettingsError for what can't be kept."""
        samples_ratio = self.samples_ratio if wanted.samples_ratio is None else wanted.samples_ratio
        if started_samples(self.group_samples, samples_ratio) > MAX_GROUP_SAMPLES:
            raise SettingsError(
                f"samples_ratio {samples_ratio:g} would start more than {MAX_GROUP_SAMPLES} samples of a prompt: "
                "choose a smaller one"
            )
        ratio = self.ratio if wanted.ratio is None else wanted.ratio
        lookahead = self.lookahead if wanted.lookahead is None else wanted.lookahead
        autotune = self.autotune if wanted.autotune is None else AutotuneMode(wanted.autotune)
        needed = smallest_max_lag(ratio, lookahead)
        if needed > self.max_lag:
            raise SettingsError(
                f"ratio {ratio:g} with lookahead {lookahead} needs rollout.max_lag >= {needed}, and it is "
                f"{self.max_lag} in this run: choose a smaller ratio or lookahead"
            )
        changes = {
            name: (old, new)
            for name, old, new in (
                ("ratio", self.ratio, ratio),
                ("samples_ratio", self.samples_ratio, samples_ratio),
                ("lookahead", self.lookahead, lookahead),
                ("autotune", self.autotune.value, autotune.value),
            )
            if old != new
        }
        if changes:
            await self._buffer.record_change(SettingsChange(at=time.time(), changes=changes, by=by))
            told = ", ".join(f"{name} {old} to {new}" for name, (old, new) in changes.items())
            about = {"event": "settings_changed", "by": by, **{name: new for name, (_, new) in changes.items()}}
            log.info("%s changed: %s", by, told, extra=about)
        self.ratio, self.samples_ratio, self.lookahead = ratio, samples_ratio, lookahead
        self.autotune = autotune
        self._mailbox.post(Changed())

    async def tune(self, ratio: float, reason: str) -> None:
        """Autotune changes the ratio."""
        change = SettingsChange(at=time.time(), changes={"ratio": (self.ratio, ratio)}, by=f"autotune: {reason}")
        await self._buffer.record_change(change)
        self.ratio = ratio

    async def view(self) -> SettingsView:
        """Live settings in force and how they came about."""
        return SettingsView(
            ratio=self.ratio,
            samples_ratio=self.samples_ratio,
            lookahead=self.lookahead,
            max_lag=self.max_lag,
            autotune=self.autotune.value,
            audit=await self._buffer.changes(),
        )
