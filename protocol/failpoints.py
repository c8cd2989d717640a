"""Places where a process can be made to fail, for tests that crash it exactly there.

Always true: a place does nothing (one look-up in an empty dict) unless the environment named it when the process
started, as `APRIL_FAILPOINT=PLACE=ACTION` or `PLACE=ACTION@PASSAGE` for another passage than the first; it then acts
once. Nothing that comes over a wire can set one.
"""

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from protocol.errors import SettingsError

VARIABLE = "APRIL_FAILPOINT"
EXIT_CODE = 86  # of the action `exit`; no shell, signal or error of ours uses it

_LOG = logging.getLogger(__name__)


class Failpoint(StrEnum):
    """Where a crash matters: the first five are the trainer's, the others the service's."""

    AFTER_LEASE = "after_lease"
    """The batch has arrived and nothing was trained."""
    MID_STEP = "mid_step"
    """Log-probs are computed, the weights are not updated."""
    AFTER_OPTIMIZER_STEP = "after_optimizer_step"
    """The weights are updated, and nobody was told."""
    AFTER_CHECKPOINT = "after_checkpoint"
    """The checkpoint is whole, and not acknowledged."""
    AFTER_ACK = "after_ack"
    """The checkpoint is acknowledged."""
    MID_CUT = "mid_cut"
    """All stragglers are aborted and as many as passages are parked."""
    MID_PARK = "mid_park"
    """All of a sample's pieces but the last are appended, and it is not parked."""
    MID_INSTALL = "mid_install"
    """The buffer says INSTALLING, no replica was touched."""
    MID_OFFER = "mid_offer"
    """Enough groups are READY, the batch is not offered."""
    AFTER_SPOOL = "after_spool"
    """The batch is on disk, its digest is not recorded."""


class FailAction(StrEnum):
    """What happens there."""

    KILL = "kill"
    """SIGKILL to this process."""
    STOP = "stop"
    """SIGSTOP to this process; it goes on at SIGCONT."""
    EXIT = "exit"
    """End at once with `EXIT_CODE`, nothing cleaned up."""


@dataclass(slots=True)
class _Armed:
    action: FailAction
    passages_left: int


def failpoint(place: Failpoint) -> None:
    """Fail here, if the environment says so."""
    armed = _ARMED.get(place)
    if armed is None:
        return
    armed.passages_left -= 1
    if armed.passages_left == 0:
        _LOG.warning("failpoint %s: %s", place, armed.action)
        _ACT[armed.action]()


def parse(text: str) -> dict[Failpoint, _Armed]:
    """`PLACE=ACTION[@PASSAGE]`, or nothing. Raises SettingsError with the names that there are."""
    if not text:
        return {}
    place, _, rest = text.partition("=")
    action, _, passage = rest.partition("@")
    try:
        armed = _Armed(FailAction(action), int(passage or 1))
        if armed.passages_left < 1:
            raise ValueError("passages count from 1")
        return {Failpoint(place): armed}
    except ValueError as error:
        raise SettingsError(
            f"{VARIABLE}={text} is not PLACE=ACTION or PLACE=ACTION@PASSAGE ({error}); places: {', '.join(Failpoint)}; "
            f"actions: {', '.join(FailAction)}"
        ) from error


def _signal_self(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


_ACT: dict[FailAction, Callable[[], None]] = {
    FailAction.KILL: _signal_self(signal.SIGKILL),
    FailAction.STOP: _signal_self(signal.SIGSTOP),
    FailAction.EXIT: lambda: os._exit(EXIT_CODE),
}
_ARMED = parse(os.environ.get(VARIABLE, ""))
