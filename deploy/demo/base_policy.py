"""The demo's base policy and the cache that keeps it.

It is made on this machine, because nothing is downloaded; `teaching.py` says how.

Always true of the cache: a folder's name is a digest of everything that determines its weights; a folder appears under
its name whole or not at all, however many processes make it at once; and one whose files are not what its manifest
says is made again.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from deploy.demo import task
from deploy.demo.byte_model import VOCABULARY_SIZE, save_policy
from deploy.demo.teaching import Recipe, TeachingProgress, train
from protocol.errors import WeightsError
from protocol.manifest import verify_manifest, write_manifest

CACHE_FORMAT = 1  # raise it when a change of the code, not of the recipe, gives other weights


def default_cache_dir() -> Path:
    """`april` under the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and must be ignored.
    root = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return root / "april"


def policy_folder(cache_dir: Path, seed: int, recipe: Recipe) -> Path:
    """Where the policy of `seed` and `recipe` is kept, whether or not it is there yet."""
    determined_by = {
        "format": CACHE_FORMAT,
        "seed": seed,
        "recipe": asdict(recipe),
        "vocabulary_size": VOCABULARY_SIZE,
        "mixture": task.MIXTURE,
        "held_out_share": task.HELD_OUT_SHARE,
        "labels": task.LABELS,
    }
    digest = hashlib.sha256(json.dumps(determined_by, sort_keys=True).encode()).hexdigest()
    return cache_dir / f"demo-policy-{digest[:16]}"


def make_base_policy(
    cache_dir: Path,
    seed: int = 0,
    progress: Callable[[TeachingProgress], None] = lambda _: None,
    recipe: Recipe | None = None,
) -> Path:
    """Folder of the base policy (model, tokenizer, manifest), from the cache or made now, in one to two minutes."""
    recipe = recipe or Recipe()
    folder = policy_folder(cache_dir, seed, recipe)
    if folder.is_dir() and _is_whole(folder):
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache_dir) as partial:
        made = Path(partial) / "policy"
        save_policy(train(seed, recipe, progress), made)
        write_manifest(made, step=0)
        _move_into_place(made, folder)
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        verify_manifest(folder)
    except WeightsError:
        shutil.rmtree(folder)  # only this cache's own folder, named by its digest
        return False
    return True


def _move_into_place(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        # Another process was faster; a folder that is there is whole, and its weights are as good as these.
        if not folder.is_dir():
            raise


@click.command()
@click.option("--seed", default=0, show_default=True, help="Seed of the weights and of the worked solutions.")
@click.option("--cache-dir", type=click.Path(path_type=Path), default=default_cache_dir, help="Where it is kept.")
@click.option("--num-samples", default=512, show_default=True, help="Held-out expressions to measure it on.")
def main(seed: int, cache_dir: Path, num_samples: int) -> None:
    """Make the demo's base policy, or take it from the cache, and measure where it starts."""
    from transformers.utils.logging import disable_progress_bar

    from deploy.demo.measure import measure_policy
    from deploy.demo.progress import report, reporting

    disable_progress_bar()  # it would come between this command's own lines
    with reporting("base policy") as progress:
        folder = make_base_policy(cache_dir, seed, progress)
    for temperature in (1.0, 0.0):
        measured = measure_policy(folder, num_samples, temperature=temperature)
        report({"path": str(folder), "temperature": temperature, "tail": measured.tail} | asdict(measured))


if __name__ == "__main__":
    main()
