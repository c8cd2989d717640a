"""The orders that the buffer promises, in one place for both buffers."""

from buffer.interface import SampleBrief
from protocol.states import SampleState

STATE_RANK = {
    SampleState.PARKED: 0,
    SampleState.QUEUED: 1,
    SampleState.RUNNING: 2,
    SampleState.FINISHED: 3,
}


def resume_order(brief: SampleBrief) -> tuple[int, int, str]:
    """Sort key of open samples: PARKED oldest version first, QUEUED, RUNNING, FINISHED; each by order of admission."""
    parked = brief.state is SampleState.PARKED
    return (STATE_RANK[brief.state], (brief.oldest_version or 0) if parked else 0, brief.sample_id)
