"""Whole services on the simulated engine, each with settings that make one thing the limit: the verdict names it."""

import asyncio
from pathlib import Path

import pytest

from protocol.samples import Reward
from protocol.watching import Limit, Verdict
from tests.support.service import TestService, running_service, service_settings

STEPS = 7
SYNCHRONOUS = {"n": 2, "ratio": 1.0, "lookahead": 0, "max_lag": 4}
AHEAD = {"n": 2, "ratio": 1.0, "lookahead": 1, "max_lag": 4}


def simulated(**changes) -> dict:
    """Decode steps of 4 ms: what the service itself takes is little beside a round."""
    return {"max_num_seqs": 8, "simulated": {"step_base_s": 0.004, "step_per_sequence_s": 0.0} | changes}


async def verdict_of(
    tmp_path: Path, lengths, rollout: dict, engine: dict, train_s: float = 0.0, score_s: float = 0.0
) -> tuple[Verdict, TestService]:
    settings = service_settings(tmp_path, rollout=rollout, engine=engine)
    async with running_service(settings, lengths=lengths) as service:

        async def slow_score(task) -> Reward:
            await asyncio.sleep(score_s)
            return Reward(1.0)

        service.scorer.score = slow_score
        headers = await service.open_trainer()
        for step in range(1, STEPS + 1):
            await service.batch(step, headers)
            await asyncio.sleep(train_s)
            await service.publish(step, headers)
        status = (await service.client.get("/v1/status")).json()
    return Verdict.model_validate(status["verdict"]), service


def all_alike(sample_id: str) -> int:
    return 40


def one_is_long(sample_id: str) -> int:
    """The first sample of every fourth group has 60 tokens, the others 4."""
    group, _, index = sample_id.removeprefix("g").partition(".")
    return 60 if int(group) % 4 == 0 and int(index) == 0 else 4


@pytest.mark.parametrize(
    ("limit", "run", "advises"),
    [
        (Limit.GENERATION, {"lengths": all_alike, "rollout": AHEAD, "engine": simulated()}, "engine.num_replicas"),
        (Limit.TAIL, {"lengths": one_is_long, "rollout": AHEAD, "engine": simulated()}, "rollout.ratio from 1 to 1.25"),
        (
            Limit.TRAINER,
            {"lengths": all_alike, "rollout": AHEAD, "engine": simulated(), "train_s": 0.5},
            "fewer engines",
        ),
        (
            Limit.TRAINER,
            {"lengths": all_alike, "rollout": SYNCHRONOUS, "engine": simulated(), "train_s": 0.4},
            "rollout.lookahead = 1",
        ),
        (
            Limit.REWARDS,
            {"lengths": lambda _: 5, "rollout": AHEAD, "engine": simulated(), "score_s": 0.4},
            "reward.num_workers",
        ),
        (
            Limit.WEIGHT_SYNC,
            {"lengths": lambda _: 10, "rollout": SYNCHRONOUS, "engine": simulated(install_s=0.4)},
            "weights.root",
        ),
    ],
)
async def test_a_run_is_told_what_limits_it(tmp_path: Path, limit: Limit, run: dict, advises: str) -> None:
    verdict, _ = await verdict_of(tmp_path, **run)
    assert verdict.limit is limit, verdict
    assert advises in verdict.advice
    assert verdict.measured["num_rounds"] >= 5


async def test_a_scorer_that_raises_is_named_and_not_the_tail(tmp_path: Path) -> None:
    settings = service_settings(tmp_path, rollout=AHEAD, engine=simulated())
    async with running_service(settings, lengths=one_is_long) as service:
        headers = await service.open_trainer()
        await service.batch(1, headers)
        await service.publish(1, headers)
        service.scorer.fails = lambda task: True
        before = service.parts.watch.scores_since(0.0).total()
        await service.until(lambda: service.parts.watch.scores_since(0.0).total() > before + 100)
        verdict = (await service.client.get("/v1/status")).json()["verdict"]
    assert verdict["limit"] == "failures", verdict
    assert "reward_error" in verdict["sentence"]
    assert "groups were dropped" in verdict["sentence"]
    assert "reward.name" in verdict["advice"]


async def test_a_buffer_without_room_limits_the_run(tmp_path: Path) -> None:
    """No more than a batch fits: while the long one of its groups runs, nothing else can be started."""
    settings = service_settings(
        tmp_path,
        rollout={"n": 2, "ratio": 3.0, "lookahead": 1, "max_lag": 8},
        engine=simulated(),
        buffer={"max_groups": 4},
    )
    async with running_service(settings, lengths=one_is_long) as service:
        headers = await service.open_trainer()
        for step in range(1, STEPS + 1):
            await service.batch(step, headers)
            await service.publish(step, headers)
        verdict = (await service.client.get("/v1/status")).json()["verdict"]
    assert verdict["measured"]["caps_share"] > 0.3, verdict
    assert verdict["limit"] == "buffer"


async def test_a_paused_run_and_one_without_a_trainer_say_so(tmp_path: Path) -> None:
    settings = service_settings(tmp_path, rollout=AHEAD, engine=simulated())
    async with running_service(settings, lengths=lambda _: 3) as service:
        await service.until(lambda: service.parts.loop.scheduler.round == 2)
        await service.until(lambda: not service.parts.loop.scheduler.table.groups)
        starting = (await service.client.get("/v1/status")).json()["verdict"]["limit"]
        assert starting in ("starting", "trainer", "generation", "buffer")
        await asyncio.sleep(0.5)
        verdict = (await service.client.get("/v1/status")).json()["verdict"]
        assert verdict["limit"] == "trainer"
        assert "No trainer is connected" in verdict["sentence"]
        await service.client.post("/v1/pause")
        verdict = (await service.client.get("/v1/status")).json()["verdict"]
        assert verdict["limit"] == "paused"
