"""Corrections compared: exactly on a policy that can be enumerated, and by learning on the demo's task.

python -m benchmarks.correction grid                   bias and variance over all pairs of lags; seconds
python -m benchmarks.correction learn                  reward after 30 steps; resumable, a file for each cell
python -m benchmarks.correction learn --cells 'none-*' only some
python -m benchmarks.correction table                  table and plot of the cells that are there
"""

import json
import math
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.enumerable import Writers, ascended, gradient_moments, random_table, true_gradient
from benchmarks.report import report
from protocol.settings.algorithm import Correction
from trainer.corrections import Corrector, Rejection
from trainer.losses import Clip
from trainer.objective import Objective

LAGS = (0, 1, 2, 4, 8)
RATE = 0.5  # of one exact gradient step a version: ratios up to some 5 at lag 8
BASELINE = 0.3
RESULTS = Path("benchmarks/results/correction")
SEEDS = (0, 1, 2)
LEARNING_LAGS = (2, 8)


def _objectives() -> dict[str, Objective]:
    clip = Clip(0.2, 0.28, 3.0)
    correctors = {
        "tok": Corrector(),
        "tok2": Corrector(cap=2.0),
        "band": Corrector(band=(0.5, 2.0)),
        "run": Corrector(level="version_run"),
        "run2": Corrector(level="version_run", cap=2.0),
        "seq": Corrector(level="sequence"),
        "seq2": Corrector(level="sequence", cap=2.0),
        "geo": Corrector(level="sequence", geometric=True),
        "rej": Corrector(cap=2.0, rejection=Rejection("k1", "sequence", "mean", 0.8, 1.25)),
    }
    given = {"none": (Correction.NONE, Corrector()), "beh": (Correction.BEHAVIOUR, Corrector())}
    given |= {name: (Correction.DECOUPLED, corrector) for name, corrector in correctors.items()}
    return {
        name: Objective(correction, clip, corrector, aggregation="seq-mean-token-sum")
        for name, (correction, corrector) in given.items()
    }


@click.group()
def main() -> None:
    """Corrections compared."""


@main.command()
@click.option("--seed", default=0, show_default=True, help="Of the policy that the versions start from.")
@click.option("--json-file", type=click.Path(path_type=Path), help="Where the rows go besides.")
def grid(seed: int, json_file: Path | None) -> None:
    """Bias and standard deviation of one response's gradient over the true gradient's norm, for every pair of lags.

    beh: behaviour; decoupled weights: tok (token), run (version run), seq (sequence), without a cap and with C = 2;
    band: IcePop [0.5, 2]; geo: geometric mean; rej: tok2 less responses that drifted by more than a factor of 1.25.
    """
    torch.set_num_threads(1)
    tables = ascended(random_table(torch.Generator().manual_seed(seed)), RATE, max(LAGS))
    held = len(tables) - 1
    truth = true_gradient(tables[held], BASELINE)
    norm = float(truth.norm())
    biases: list[dict[str, object]] = []
    deviations: list[dict[str, object]] = []
    for early, late in ((early, late) for early in LAGS for late in LAGS if late <= early):
        writers = Writers(tables[held - early], tables[held - late], (early, late))
        moments = {
            name: gradient_moments(objective, tables[held], writers, BASELINE)
            for name, objective in _objectives().items()
        }
        lags: dict[str, object] = {"lags": f"{early},{late}"}
        biases.append(lags | {n: round(float((m.mean - truth).norm()) / norm, 3) for n, m in moments.items()})
        deviations.append(
            lags | {n: round(math.sqrt(max(0.0, m.total_variance)) / norm, 2) for n, m in moments.items()}
        )
    _print_grid("bias over the true gradient's norm (begun, resumed at lag)", biases)
    _print_grid("standard deviation of one response's gradient, over the same", deviations)
    if json_file:
        json_file.write_text(json.dumps({"bias": biases, "deviation": deviations}, indent=2) + "\n")


def _print_grid(title: str, rows: Sequence[dict[str, object]]) -> None:
    """Twelve narrow columns, without the borders of `report`: they fit into 80 characters."""
    click.echo(f"\n{title}")
    click.echo("".join(f"{name:>6}" for name in rows[0]))
    for row in rows:
        click.echo("".join(f"{value:>6}" for value in row.values()))


