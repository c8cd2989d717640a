"""The spool: a superseded service that wakes in the middle of spooling leaves its successor's bytes alone."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from buffer.interface import BatchLease
from protocol.batch import decode_batch
from protocol.errors import FencedError
from protocol.samples import Group, Prompt, Reward, Sample, Segment
from protocol.states import FinishReason, GroupState, SampleState
from rollout_service.delivery import Delivery
from rollout_service.events import Mailbox


def leased_group() -> Group:
    segment = Segment(0, 0, np.arange(5, dtype=np.int32), np.zeros(5, np.float32))
    sample = Sample("g.0", "g", 0, SampleState.SCORED, (segment,), finish_reason=FinishReason.STOP, reward=Reward(1.0))
    return Group("g", 0, Prompt("p", (1, 2), "", "sums"), GroupState.LEASED, 0, (sample,))


class Run:
    """What the buffer knows of one leased step."""

    def __init__(self) -> None:
        self.lease = BatchLease(1, ("g",), 0, False, None)
        self.group = leased_group()


class View:
    """The buffer as one service sees it; one that fell asleep has an old lease in hand and is fenced."""

    def __init__(self, run: Run, asleep: bool = False) -> None:
        self._run = run
        self._seen = run.lease if asleep else None

    async def lease_batch(self, step: int, trainer_epoch: int, num_groups: int) -> BatchLease:
        return self._run.lease

    async def batch_leases(self) -> list[BatchLease]:
        return [self._seen or self._run.lease]

    async def groups(self, group_ids: Sequence[str]) -> list[Group]:
        return [self._run.group]

    async def record_spool(self, step: int, sha256: str) -> None:
        if self._seen:
            raise FencedError("service epoch 1 does not own this run, epoch 2 does")
        self._run.lease = replace(self._run.lease, sha256=sha256)
        samples = tuple(replace(sample, segments=()) for sample in self._run.group.samples)
        self._run.group = replace(self._run.group, samples=samples)


async def test_a_superseded_service_does_not_touch_what_its_successor_spooled(tmp_path):
    run = Run()
    old = Delivery(View(run, asleep=True), Mailbox(), "test", 1, tmp_path)
    new = Delivery(View(run), Mailbox(), "test", 1, tmp_path)
    data, sha256 = await new.lease(1, 1, 0.0)
    with pytest.raises(FencedError):
        await old.lease(1, 1, 0.0)
    assert await new.lease(1, 2, 0.0) == (data, sha256)
    assert len(decode_batch(data).tokens) == 7


async def test_discard_removes_everything_of_durable_steps_and_nothing_else(tmp_path):
    for name in ("step-00000001-ab.safetensors", "step-00000002-ab.7.partial", "step-00000003-ab.safetensors"):
        (tmp_path / name).write_bytes(b"")
    delivery = Delivery(View(Run()), Mailbox(), "test", 1, tmp_path)
    delivery.discard([])
    assert len(list(tmp_path.iterdir())) == 3
    delivery.discard([BatchLease(2, (), 0, True, "ab")])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003-ab.safetensors"]
