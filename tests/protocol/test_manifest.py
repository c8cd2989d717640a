"""Manifests of published weights."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from protocol.errors import WeightsError
from protocol.manifest import read_manifest, verify_manifest, write_manifest


@pytest.fixture
def folder(tmp_path):
    save_file({"x": np.arange(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    write_manifest(tmp_path, 3)
    return tmp_path


def test_verified_manifest_names_step_and_files(folder):
    manifest = verify_manifest(folder)
    assert manifest.step == 3
    assert [f.name for f in manifest.files] == ["model.safetensors"]


def test_changed_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(WeightsError, match="another checksum"):
        verify_manifest(folder)


def test_missing_file(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="lacks the plain file model"):
        verify_manifest(folder)


def test_unfinished_folder(tmp_path):
    with pytest.raises(WeightsError, match="publish a finished folder"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../evil.safetensors", ".hidden", "a/b"])
def test_names_outside_the_folder(folder, name):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("model.safetensors", name))
    with pytest.raises(WeightsError, match="no weights files of its own"):
        verify_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"step": 1}', '{"step": 1, "files": []}'])
def test_not_a_manifest(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(WeightsError, match="publish the folder again"):
        verify_manifest(folder)
