"""Labels are read once before a run begins, so that a bad one is a sentence at the start and not a failed sample later.

The reading happens in a scorer's worker: the service itself imports neither a user's code nor a symbolic algebra, and
a label that makes a parser hang ends by a time-out.
"""

import math
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from protocol.errors import DataError
from protocol.samples import Prompt
from protocol.settings import RunSettings
from rollout_service.rewards.frames import encode_frame, read_frame
from rollout_service.rewards.process import LOAD_TIMEOUT_S, ScorerConfig, kill_group, worker_command

CHUNK_SIZE = 128  # labels in one frame: a hanging one is looked for among so many
MAX_LABELS = 20_000  # about 20 s of parsing; of more labels an even spread is read
MAX_SHOWN_CHARS = 60


def check_labels(prompts: Sequence[Prompt], settings: RunSettings) -> None:
    """Raise DataError, naming the prompt, for the first label that the scorer of `settings` can't read.

    Blocks: call it in a thread from asynchronous code. Raises DataError as well if the scorer can't be loaded.
    """
    stride = max(1, math.ceil(len(prompts) / MAX_LABELS))
    chosen = prompts[::stride]
    config = ScorerConfig(settings.reward.name, settings.reward.settings)
    with _worker(config) as worker:
        for start in range(0, len(chosen), CHUNK_SIZE):
            _check_chunk(worker, chosen[start : start + CHUNK_SIZE], settings.reward.timeout_s)


def _check_chunk(worker: "subprocess.Popen[bytes]", prompts: Sequence[Prompt], timeout_s: float) -> None:
    labels = [[prompt.ground_truth, prompt.data_source] for prompt in prompts]
    reply = _ask(worker, {"labels": labels}, LOAD_TIMEOUT_S + timeout_s)
    if reply is None:
        first, last = prompts[0].prompt_id, prompts[-1].prompt_id
        raise DataError(f"the scorer hangs or dies over a label between {first} and {last}; look at those rows")
    for prompt, fault in zip(prompts, reply["faults"], strict=True):
        if fault is not None:
            raise DataError(f"{prompt.prompt_id}: the label {_shorten(prompt.ground_truth)} is of no use: {fault}")


@contextmanager
def _worker(config: ScorerConfig) -> "Generator[subprocess.Popen[bytes]]":
    pipe = subprocess.PIPE
    with subprocess.Popen(worker_command(), stdin=pipe, stdout=pipe, start_new_session=True) as worker:  # noqa: S603
        try:
            reply = _ask(worker, config.setup(), LOAD_TIMEOUT_S)
            if reply is None:
                raise DataError(f"reward.name = {config.name!r} can't be loaded: its process ended or took too long")
            if "error" in reply:
                raise DataError(reply["error"])
            yield worker
        finally:
            kill_group(worker.pid)


def _ask(worker: "subprocess.Popen[bytes]", message: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    """The worker's reply, None if it ends or must be ended because it takes too long."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    timer = threading.Timer(timeout_s, kill_group, [worker.pid])
    timer.start()
    try:
        worker.stdin.write(encode_frame(message))
        worker.stdin.flush()
        return read_frame(worker.stdout)
    except BrokenPipeError:
        return None
    finally:
        timer.cancel()


def _shorten(label: object) -> str:
    text = repr(label)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
