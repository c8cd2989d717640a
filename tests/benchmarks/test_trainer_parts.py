"""The trainer's benchmark compares like with like: same loss from all contestants, and exact splits."""

from pathlib import Path

import pytest

from benchmarks.trainer_parts.exactness import SMALL, SPLITS, difference, gradients
from benchmarks.trainer_parts.protocol import contestant
from benchmarks.trainer_parts.workload import Workload, make_batch, write_model

TINY = Workload(
    2, 4, median_response=8, max_response=32, vocabulary=512, hidden_size=64, num_layers=1, samples_at_once=4
)


def test_batches_are_the_same_whoever_asks() -> None:
    one, other, next_one = make_batch(TINY, 3), make_batch(TINY, 3), make_batch(TINY, 4)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.tokens.tolist() != next_one.tokens.tolist()
    lengths = (one.sample_offsets[1:] - one.sample_offsets[:-1]) - one.prompt_lengths
    assert lengths.max() <= TINY.max_response


@pytest.mark.slow
def test_trl_and_both_of_our_forms_train_the_same(tmp_path: Path) -> None:
    write_model(TINY, tmp_path)
    padded = {"model": {"use_remove_padding": False}}
    losses = []
    for name, options in (("trl_step", {}), ("ours", {}), ("ours", {"sections": padded})):
        with contestant(name, TINY, tmp_path, **options) as process:
            losses.append([process.step().loss for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4), "the second and third loss depend on the updates before"
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert len(set(losses[0])) == 3


@pytest.mark.slow
def test_loss_and_gradient_do_not_depend_on_splits_or_ranks(tmp_path: Path) -> None:
    write_model(SMALL, tmp_path)
    found = {ranks: gradients(tmp_path, ranks, ["float64"]) for ranks in (1, 2)}
    first = found[1]["float64", next(iter(SPLITS))]
    assert any(gradient.abs().max() > 1e-3 for gradient in first.values())
    for ranks in (1, 2):
        for split in SPLITS:
            assert max(difference(found[ranks]["float64", split], first)) < 1e-6, (split, ranks)
