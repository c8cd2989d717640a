"""What a run belongs to: parked samples can't be continued by another model or at another temperature.

Always true: a service works on a folder and on a buffer only if they are new or were made with the same model,
tokenizer and temperature; everything else in the settings may change between two starts. Both keep it, since each may
be lost without the other. A folder is claimed by a service that has started: one whose settings are wrong leaves it to
the next.
"""

import json
import logging
from pathlib import Path

from buffer.interface import ContinuationBuffer
from protocol.errors import SettingsError
from protocol.settings import RunSettings

FILE_NAME = "run.json"

log = logging.getLogger(__name__)


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


def identity_of(settings: RunSettings) -> dict[str, str]:
    """What the buffer keeps of it and compares when it is claimed, as text."""
    return {name: str(value) for name, value in _identity(settings).items()}


async def warn_of_longer(buffer: ContinuationBuffer, max_response_length: int) -> None:
    """Say how many samples passed the limit when it was higher: they are ended and delivered with all they have."""
    num_longer = await buffer.count_longer(max_response_length)
    if num_longer:
        log.warning(
            "%d samples in the buffer are longer than data.max_response_length = %d, which was higher when they were "
            "written; they end where they are and are trained on with all their tokens",
            num_longer,
            max_response_length,
            extra={"event": "longer_samples", "samples": num_longer},
        )


def _identity(settings: RunSettings) -> dict[str, str | float | None]:
    return {
        "model.path": _resolved(settings.model.path),
        "model.tokenizer_path": _resolved(settings.model.tokenizer_path),
        "rollout.temperature": settings.rollout.temperature,
    }


def _resolved(path: Path | None) -> str | None:
    return str(path.resolve()) if path else None
