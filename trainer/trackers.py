"""Trackers that need a library of their own: TensorBoard, Weights & Biases, MLflow.

Always true: a trainer that is started again goes on with the same run of the tracker, whose id is kept in the
trainer's folder; the step is logged as a value of its own, so that an evaluation that ends late is not refused for
coming out of order.
"""

import importlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.settings import RunSettings
from trainer.sample_tables import COLUMNS, SampleRow, markdown_table

RUN_IDS_NAME = "tracker_runs.json"
STEP_AXIS = "trainer/step"
SAMPLES = "samples"
MAX_MLFLOW_BATCH = 500  # MLflow refuses more than 1,000 metrics, and more than 100 parameters, in one call
MAX_MLFLOW_PARAMETERS = 100
# A server that is away holds the start up for half a minute, not for the many minutes of MLflow's own seven tries.
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
MAX_MLFLOW_VALUE = 6000  # characters of one parameter, beyond which MLflow refuses it


class TensorboardLogger:
    """Scalars, and samples and settings as text."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        writer: Any = importlib.import_module("torch.utils.tensorboard.writer")
        self._writer = writer.SummaryWriter(str(folder))
        lines = [f"    {name} = {json.dumps(value)}" for name, value in settings.items()]
        self._writer.add_text("settings", "\n".join(lines), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """A Markdown table."""
        self._writer.add_text(SAMPLES, markdown_table(rows), step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the trainer's folder."""

    def __init__(self, settings: RunSettings, public: Mapping[str, Any]) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        folder = settings.trainer_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = None
        try:
            self._run = self._wandb.init(
                project=settings.trainer.project_name,
                name=_experiment(settings),
                id=run_id(folder, "wandb", secrets.token_hex(8)),
                resume="allow",
                dir=str(folder),
                config=dict(public),
                # The console already has its own tracker, and wandb's capture of it would hold a copy of every line.
                settings=self._wandb.Settings(console="off", silent=True),
            )
        except self._wandb.Error as error:
            raise SettingsError(
                f"wandb can't start ({error}): log in with `wandb login`, set WANDB_MODE=offline, or take wandb out of "
                "trainer.logger"
            ) from error
        self._run.define_metric(STEP_AXIS)
        self._run.define_metric("*", step_metric=STEP_AXIS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a step at once."""
        self._run.log({STEP_AXIS: step, **metrics})

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """A table."""
        table = self._wandb.Table(columns=list(COLUMNS), data=[row.cells() for row in rows])
        self._run.log({STEP_AXIS: step, SAMPLES: table})

    def close(self) -> None:
        """Upload what is left and end the run."""
        self._run.finish()


class MlflowLogger:
    """A run of MLflow, at MLFLOW_TRACKING_URI, or in the trainer's folder if that is not set."""

    def __init__(self, settings: RunSettings, public: Mapping[str, Any]) -> None:
        for name, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(name, value)
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        folder = settings.trainer_dir
        address = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").resolve().as_uri()
        if address.startswith("file:"):
            # MLflow refuses folders unless told that one is meant; without a server there is nothing else.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=address)
            self._id = self._open(settings, folder)
            self._log_settings(public)
        except mlflow.exceptions.MlflowException as error:
            raise SettingsError(
                f"MLflow can't start at {address} ({error}): set MLFLOW_TRACKING_URI, or take mlflow out of "
                "trainer.logger"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a step, in batches."""
        at_ms = int(time.time() * 1000)
        made = [self._entities.Metric(name, value, at_ms, step) for name, value in metrics.items()]
        for start in range(0, len(made), MAX_MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=made[start : start + MAX_MLFLOW_BATCH])

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """A Markdown file among the run's artifacts."""
        self._client.log_text(self._id, markdown_table(rows) + "\n", f"{SAMPLES}/step-{step:06d}.md")

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)

    def _open(self, settings: RunSettings, folder: Path) -> str:
        project = settings.trainer.project_name
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
        kept = run_id(folder, "mlflow")
        if kept:
            self._client.update_run(kept, status="RUNNING")
            return kept
        made = self._client.create_run(experiment_id, run_name=_experiment(settings)).info.run_id
        return run_id(folder, "mlflow", made)

    def _log_settings(self, public: Mapping[str, Any]) -> None:
        # MLflow refuses a parameter that was logged with another value: after a restart the first ones stand.
        known = self._client.get_run(self._id).data.params
        made = [
            self._entities.Param(name, json.dumps(value)[:MAX_MLFLOW_VALUE])
            for name, value in public.items()
            if name not in known
        ]
        for start in range(0, len(made), MAX_MLFLOW_PARAMETERS):
            self._client.log_batch(self._id, params=made[start : start + MAX_MLFLOW_PARAMETERS])


def run_id(folder: Path, tracker: str, new: str = "") -> str:
    """The id of this run at `tracker`: the one kept in `folder`, else `new`, which is kept if it is not empty."""
    path = folder / RUN_IDS_NAME
    ids: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if tracker in ids or not new:
        return ids.get(tracker, "")
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(ids | {tracker: new}, indent=1) + "\n")
    partial.replace(path)
    return new


def _experiment(settings: RunSettings) -> str:
    return settings.trainer.experiment_name or settings.run.name
