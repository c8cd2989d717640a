"""What the buffer holds when a service starts, given to the scheduler."""

import logging
from dataclasses import dataclass

from buffer.interface import ContinuationBuffer, GroupBrief, SampleBrief
from protocol.samples import Prompt
from protocol.states import GroupState, SampleState
from rollout_service.scheduler.rounds import RoundScheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """Groups in flight by their prompts, samples that finished and are not scored, and those that wait."""

    prompt_of: dict[str, Prompt]
    unscored: list[SampleBrief]
    waiting: list[SampleBrief]


async def restore(buffer: ContinuationBuffer, scheduler: RoundScheduler) -> Restored:
    """Tell `scheduler` of all groups that are OPEN or READY, as they are in the buffer.

    What was offered with another batch size is offered with that of now, as far as READY groups go.
    """
    await buffer.resize_offers(scheduler.limits.batch_groups)
    groups: list[GroupBrief] = []
    for group in await buffer.open_groups():
        if group.state is GroupState.OPEN:
            groups.append(group)
        else:
            scheduler.restored_ready(group.oldest_version)
    waiting: dict[str, list[SampleBrief]] = {g.group_id: [] for g in groups}
    unscored: list[SampleBrief] = []
    for sample in await buffer.open_samples():
        if sample.state is SampleState.FINISHED:
            unscored.append(sample)
        else:
            waiting[sample.group_id].append(sample)
    prompt_of = {g.group_id: g.prompt for g in await buffer.groups([g.group_id for g in groups])}
    for brief in groups:
        samples = [(s.sample_id, index_of(s.sample_id)) for s in waiting[brief.group_id]]
        scheduler.restored(brief.group_id, brief.seq, samples, brief.oldest_version)
    all_waiting = [sample for samples in waiting.values() for sample in samples]
    if groups:
        about = {"event": "restored", "groups": len(groups), "samples": len(all_waiting)}
        log.info("took up %d groups with %d unfinished samples", len(groups), len(all_waiting), extra=about)
    return Restored(prompt_of, unscored, all_waiting)


def index_of(sample_id: str) -> int:
    """Index of a sample within its group: the part of its id after the dot."""
    return int(sample_id.rpartition(".")[2])
