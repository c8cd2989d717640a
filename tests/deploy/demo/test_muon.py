"""Muon: the update is an orthogonal matrix's, and it is applied to matrices only."""

import pytest
import torch
from torch import nn

from deploy.demo.byte_model import make_model
from deploy.demo.muon import Muon, make_optimizers, orthogonalize


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrices = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    values = torch.linalg.svdvals(orthogonalize(matrices))
    before = torch.linalg.svdvals(matrices)
    # The quintic iteration trades exactness for speed: large singular values end between about 0.7 and 1.2.
    assert values.max() < 1.3
    assert values[before > 0.1 * before.amax(-1, keepdim=True)].min() > 0.5


def test_orthogonalizing_keeps_the_singular_directions() -> None:
    matrix = torch.randn(1, 32, 48, generator=torch.Generator().manual_seed(1))
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    aligned = u.mT @ orthogonalize(matrix) @ vh.mT  # diagonal, if the directions are kept
    off_diagonal = aligned - torch.diag_embed(torch.diagonal(aligned, dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 1e-3


def test_matrices_are_orthogonalized_apart_from_each_other() -> None:
    matrices = torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([orthogonalize(m[None]) for m in matrices])
    torch.testing.assert_close(orthogonalize(matrices), alone)


@pytest.mark.parametrize(("shape", "scale"), [((16, 32), 1.0), ((32, 16), 2**0.5)])
def test_a_step_has_the_size_of_its_learning_rate_whatever_the_gradient(shape: tuple[int, int], scale: float) -> None:
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = Muon([weight], lr=0.1, momentum=0.9)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    weight.grad = 1e-4 * gradient
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -0.1 * scale * orthogonalize(gradient[None])[0], atol=1e-5, rtol=1e-3)


def test_momentum_carries_earlier_gradients_into_a_step() -> None:
    weight = nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([weight], lr=0.1, momentum=0.5)
    first, second = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(4))
    weight.grad = first.clone()
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = second.clone()
    optimizer.step()
    nesterov = second + 0.5 * (0.5 * first + second)
    torch.testing.assert_close(weight.detach() - before, -0.1 * orthogonalize(nesterov[None])[0])


def test_a_matrix_without_a_gradient_stays_finite() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    weight.grad = torch.zeros(8, 8)
    Muon([weight], lr=0.1, momentum=0.9).step()
    assert torch.equal(weight.detach(), torch.ones(8, 8))


def test_every_parameter_has_one_optimizer_and_embeddings_have_adamw() -> None:
    model = make_model(seed=0)
    muon, adamw = make_optimizers(model, matrix_lr=0.02, matrix_momentum=0.8, other_lr=4e-3)
    taken = [[id(p) for group in o.param_groups for p in group["params"]] for o in (muon, adamw)]
    assert sorted(taken[0] + taken[1]) == sorted(id(p) for p in model.parameters())
    assert isinstance(muon, Muon)
    assert id(model.model.embed_tokens.weight) in taken[1]
    assert len(taken[0]) == 3 * 7  # q, k, v, o, gate, up, down of each layer
