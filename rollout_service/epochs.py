"""The highest epochs that a run has given out, beside the run and not in its Redis.

Always true: a value in the file never sinks, and the file is whole at every moment. An emptied Redis would begin to
count at 1 again and take who is left from before for one of its own.
"""

import json
import os
import threading
from pathlib import Path

from buffer.epochs import Epochs
from protocol.errors import SettingsError, UnavailableError

FILE_NAME = "epochs.json"


class EpochFile:
    """An `EpochKeeper` in the run's folder."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._lock = threading.Lock()

    def read(self) -> Epochs:
        """Zeros if the file isn't there. Raises SettingsError for one that can't be read."""
        try:
            fields = json.loads(self._path.read_text())
            return Epochs(service=int(fields["service"]), trainer=int(fields["trainer"]))
        except FileNotFoundError:
            return Epochs()
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise SettingsError(
                f"{self._path} can't be read ({error}); delete it if the run's Redis was not lost since, or set "
                "another run.dir and run.name"
            ) from error

    def raise_to(self, epochs: Epochs) -> None:
        """See `EpochKeeper.raise_to`. Raises UnavailableError if it can't be written."""
        with self._lock:
            known = self.read()
            raised = Epochs(max(known.service, epochs.service), max(known.trainer, epochs.trainer))
            if raised != known:
                try:
                    self._write(raised)
                except OSError as error:
                    raise UnavailableError(
                        f"{self._path} can't be written ({error.strerror}); mend that, and try again"
                    ) from error

    def _write(self, epochs: Epochs) -> None:
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        with partial.open("w") as file:
            json.dump({"service": epochs.service, "trainer": epochs.trainer}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)
