"""A scorer's process: `python -m rollout_service.rewards.worker`, driven over its standard input and output.

Always true:
- the scorer runs in the main thread, one task at a time, so that it may use signals;
- nothing that the scorer prints or reads reaches the pipes: they are moved away before it is imported;
- it ends when the service is gone: at the end of its input, or, where the system can, by a signal of the kernel even
  while the scorer holds the interpreter;
- a task is answered by `started` (the scorer is loaded, its time counts from here) and then by one result.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from protocol.errors import DataError
from protocol.samples import Reward
from protocol.states import FailReason, FinishReason
from rollout_service.rewards.frames import FrameError, describe, encode_frame, read_frame
from rollout_service.rewards.interface import ScoringError, ScoringTask
from rollout_service.rewards.registry import load_scorer
from rollout_service.rewards.scorer import LabelError, LoadedScorer, to_reward

PR_SET_PDEATHSIG = 1  # prctl(2)
SIGKILL = 9


def main() -> None:
    """Read the set-up, load the scorer, answer until the input ends."""
    end_with_parent()
    source, sink = take_pipes()
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(source, inbox), name="inbox", daemon=True).start()
    setup = inbox.get()
    sys.path.extend(path for path in setup["sys_path"] if path not in sys.path)
    try:
        scorer = load_scorer(setup["name"], setup["settings"])
    except DataError as error:
        _send(sink, {"error": str(error)})
        return
    _send(sink, {"ready": True})
    while True:
        message = inbox.get()
        if "labels" in message:
            _send(sink, {"faults": check_labels(scorer, message["labels"])})
        else:
            answer(scorer, message, sink)


def answer(scorer: LoadedScorer, message: dict[str, Any], sink: BinaryIO) -> None:
    """Reply to one task: `started`, then a value with its parts, or a reason and a message."""
    fields: dict[str, Any] = {**message, "finish_reason": FinishReason(message["finish_reason"])}
    task = ScoringTask(**fields)
    failure = _failure_of(lambda: scorer.prepare(task.data_source))
    _send(sink, {"started": True})
    rewards: list[Reward] = []
    failure = failure or _failure_of(lambda: rewards.append(to_reward(scorer.score(task))))
    _send(sink, failure or {"value": rewards[0].value, "parts": rewards[0].parts})


def _failure_of(action: Callable[[], None]) -> dict[str, Any] | None:
    """Reason and message of what `action` raises; None if it goes well."""
    try:
        action()
    except ScoringError as error:
        return {"reason": error.reason, "message": str(error)}
    except LabelError as error:
        return {"reason": FailReason.REWARD_ERROR, "message": f"the label is of no use: {error}"}
    except DataError as error:
        return {"reason": FailReason.REWARD_ERROR, "message": str(error)}
    except (Exception, SystemExit) as error:
        # The scorer is somebody else's code: whatever it raises fails this sample and nothing more.
        return {"reason": FailReason.REWARD_ERROR, "message": describe(error)}
    return None


def check_labels(scorer: LoadedScorer, labels: list[list[Any]]) -> list[str | None]:
    """What is wrong with each (label, data source), None where nothing is."""
    faults: list[str | None] = []
    for label, data_source in labels:
        try:
            scorer.check_label(label, data_source)
            faults.append(None)
        except LabelError as error:
            faults.append(str(error))
        except Exception as error:
            # Parsers of labels raise what they like; for the user it is a label that can't be read.
            faults.append(describe(error))
    return faults


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes for ourselves; the scorer's own input is empty and its output goes to standard error."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return source, sink


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere the end of the input has to do."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died in between


def _read(source: BinaryIO, inbox: "queue.SimpleQueue[dict[str, Any]]") -> None:
    """Pass frames on until there are no more, then end the process, whatever the scorer is doing."""
    try:
        while (message := read_frame(source)) is not None:
            inbox.put(message)
    except FrameError as error:
        sys.stderr.write(f"scorer worker: {error}\n")
    os._exit(0)


def _send(sink: BinaryIO, message: dict[str, Any]) -> None:
    sink.write(encode_frame(message))
    sink.flush()


if __name__ == "__main__":
    main()
