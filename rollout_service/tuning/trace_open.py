"""The trace of a run, as its settings want it."""

from collections.abc import Sequence

from protocol.settings import RunSettings
from rollout_service.scheduler.limits import kv_tokens_of
from rollout_service.tuning.trace_recorder import LineSink, TraceRecorder
from rollout_service.tuning.trace_records import Header, TracedLimits
from rollout_service.tuning.trace_writer import TraceWriter, trace_folder


def open_trace(settings: RunSettings, service_epoch: int, sinks: Sequence[LineSink] = ()) -> TraceRecorder:
    """A recorder that hands its lines to `sinks` and, unless `trace.enabled` is off, to files in the run's folder."""
    batch_groups = settings.data.train_batch_size
    if not settings.trace.enabled:
        return TraceRecorder(sinks, batch_groups)
    header = Header(run=settings.run.name, service_epoch=service_epoch, limits=limits_of_settings(settings))
    folder = trace_folder(settings.run_dir)
    writer = TraceWriter(folder, header, settings.trace.max_file_bytes, settings.trace.max_files)
    return TraceRecorder([writer.put, *sinks], batch_groups, writer.close)


def limits_of_settings(settings: RunSettings) -> TracedLimits:
    """What a header says of the run."""
    rollout = settings.rollout
    return TracedLimits(
        train_batch_size=settings.data.train_batch_size,
        n=rollout.n,
        ratio=rollout.ratio,
        samples_ratio=rollout.samples_ratio,
        lookahead=rollout.lookahead,
        max_lag=rollout.max_lag,
        admission=rollout.admission,
        order=rollout.order,
        cut=rollout.cut.value,
        slots=settings.engine.max_num_seqs * settings.engine.num_replicas,
        num_replicas=settings.engine.num_replicas,
        max_response_length=settings.data.max_response_length,
        kv_tokens=kv_tokens_of(settings),
    )
