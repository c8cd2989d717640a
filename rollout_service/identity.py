"""What a run folder belongs to: parked samples can't be continued by another model or at another temperature.

Always true: a service works on a folder only if the folder is new or was made with the same model, tokenizer and
temperature; everything else in the settings may change between two starts. A folder is claimed by a service that has
started: one whose settings are wrong leaves it to the next.
"""

import json
from pathlib import Path

from protocol.errors import SettingsError
from protocol.settings import RunSettings

FILE_NAME = "run.json"


def check_identity(settings: RunSettings) -> None:
    """Compare the folder's run with this one; raises SettingsError naming what differs."""
    mine = _identity(settings)
    path = settings.run_dir / FILE_NAME
    try:
        theirs = json.loads(path.read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} can't be read ({error}); set another run.dir") from error
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise SettingsError(
                f"{settings.run_dir} holds a run with {name} = {theirs.get(name)} and this one has {value}, so its "
                "unfinished samples can't be continued; set another run.dir and run.name"
            )


def claim_folder(settings: RunSettings) -> None:
    """Write what the run is into its folder, if nobody has; raises SettingsError if it is another run's by now."""
    check_identity(settings)
    path = settings.run_dir / FILE_NAME
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(_identity(settings), indent=2) + "\n")
        partial.replace(path)


def _identity(settings: RunSettings) -> dict[str, str | float | None]:
    return {
        "model.path": _resolved(settings.model.path),
        "model.tokenizer_path": _resolved(settings.model.tokenizer_path),
        "rollout.temperature": settings.rollout.temperature,
    }


def _resolved(path: Path | None) -> str | None:
    return str(path.resolve()) if path else None
