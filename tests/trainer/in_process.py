"""The updater without DeepSpeed or processes: an engine of plain PyTorch, and ranks that are threads."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.logprobs import TokenLogprobs
from trainer.model import PolicyModel
from trainer.packing import MicroBatch


class SoloRanks:
    """One rank."""

    rank = 0
    size = 1
    is_main = True
    replica = 0
    num_replicas = 1

    def any_of(self, flag: bool) -> bool:
        return flag

    def total(self, values: Tensor) -> Tensor:
        return values.clone()

    largest = total


class ThreadRanks(SoloRanks):
    """One of `size` ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: list[Any]) -> None:
        self.rank = self.replica = rank
        self.size = self.num_replicas = size
        self.is_main = rank == 0
        self._barrier = barrier
        self._shared = shared

    def gather(self, value: Any) -> list[Any]:
        self._shared[self.rank] = value
        self._barrier.wait()
        values = list(self._shared)
        self._barrier.wait()
        return values

    def any_of(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def total(self, values: Tensor) -> Tensor:
        return torch.stack(self.gather(values.clone())).sum(0)

    def largest(self, values: Tensor) -> Tensor:
        return torch.stack(self.gather(values.clone())).amax(0)


def on_ranks(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What `work` gives on each of `size` ranks; raises what one of them raised."""
    barrier, shared = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, size, barrier, shared))
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class PlainEngine:
    """What the updater needs of an engine. Plain gradient descent; `gradients` keeps those of each update."""

    device = torch.device("cpu")

    def __init__(self, policy: PolicyModel, ranks: SoloRanks, lr: float = 0.0) -> None:
        self.policy = policy
        self.gradients: list[list[Tensor]] = []
        self.num_forwards = 0
        self._ranks = ranks
        self._lr = lr

    def learning_rate(self, step: int) -> float:
        return self._lr

    def forward(self, micro: MicroBatch) -> TokenLogprobs:
        self.num_forwards += 1
        return self.policy(micro)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        return self.forward(micro).logprobs

    def backward(self, loss: Tensor) -> bool:
        loss.backward()
        return all(bool(p.grad.isfinite().all()) for p in self.policy.parameters() if p.grad is not None)

    def update(self, lr: float, skip: bool) -> float:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.policy.parameters()]
        summed = [self._ranks.total(g) for g in grads]
        self.policy.zero_grad()
        if skip:
            return float("nan")
        self.gradients.append(summed)
        with torch.no_grad():
            for parameter, gradient in zip(self.policy.parameters(), summed, strict=True):
                parameter -= lr * gradient
        return float(torch.stack([g.norm() for g in summed]).norm())

    def train(self, mode: bool) -> None:
        self.policy.train(mode)


class FixedReference:
    """A reference whose log-probs are a function of the tokens, whatever the split."""

    def logprobs(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        return [-3 - torch.sin(micro.targets.double() + micro.positions[micro.predictors]) for micro in micros]


class FixedCritic:
    """Values that are a function of the state; remembers what it was asked to learn."""

    def __init__(self) -> None:
        self.returns: list[Tensor] = []
        self.steps: list[int] = []

    def values(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        return [torch.cos(micro.positions[micro.predictors].float()) for micro in micros]

    def update(
        self,
        micros: Sequence[MicroBatch],
        returns: Sequence[Tensor],
        old_values: Sequence[Tensor],
        num_tokens: int,
        step: int,
    ) -> dict[str, float]:
        assert [len(r) for r in returns] == [len(v) for v in old_values] == [len(m.targets) for m in micros]
        self.returns += returns
        self.steps.append(step)
        return {"critic/num_tokens": float(num_tokens)}
