"""What the service remembered before it was stopped, from the files that it and the trainer left."""

import logging
from pathlib import Path

from protocol.errors import DataError
from protocol.settings import RunSettings
from rollout_service.tuning.trace_writer import trace_folder
from rollout_service.watch.folder import METRICS_NAME, TraceFolder, step_lines
from rollout_service.watch.recent import Watch

log = logging.getLogger(__name__)

NEWEST_BYTES = 16 << 20  # of the trace: some 50,000 lines, which are read in a second while the engines start


def restore_watch(watch: Watch, settings: RunSettings) -> None:
    """Remember the last part of the run so far, if it has left any. A trace that can't be read costs a warning."""
    if any(trace_folder(settings.run_dir).glob("*.jsonl")):
        try:
            folder = TraceFolder(settings.run_dir, NEWEST_BYTES)
            for line in folder.lines():
                if folder.header is not None and folder.header.run == settings.run.name:
                    watch.put(line)
        except DataError as error:
            log.warning("pictures begin anew: %s", error)
    file: Path = settings.trainer_dir / METRICS_NAME
    if file.is_file():
        for step, metrics in step_lines(file, []):
            watch.steps.put(step, metrics)
