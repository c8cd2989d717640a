"""From what a user names (settings, a run's folder, a trace, a list of lengths) to what is simulated.

Always true: what is named explicitly wins over the run's settings, those over the trace's header, and that over the
defaults, which are those of a small run; where a number is a default, the report says so.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.errors import DataError, SettingsError
from protocol.settings import RunSettings
from protocol.settings.rollout import EngineBackend
from rollout_service.tuning.calibration import Calibration, fit, stretches_of_trace
from rollout_service.tuning.engine_model import EngineModel, read_engine
from rollout_service.tuning.lengths import LengthSource, lengths_of_trace
from rollout_service.tuning.lengths_stats import install_s, trainer_step_s
from rollout_service.tuning.report_files import write_report
from rollout_service.tuning.simulation import TrainerModel
from rollout_service.tuning.sweep import Scenario
from rollout_service.tuning.trace_open import limits_of_settings
from rollout_service.tuning.trace_reader import Trace, read_trace
from rollout_service.tuning.trace_records import TracedLimits
from rollout_service.tuning.trace_writer import trace_folder

DEFAULT_GROUPS = 16
DEFAULT_SAMPLES = 8
CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True, slots=True)
class Given:
    """What was named explicitly; None leaves it to the settings, the trace, or the default."""

    groups: int | None = None
    samples: int | None = None
    slots: int | None = None
    max_lag: int | None = None
    trainer_s: float | None = None
    install_s: float | None = None
    engine: Path | None = None
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What there is to build on."""

    limits: TracedLimits | None = None
    settings: RunSettings | None = None
    trace: Trace | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario, where its numbers come from, and the settings that the run has now."""

    scenario: Scenario
    sources: tuple[str, ...]
    limits: TracedLimits | None


def known_of_trace(path: Path) -> Known:
    """What a trace says."""
    trace = read_trace(path)
    return Known(limits=trace.limits, trace=trace, folder=folder_of(path))


def folder_of(path: Path) -> Path:
    """The run's folder (where a calibration is kept) of what was named: itself, its trace folder, or a file of that."""
    folder = path if path.is_dir() else path.parent
    return folder.parent if folder == trace_folder(folder.parent) else folder


def known_of_settings(settings: RunSettings) -> Known:
    """What the settings say, and the trace of the run if it has left one."""
    folder = settings.run_dir
    left = any(trace_folder(folder).glob("*.jsonl"))
    trace = read_trace(folder, settings.data.max_response_length) if left else None
    return Known(limits_of_settings(settings), settings, trace, folder)


def prepare(known: Known, lengths: LengthSource | None, given: Given) -> Prepared:
    """The scenario. Raises SettingsError if nothing says how long responses are."""
    sources: list[str] = []
    if lengths is None:
        if known.trace is None:
            raise SettingsError(
                "nothing says how long responses are: name a run that has left a trace, or give --lengths-csv or "
                "--lengths"
            )
        lengths = lengths_of_trace(known.trace)
        sources += known.trace.notes
    limits = known.limits
    engine, source = _engine(known, given)
    sources.append(source)
    if limits is not None and limits.samples_ratio > 1:
        sources.append(
            f"samples_ratio: the run's {limits.samples_ratio:g} is not simulated: here a group starts n samples and "
            "waits for all of them"
        )
    trainer = _trainer(known, given)
    sources.append(
        f"trainer: {trainer.step_s:.3g} s a step, {trainer.install_s:.3g} s an install"
        + ("" if known.trace or given.trainer_s is not None else " (not known: give --trainer-s)")
    )
    scenario = Scenario(
        lengths=lengths,
        engine=engine,
        trainer=trainer,
        batch_groups=given.groups or (limits.train_batch_size if limits else DEFAULT_GROUPS),
        group_samples=given.samples or (limits.n if limits else DEFAULT_SAMPLES),
        max_lag=given.max_lag if given.max_lag is not None else limits.max_lag if limits else None,
    )
    return Prepared(scenario, tuple(sources), limits)


def _trainer(known: Known, given: Given) -> TrainerModel:
    step_s = trainer_step_s(known.trace) if known.trace else None
    installing_s = install_s(known.trace) if known.trace else None
    return TrainerModel(
        step_s=given.trainer_s if given.trainer_s is not None else step_s or 0.0,
        install_s=given.install_s if given.install_s is not None else installing_s or 0.0,
    )


def _engine(known: Known, given: Given) -> tuple[EngineModel, str]:
    limits = known.limits
    slots = given.slots or (limits.slots if limits else None)
    engine, source = _engine_model(known, given)
    engine = replace(engine, slots=slots or engine.slots)
    if engine.decodes_in_no_time:
        raise SettingsError(
            f"{source.removeprefix('engine: ')}: a decode step takes no time, so there is no throughput to compare; "
            "give --engine with numbers that `april calibrate` measured"
        )
    if given.kv_tokens is not None:
        engine = replace(engine, kv_tokens=given.kv_tokens)
    if given.slots is None and limits is None and given.engine is None:
        groups, samples = given.groups or DEFAULT_GROUPS, given.samples or DEFAULT_SAMPLES
        engine = replace(engine, slots=groups * samples)
        source += f", {engine.slots} slots (as many as a batch has samples: give --slots)"
    return engine, source


def _engine_model(known: Known, given: Given) -> tuple[EngineModel, str]:
    if given.engine is not None:
        return read_engine(given.engine), f"engine: {given.engine}"
    file = known.folder / CALIBRATION_FILE if known.folder else None
    if file is not None and file.is_file():
        return read_engine(file), f"engine: {file}"
    settings = known.settings
    if settings is not None and settings.engine.backend is EngineBackend.SIMULATED:
        return simulated_model(settings), "engine: the simulated one's own numbers"
    if known.trace is not None and known.trace.limits is not None:
        found = calibration_of_trace(known.trace)
        return found.engine, f"engine: fitted from the trace (median error {found.median_error:.0%})"
    return EngineModel(slots=1), "engine: assumed numbers (not calibrated: run `april calibrate`)"


def calibration_of_trace(trace: Trace) -> Calibration:
    """An engine model from the times in a trace. Raises DataError if it says too little."""
    limits = trace.limits
    if limits is None:
        raise DataError(f"{trace.name} has lengths only and says nothing of an engine: calibrate on RUN.toml")
    stretches = stretches_of_trace([attempt for sample in trace.samples for attempt in sample.attempts])
    found = fit(stretches, limits.slots // limits.num_replicas, limits.kv_tokens // limits.num_replicas)
    return replace(found, engine=found.engine.scaled(limits.num_replicas))


def simulated_model(settings: RunSettings) -> EngineModel:
    """The engine model that the simulated engine is."""
    simulated = settings.engine.simulated
    engine = EngineModel(
        slots=settings.engine.max_num_seqs,
        step_base_s=simulated.step_base_s,
        step_per_sequence_s=simulated.step_per_sequence_s,
        prefill_per_token_s=simulated.prefill_per_token_s,
    )
    return engine.scaled(settings.engine.num_replicas)


def write_json(path: Path, data: object) -> None:
    """Write a report. Raises DataError if the file can't be written."""
    write_report(path, (json.dumps(data, indent=2) + "\n").encode())
