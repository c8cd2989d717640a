"""The numbers on top of the page, as its script writes them too (`static/status.js`)."""

from protocol.messages import Status
from protocol.states import SampleState

NOTHING = "–"


def status_fields(status: Status | None) -> dict[str, str]:
    """Text by field; a dash where there is nothing to say yet."""
    if status is None:
        return {}
    ledger, current = status.ledger, status.round
    slots = sum(engine.slots for engine in status.engines)
    return {
        "trained_step": f"{status.trained_step:,}",
        "durable_step": f"{status.durable_step:,}",
        "active_version": str(status.active_version),
        "newest_version": str(status.newest_version),
        "round": str(current.round) if current else NOTHING,
        "round_ready": f"{current.num_ready} / {status.settings['train_batch_size']:g}" if current else NOTHING,
        "running": f"{sum(engine.running for engine in status.engines):,} / {slots:,}",
        "parked": f"{status.samples.get(SampleState.PARKED, 0):,}",
        "ready": f"{ledger.ready:,}",
        "leased": f"{ledger.leased:,}",
        "ratio": f"{status.settings['ratio']:g}",
        "ledger_error": str(status.ledger_error),
    }
