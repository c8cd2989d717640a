"""A policy small enough to enumerate every response, so that expectations are sums and not estimates.

Three tokens, the last of which ends a response; at most four tokens; one softmax for each of the 15 prefixes, so a
policy is a table of logits [15, 3] and there are 31 responses. A response may be written by two behaviour policies, one
up to a cut and the other after it, as a parked and resumed one is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from trainer.aggregation import Counts
from trainer.logprobs import TokenLogprobs
from trainer.objective import Anchors, Objective
from trainer.packing import MicroBatch

VOCABULARY = 3
END = VOCABULARY - 1
MAX_LENGTH = 4
NUM_PREFIXES = sum(END**n for n in range(MAX_LENGTH))


@dataclass(frozen=True, slots=True)
class EnumeratedResponse:
    """`prefixes` [T] i64: row of the table that each token is drawn from; `tokens` [T] i64."""

    prefixes: Tensor
    tokens: Tensor

    def logprobs(self, table: Tensor) -> Tensor:
        """Log-probs [T] of its tokens under the policy `table` [15, 3]."""
        return torch.log_softmax(table, -1)[self.prefixes, self.tokens]


@dataclass(frozen=True, slots=True)
class Writers:
    """Who wrote the responses: `first` before token `cut`, `second` from it on; `lags` behind the trainer."""

    first: Tensor
    second: Tensor
    lags: tuple[int, int]
    cut: int = 2

    def logprobs(self, response: EnumeratedResponse) -> Tensor:
        """Behaviour log-probs [T]."""
        early = torch.arange(len(response.tokens)) < self.cut
        return torch.where(early, response.logprobs(self.first), response.logprobs(self.second))

    def versions(self, response: EnumeratedResponse) -> Tensor:
        """Version [T] that wrote each token; the trainer holds version 0."""
        early = torch.arange(len(response.tokens)) < self.cut
        return torch.where(early, -self.lags[0], -self.lags[1]).to(torch.int32)


@dataclass(frozen=True, slots=True)
class GradientMoments:
    """Of the policy gradient of one response: `mean` [45] and `total_variance`, exact."""

    mean: Tensor
    total_variance: float


def enumerate_responses() -> list[EnumeratedResponse]:
    """All 31."""
    rows = {prefix: row for row, prefix in enumerate(_prefixes())}
    found: list[EnumeratedResponse] = []
    for prefix in rows:
        for token in range(VOCABULARY):
            whole = (*prefix, token)
            if token == END or len(whole) == MAX_LENGTH:
                where = torch.tensor([rows[whole[:n]] for n in range(len(whole))])
                found.append(EnumeratedResponse(where, torch.tensor(whole)))
    return found


def reward(response: EnumeratedResponse) -> float:
    """Something that depends on every token and its place."""
    weights = torch.tensor([1.0, -0.6, 0.8, -0.4])[: len(response.tokens)]
    return float((weights * (response.tokens + 1)).sum()) / 2


def random_table(generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Logits of a policy, float64."""
    return scale * torch.randn(NUM_PREFIXES, VOCABULARY, generator=generator, dtype=torch.float64)


def true_gradient(table: Tensor, baseline: float) -> Tensor:
    """Of the expected loss −E[reward − baseline] under the policy itself, [45]: what every estimator should give."""
    parameters = table.clone().requires_grad_()
    terms = [r.logprobs(parameters).sum().exp() * (reward(r) - baseline) for r in enumerate_responses()]
    (gradient,) = torch.autograd.grad(-torch.stack(terms).sum(), parameters)
    return gradient.flatten()


def ascended(table: Tensor, rate: float, num_steps: int) -> list[Tensor]:
    """`table` and the policies after each of `num_steps` exact gradient steps: versions of a run."""
    tables = [table]
    for _ in range(num_steps):
        tables.append(tables[-1] - rate * true_gradient(tables[-1], 0.0).reshape(table.shape))
    return tables


def gradient_moments(objective: Objective, table: Tensor, writers: Writers, baseline: float) -> GradientMoments:
    """Mean and variance over responses, drawn from `writers`, of the gradient of `objective` at `table`.

    The proximal policy is the current one, as in the first update of a step; the gradient is that of one response.
    """
    mean = torch.zeros(table.numel(), dtype=table.dtype)
    second_moment = 0.0
    for response in enumerate_responses():
        behaviour = writers.logprobs(response)
        probability = behaviour.sum().exp()
        parameters = table.clone().requires_grad_()
        logprobs = response.logprobs(parameters)
        micro = _micro(response, behaviour, writers.versions(response), reward(response) - baseline)
        out = TokenLogprobs(logprobs, torch.zeros_like(logprobs))
        anchors = Anchors(logprobs.detach(), None)
        loss = objective.loss(out, micro, anchors, Counts(len(logprobs), 1), 0).loss
        (gradient,) = torch.autograd.grad(loss, parameters)
        mean += probability * gradient.flatten()
        second_moment += float(probability * gradient.square().sum())
    return GradientMoments(mean, second_moment - float(mean.square().sum()))


def _micro(response: EnumeratedResponse, behaviour: Tensor, versions: Tensor, advantage: float) -> MicroBatch:
    length = len(response.tokens)
    where = torch.arange(length)
    return MicroBatch(
        sample_indices=(0,),
        lengths=(length,),
        tokens=response.tokens,
        positions=where,
        predictors=where,
        targets=response.tokens,
        behaviour=behaviour,
        advantages=torch.full((length,), advantage, dtype=behaviour.dtype),
        versions=versions,
        samples=torch.zeros_like(where),
    )


def _prefixes() -> Iterator[tuple[int, ...]]:
    for length in range(MAX_LENGTH):
        yield from product(range(END), repeat=length)
