"""Spans of the trainer's steps, on rank 0: a step, and its parts as children of it.

Always true: without tracing every method returns at once; a part may be told before or after its step, since the ids of
a step's span follow from the run, the trainer's epoch and the step.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from protocol.logs import process_fields
from protocol.settings import RunSettings
from protocol.span_ids import SpanIds, step_ids
from protocol.tracing import open_tracing

if TYPE_CHECKING:
    from protocol.otel import Tracing

TOLD = (
    "reward/mean",
    "response/length_mean",
    "lag/mean",
    "off_policy/token_share",
    "importance/ess",
    "tokens/trained",
    "timing_s/logprobs",
    "timing_s/critic",
    "timing_s/update",
)


class StepSpans:
    """Of one trainer; `is_main`: on the other ranks there are none."""

    def __init__(self, settings: RunSettings, is_main: bool) -> None:
        self._tracing: Tracing | None = open_tracing(settings.tracing, "april-trainer") if is_main else None
        self._run = settings.run.name

    @contextmanager
    def part(self, name: str, step: int) -> Generator[None]:
        """Time a part of `step`; one that ends with an error says so."""
        if self._tracing is None:
            yield
            return
        began, error = time.time(), "it was broken off"
        try:
            yield
            error = None
        finally:
            self._tracing.span(name, began, time.time(), {"step": step}, parent=self._ids(step), error=error)

    def step(self, step: int, took_s: float, version: int, groups: Sequence[str], metrics: Mapping[str, float]) -> None:
        """`step` is over just now, after `took_s`; `groups` it was trained on, `version` it was trained from."""
        if self._tracing is None:
            return
        told = {name: metrics[name] for name in TOLD if name in metrics}
        attributes = {"step": step, "version": version, "groups": list(groups), **told}
        now = time.time()
        self._tracing.span("step", now - took_s, now, attributes, ids=self._ids(step))

    def close(self) -> None:
        """Export what waits."""
        if self._tracing is not None:
            self._tracing.close()

    def _ids(self, step: int) -> SpanIds:
        return step_ids(self._run, int(process_fields().get("trainer_epoch", 0)), step)
