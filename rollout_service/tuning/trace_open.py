"""The trace of a run, as its settings want it."""

from protocol.settings import RunSettings
from rollout_service.scheduler.limits import kv_tokens_of
from rollout_service.tuning.trace_recorder import TraceRecorder
from rollout_service.tuning.trace_records import Header, TracedLimits
from rollout_service.tuning.trace_writer import TraceWriter, trace_folder


def open_trace(settings: RunSettings, service_epoch: int) -> TraceRecorder:
    """A recorder into the run's folder, or one that records nothing."""
    if not settings.trace.enabled:
        return TraceRecorder()
    header = Header(run=settings.run.name, service_epoch=service_epoch, limits=limits_of_settings(settings))
    folder = trace_folder(settings.run_dir)
    writer = TraceWriter(folder, header, settings.trace.max_file_bytes, settings.trace.max_files)
    return TraceRecorder(writer.put, settings.data.train_batch_size, writer.close)


def limits_of_settings(settings: RunSettings) -> TracedLimits:
    """What a header says of the run."""
    rollout = settings.rollout
    return TracedLimits(
        train_batch_size=settings.data.train_batch_size,
        n=rollout.n,
        ratio=rollout.ratio,
        lookahead=rollout.lookahead,
        max_lag=rollout.max_lag,
        admission=rollout.admission.value,
        order=rollout.order.value,
        cut=rollout.cut.value,
        slots=settings.engine.max_num_seqs * settings.engine.num_replicas,
        num_replicas=settings.engine.num_replicas,
        max_response_length=settings.data.max_response_length,
        kv_tokens=kv_tokens_of(settings),
    )
