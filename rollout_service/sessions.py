"""What a trainer asks for: its session, its steps, its policies.

Always true: every change carries the trainer's epoch into the buffer, which refuses an older one; what waits for a
batch is woken when the epoch changes, so that a superseded trainer hears of it.
"""

import logging

from protocol.errors import ConflictError
from protocol.messages import Acked, Policy, StepTrained, TrainerSession
from rollout_service.events import Changed
from rollout_service.parts import ServiceParts
from rollout_service.status import StatusBoard

log = logging.getLogger(__name__)


class TrainerSessions:
    """Carries out the trainer's side of the API."""

    def __init__(self, parts: ServiceParts, board: StatusBoard) -> None:
        self._parts = parts
        self._board = board

    async def open(self, durable_step: int, accept_lost_buffer: bool = False) -> TrainerSession:
        """A new session; older ones are fenced from now on. Steps up to `durable_step` are acknowledged.

        A buffer that lacks some of those steps was lost or set back, or belongs to another run: ConflictError, unless
        the trainer's user accepts it.
        """
        last = await self._last_leased_step()
        if durable_step > last:
            lost = _lost_buffer(durable_step, last)
            if not accept_lost_buffer:
                raise ConflictError(
                    f"{lost}; give the service the run's buffer (run.name, buffer.url, buffer.namespace) or the "
                    "trainer the run's checkpoints (trainer.default_local_dir), or accept the loss with "
                    "--trainer.accept_lost_buffer=true"
                )
            log.warning("%s; the trainer goes on all the same", lost, extra={"event": "lost_buffer"})
        opened = await self._parts.buffer.open_trainer(durable_step)
        self._parts.delivery.discard(list(opened.released))
        await self._parts.delivery.batch_offered()
        self._board.heard_trainer()
        self._changed()
        about = {"event": "trainer_session", "trainer_epoch": opened.trainer_epoch, "step": opened.durable_step}
        log.info("a trainer opened session %d at step %d", opened.trainer_epoch, opened.durable_step, extra=about)
        return TrainerSession(
            trainer_epoch=opened.trainer_epoch,
            durable_step=opened.durable_step,
            policy_version=self._parts.policies.newest.version,
            run=self._parts.settings.run.name,
            num_train_prompts=self._parts.num_train_prompts,
        )

    async def trained(self, step: int, trainer_epoch: int) -> StepTrained:
        """The step's update is done: capacity is free, rounds move on."""
        trained_step = await self._parts.buffer.mark_trained(step, trainer_epoch)
        self._changed()
        self._board.heard_trainer()
        return StepTrained(step=step, trained_step=trained_step)

    async def ack(self, step: int, trainer_epoch: int) -> Acked:
        """Steps up to `step` are durable: what replay needed is released."""
        released = await self._parts.buffer.ack(step, trainer_epoch)
        self._parts.delivery.discard(released)
        self._board.heard_trainer()
        self._changed()
        durable_step = (await self._parts.buffer.snapshot()).durable_step
        return Acked(durable_step=durable_step, num_groups=sum(len(b.group_ids) for b in released))

    async def publish(self, step: int, path: str, trainer_epoch: int) -> Policy:
        """Publishing the weights after a step says that it is trained, too."""
        last = await self._last_leased_step()
        if step > last:
            raise ConflictError(f"step {step} was never leased, the last one is {last}: publish what you have trained")
        policy = await self._parts.policies.publish(step, path, trainer_epoch)
        self._board.heard_trainer()
        if step > 0:
            await self._parts.buffer.mark_trained(step, trainer_epoch)
        self._changed()
        return policy

    async def _last_leased_step(self) -> int:
        snapshot = await self._parts.buffer.snapshot()
        return max(snapshot.leased_steps, default=snapshot.durable_step)

    def _changed(self) -> None:
        self._parts.sample_parts.mailbox.post(Changed())


def _lost_buffer(durable_step: int, last: int) -> str:
    so = f"leased only {last} steps" if last else "leased none"
    return (
        f"the trainer's checkpoint holds step {durable_step} and this run's buffer has {so}, so it is new, was set "
        "back, or is another run's: groups in flight since are gone, and the order of prompts begins "
        f"{'where the buffer has it' if last else 'anew'}"
    )
