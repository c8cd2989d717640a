"""Every wait has a who, a what and a since."""

import asyncio
from pathlib import Path

import pytest

from rollout_service.watch.waits import LINGER_S, LongPolls, Open, WaitBook, counted, scheduler_wait
from tests.support.service import running_service, service_settings


def test_one_is_not_many() -> None:
    assert [counted(n, "batch") for n in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]
    assert [counted(n, "finished response") for n in (1, 2)] == ["1 finished response", "2 finished responses"]


def test_a_wait_keeps_its_begin_while_its_numbers_change() -> None:
    book = WaitBook()
    book.update(10.0, [scheduler_wait("3 more groups to be ready, of 4", 7)])
    (wait,) = book.update(12.0, [scheduler_wait("2 more groups to be ready, of 4", 7)])
    assert (wait.who, wait.waits_for, wait.since) == ("the round", "2 more groups to be ready, of 4", 10.0)
    (wait,) = book.update(13.0, [scheduler_wait("4 more groups to be ready, of 4", 8)])
    assert wait.since == 13.0


def test_a_wait_that_begins_again_is_a_new_one() -> None:
    book = WaitBook()
    book.update(10.0, [Open("a", "x", "y")])
    book.update(10.0 + LINGER_S + 1, [])
    assert book.update(20.0, [Open("a", "x", "y")])[0].since == 20.0


def test_the_oldest_wait_comes_first_and_none_begins_in_the_future() -> None:
    found = WaitBook().update(10.0, [Open("a", "a", "?", 9.0), Open("b", "b", "?", 3.0), Open("c", "c", "?", 99.0)])
    assert [(wait.who, wait.since) for wait in found] == [("b", 3.0), ("a", 9.0), ("c", 10.0)]


def test_a_trainer_that_asks_again_and_again_waits_once() -> None:
    polls, now = LongPolls(), [0.0]
    for began in (0.0, 60.0, 120.5):
        now[0] = began
        with polls.asking(7, lambda: now[0]):
            assert [(w.key, w.since) for w in polls.waits(now[0])] == [("trainer:7", 0.0)]
            now[0] = began + 60.0
        assert [(w.waits_for, w.since) for w in polls.waits(now[0])] == [("the batch of step 7", 0.0)]
    with polls.asking(7, lambda: now[0]) as poll:
        poll.answered = True
    assert polls.waits(now[0]) == []
    with polls.asking(8, lambda: now[0]):
        assert polls.waits(now[0])[0].since == now[0]


def test_a_trainer_that_comes_back_later_waits_anew() -> None:
    polls, now = LongPolls(), [0.0]
    with polls.asking(7, lambda: now[0]):
        now[0] = 5.0
    now[0] = 5.0 + LINGER_S
    assert polls.waits(now[0] + 0.1) == []
    now[0] += 10.0
    with polls.asking(7, lambda: now[0]):
        assert polls.waits(now[0])[0].since == now[0]


def test_a_call_that_fails_is_no_wait_for_ever() -> None:
    polls = LongPolls()
    with pytest.raises(ValueError, match="refused"), polls.asking(7, lambda: 0.0):
        raise ValueError("refused")
    assert polls.waits(LINGER_S + 0.1) == []


async def waiting(service) -> dict[str, tuple[str, float]]:
    body = (await service.client.get("/v1/status")).json()
    return {wait["who"]: (wait["waits_for"], body["now"] - wait["since"]) for wait in body["waiting"]}


