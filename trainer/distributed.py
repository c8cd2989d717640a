"""Ranks: how they find each other, and what rank 0 tells the others.

Always true: only rank 0 speaks HTTP; what it decides reaches the others as bytes over a gloo group of their own, so
that they wait for a slow batch without a GPU collective timing out; nothing is pickled.
"""

import json
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.sequence_parallel import make_sequence_group

COLLECTIVE_TIMEOUT_S = 1800.0  # of tensor collectives: a rank that is this late has died
WAIT_MARGIN_S = 600.0  # added to the wait for a batch: others must not give up before rank 0 does


def prepare_environment() -> None:
    """Set what DeepSpeed and torch.distributed read, where no launcher has; a no-op under torchrun and deepspeed."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" in os.environ:
        return
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT=str(_free_port()))


class Ranks:
    """This process's place among the ranks, and messages from rank 0.

    `replica` of `num_replicas`: ranks of one replica share their samples (`sequence`), and what they say of them is
    counted once; without sequence parallelism each rank is a replica.
    """

    def __init__(self, wait_timeout_s: float, sequence_parallel_size: int = 1) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.sequence = make_sequence_group(self.rank, self.size, sequence_parallel_size)
        self.replica, self._place = divmod(self.rank, sequence_parallel_size)
        self.num_replicas = self.size // sequence_parallel_size
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_timeout_s + WAIT_MARGIN_S))
        assert isinstance(group, dist.ProcessGroup), "every rank is in the group of all ranks"
        self._group = group

    @property
    def is_main(self) -> bool:
        """Rank 0: it speaks to the service, writes reports, and decides."""
        return self.rank == 0

    def share_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's `data` on every rank; the others pass None."""
        if self.size == 1:
            assert data is not None, "rank 0 has something to say"
            return data
        size = torch.tensor([len(data or b"")])
        dist.broadcast(size, 0, group=self._group)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if data:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, 0, group=self._group)
        return buffer.numpy().tobytes()

    def share(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank."""
        return json.loads(self.share_bytes(json.dumps(value).encode() if self.is_main else None))

    def any_of(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        return bool(self.largest(torch.tensor([float(flag)]))[0])

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over replicas of a CPU tensor."""
        return self._reduced(values if self._place == 0 else torch.zeros_like(values), dist.ReduceOp.SUM)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over ranks of a CPU tensor."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.total(torch.zeros(1))

    def _reduced(self, values: torch.Tensor, operation: Any) -> torch.Tensor:
        values = values.clone()
        if self.size > 1:
            dist.all_reduce(values, op=operation, group=self._group)
        return values


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
