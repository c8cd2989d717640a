"""A user's scorers in a module of their own, and tasks to score."""

import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from protocol.settings import RunSettings
from protocol.states import FinishReason
from rollout_service.rewards.build import build_scorer
from rollout_service.rewards.interface import ScoringTask
from rollout_service.rewards.pool import ScorerPool

MODULE = '''
import os, re, subprocess, sys, time
import numpy

def echo(data_source, solution_str, ground_truth, extra_info):
    return ground_truth

def act(task, *, note=None):
    """Do what the response says; the ground truth is the argument."""
    return globals()[task.response](task)

def value(task): return task.ground_truth
def nan(task): return float("nan")
def infinite(task): return numpy.float32("inf")
def huge(task): return 10 ** 400
def beyond_float32(task): return 1e39
def scalar(task): return numpy.float32(0.5)
def array(task): return numpy.ones(3)
def parts(task): return {"score": 1, "format": 0.25, "note": "text", "bad": float("nan"), "far": -1e39, "right": True}
def no_score(task): return {"reward": 1.0}
async def coroutine(task): return 0.75
def fail(task): raise KeyError("no such column")
def leave(task): sys.exit("enough")
def die(task): os._exit(3)
def kill(task): os.kill(os.getpid(), 9)
def hang(task): time.sleep(3600)
def backtrack(task): return re.match(r"(a+)+$", "a" * 64 + "b") is None
def pid(task): return os.getpid()

def chatter(task):
    print("loud")
    sys.stdout.write("x" * 100_000)
    os.write(1, b"\\x00\\x00\\x00\\x02{}")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    assert sys.stdin.read() == ""
    return 0.5

def hang_with_child(task):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with open(task.ground_truth + ".new", "w") as stream:
        stream.write(str(child.pid))
    os.replace(task.ground_truth + ".new", task.ground_truth)
    time.sleep(3600)
'''

PoolMaker = Callable[..., Awaitable[ScorerPool]]


@pytest.fixture
def user_scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an importable module with scorers that behave in all ways."""
    (tmp_path / "user_scorers.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "user_scorers"


@pytest.fixture
async def make_pool(user_scorers: str) -> AsyncIterator[PoolMaker]:
    """Start pools that are closed at the end of the test."""
    pools: list[ScorerPool] = []

    async def start(name: str = "act", num_workers: int = 1, timeout_s: float = 30.0, **settings: object) -> ScorerPool:
        full_name = name if name in {"auto", "gsm8k", "math_verify"} else f"{user_scorers}:{name}"
        reward = {"name": full_name, "num_workers": num_workers, "timeout_s": timeout_s, "settings": settings}
        pool = build_scorer(RunSettings.model_validate({"reward": reward}))
        assert isinstance(pool, ScorerPool)
        pools.append(pool)
        await pool.start()
        return pool

    yield start
    for pool in pools:
        await pool.close()


@pytest.fixture
def make_task() -> Callable[..., ScoringTask]:
    """A task from the fields that matter to a test."""

    def make(response: str, ground_truth: object = None, data_source: str = "own", stopped: bool = True) -> ScoringTask:
        return ScoringTask(
            sample_id="g0/0",
            data_source=data_source,
            prompt="question",
            response=response,
            ground_truth=ground_truth,  # pyright: ignore[reportArgumentType]
            extra={"split": "train"},
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            num_tokens=3,
        )

    return make