async def test_the_waits_of_a_service(tmp_path: Path) -> None:
    settings = service_settings(
        tmp_path,
        rollout={"n": 2, "ratio": 1.0, "lookahead": 0, "max_lag": 4},
        engine={"simulated": {"install_s": 0.3, "step_base_s": 0.0005, "step_per_sequence_s": 0.0}},
    )
    async with running_service(settings, lengths=lambda _: 3) as service:
        loop = service.parts.loop
        await service.until(lambda: "lookahead" in " ".join(loop.scheduler.waits))
        found = await waiting(service)
        assert found["the round"][0].startswith("the trainer: 1 batches are offered or leased")
        assert found["1 batch"] == ("a trainer to connect", pytest.approx(found["1 batch"][1]))
        headers = await service.open_trainer()
        await service.batch(1, headers)
        assert "1 batch" not in await waiting(service)
        poll = asyncio.create_task(service.client.post("/v1/batches", json={"step": 2, "wait_s": 20}, headers=headers))
        await asyncio.sleep(0.05)
        assert (await waiting(service))["the trainer"][0] == "the batch of step 2"
        await service.publish(1, headers)
        await service.until(lambda: loop.scheduler.installing)
        assert (await waiting(service))["version 1"][0] == "every engine to load it"
        assert (await poll).status_code == 200
        await service.client.post("/v1/pause")
        assert (await waiting(service))["generation"][0] == "the operator to resume"
        assert all(0 <= since < 60 for _, since in (await waiting(service)).values())


async def test_since_when_a_wait_goes_on_does_not_depend_on_who_looks(tmp_path: Path) -> None:
    settings = service_settings(tmp_path, rollout={"n": 2, "ratio": 1.0, "lookahead": 0, "max_lag": 4})
    async with running_service(settings, lengths=lambda _: 3) as service:
        await service.until(lambda: "lookahead" in " ".join(service.parts.loop.scheduler.waits))
        board = service.host.running.board
        board.note_waits()
        noted_at = board.observer.now()
        await service.until(lambda: board.observer.now() > noted_at + 0.01)
        body = (await service.client.get("/v1/status")).json()
        assert [wait["who"] for wait in body["waiting"]] == ["the round", "1 batch"]
        assert all(wait["since"] <= noted_at + 0.001 for wait in body["waiting"])


async def test_responses_that_wait_for_scores_are_a_wait(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path), lengths=lambda _: 3) as service:
        never = asyncio.Event()

        async def hang(task):
            await never.wait()

        service.scorer.score = hang
        await service.until(lambda: service.parts.sample_parts.trace.num_scoring > 0)
        await asyncio.sleep(0.05)
        found = await waiting(service)
        assert any("finished response" in who and what == "their scores" for who, (what, _) in found.items())


async def test_a_trainer_that_asks_is_not_silent_however_long_it_waits(tmp_path: Path) -> None:
    settings = service_settings(tmp_path, rollout={"n": 2, "ratio": 1.0, "lookahead": 0, "max_lag": 4})
    async with running_service(settings, lengths=lambda _: 3) as service:
        board = service.host.running.board
        assert board.trainer_silent_s is None
        headers = await service.open_trainer()
        await service.batch(1, headers)
        await service.until(lambda: (board.trainer_silent_s or 0.0) > 0.0)
        poll = asyncio.create_task(service.client.post("/v1/batches", json={"step": 2, "wait_s": 20}, headers=headers))
        await service.until(lambda: board.trainer_silent_s == 0.0)
        await service.publish(1, headers)
        assert (await poll).status_code == 200
        await service.until(lambda: (board.trainer_silent_s or 0.0) > 0.0)


async def test_a_silent_redis_is_said_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_service.status.SNAPSHOT_PATIENCE_S", 0.01)
    async with running_service(service_settings(tmp_path)) as service:
        never = asyncio.Event()
        buffer = service.parts.sample_parts.buffer
        answering = buffer.snapshot
        buffer.snapshot = never.wait
        response = await service.client.get("/v1/status")
        assert response.status_code == 503
        assert response.json()["detail"].startswith("Redis hasn't answered for")
        buffer.snapshot = answering
        never.set()


async def test_a_service_that_is_not_watched_says_nothing(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path, service={"watch": False})) as service:
        body = (await service.client.get("/v1/status")).json()
        assert body["verdict"] is None
        assert body["waiting"] == []
        response = await service.client.get("/v1/pictures/tail")
        assert response.status_code == 404
        assert "service.watch = true" in response.json()["detail"]
