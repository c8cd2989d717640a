"""Over-provisioning inside groups: how much sooner they are ready, and how much shorter what is trained on is.

By simulation (rollout_service/tuning/races.py): lognormal lengths, half of whose variance lies between prompts; once
with samples that go on in the next epoch, once with samples that are thrown away.
"""

import math
from pathlib import Path

import click

from benchmarks.report import report
from protocol.settings import started_samples
from rollout_service.tuning.races import RaceResult, lognormal_prompts, simulate_races

RATIOS = (1.0, 1.125, 1.25, 1.5, 2.0)
NUM_PROMPTS = 2000  # the means below are then good to about 1 %
MEDIAN_TOKENS = 1000.0


def measure(n: int, sigma: float, num_epochs: int, goes_on: bool, seed: int) -> list[dict[str, object]]:
    """One row for each ratio."""
    base: RaceResult | None = None
    rows: list[dict[str, object]] = []
    for ratio in RATIOS:
        prompts = lognormal_prompts(NUM_PROMPTS, MEDIAN_TOKENS, sigma * math.sqrt(0.5), sigma * math.sqrt(0.5), seed)
        result = simulate_races(prompts, n, started_samples(n, ratio), num_epochs, goes_on)
        base = base or result
        rows.append(
            {
                "epochs": num_epochs,
                "samples_ratio": ratio,
                "goes_on": goes_on,
                "wait": round(result.mean_wait / base.mean_wait, 2),
                "trained_over_started": round(result.trained_tokens / result.started_tokens, 2),
                "lost_share": round(result.lost_share, 2),
            }
        )
    return rows


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the rows as JSON.")
@click.option("--n", default=8, show_default=True, help="Samples that a group wants.")
@click.option("--sigma", default=1.0, show_default=True, help="Sigma of the lognormal lengths.")
@click.option("--seed", default=0, show_default=True, help="Seed of the lengths.")
def main(json_file: Path | None, n: int, sigma: float, seed: int) -> None:
    """Print waits and lengths by ratio, against ratio 1."""
    rows = [
        row
        for num_epochs, goes_on in ((1, False), (4, True), (16, True))
        for row in measure(n, sigma, num_epochs, goes_on, seed)
    ]
    report("Over-provisioning inside groups, against ratio 1", rows, json_file)


if __name__ == "__main__":
    main()
