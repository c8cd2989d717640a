"""Step metrics, loggers, weights files and checkpoints as they are on the disk."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from tests.trainer.factory import make_batch, make_settings
from trainer.loggers import ConsoleLogger, JsonlLogger, make_loggers
from trainer.metrics import add_to_totals, batch_metrics, finite, token_metrics
from trainer.objective import MAX_NAMES, SUM_NAMES
from trainer.summary import Totals, summarise
from trainer.weights_file import write_weights


def test_batch_metrics_are_what_the_batch_says() -> None:
    batch = make_batch(version=3)
    metrics = batch_metrics(batch, held_version=5)
    versions = batch.versions[batch.loss_mask == 1]
    assert metrics["lag/mean"] == pytest.approx((5 - versions).mean())
    assert metrics["lag/max"] == 3
    assert metrics["off_policy/token_share"] == 1
    assert batch_metrics(batch, 3)["off_policy/token_share"] == pytest.approx(np.mean(versions < 3))
    assert metrics["samples/multi_version"] == metrics["samples/resumed"] == 6
    assert metrics["tokens/trained"] == batch.loss_mask.sum()
    assert metrics["response/stopped_share"] == 0.5
    assert metrics["reward/mean"] == pytest.approx(batch.rewards.mean())


def test_totals_weigh_tokens_not_steps() -> None:
    totals = Totals()
    short, long = make_batch(version=1, max_length=4), make_batch(version=0, max_length=60)
    for batch in (short, long):
        add_to_totals(totals, batch, 1, batch_metrics(batch, 1))
    old = np.concatenate([1 - b.versions[b.loss_mask == 1] for b in (short, long)])
    summary = summarise(totals)
    assert summary.mean_lag == pytest.approx(old.mean())
    assert summary.off_policy_token_share == pytest.approx((old > 0).mean())
    assert summary.samples_trained == 32


def test_token_metrics_of_nothing_are_left_out() -> None:
    values = token_metrics(torch.zeros(len(SUM_NAMES)).double(), torch.zeros(len(MAX_NAMES)).double())
    assert set(finite(values)) == {"importance/max"}


def test_console_is_a_line_on_a_terminal_and_json_on_a_pipe() -> None:
    metrics = {"reward/mean": 0.5, "lag/mean": 1.25, "timing_s/step": 2.0}
    terminal, pipe = io.StringIO(), io.StringIO()
    ConsoleLogger(20, Console(file=terminal, force_terminal=True, width=200)).log(5, metrics)
    ConsoleLogger(20, Console(file=pipe, force_terminal=False)).log(5, metrics)
    assert "reward 0.500" in terminal.getvalue()
    assert "25%" in terminal.getvalue()
    assert json.loads(pipe.getvalue()) | metrics == json.loads(pipe.getvalue())


def test_jsonl_is_appended_to_over_restarts(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = JsonlLogger(tmp_path / "logs" / "metrics.jsonl")
        logger.log(step, {"reward/mean": 0.1})
        logger.close()
    lines = (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_loggers_are_those_that_are_named(tmp_path: Path) -> None:
    assert make_loggers(make_settings(tmp_path, tmp_path, trainer={"logger": []}), 3) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_file_is_read_by_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {
        "a.weight": torch.randn(3, 5).to(dtype),
        "b": torch.randn(7).to(dtype),
        "scalar": torch.ones((), dtype=dtype),
    }
    shapes = {name: (w.dtype, tuple(w.shape)) for name, w in weights.items()}
    write_weights(tmp_path / "w.safetensors", shapes, weights.items())
    read = load_file(tmp_path / "w.safetensors")
    assert set(read) == set(weights)
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_weights_are_gathered_to_the_end_when_the_disk_is_full() -> None:
    weights = {str(i): torch.ones(1 << 20) for i in range(3)}
    seen: list[str] = []

    def gathered() -> object:
        for name, weight in weights.items():
            seen.append(name)
            yield name, weight

    shapes = {name: (w.dtype, tuple(w.shape)) for name, w in weights.items()}
    with pytest.raises(OSError, match="No space left"):
        write_weights(Path("/dev/full"), shapes, gathered())  # pyright: ignore[reportArgumentType]
    assert seen == list(weights), "the other ranks are in the same collectives"
