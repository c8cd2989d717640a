"""The pool keeps its promises whatever a scorer does."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from protocol.errors import DataError, UnavailableError
from protocol.samples import Reward
from protocol.states import FailReason
from rollout_service.rewards.interface import ScoringError

END_TIMEOUT_S = 30  # for a process to vanish on a busy machine


async def test_replies_go_to_their_own_tasks(make_pool, make_task):
    pool = await make_pool("echo", num_workers=3)
    rewards = await asyncio.gather(*(pool.score(make_task("", i)) for i in range(300)))
    assert [reward.value for reward in rewards] == list(range(300))
    assert pool.num_restarts == 0


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("scalar", Reward(0.5)),
        ("parts", Reward(1.0, {"format": 0.25, "right": 1.0})),
        ("coroutine", Reward(0.75)),
    ],
)
async def test_what_counts_as_a_reward(make_pool, make_task, action, expected):
    pool = await make_pool()
    assert await pool.score(make_task(action)) == expected


@pytest.mark.parametrize(
    ("action", "reason", "words"),
    [
        ("value", FailReason.REWARD_NOT_FINITE, "returned None"),
        ("nan", FailReason.REWARD_NOT_FINITE, "returned nan"),
        ("infinite", FailReason.REWARD_NOT_FINITE, "returned inf"),
        ("huge", FailReason.REWARD_NOT_FINITE, "returned inf"),
        ("beyond_float32", FailReason.REWARD_NOT_FINITE, "1e\\+39, which is infinite in a batch's float32"),
        ("array", FailReason.REWARD_NOT_FINITE, "not a finite number"),
        ("no_score", FailReason.REWARD_NOT_FINITE, "without 'score'"),
        ("fail", FailReason.REWARD_ERROR, "KeyError: 'no such column'"),
        ("leave", FailReason.REWARD_ERROR, "SystemExit: enough"),
    ],
)
async def test_no_number_is_a_failure_with_its_reason(make_pool, make_task, action, reason, words):
    pool = await make_pool()
    [pid] = pool.pids
    with pytest.raises(ScoringError, match=words) as caught:
        await pool.score(make_task(action))
    assert caught.value.reason is reason
    assert (await pool.score(make_task("value", 1.5))).value == 1.5
    assert pool.pids == [pid], "a worker that replied is used again"


@pytest.mark.parametrize(("action", "words"), [("die", "exited with code 3"), ("kill", "ended by SIGKILL")])
async def test_a_task_that_ends_two_workers_fails_alone(make_pool, make_task, action, words):
    pool = await make_pool()
    [pid] = pool.pids
    with pytest.raises(ScoringError, match=words) as caught:
        await pool.score(make_task(action))
    assert caught.value.reason is FailReason.REWARD_ERROR
    assert (await pool.score(make_task("value", 2))).value == 2
    assert pool.num_restarts == 2
    assert pool.pids != [pid]


async def test_a_worker_that_was_killed_while_idle_costs_no_sample(make_pool, make_task):
    pool = await make_pool()
    [pid] = pool.pids
    os.kill(pid, signal.SIGKILL)
    assert (await pool.score(make_task("value", 2))).value == 2
    assert pool.num_restarts == 1
    assert pool.pids != [pid]


@pytest.mark.parametrize("action", ["hang", "backtrack"])
async def test_a_hanging_scorer_is_killed_and_delays_no_other(make_pool, make_task, action):
    pool = await make_pool(num_workers=2, timeout_s=4.0)
    before = set(pool.pids)
    ends: list[str] = []

    async def score(what: str) -> None:
        try:
            await pool.score(make_task(what, 1))
        finally:
            ends.append(what)

    hanging = asyncio.create_task(score(action))
    await asyncio.gather(*(score("value") for _ in range(20)))
    with pytest.raises(ScoringError, match="longer than 4 s") as caught:
        await hanging
    assert caught.value.reason is FailReason.REWARD_TIMEOUT
    assert ends == ["value"] * 20 + [action]
    await asyncio.gather(*pool._restarts)
    killed = before - set(pool.pids)
    assert len(killed) == 1
    assert all(_has_ended(pid) for pid in killed)
    assert pool.num_restarts == 1
    assert [(await pool.score(make_task("value", i))).value for i in range(2)] == [0, 1]


async def test_what_a_killed_scorer_started_ends_with_it(make_pool, make_task, tmp_path):
    pool = await make_pool(timeout_s=5.0)
    file = tmp_path / "pid"
    with pytest.raises(ScoringError):
        await pool.score(make_task("hang_with_child", str(file)))
    await pool.score(make_task("value", 1))  # the slot is back: its old worker has been killed
    assert _has_ended(int(file.read_text()))


async def test_prints_and_reads_of_a_scorer_do_not_reach_the_pipes(make_pool, make_task):
    pool = await make_pool()
    assert (await pool.score(make_task("chatter"))).value == 0.5
    assert (await pool.score(make_task("value", 3))).value == 3
    assert pool.num_restarts == 0


async def test_a_caller_that_gives_up_leaves_no_stale_reply(make_pool, make_task):
    pool = await make_pool()
    scoring = asyncio.create_task(pool.score(make_task("value", 99)))
    await asyncio.sleep(0)  # it has its slot and has written its task
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert (await pool.score(make_task("value", 4))).value == 4


async def test_closing_fails_no_sample(make_pool, make_task):
    pool = await make_pool()
    pids = pool.pids
    tasks = [asyncio.create_task(pool.score(make_task("hang"))) for _ in range(3)]
    await asyncio.sleep(0)  # one has its slot, two wait for it
    await pool.close()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, UnavailableError)
    assert pool.pids == []
    assert all(_has_ended(pid) for pid in pids)
    with pytest.raises(UnavailableError):
        await pool.score(make_task("value", 1))


async def test_a_worker_that_starts_while_the_pool_closes_is_ended(make_pool, make_task):
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    pool = await make_pool()
    with pytest.raises(ScoringError):
        await pool.score(make_task("die"))
    await asyncio.sleep(0)  # its replacement has begun
    await pool.close()
    assert pool.pids == []
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    assert not [pid for pid in children - others if not _has_ended(pid)]


async def test_odd_text_survives_the_pipe(make_pool, make_task):
    pool = await make_pool("echo")
    text = "\ud800 \x00 ￿ 😀"
    with pytest.raises(ScoringError, match="not a finite number"):
        await pool.score(make_task(text, text))
    assert pool.num_restarts == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "has no function 'nowhere'"),
        ("MODULE", "has no function 'MODULE'"),
    ],
)
async def test_a_scorer_that_is_not_there_is_said_at_the_start(make_pool, name, words):
    with pytest.raises(DataError, match=words):
        await make_pool(name)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("x = (", "SyntaxError"),
        ("import os; os._exit(7)", "exited with code 7"),
    ],
)
async def test_a_scorer_that_can_not_be_imported_is_said_at_the_start(make_pool, tmp_path, source, words):
    (tmp_path / "user_scorers.py").write_text(source)
    with pytest.raises(DataError, match=words):
        await make_pool("echo", num_workers=2)


async def test_an_unknown_setting_of_a_scorer_is_said_at_the_start(make_pool):
    with pytest.raises(
        DataError, match=r"reward.settings.only_makred is no setting of scorer gsm8k; it has .*only_marked"
    ):
        await make_pool("gsm8k", only_makred=True)
    with pytest.raises(DataError, match="unexpected keyword argument 'colour'"):
        await make_pool("act", colour="red")


async def test_settings_reach_the_scorer(make_pool, make_task):
    lenient = await make_pool("gsm8k")
    strict = await make_pool("gsm8k", only_marked=True)
    task = make_task("it is 72", "72")
    assert [(await pool.score(task)).value for pool in (lenient, strict)] == [1.0, 0.0]


async def test_cut_off_responses_are_wrong_by_setting(make_pool, make_task):
    pool = await make_pool("auto", require_stop=True)
    for stopped in (True, False):
        reward = await pool.score(make_task("#### 72", "72", "openai/gsm8k", stopped))
        assert reward.value == float(stopped)


async def test_auto_chooses_by_data_source(make_pool, make_task):
    pool = await make_pool("auto", timeout_s=10.0)
    assert (await pool.score(make_task("so #### 1,000", "1000", "openai/gsm8k"))).value == 1
    assert (await pool.score(make_task(r"\boxed{\frac12}", "0.5", "lighteval/MATH"))).value == 1
    entry = {"question": "1 + 1", "answer": "2", "metadata": {}}
    assert (await pool.score(make_task("<answer>2</answer>", entry, "reasoning_gym/chain_sum"))).value == 1
    with pytest.raises(ScoringError, match=r"no scorer is known for data source 'own'; set reward.name"):
        await pool.score(make_task("2", "2"))
    assert pool.num_restarts == 0


async def test_workers_are_light(make_pool, make_task, tmp_path):
    (tmp_path / "user_scorers.py").write_text(
        "import sys\nHEAVY = {'torch', 'vllm', 'transformers', 'pydantic', 'reasoning_gym', 'math_verify'}\n"
        "def heavy(task): return len(HEAVY & set(sys.modules))\n"
    )
    pool = await make_pool("heavy")
    assert (await pool.score(make_task(""))).value == 0


ORPHAN = """
import asyncio, json, sys
from protocol.settings import RunSettings
from protocol.states import FinishReason
from rollout_service.rewards.build import build_scorer
from rollout_service.rewards.interface import ScoringTask

async def main():
    reward = {"name": "user_scorers:act", "num_workers": 2, "timeout_s": 600}
    pool = build_scorer(RunSettings.model_validate({"reward": reward}))
    await pool.start()
    task = ScoringTask("s", "own", "q", "backtrack", None, {}, FinishReason.STOP, 1)
    asyncio.get_running_loop().create_task(pool.score(task))
    await asyncio.sleep(0.2)
    print(json.dumps(pool.pids), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_workers_die_with_a_killed_service_even_while_they_hang(user_scorers, tmp_path):
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    service = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    with service:
        assert service.stdout is not None
        pids = json.loads(service.stdout.readline())
        assert all(psutil.pid_exists(pid) for pid in pids)
        service.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    assert all(_has_ended(pid) for pid in pids)


def _has_ended(pid: int) -> bool:
    """Whether a process is gone; one that nobody reaps yet has ended, too."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        process.wait(END_TIMEOUT_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.pid_exists(pid) and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
