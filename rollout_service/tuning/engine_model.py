"""How long an engine takes: a decode step by what runs in it, a prefill by its tokens, and how much KV cache there is.

A decode step reads the weights once, does some work for each sequence, and reads the KV cache of all of them:

    step = base + per_sequence * running + per_context_token * context

which holds below and at the point where the engine is saturated; fitted by `april calibrate`, or from a trace.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from protocol.errors import DataError

CALIBRATION_VERSION = 1
LONGEST_S = 1e6  # for one step or token: eleven days, so that no sum of times overflows
MAX_COUNT = 1 << 40  # slots and tokens
COUNTS = frozenset({"slots", "kv_tokens"})


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Seconds by counts. `slots`: sequences decoded at once; `kv_tokens`: what the KV cache holds, 0 is no bound."""

    slots: int
    step_base_s: float = 0.005
    step_per_sequence_s: float = 0.00014
    step_per_context_token_s: float = 0.0
    prefill_per_token_s: float = 0.00002
    kv_tokens: int = 0

    @property
    def decodes_in_no_time(self) -> bool:
        """Nothing that a decode step does takes time, so that there is no throughput to speak of."""
        return not (self.step_base_s or self.step_per_sequence_s or self.step_per_context_token_s)

    def step_s(self, running: int, context: int) -> float:
        """One decode step of `running` sequences with `context` tokens (prompts and responses) between them."""
        return self.step_base_s + self.step_per_sequence_s * running + self.step_per_context_token_s * context

    def steps_s(self, num_steps: int, running: int, context: int) -> float:
        """`num_steps` decode steps, each of which adds a token to every sequence's context."""
        grown = running * num_steps * (num_steps - 1) / 2
        return num_steps * self.step_s(running, context) + self.step_per_context_token_s * grown

    def steps_within(self, seconds: float, running: int, context: int) -> int:
        """How many whole decode steps fit into a time."""
        first = self.step_s(running, context)
        growth = self.step_per_context_token_s * running / 2
        if growth <= 0:
            return int(seconds / first) if first > 0 else 0
        linear = first - growth
        return max(0, int((math.sqrt(linear * linear + 4 * growth * max(seconds, 0.0)) - linear) / (2 * growth)))

    def steps_to_full(self, running: int, context: int) -> int | None:
        """Decode steps until the KV cache is full; None if it has no bound or nothing runs."""
        if not self.kv_tokens or not running:
            return None
        return max(0, (self.kv_tokens - context) // running)

    def scaled(self, num_replicas: int) -> "EngineModel":
        """So many replicas with the load in equal parts, as one engine: each does its share of the work at once."""
        return replace(
            self,
            slots=self.slots * num_replicas,
            kv_tokens=self.kv_tokens * num_replicas,
            step_per_sequence_s=self.step_per_sequence_s / num_replicas,
            step_per_context_token_s=self.step_per_context_token_s / num_replicas,
            prefill_per_token_s=self.prefill_per_token_s / num_replicas,
        )

    def to_json(self) -> dict[str, Any]:
        """Its numbers by name."""
        return asdict(self)


def engine_of_json(data: Mapping[str, Any], where: str) -> EngineModel:
    """The engine model in what `april calibrate` wrote. Raises DataError with what is wrong."""
    numbers = data.get("engine")
    if data.get("version") != CALIBRATION_VERSION or not isinstance(numbers, Mapping):
        raise DataError(f"{where} is no calibration of this version of april: write it anew with `april calibrate`")
    names = {field.name for field in fields(EngineModel)}
    values: dict[str, Any] = {str(name): value for name, value in numbers.items()}  # pyright: ignore[reportUnknownVariableType]  JSON
    wrong = sorted(n for n, v in values.items() if n not in names or not _fits(n, v))
    if wrong or names - set(values):
        raise DataError(
            f"{where} has no use as an engine's numbers ({', '.join(wrong) or 'some are missing'}): write it anew"
        )
    return EngineModel(**values)


def _fits(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name in COUNTS:
        return isinstance(value, int) and (name == "kv_tokens" or value >= 1) and 0 <= value <= MAX_COUNT
    return 0 <= value <= LONGEST_S


def read_engine(path: Path) -> EngineModel:
    """The engine model in a file that `april calibrate` wrote."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"can't read the calibration {path} ({error}); write it with `april calibrate`") from error
    if not isinstance(data, dict):
        raise DataError(f"{path} is no calibration: write it with `april calibrate`")
    return engine_of_json(data, str(path))  # pyright: ignore[reportUnknownArgumentType]  JSON
