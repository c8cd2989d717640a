"""What ends for good: samples that will never run again, and a service that was superseded."""

from collections.abc import Sequence

from buffer.interface import Snapshot
from buffer.keys import split_sample_id
from protocol.errors import FencedError, NotFoundError
from protocol.states import FailReason, GroupState
from rollout_service.events import GroupClosed
from rollout_service.samples import SampleParts
from rollout_service.scheduler.rounds import RoundScheduler


async def fail_waiting(
    parts: SampleParts, scheduler: RoundScheduler, sample_ids: Sequence[str], reason: FailReason, text: str
) -> None:
    """Samples that wait become FAILED; only a running sample may, so they are started for it."""
    min_scored = parts.settings.rollout.min_group_samples
    for sample_id in sample_ids:
        try:
            await parts.buffer.start([sample_id], parts.owner, parts.settings.buffer.sample_lease_s)
            state = await parts.buffer.fail(sample_id, reason, text, min_scored)
        except NotFoundError:
            continue  # its group was dropped with the one before
        scheduler.ended(sample_id)
        if state in (GroupState.READY, GroupState.DROPPED):
            parts.mailbox.post(GroupClosed(split_sample_id(sample_id)[0], state is GroupState.READY))


def check_owner(snapshot: Snapshot, service_epoch: int, run: str) -> None:
    """Raise FencedError if another service has taken over the run, or if the buffer has lost it."""
    if snapshot.service_epoch < service_epoch:
        raise FencedError(
            f"the buffer of the run {run} was emptied or set back to an older state: its service epoch is "
            f"{snapshot.service_epoch}, ours {service_epoch}. Groups in flight, unfinished samples and batches that "
            "are not acknowledged are gone, unless you bring Redis back with what it had (AOF, replica, export). "
            "This service stops; started again, it goes on from what the buffer has, and a trainer whose checkpoint is "
            "ahead of that is told how to go on"
        )
    if snapshot.service_epoch != service_epoch:
        raise FencedError(
            f"another service has taken over the run {run} (its epoch is {snapshot.service_epoch}, ours "
            f"{service_epoch}); this one stops"
        )
