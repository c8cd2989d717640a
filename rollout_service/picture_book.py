"""The pictures of a running service, painted when somebody asks.

Always true:
- what is drawn from is a snapshot: painting runs in a thread and holds up neither the event loop nor the run;
- a picture is painted at most once for each change, and once a second where it shows what runs; who asks meanwhile is
  given the same bytes;
- at most MAX_PAINTED are kept.
"""

import asyncio
import gzip
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from protocol.watching import Picture, Timeline
from rollout_service.observer import Observer
from rollout_service.parts import ServiceParts
from rollout_service.watch.as_trace import trace_of
from rollout_service.watch.forecast_job import make_job
from rollout_service.watch.moments import moments
from rollout_service.watch.predictor import Predictor
from rollout_service.watch.ratio import ratio
from rollout_service.watch.recent import PICTURES, View, Watch
from rollout_service.watch.tail import tail
from rollout_service.watch.timeline import timeline, timeline_json

MAX_PAINTED = 16  # a page asks for five; others choose their own number of rounds
COMPRESS_FROM = 1024  # bytes: less is not worth it
GZIP_LEVEL = 4  # numbers as text: a tenth of the size, at a third of the time of level 9
FRESH_S = 1.0  # what runs now is looked at once a second


@dataclass(frozen=True, slots=True)
class Painted:
    """A picture as JSON, plain and compressed (None where it is small), with the tag that names these bytes."""

    plain: bytes
    packed: bytes | None
    tag: str


class PictureBook:
    """Of one service that is watched."""

    def __init__(self, parts: ServiceParts, watch: Watch, observer: Observer) -> None:
        self._parts = parts
        self._watch = watch
        self._observer = observer
        self._predictor = Predictor()
        self._kept: OrderedDict[tuple[str, int, int], tuple[tuple[float, ...], Painted]] = OrderedDict()
        self._locks = {name: asyncio.Lock() for name in PICTURES}

    def changes(self) -> dict[str, int]:
        """A number for each picture, which grows when it would look different."""
        settings = self._observer.choices()
        mine = hash((settings.ratio, settings.lookahead, settings.recommended))
        own = {"steps": self._watch.steps.num_changes, "ratio": self._predictor.num_changes + mine}
        return {name: own.get(name, count) for name, count in self._watch.changes.items()}

    def view(self, running: bool) -> View:
        """A snapshot, with what runs now if that is wanted."""
        trace = self._parts.sample_parts.trace
        now_running = tuple(trace.running()) if running else ()
        return self._watch.view(trace.now(), trace.round_so_far() if running else None, now_running)

    async def get(self, name: str, num_rounds: int, max_samples: int) -> Painted:
        """A picture; `num_rounds` and `max_samples` are the timeline's."""
        key = (name, num_rounds, max_samples) if name == "timeline" else (name, 0, 0)
        async with self._locks[name]:
            if name == "ratio":
                self._predictor.wanted(self._observer.choices(), self._job())
            asked = (float(self.changes()[name]), time.monotonic() // FRESH_S if name in ("timeline", "ratio") else 0.0)
            kept = self._kept.get(key)
            if kept is None or kept[0] != asked:
                kept = (asked, await asyncio.to_thread(_paint, self._painter(name, num_rounds, max_samples)))
                self._kept[key] = kept
            self._kept.move_to_end(key)
            if len(self._kept) > MAX_PAINTED:
                self._kept.popitem(last=False)
            return kept[1]

    async def close(self) -> None:
        """End what is being predicted."""
        await self._predictor.close()

    def _painter(self, name: str, num_rounds: int, max_samples: int) -> Callable[[], Picture]:
        """What paints the picture, from what is known now."""
        match name:
            case "timeline":
                return partial(timeline, self.view(running=True), num_rounds, max_samples)
            case "tail":
                return partial(tail, self.view(running=True))
            case "moments":
                return partial(moments, self.view(running=False))
            case "steps":
                return self._watch.steps.snapshot().picture
            case _:
                return partial(ratio, self._observer.choices(), self._parts.loop.autotune.status(), self._predictor)

    def _job(self) -> Callable[[], dict[str, object]]:
        view, settings = self.view(running=True), self._parts.settings
        choices = self._observer.choices()
        return lambda: make_job(trace_of(view, settings.run.name), choices, settings, settings.run_dir)


def _paint(painter: Callable[[], Picture]) -> Painted:
    picture = painter()
    plain = timeline_json(picture) if isinstance(picture, Timeline) else picture.model_dump_json().encode()
    packed = gzip.compress(plain, GZIP_LEVEL, mtime=0) if len(plain) >= COMPRESS_FROM else None
    return Painted(plain, packed, f'"{hashlib.blake2b(plain, digest_size=12).hexdigest()}"')
