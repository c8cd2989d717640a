"""The round timeline: every sample that was in an engine in the last rounds, those that run now included."""

import json
from collections.abc import Iterable

from protocol.watching import AttemptBar, InstallSpan, RoundSpan, SampleBar, SegmentBar, Timeline
from rollout_service.watch.recent import Held, Line, View

DEFAULT_ROUNDS = 10
DEFAULT_SAMPLES = 20_000  # some megabytes of JSON, a tenth of that on the wire
MAX_SAMPLES = 60_000
SLICE = 500  # some milliseconds
ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False)


def timeline(view: View, num_rounds: int = DEFAULT_ROUNDS, max_samples: int = DEFAULT_SAMPLES) -> Timeline:
    """The last `num_rounds` offered rounds and the one that fills; of their samples the newest `max_samples`."""
    rounds: list[RoundSpan] = list(view.rounds[-num_rounds:]) if num_rounds else []
    if view.filling is not None:
        rounds.append(view.filling)
    begin = rounds[0].started_at if rounds else view.now
    running = {line["sample"]: line for line in view.running}
    seen: list[Held | Line] = [h for h in view.samples if h.attempts[-1].end >= begin or h.sample in running]
    known = {held.sample for held in view.samples}
    seen += [line for name, line in running.items() if name not in known]
    seen.sort(key=_first_start)
    shown = seen[-max_samples:] if max_samples else []
    return Timeline.model_construct(
        now=view.now,
        rounds=rounds,
        samples=[_bar(one, running.get(one.sample)) if isinstance(one, Held) else _first(one) for one in shown],
        installs=[InstallSpan(version=v, start=start, end=end) for v, start, end in view.installs if end >= begin],
        trained=[(step, at) for step, at in view.trained if at >= begin],
        num_left_out=len(seen) - len(shown),
    )


def timeline_json(picture: Timeline) -> bytes:
    """The picture as JSON, made in slices: one call for all of it would keep the event loop from its turn."""
    head = picture.model_copy(update={"samples": []}).model_dump_json(warnings=False)
    before, empty, after = head.partition('"samples":[]')
    assert empty, "rounds have no text in them"
    bars = picture.samples
    slices = (bars[start : start + SLICE] for start in range(0, len(bars), SLICE))
    text = ",".join(ENCODER.encode(part)[1:-1] for part in slices)
    return f'{before}"samples":[{text}]{after}'.encode()


def _first_start(one: Held | Line) -> float:
    return one.attempts[0].start if isinstance(one, Held) else one["started_at"]


def _bar(held: Held, running: Line | None) -> SampleBar:
    attempts = [AttemptBar(*attempt[:7], _segments(attempt.segments)) for attempt in held.attempts]
    if running is not None:
        attempts.append(_running(running))
    return SampleBar(held.sample, held.group, held.prompt, held.reward, held.failed, attempts)


def _first(line: Line) -> SampleBar:
    return SampleBar(line["sample"], line["group"], line["prompt"], None, None, [_running(line)])


def _running(line: Line) -> AttemptBar:
    about = (line["worker"], line["round"], line["started_at"], line["ended_at"])
    return AttemptBar(*about, "running", line["before"], line["waited_s"], _segments(line["segments"]))


def _segments(segments: Iterable[Iterable[float]]) -> list[SegmentBar]:
    return [SegmentBar(*segment) for segment in segments]  # pyright: ignore[reportArgumentType]  as a line has them
