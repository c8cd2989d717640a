"""The manifest that a trainer writes beside published weights, and every reader checks.

Always true of a published folder: `manifest.json` was written last, so a folder without one is unfinished; it names
every weights file with its size and SHA-256, so that a replica can tell that it loaded what was published.
"""

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.errors import WeightsError

MANIFEST_NAME = "manifest.json"
READ_BYTES = 1 << 20  # large enough that hashing, not reading, is what takes the time


class WeightsFile(BaseModel):
    """One safetensors file of a published version."""

    model_config = ConfigDict(extra="forbid")
    name: str
    size: int
    sha256: str


class WeightsManifest(BaseModel):
    """What was published: `step` is the optimizer step that the weights come after."""

    model_config = ConfigDict(extra="forbid")
    format: int = 1
    step: int
    files: list[WeightsFile]


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, step: int) -> WeightsManifest:
    """Hash the safetensors files of `folder` and write its manifest, atomically."""
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    files = [WeightsFile(name=n, size=(folder / n).stat().st_size, sha256=sha256_of(folder / n)) for n in names]
    manifest = WeightsManifest(step=step, files=files)
    partial = folder / f".{MANIFEST_NAME}.partial"
    partial.write_text(manifest.model_dump_json(indent=1))
    partial.replace(folder / MANIFEST_NAME)
    return manifest


def read_manifest(folder: Path) -> WeightsManifest:
    """The manifest of `folder`; raises `WeightsError` if there is none or it names no files."""
    path = folder / MANIFEST_NAME
    if path.is_symlink() or not path.is_file():
        raise WeightsError(f"{folder} has no {MANIFEST_NAME} that is a plain file; publish a finished folder")
    try:
        manifest = WeightsManifest.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        raise WeightsError(f"{path} is not a weights manifest; publish the folder again") from error
    if not manifest.files or any("/" in f.name or f.name.startswith(".") for f in manifest.files):
        raise WeightsError(f"{path} names no weights files of its own folder; publish the folder again")
    return manifest


def verify_manifest(folder: Path) -> WeightsManifest:
    """Read the manifest and check every file against it; raises `WeightsError` naming the file that differs."""
    manifest = read_manifest(folder)
    for file in manifest.files:
        path = folder / file.name
        if path.is_symlink() or not path.is_file():
            raise WeightsError(
                f"{folder} lacks the plain file {file.name}, which its manifest names; publish the folder again"
            )
        if path.stat().st_size != file.size or sha256_of(path) != file.sha256:
            raise WeightsError(f"{path} has another checksum than its manifest says; publish the folder again")
    return manifest
