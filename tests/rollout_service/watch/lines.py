"""Lines of a trace as the recorder makes them, and views of them, for tests."""

from rollout_service.watch.recent import Watch
from tests.rollout_service.tuning.records import limits


def attempt(sample: str, tokens: int, *, end: str = "stop", before: int = 0, round_number: int = 1, **changes):
    """A stay of a second that one version wrote, unless told otherwise."""
    started = changes.pop("started_at", 100.0)
    ended = changes.pop("ended_at", started + 1.0)
    version = changes.pop("version", 0)
    line = {
        "kind": "attempt",
        "sample": sample,
        "group": sample.rpartition(".")[0],
        "prompt": f"p{sample.rpartition('.')[0]}",
        "source": "test",
        "prompt_tokens": 5,
        "attempt": 1,
        "worker": "engine-0",
        "round": round_number,
        "waited_s": 0.5,
        "started_at": started,
        "ended_at": ended,
        "before": before,
        "segments": [[version, tokens, started, ended]] if tokens else [],
        "end": end,
    }
    return line | changes


def score(sample: str, reward: float | None = 1.0, at: float = 101.5, failed: str | None = None):
    return {"kind": "score", "sample": sample, "reward": reward, "failed": failed, "at": at}


def round_line(number: int, **changes):
    """A round of one second in which a batch of four became READY evenly."""
    line = {
        "kind": "round",
        "round": number,
        "started_at": 100.0 + number,
        "cut_at": None,
        "offered_at": 101.0 + number,
        "active_version": number,
        "ready_s": [0.25, 0.5, 0.75, 1.0],
        "num_fresh": 4,
        "num_dropped": 0,
        "surplus_groups": 0,
        "open_groups": 0,
        "parked_samples": 0,
        "running": [[0.0, 8], [0.5, 4], [0.75, 2]],
        "slots": 8,
        "bubble_share": None,
        "spent": {"generating": 0.8, "tail": 0.2},
    }
    return line | changes


def moment(at: float, **values):
    return {"kind": "moment", "at": at, "values": values}


def watch_of(*lines, **limit_changes) -> Watch:
    watch = Watch(limits(**limit_changes))
    for line in lines:
        watch.put(line)
    return watch
