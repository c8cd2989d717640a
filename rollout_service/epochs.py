"""The highest epochs that a run has given out, beside the run and not in its Redis.

Always true: a value in the file never sinks, the file is whole at every moment, and a disk that takes no file holds up
nothing. An emptied Redis would begin to count at 1 again and take who is left from before for one of its own.
"""

import json
import logging
import os
import threading
from pathlib import Path

from buffer.epochs import Epochs
from protocol.errors import SettingsError

log = logging.getLogger(__name__)

FILE_NAME = "epochs.json"
LARGEST = 1 << 53  # that Redis' Lua counts exactly


class EpochFile:
    """An `EpochKeeper` in the run's folder."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._lock = threading.Lock()

    def read(self) -> Epochs:
        """Zeros if the file isn't there. Raises SettingsError for one that can't be read."""
        try:
            fields = json.loads(self._path.read_text())
            return Epochs(service=_count(fields["service"]), trainer=_count(fields["trainer"]))
        except FileNotFoundError:
            return Epochs()
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise SettingsError(
                f"{self._path} can't be read ({error}); delete it if the run's Redis was not lost since, or set "
                "another run.dir and run.name"
            ) from error

    def raise_to(self, epochs: Epochs) -> None:
        """See `EpochKeeper.raise_to`. What can't be written is a warning: it matters only if Redis is lost, too."""
        with self._lock:
            try:
                known = self.read()
                raised = Epochs(max(known.service, epochs.service), max(known.trainer, epochs.trainer))
                if raised != known:
                    self._write(raised)
            except (OSError, SettingsError) as error:
                log.warning(
                    "%s is not up to date (%s): should the run's Redis be emptied, a trainer or service from before "
                    "may not be fenced",
                    self._path,
                    error,
                    extra={"event": "epochs_not_kept"},
                )

    def _write(self, epochs: Epochs) -> None:
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            with partial.open("w") as file:
                json.dump({"service": epochs.service, "trainer": epochs.trainer}, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST:
        raise ValueError(f"{value!r} is no epoch")
    return value
