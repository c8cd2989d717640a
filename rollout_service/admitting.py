"""Admission: new groups into the buffer, and what the scheduler is told of them.

Always true:
- prompts come in the order of the cursor that the buffer holds, and it moves with the groups in one transaction;
- while the buffer is full it isn't asked at every event;
- a prompt that kills engines is admitted, since every prompt of an epoch is, and dropped before anything of it runs.
"""

import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from buffer.interface import CursorMove, Snapshot
from buffer.open import limits_of
from protocol.errors import BufferFullError
from protocol.samples import Group, Prompt
from protocol.states import DropReason
from rollout_service.events import GroupClosed
from rollout_service.pools import PooledSamples, begun_of, unscored_of, waiting_of
from rollout_service.prompts.interface import START_CURSOR, PromptOrder
from rollout_service.samples import SampleParts, score_sample
from rollout_service.scheduler.rounds import RoundScheduler
from rollout_service.tuning.live_forecast import LiveForecast

log = logging.getLogger(__name__)

FULL_WAIT_S = 2.0  # until a full buffer is asked again; a batch that is trained frees room no faster


class GroupAdmission:
    """Of one round loop. `prompt_of`: the prompts of groups that are not closed, by group id."""

    def __init__(
        self,
        parts: SampleParts,
        prompts: PromptOrder,
        scheduler: RoundScheduler,
        pools: PooledSamples,
        prompt_of: dict[str, Prompt],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._parts = parts
        self._prompts = prompts
        self._scheduler = scheduler
        self._pools = pools
        self._prompt_of = prompt_of
        self._spawn = spawn
        self._caps = limits_of(parts.settings)
        self._quarantined: set[str] = set()
        self._full_until_s = 0.0

    def upcoming(self, snapshot: Snapshot, count: int) -> list[Prompt]:
        """The prompts that are admitted next."""
        return self._prompts.take(snapshot.cursor or START_CURSOR, count)[0]

    def room(self, snapshot: Snapshot) -> int:
        """Groups that the buffer's caps leave room for."""
        if time.monotonic() < self._full_until_s:
            return 0
        return self._caps.room(snapshot, self._scheduler.limits.started_samples)

    def quarantine(self, prompt_id: str) -> None:
        """This prompt kills engines."""
        self._quarantined.add(prompt_id)
        log.error("the prompt %s kills engines, the last time alone: no engine is given it any more", prompt_id)

    async def admit(self, snapshot: Snapshot, num_groups: int, oldest_version: int, forecast: LiveForecast) -> None:
        """Carry out the decision `Admit`."""
        prompts, after = self._prompts.take(snapshot.cursor or START_CURSOR, num_groups)
        groups = self._pools.new_groups(prompts, self._scheduler.limits, oldest_version)
        move = CursorMove(snapshot.cursor, after)
        try:
            admitted = await self._parts.buffer.admit(groups, snapshot.active_version, move)
        except BufferFullError as error:
            log.warning("no new prompts for now: %s", error)
            self._full_until_s = time.monotonic() + FULL_WAIT_S
            self._scheduler.not_admitted(num_groups)
            return
        self._parts.trace.admitted(group.group_id for group in admitted)
        forecast.restored(begun_of(admitted))
        for group in admitted:
            await self._enter(group, forecast)

    async def _enter(self, group: Group, forecast: LiveForecast) -> None:
        self._prompt_of[group.group_id] = group.prompt
        outlook, age = forecast.outlook(group.prompt), self._pools.age_of(group)
        self._scheduler.admitted(group.group_id, group.seq, waiting_of(group), outlook, age)
        for sample in unscored_of(group):
            self._spawn(score_sample(self._parts, sample.sample_id, group.prompt))
        if group.prompt.prompt_id in self._quarantined:
            await self._parts.buffer.drop(group.group_id, DropReason.QUARANTINED)
            self._parts.mailbox.post(GroupClosed(group.group_id, ready=False))
