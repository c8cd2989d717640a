"""Lines of traces, for tests."""

from rollout_service.tuning.trace_records import AttemptLine, Header, TracedLimits, TracedSegment


def limits(**changes) -> TracedLimits:
    """Of a small run."""
    values = {
        "train_batch_size": 4,
        "n": 2,
        "ratio": 2.0,
        "lookahead": 0,
        "max_lag": 4,
        "admission": "fixed",
        "order": "fifo",
        "cut": "abort",
        "slots": 8,
        "max_response_length": 100,
    }
    return TracedLimits.model_validate(values | changes)


def header(run: str = "test", epoch: int = 1, **changes) -> Header:
    """Of a file."""
    return Header(run=run, service_epoch=epoch, limits=limits(), **changes)


def attempt(sample: str, tokens: int, *, end: str = "stop", before: int = 0, number: int = 1, **changes) -> AttemptLine:
    """One segment of one version."""
    started = changes.pop("started_at", 100.0)
    ended = changes.pop("ended_at", started + 1.0)
    segments = (TracedSegment(version=0, num_tokens=tokens, start=started, end=ended),) if tokens else ()
    values = {
        "sample": sample,
        "group": sample.rpartition(".")[0],
        "prompt": f"p{sample.rpartition('.')[0]}",
        "source": "test",
        "prompt_tokens": 5,
        "attempt": number,
        "worker": "engine-0",
        "round": 1,
        "waited_s": 0.5,
        "started_at": started,
        "ended_at": ended,
        "before": before,
        "segments": segments,
        "end": end,
    }
    return AttemptLine.model_validate(values | changes)
