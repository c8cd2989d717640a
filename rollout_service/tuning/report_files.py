"""Files that the commands write.

Always true: a file appears whole or not at all, so that a command that is killed leaves the one before; whether it can
be written is known before the work that it takes.
"""

import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from protocol.errors import DataError, SettingsError


def check_outputs(outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """Raise before the work if a file can't be written afterwards, would replace what is read, or is named twice."""
    read = {path.resolve() for path in inputs if path.is_file()}
    seen: set[Path] = set()
    for path in outputs:
        where = path.resolve()
        if where in read:
            raise SettingsError(f"{path} is read by this command and would be replaced: write to another file")
        if where in seen:
            raise SettingsError(f"{path} is to be written twice: name a file for each")
        seen.add(where)
        _check_writable(path)


def make_folder(path: Path) -> Path:
    """Make a run's folder. Raises DataError if it can't be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        return path
    except OSError as error:
        raise DataError(
            f"can't make the folder {path} ({error.strerror}); set another run.dir, or give --json"
        ) from error


def write_report(path: Path, data: bytes) -> None:
    """Write a file, in place of what was there. Raises DataError if that fails."""
    try:
        if _is_device(path):
            path.write_bytes(data)
            return
        where = path.resolve()  # what a link names is replaced, not the link
        partial = where.with_name(f".{where.name}.{os.getpid()}.partial")
        try:
            partial.write_bytes(data)
            partial.replace(where)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _check_writable(path: Path) -> None:
    try:
        if _is_device(path):
            return
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from error


def _is_device(path: Path) -> bool:
    """A pipe or a device, such as /dev/stdout, is written to and not replaced."""
    return path.exists() and not stat.S_ISREG(path.stat().st_mode)


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        f"can't write {path} ({error.strerror}); name a file in a folder that exists and that you may write to"
    )