@main.command()
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True, help="Folder of the cells.")
@click.option("--cells", default="*", show_default=True, help="Which cells, as a shell pattern of their names.")
@click.option("--steps", default=30, show_default=True, help="Steps of each.")
@click.option("--num-threads", default=1, show_default=True, help="Of PyTorch: tensors here are small.")
def learn(out: Path, cells: str, steps: int, num_threads: int) -> None:
    """Run the cells that are not there yet, each a minute or so, all in this process; then print the table."""
    from benchmarks.learning import METHODS, Cell, run_cell
    from deploy.demo.base_policy import default_cache_dir, make_base_policy
    from trainer.distributed import Ranks
    from trainer.engine import start_deepspeed

    base = make_base_policy(default_cache_dir())
    start_deepspeed()
    torch.set_num_threads(num_threads)
    ranks = Ranks(wait_timeout_s=60.0)
    out.mkdir(parents=True, exist_ok=True)
    # Lag 0 has nothing to correct: it is run once, as what the others are held against.
    wanted = [Cell("none", 0, seed, steps) for seed in SEEDS]
    wanted += [Cell(m, lag, seed, steps) for seed in SEEDS for lag in LEARNING_LAGS for m in METHODS]
    for cell in wanted:
        path = out / f"{cell.name}.json"
        if path.exists() or not fnmatch(cell.name, cells):
            continue
        result = run_cell(cell, base, out, ranks)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=2) + "\n")
        partial.rename(path)
        click.echo(
            f"{cell.name}: held-out reward {result['reward_before']:.3f} -> {result['reward_after']:.3f}, "
            f"{result['seconds']:.0f} s"
        )
    _print_table(out, None)


@main.command()
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True, help="Folder of the cells.")
@click.option("--json-file", type=click.Path(path_type=Path), help="Where the rows go besides.")
def table(out: Path, json_file: Path | None) -> None:
    """Table and plot of the cells that are there."""
    _print_table(out, json_file)


def _print_table(out: Path, json_file: Path | None) -> None:
    cells = [json.loads(path.read_text()) for path in sorted(out.glob("*-seed*.json"))]
    if not cells:
        raise click.ClickException(f"{out} has no cells: run `python -m benchmarks.correction learn` first")
    rows: list[dict[str, object]] = []
    for lag, method in sorted({(c["lag"], c["method"]) for c in cells}):
        same = [c for c in cells if (c["lag"], c["method"]) == (lag, method)]
        after = [c["reward_after"] for c in same]
        rows.append(
            {
                "lag": lag,
                "correction": method if lag else "(nothing to correct)",
                "before": _mean([c["reward_before"] for c in same]),
                "after": _mean(after),
                "lowest": min(after),
                "highest": max(after),
                "seeds": len(same),
                "ess": _mean([s["importance/ess"] for c in same for s in c["steps_detail"] if "importance/ess" in s]),
                "skipped": sum(int(s["skipped"]) for c in same for s in c["steps_detail"]),
                "s a cell": _mean([c["seconds"] for c in same]),
            }
        )
    first = cells[0]
    settings = f"lr {first['learning_rate']:g}, {first['num_updates']} updates a batch"
    title = f"held-out reward after {first['steps']} steps, {settings}"
    report(title, rows, json_file)
    _plot(cells, out / "correction.png")


def _plot(cells: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lags = sorted({c["lag"] for c in cells})
    figure, axes = plt.subplots(1, len(lags), figsize=(5 * len(lags), 3.6), sharey=True, squeeze=False)
    for axis, lag in zip(axes[0], lags, strict=True):
        for method in sorted({c["method"] for c in cells if c["lag"] == lag}):
            runs = [[s["reward"] for s in c["steps_detail"]] for c in cells if (c["lag"], c["method"]) == (lag, method)]
            steps = min(len(run) for run in runs)
            mean = [_mean([run[i] for run in runs]) for i in range(steps)]
            axis.plot(range(1, steps + 1), mean, label=method if lag else "lag 0")
            low, high = (
                [min(run[i] for run in runs) for i in range(steps)],
                [max(r[i] for r in runs) for i in range(steps)],
            )
            axis.fill_between(range(1, steps + 1), low, high, alpha=0.15)
        axis.set_title(f"lag {lag}")
        axis.set_xlabel("step")
        axis.legend(fontsize="small")
    axes[0][0].set_ylabel("mean reward of the batch")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    click.echo(f"plot in {path}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


if __name__ == "__main__":
    main()
