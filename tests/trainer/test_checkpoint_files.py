"""Manifests of checkpoints, hashed in pieces by several ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.in_process import ThreadRanks, on_ranks
from trainer import checkpoint_files
from trainer.checkpoint_files import CheckpointManifest, damage, write_manifest


class SharingRanks(ThreadRanks):
    def share(self, value: Any) -> Any:
        return self.gather(value)[0]


def on(size: int, work: Any) -> list[Any]:
    def call(ranks: ThreadRanks) -> Any:
        return work(SharingRanks(ranks.rank, ranks.size, ranks._barrier, ranks._shared))

    return on_ranks(size, call)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of 0 to 7 pieces."""
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", 100)
    monkeypatch.setattr(checkpoint_files, "READ_BYTES", 30)  # does not divide a piece
    (tmp_path / "policy").mkdir()
    for name, size in (("empty", 0), ("policy/a", 700), ("policy/b", 99), ("c", 101)):
        (tmp_path / name).write_bytes(bytes(n % 251 for n in range(size)))
    return tmp_path


@pytest.mark.parametrize("writers", [1, 3])
@pytest.mark.parametrize("readers", [1, 4])
def test_any_number_of_ranks_reads_what_any_number_wrote(folder: Path, writers: int, readers: int) -> None:
    on(writers, lambda ranks: write_manifest(folder, ranks))
    manifest = CheckpointManifest.model_validate_json((folder / "manifest.json").read_bytes())
    assert {file.name: len(file.sha256) for file in manifest.files} == {
        "c": 2,
        "empty": 0,
        "policy/a": 7,
        "policy/b": 1,
    }
    assert on(readers, lambda ranks: damage(folder, ranks)) == [None] * readers


@pytest.mark.parametrize("at", [0, 99, 100, 350, 699])
def test_all_ranks_name_the_piece_that_changed(folder: Path, at: int) -> None:
    on(2, lambda ranks: write_manifest(folder, ranks))
    data = bytearray((folder / "policy" / "a").read_bytes())
    data[at] ^= 128
    (folder / "policy" / "a").write_bytes(data)
    words = f"policy/a has another checksum from byte {at // 100 * 100} on than when it was saved"
    assert on(3, lambda ranks: damage(folder, ranks)) == [words] * 3


def test_a_manifest_of_other_pieces_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(1, lambda ranks: write_manifest(folder, ranks))
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", 50)
    assert on(1, lambda ranks: damage(folder, ranks)) == ["manifest.json does not fit its files"]
