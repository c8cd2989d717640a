"""What a step of the trainer costs, held against TRL's, against padding and against full logits; and that it is exact.

- one optimizer step on the same model, tokens and threads: our trainer, the same with padding, TRL's GRPOTrainer. They
  take turns step by step, each in a process of its own; the first turn warms up and does not count; medians. The losses
  must agree, so that all three do the same work. Tokens are those of prompts and responses, never padding.
- log-probs and entropy at Qwen3's vocabulary: chunked against full logits, peak memory beyond weights and inputs.
- loss and gradient for several splits into micro-batches, on one and on two ranks, in float64 and float32.

Time on the processor is reported beside the clock's, because other work on the machine does not count in it.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from benchmarks.report import report
from benchmarks.trainer_parts.exactness import SMALL, SPLITS, difference, gradients
from benchmarks.trainer_parts.protocol import StepResult, contestant
from benchmarks.trainer_parts.workload import Workload, make_batch, write_model

MIB = 1 << 20
SPEED_GOAL = 1.5  # times TRL's tokens a second
MEMORY_GOAL = 0.3  # of the peak with full logits
TOLERANCES = {"float64": 1e-6, "float32": 1e-4}
LOSS_TOLERANCE = 1e-4  # between contestants, relative: all compute in float32, in different orders
VOCABULARY = 151_936  # Qwen3's
HEAD_HIDDEN = 512
HEAD_TOKENS = 2048
PADDED = {"model": {"use_remove_padding": False}}

Rows = list[dict[str, object]]


def steps_table(work: Workload, turns: int) -> Rows:
    """One row a contestant."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_model(work, folder)
        running = {
            "TRL": stack.enter_context(contestant("trl_step", work, folder)),
            "ours, padded": stack.enter_context(contestant("ours", work, folder, sections=PADDED)),
            "ours": stack.enter_context(contestant("ours", work, folder)),
        }
        results: dict[str, list[StepResult]] = {name: [] for name in running}
        for _ in range(turns + 1):
            for who, process in running.items():
                results[who].append(process.step())
    tokens = [len(make_batch(work, turn + 1).tokens) for turn in range(turns + 1)]
    base = _speed([r.seconds for r in results["TRL"]], tokens)
    return [
        {
            "step": who,
            "tokens/s": _speed([r.seconds for r in found], tokens),
            "times TRL": _speed([r.seconds for r in found], tokens) / base,
            "tokens/CPU s": _speed([r.cpu_seconds for r in found], tokens),
            "times TRL (CPU)": _speed([r.cpu_seconds for r in found], tokens)
            / _speed([r.cpu_seconds for r in results["TRL"]], tokens),
            "peak MiB": max(r.peak_bytes for r in found) / MIB,
            "of it for the step": max(r.above_bytes for r in found) / MIB,
            "loss apart": _apart([r.loss for r in found], [r.loss for r in results["TRL"]]),
        }
        for who, found in results.items()
    ]


def head_table(work: Workload) -> Rows:
    """Chunked against full logits; one pass each, since memory does not vary."""
    sizes = {"vocabulary": VOCABULARY, "hidden": HEAD_HIDDEN, "tokens": HEAD_TOKENS}
    found: dict[str, StepResult] = {}
    for form in ("full", "chunked"):
        with contestant("head", work, Path("."), form=form, **sizes) as process:
            found[form] = process.step()
    full = found["full"]
    return [
        {
            "log-probs": form,
            **sizes,
            "peak MiB": result.above_bytes / MIB,
            "of full": result.above_bytes / full.above_bytes,
            "CPU s": result.cpu_seconds,
            "loss apart": _apart([result.loss], [full.loss]),
            "gradient apart": _apart([result.grad_norm], [full.grad_norm]),
        }
        for form, result in found.items()
    ]


def exactness_table() -> Rows:
    """Relative differences to one micro-batch on one rank."""
    with tempfile.TemporaryDirectory() as name:
        write_model(SMALL, Path(name))
        found = {ranks: gradients(Path(name), ranks, list(TOLERANCES)) for ranks in (1, 2)}
    rows: Rows = []
    for dtype, tolerance in TOLERANCES.items():
        first = found[1][dtype, next(iter(SPLITS))]
        for split in SPLITS:
            for ranks in (1, 2):
                loss, gradient = difference(found[ranks][dtype, split], first)
                rows.append(
                    {
                        "dtype": dtype,
                        "split": split,
                        "ranks": ranks,
                        "loss apart": loss,
                        "gradient apart": gradient,
                        "within": tolerance,
                        "exact": max(loss, gradient) <= tolerance,
                    }
                )
    return rows


def verdicts(steps: Rows, head: Rows, exact: Rows) -> Rows:
    """Each goal and whether it is met."""
    ours = next(row for row in steps if row["step"] == "ours")
    chunked = next(row for row in head if row["log-probs"] == "chunked")
    agree = max(float(str(row["loss apart"])) for row in steps)
    return [
        {"goal": f"tokens/s at least {SPEED_GOAL} times TRL's", "found": ours["times TRL"]},
        {"goal": f"chunked log-probs at most {MEMORY_GOAL} of the peak with full logits", "found": chunked["of full"]},
        {
            "goal": "splits and ranks within tolerance",
            "found": f"{sum(bool(r['exact']) for r in exact)} of {len(exact)}",
        },
        {"goal": f"losses of all contestants within {LOSS_TOLERANCE}", "found": agree},
    ]


def _speed(seconds: Sequence[float], tokens: Sequence[int]) -> float:
    """Median tokens a second, without the first turn."""
    return statistics.median(t / s for t, s in list(zip(tokens, seconds, strict=True))[1:])


def _apart(values: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all tables as JSON.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1), help="Steps of each contestant.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Threads of each contestant.")
def main(json_file: Path | None, turns: int, threads: int) -> None:
    """Print the tables, and which goals are met."""
    work = Workload(threads=threads)
    steps, head, exact = steps_table(work, turns), head_table(work), exactness_table()
    goals = verdicts(steps, head, exact)
    tables = {"steps": steps, "log-probs": head, "exactness": exact, "goals": goals}
    titles = {
        "steps": f"{work.num_samples} samples a step, median of {turns} turns, {threads} threads",
        "log-probs": "Log-probs and entropy, forward and backward",
        "exactness": "Loss and gradient against one micro-batch on one rank (relative)",
        "goals": "Goals",
    }
    for name, rows in tables.items():
        report(titles[name], rows, None)
    if json_file:
        json_file.write_text(json.dumps({"workload": work.as_dict()} | tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
