"""What is remembered as the trace that tuning reads, with what runs now counted as unfinished."""

from collections.abc import Callable
from typing import NamedTuple, cast

from protocol.watching import AttemptBar
from rollout_service.tuning.trace_reader import Trace, TracedSample
from rollout_service.tuning.trace_records import AttemptLine, InstallLine, RoundLine, TracedSegment, TrainedLine
from rollout_service.watch.recent import Held, View


def trace_of(view: View, run: str) -> Trace:
    """All that is remembered. Nothing is validated again: it came from lines of the trace."""
    return Trace(
        run=run,
        limits=view.limits,
        samples=traced_samples(view, _lines),
        rounds=[RoundLine.model_construct(**span.model_dump()) for span in view.rounds],
        trained=[TrainedLine(step=step, at=at) for step, at in view.trained],
        installs=[InstallLine(version=v, started_at=start, ended_at=end) for v, start, end in view.installs],
        notes=[],
    )


class _Stay(NamedTuple):
    """What statistics ask of a stay."""

    end: str


_STAYS = {how: _Stay(how) for how in ("stop", "length", "parked", "lost")}


def ends_only(held: Held) -> list[AttemptLine]:
    """Stays of which only the end is known: a tenth of the time, for statistics that ask for no more."""
    return cast(list[AttemptLine], [_STAYS[bar.how] for bar in held.attempts])


def _lines(held: Held) -> list[AttemptLine]:
    return [_line(held, bar, number) for number, bar in enumerate(held.attempts, 1)]


def traced_samples(view: View, stays: Callable[[Held], list[AttemptLine]]) -> list[TracedSample]:
    """Samples with their stays; one that runs is as long as it is now."""
    samples = {held.sample: TracedSample(*held[:9], stays(held)) for held in view.samples}
    for line in view.running:
        tokens = line["before"] + sum(segment[1] for segment in line["segments"])
        sample = samples.get(line["sample"])
        if sample is None:
            about = (line["sample"], line["group"], line["prompt"], line["source"], line["prompt_tokens"])
            samples[line["sample"]] = TracedSample(*about, tokens, False)
        else:
            sample.num_tokens, sample.finished = tokens, False
    return list(samples.values())


def _line(held: Held, bar: AttemptBar, number: int) -> AttemptLine:
    return AttemptLine.model_construct(
        sample=held.sample,
        group=held.group,
        prompt=held.prompt,
        source=held.source,
        prompt_tokens=held.prompt_tokens,
        attempt=number,
        worker=bar.worker,
        round=bar.round,
        waited_s=bar.waited_s,
        started_at=bar.start,
        ended_at=bar.end,
        before=bar.before,
        segments=tuple(TracedSegment(*segment) for segment in bar.segments),
        end=bar.how,
    )
