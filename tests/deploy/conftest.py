"""Scripts as `april from-verl` translates them."""

from pathlib import Path

import pytest

from deploy.from_verl import convert, run_toml
from protocol.settings import load_settings


@pytest.fixture
def translated(tmp_path: Path, monkeypatch):
    """Rows by verl's key, and the settings that the written file loads as."""
    monkeypatch.setenv("HOME", "/home/me")

    def make(script: str):
        path = tmp_path / "run.sh"
        path.write_text(script)
        translation = convert(path)
        toml = tmp_path / "RUN.toml"
        toml.write_text(run_toml(translation, path))
        return {row.key: row for row in translation.rows if row.key}, load_settings(toml)

    return make
