"""Files that the commands write: whole or not at all, and refused before the work."""

from pathlib import Path

import pytest

from protocol.errors import AprilError, DataError
from rollout_service.tuning.report_files import check_outputs, write_report


def test_what_was_there_stays_if_the_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    write_report(file, b"before")

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(DataError, match="No space left on device"):
            write_report(file, b"after")
    assert file.read_bytes() == b"before"
    write_report(file, b"after")
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("out.json", b"after")], (
        "nothing half-done is left"
    )


def test_a_link_is_followed_and_a_device_is_written_to(tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "out.json"
    link.symlink_to(file)
    write_report(link, b"x")
    assert link.is_symlink()
    assert file.read_bytes() == b"x"
    write_report(Path("/dev/null"), b"x")
    with pytest.raises(DataError, match="No space left"):
        write_report(Path("/dev/full"), b"x")


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    read, out = tmp_path / "in.csv", tmp_path / "out.json"
    read.write_text("a")
    (tmp_path / "link").symlink_to(read)
    check_outputs([out, Path("/dev/null")], [read, tmp_path])
    assert not out.exists(), "to ask is not to write"
    for outputs, message in (
        ([tmp_path / "none" / "out.json"], "name a file in a folder that exists"),
        ([read / "out.json"], "name a file in a folder that exists"),
        ([tmp_path / "link"], "would be replaced"),
        ([out, tmp_path / "." / "out.json"], "written twice"),
    ):
        with pytest.raises(AprilError, match=message) as raised:
            check_outputs(outputs, [read])
        assert raised.value.exit_code == 2
