"""`python -m deploy.compose.policy FOLDER`: makes the demo's base policy once, and FOLDER/policy points to it."""

from pathlib import Path

import click

from deploy.demo.base_policy import make_base_policy
from deploy.demo.progress import reporting

LINK_NAME = "policy"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--seed", default=0, show_default=True, help="Seed of the weights and of the worked solutions.")
def main(folder: Path, seed: int) -> None:
    """Make the demo's base policy in FOLDER, unless it is there."""
    with reporting("base policy") as progress:
        policy = make_base_policy(folder, seed, progress)
    link, partial = folder / LINK_NAME, folder / f".{LINK_NAME}.partial"
    partial.unlink(missing_ok=True)
    partial.symlink_to(policy.name)
    partial.replace(link)
    print(link)


if __name__ == "__main__":
    main()
