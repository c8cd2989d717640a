"""The files of a checkpoint, with their sizes and SHA-256: written when it is saved, compared before it is loaded.

Always true: the manifest names every other file of the folder and is written after them; nothing of a checkpoint is
read before all of its files are what the manifest says. Digests are of pieces of a file, so that one large file is
hashed by all ranks and by several threads of each.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.errors import TrainingError
from protocol.manifest import MANIFEST_NAME
from trainer.distributed import Ranks

PIECE_BYTES = (
    32 << 20
)  # small enough to share out even a checkpoint of one file, large enough that opening costs nothing
READ_BYTES = 1 << 20  # stays in the processor's cache between the read and the hash
MAX_THREADS = 8  # one hashes 1 to 2 GB/s: more than these are faster than any disk
DIGEST_BYTES = 32


class SavedFile(BaseModel):
    """`name` is the path in the checkpoint; `sha256` of each `PIECE_BYTES` of it."""

    model_config = ConfigDict(extra="forbid")
    name: str
    size: int
    sha256: list[str] = []


class CheckpointManifest(BaseModel):
    """All files of a checkpoint but this one."""

    model_config = ConfigDict(extra="forbid")
    files: list[SavedFile]


class _Piece(NamedTuple):
    path: Path
    begin: int


def write_manifest(folder: Path, ranks: Ranks) -> None:
    """Hash everything under `folder` and write the manifest; every rank calls it once all of them have written."""
    listed = ranks.share(_list(folder) if ranks.is_main else None)
    files = [SavedFile(name=name, size=size) for name, size in listed]
    pieces = _pieces(folder, files)
    digests = torch.zeros(len(pieces), DIGEST_BYTES, dtype=torch.int64)
    mine = range(ranks.rank, len(pieces), ranks.size)
    for place, digest in zip(mine, _digests([pieces[place] for place in mine]), strict=True):
        digests[place] = torch.tensor(list(bytes.fromhex(digest)))
    digests = ranks.largest(digests)  # each row is some rank's, and zero on the others
    if ranks.is_main:
        by_path = {folder / file.name: file.sha256 for file in files}
        for piece, digest in zip(pieces, digests.tolist(), strict=True):
            by_path[piece.path].append(bytes(digest).hex())
        (folder / MANIFEST_NAME).write_text(CheckpointManifest(files=files).model_dump_json(indent=1))


def damage(folder: Path, ranks: Ranks) -> str | None:
    """What is wrong with a file of `folder`, in words that name it; the same on every rank, each of which calls it."""
    try:
        files = CheckpointManifest.model_validate_json((folder / MANIFEST_NAME).read_bytes()).files
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is not there"
    except (OSError, ValidationError):
        return f"{MANIFEST_NAME} can't be read"
    told = next((words for file in files if (words := _told_by_size(folder, file))), None)
    if told:
        return told
    pieces, expected = _pieces(folder, files), [digest for file in files for digest in file.sha256]
    if len(pieces) != len(expected):
        return f"{MANIFEST_NAME} does not fit its files"
    mine = range(ranks.rank, len(pieces), ranks.size)
    digests = _digests([pieces[place] for place in mine])
    wrong = [place for place, digest in zip(mine, digests, strict=True) if digest != expected[place]]
    # Any of those that are found will do, but all ranks must say the same.
    found = int(ranks.largest(torch.tensor([wrong[0] if wrong else -1]))[0])
    return None if found < 0 else _told_by_digest(folder, pieces[found])


def _told_by_size(folder: Path, file: SavedFile) -> str | None:
    try:
        size = (folder / file.name).stat().st_size
    except OSError:
        return f"{file.name} is not there"
    return None if size == file.size else f"{file.name} has {size} bytes and had {file.size} when it was saved"


def _told_by_digest(folder: Path, piece: _Piece) -> str:
    name = piece.path.relative_to(folder)
    return f"{name} has another checksum from byte {piece.begin} on than when it was saved"


def _list(folder: Path) -> list[tuple[str, int]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path.relative_to(folder)), path.stat().st_size) for path in paths]


def _pieces(folder: Path, files: Sequence[SavedFile]) -> list[_Piece]:
    return [_Piece(folder / file.name, begin) for file in files for begin in range(0, file.size, PIECE_BYTES)]


def _digests(pieces: Sequence[_Piece]) -> list[str]:
    """SHA-256 of each. Raises `TrainingError` naming the file that can't be read."""
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        try:
            return list(threads.map(_digest, pieces))
        except OSError as error:
            raise TrainingError(
                f"a file of a checkpoint can't be read ({error}): mend the disk, or restore the file from a copy"
            ) from error


def _digest(piece: _Piece) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
    with piece.path.open("rb", buffering=0) as file:
        file.seek(piece.begin)
        left = PIECE_BYTES
        while left and (count := file.readinto(block[: min(left, READ_BYTES)])):
            digest.update(block[:count])
            left -= count
    return digest.hexdigest()
