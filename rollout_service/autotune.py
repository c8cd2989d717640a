"""The ratio of a running service, measured and decided once a round (`rollout.autotune`).

Always true: with `shadow` nothing changes; with `on` every change is bounded by the settings and by `max_lag`, is in
the log and in the audit record with its reason, and a ratio that somebody sets by hand is where it goes on from; a
metric of the trainer counts for as long as its step can still be one of those that are averaged, then it is not known.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from buffer.interface import Snapshot
from protocol.messages import AutotuneStatus
from protocol.settings import RunSettings
from protocol.settings.rollout import AutotuneMode
from rollout_service.control import Control
from rollout_service.engines.interface import EngineStats
from rollout_service.tuning.controller import (
    AVERAGED_ROUNDS,
    ControllerState,
    Direction,
    RoundMeasures,
    TuneBounds,
    Tuning,
    step_controller,
)

log = logging.getLogger(__name__)

ESS = "importance/ess"
OFF_POLICY = "off_policy/token_share"


class RoundMeter:
    """What one round measures: idle slots over time, prefilled and generated tokens, groups in the buffer."""

    def __init__(self) -> None:
        self._last: tuple[float, int, int] | None = None  # when, running, slots
        self._idle_s = self._slot_s = 0.0
        self._reprefilled = self._num_started = self._preempted_before = 0
        self._tokens_before: int | None = None
        self._groups_before: int | None = None

    def saw(self, now_s: float, running: int, slots: int, filling: bool) -> None:
        """So many samples run from now on; time in which no batch fills is nobody's bubble."""
        if self._last is not None:
            since_s, ran, had = self._last
            self._slot_s += (now_s - since_s) * had
            self._idle_s += (now_s - since_s) * max(0, had - ran)
        self._last = (now_s, running, slots) if filling else None

    def started(self, num_prefilled: int) -> None:
        """A sample runs; of one that goes on, prompt and response so far are prefilled again: 0 for a new one."""
        self._num_started += 1
        self._reprefilled += num_prefilled

    def end(
        self, num_groups: int, batch_groups: int, tokens_generated: int, num_preemptions: int = 0
    ) -> RoundMeasures | None:
        """The round is over; None if no time passed in it. Tokens and preemptions count since the engines started."""
        generated = tokens_generated - (tokens_generated if self._tokens_before is None else self._tokens_before)
        grown = 0 if self._groups_before is None else num_groups - self._groups_before
        measured = RoundMeasures(
            bubble=self._idle_s / self._slot_s if self._slot_s else 0.0,
            reprefill=self._reprefilled / max(1, self._reprefilled + max(0, generated)),
            growth=grown / batch_groups,
            preemptions=max(0, num_preemptions - self._preempted_before) / max(1, self._num_started),
        )
        known = self._slot_s > 0 and self._tokens_before is not None
        self._idle_s = self._slot_s = 0.0
        self._reprefilled = self._num_started = 0
        self._preempted_before = num_preemptions
        self._tokens_before, self._groups_before = tokens_generated, num_groups
        return measured if known else None


class Autotune:
    """Runs the controller over what the round loop and the trainer report."""

    def __init__(self, settings: RunSettings, control: Control) -> None:
        self._settings = settings.rollout
        self._batch_groups = settings.data.train_batch_size
        self._control = control
        self._state = ControllerState(control.ratio)
        self._num_rounds = 0
        self._reported: dict[str, tuple[float, int]] = {}  # metric -> its last value, and rounds ended by then
        self.meter = RoundMeter()
        self.last: Tuning | None = None

    def trainer_reported(self, metrics: Mapping[str, float]) -> None:
        """The trainer's metrics of a step; one that is no number says nothing."""
        for name in (ESS, OFF_POLICY):
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                self._reported[name] = (value, self._num_rounds)

    def _still_known(self, name: str) -> float | None:
        """The last value, for the rounds that the service may be ahead by, and as many as are averaged."""
        value, reported_in = self._reported.get(name, (None, 0))
        oldest = self._num_rounds - self._control.lookahead - AVERAGED_ROUNDS
        return value if reported_in >= oldest else None

    @property
    def bounds(self) -> TuneBounds:
        """The user's, and the largest ratio that keeps `max_lag`."""
        rollout, control = self._settings, self._control
        in_time = max(1.0, float(control.max_lag - control.lookahead + 1))
        return TuneBounds(
            min_ratio=min(rollout.autotune_min_ratio, in_time),
            max_ratio=min(rollout.autotune_max_ratio, in_time),
            max_off_policy=rollout.autotune_max_off_policy_share,
            min_ess=rollout.autotune_min_ess,
        )

    async def round_ended(self, snapshot: Snapshot | None, replicas: Sequence[EngineStats]) -> None:
        """A batch was offered: decide, say it, and with `on` do it. `snapshot`: the counts before the offer."""
        assert snapshot is not None, "an offer follows a snapshot"
        self._num_rounds += 1
        num_groups = snapshot.ledger.open + snapshot.ledger.ready
        tokens_generated = sum(replica.tokens_generated for replica in replicas)
        num_preemptions = sum(replica.num_preemptions or 0 for replica in replicas)
        measured = self.meter.end(num_groups, self._batch_groups, tokens_generated, num_preemptions)
        mode = self._control.autotune
        if mode is AutotuneMode.OFF or measured is None:
            return
        if self._state.ratio != self._control.ratio:
            self._state = ControllerState(self._control.ratio)
        measured = replace(measured, ess=self._still_known(ESS), off_policy=self._still_known(OFF_POLICY))
        before = self._state
        self._state, self.last = step_controller(self._state, measured, self.bounds)
        if self.last.direction is Direction.STAY:
            log.debug("autotune: ratio %g stays: %s (%s)", self._control.ratio, self.last.reason, self.last.measured)
        elif mode is AutotuneMode.SHADOW:
            about = {"event": "ratio_wished", "ratio_wish": self.last.ratio, "ratio": self._control.ratio}
            why = f"{self.last.reason} ({measured})"
            log.info("autotune would set the ratio to %g: %s", self.last.ratio, why, extra=about)
            self._state = replace(before, averages=self.last.measured, num_rounds=before.num_rounds + 1)
        else:
            about = {"event": "ratio_set", "ratio_wish": self.last.ratio, "ratio": self._control.ratio}
            why = f"{self.last.reason} ({measured})"
            log.info("autotune sets the ratio to %g: %s", self.last.ratio, why, extra=about)
            await self._control.tune(self.last.ratio, self.last.reason)

    def status(self) -> AutotuneStatus:
        """For `/v1/status`."""
        mode, last = self._control.autotune, self.last
        if last is None or mode is AutotuneMode.OFF:
            return AutotuneStatus(mode=mode.value, ratio=None, reason=None, measured={})
        names = ("bubble", "reprefill", "preemptions", "growth", "ess", "off_policy")
        values = {name: getattr(last.measured, name) for name in names}
        measured = {name: value for name, value in values.items() if value is not None}
        return AutotuneStatus(mode=mode.value, ratio=last.ratio, reason=last.reason, measured=measured)
