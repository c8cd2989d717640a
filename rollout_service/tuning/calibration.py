"""From measured stretches of decoding to an engine model.

A stretch is any time in which an engine took `steps` decode steps and prefilled some tokens. Its duration is linear in
what it did,

    seconds = base * steps + per_sequence * sum of running + per_context_token * sum of context + per_token * prefilled

with sums over the steps, so stretches in which sequences end early are as good as others. The numbers are those with
the least squared relative error, none negative; stretches that something else disturbed count for less (Huber).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import DataError
from rollout_service.tuning.engine_model import CALIBRATION_VERSION, EngineModel
from rollout_service.tuning.trace_records import AttemptLine

Floats = npt.NDArray[np.float64]

NUM_REWEIGHTS = 10  # the weights have settled to three digits by then
HUBER = 1.345  # in units of the residuals' spread: keeps 95 % of the efficiency when nothing is disturbed
MAD_TO_SIGMA = 1.4826  # median absolute deviation to the standard deviation of a normal distribution
SHORTEST_S = 1e-6  # no stretch is predicted to be shorter
MIN_STRETCHES = 5  # four numbers are fitted
MAX_TRACED = 20_000  # attempts: the latest; more make the fit no better


@dataclass(frozen=True, slots=True)
class Stretch:
    """One measurement. `running` and `context`: sums over the steps of sequences and of their tokens."""

    seconds: float
    steps: float
    running: float
    context: float
    prefilled: float = 0.0

    @property
    def row(self) -> tuple[float, float, float, float]:
        """What the four numbers are multiplied by."""
        return self.steps, self.running, self.context, self.prefilled


@dataclass(frozen=True, slots=True)
class Calibration:
    """An engine model and how well it fits. Residuals are measured over predicted, minus one."""

    engine: EngineModel
    r_squared: float
    median_error: float
    worst_error: float
    residuals: tuple[float, ...]
    stretches: tuple[Stretch, ...]

    def to_json(self) -> dict[str, Any]:
        """What `april simulate` and `april tune` read, and the goodness of fit."""
        return {
            "version": CALIBRATION_VERSION,
            "engine": self.engine.to_json(),
            "fit": {
                "num_stretches": len(self.stretches),
                "r_squared": self.r_squared,
                "median_relative_error": self.median_error,
                "worst_relative_error": self.worst_error,
            },
            "stretches": [
                {
                    "seconds": s.seconds,
                    "steps": s.steps,
                    "mean_running": s.running / s.steps if s.steps else 0.0,
                    "mean_context": s.context / s.steps if s.steps else 0.0,
                    "prefilled": s.prefilled,
                    "residual": residual,
                }
                for s, residual in zip(self.stretches, self.residuals, strict=True)
            ],
        }


def fit(stretches: Sequence[Stretch], slots: int, kv_tokens: int) -> Calibration:
    """The engine model of these stretches. Raises DataError if they are too few to tell anything."""
    used = [s for s in stretches if s.seconds > 0 and (s.steps > 0 or s.prefilled > 0)]
    if len(used) < MIN_STRETCHES:
        raise DataError(
            f"{len(used)} stretches of decoding are too few to fit an engine model, it takes {MIN_STRETCHES}: let the "
            "run go on, or calibrate on the engine itself"
        )
    rows = np.array([s.row for s in used], np.float64)
    seconds = np.array([s.seconds for s in used], np.float64)
    numbers = _robust(rows, seconds)
    predicted = rows @ numbers
    residuals = seconds / np.maximum(predicted, SHORTEST_S) - 1
    base, per_sequence, per_context, per_prefill = (float(n) for n in numbers)
    spread = float(np.sum((seconds - seconds.mean()) ** 2))
    return Calibration(
        engine=EngineModel(slots, base, per_sequence, per_context, per_prefill, kv_tokens),
        r_squared=1 - float(np.sum((seconds - predicted) ** 2)) / spread if spread > 0 else 1.0,
        median_error=float(np.median(np.abs(residuals))),
        worst_error=float(np.max(np.abs(residuals))),
        residuals=tuple(float(r) for r in residuals),
        stretches=tuple(used),
    )


def _robust(rows: Floats, seconds: Floats) -> Floats:
    """Numbers x >= 0 that make seconds / (rows @ x) close to 1, by least squares with Huber's weights.

    Errors are relative to what is predicted, not to what was measured: a stretch that took too long would otherwise
    count for little by its size, one that seems too short for much, and the numbers would come out too small.
    """
    numbers = nonnegative_least_squares(rows / seconds[:, None], np.ones(len(rows)))
    for _ in range(NUM_REWEIGHTS):
        predicted = np.maximum(rows @ numbers, SHORTEST_S)
        off = np.abs(seconds / predicted - 1)
        scale = max(1e-9, MAD_TO_SIGMA * float(np.median(off)))
        root = np.sqrt(np.minimum(1.0, HUBER * scale / np.maximum(off, 1e-12))) / predicted
        numbers = nonnegative_least_squares(rows * root[:, None], seconds * root)
    return numbers


def nonnegative_least_squares(rows: Floats, wanted: Floats) -> Floats:
    """x >= 0 with the least |rows @ x - wanted|: of all sets of columns that may be positive, the best that are.

    rows [M, K], wanted [M]; K is small, so that all 2^K sets are tried.
    """
    num_columns = rows.shape[1]
    scale = np.maximum(np.linalg.norm(rows, axis=0), 1e-300)
    best, least = np.zeros(num_columns), float(np.sum(wanted**2))
    for size in range(1, num_columns + 1):
        for columns in itertools.combinations(range(num_columns), size):
            chosen = list(columns)
            solved = np.linalg.lstsq(rows[:, chosen] / scale[chosen], wanted, rcond=None)[0] / scale[chosen]
            if np.any(solved < 0):
                continue
            error = float(np.sum((rows[:, chosen] @ solved - wanted) ** 2))
            if error < least:
                best, least = np.zeros(num_columns), error
                best[chosen] = solved
    return best


def stretches_of_trace(attempts: Sequence[AttemptLine]) -> list[Stretch]:
    """Each attempt as a stretch of its replica, from its start to its last token.

    What else ran there is known from the other attempts; a sequence's context is taken to grow evenly.
    """
    stretches: list[Stretch] = []
    workers: dict[str, list[AttemptLine]] = {}
    for attempt in sorted(attempts, key=lambda a: a.started_at)[-MAX_TRACED:]:
        if attempt.worker is not None and attempt.segments:
            workers.setdefault(attempt.worker, []).append(attempt)
    for of_worker in workers.values():
        stretches += _of_worker(of_worker)
    return stretches


def _of_worker(attempts: Sequence[AttemptLine]) -> list[Stretch]:
    start = np.array([a.started_at for a in attempts])
    end = np.maximum(np.array([a.segments[-1].end for a in attempts]), start)
    tokens = np.array([sum(s.num_tokens for s in a.segments) for a in attempts], np.float64)
    context = np.array([a.prompt_tokens + a.before for a in attempts], np.float64)
    rate = tokens / np.maximum(end - start, 1e-9)
    running = _Integral(start, end, np.ones(len(attempts)), np.zeros(len(attempts)))
    contexts = _Integral(start, end, context, rate)
    order = np.argsort(start)
    prefilled = np.concatenate([[0.0], np.cumsum(context[order])])
    stretches: list[Stretch] = []
    for index in range(len(attempts)):
        seconds = float(end[index] - start[index])
        if seconds <= 0 or tokens[index] < 2:
            continue
        first, last = np.searchsorted(start[order], [start[index], end[index]], side="left")
        steps = float(tokens[index])
        mean_running = running.between(start[index], end[index]) / seconds
        mean_context = contexts.between(start[index], end[index]) / seconds
        prefill = float(prefilled[last] - prefilled[first])
        stretches.append(Stretch(seconds, steps, steps * mean_running, steps * mean_context, prefill))
    return stretches


class _Integral:
    """Integral over time of a sum of pieces, each `value + rate * (t - start)` from its start to its end."""

    def __init__(self, start: Floats, end: Floats, value: Floats, rate: Floats) -> None:
        self._edges = np.unique(np.concatenate([start, end]))
        origin = self._edges[0]
        level, slope = np.zeros(len(self._edges)), np.zeros(len(self._edges))
        constant = value - rate * (start - origin)
        first, last = np.searchsorted(self._edges, start), np.searchsorted(self._edges, end)
        np.add.at(level, first, constant)
        np.add.at(level, last, -constant)
        np.add.at(slope, first, rate)
        np.add.at(slope, last, -rate)
        self._level, self._slope = np.cumsum(level), np.cumsum(slope)
        at = self._edges - origin
        cells = self._level[:-1] * np.diff(at) + self._slope[:-1] * np.diff(at**2) / 2
        self._sums = np.concatenate([[0.0], np.cumsum(cells)])

    def between(self, start: float, end: float) -> float:
        """Between two edges."""
        first, last = np.searchsorted(self._edges, [start, end])
        return float(self._sums[last] - self._sums[first])
