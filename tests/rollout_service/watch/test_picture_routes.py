"""`GET /v1/pictures/NAME` of a service that runs."""

import asyncio
import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from protocol.watching import Moments, RatioPicture, Steps, Tail, Timeline
from rollout_service import picture_book as book_module
from rollout_service.app.picture_routes import _takes_gzip
from rollout_service.watch.recent import PICTURES
from tests.support.service import running_service, service_settings

KINDS = {"timeline": Timeline, "tail": Tail, "moments": Moments, "steps": Steps, "ratio": RatioPicture}


@pytest.fixture(autouse=True)
def no_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other ratios would do is asked for in test_forecast.py alone: it takes seconds of a core."""
    monkeypatch.setattr(book_module, "make_job", _no_data)


def _no_data(*_):
    from protocol.errors import DataError

    raise DataError("no response has finished")


async def steps(service, first: int, last: int, headers) -> None:
    for step in range(first, last + 1):
        await service.batch(step, headers)
        metrics = {"step": step, "metrics": {"reward/mean": step / 10, "eval/reward": 0.5}}
        await service.client.post("/v1/trainers/metrics", json=metrics, headers=headers)
        await service.publish(step, headers)


async def test_pictures_of_a_run_are_what_happened(tmp_path: Path) -> None:
    settings = service_settings(tmp_path, rollout={"n": 2, "ratio": 2.0, "lookahead": 0, "max_lag": 4})
    async with running_service(settings) as service:
        headers = await service.open_trainer()
        await steps(service, 1, 6, headers)
        found = {}
        for name, kind in KINDS.items():
            response = await service.client.get(f"/v1/pictures/{name}")
            assert response.status_code == 200, response.text
            found[name] = kind.model_validate_json(response.content)
        status = (await service.client.get("/v1/status")).json()
    timeline = found["timeline"]
    assert [span.round for span in timeline.rounds if span.offered_at is not None][:5] == [1, 2, 3, 4, 5]
    assert [install.version for install in timeline.installs][:5] == [1, 2, 3, 4, 5]
    resumed = [bar for bar in timeline.samples if len({s.version for a in bar.attempts for s in a.segments}) > 1]
    assert resumed, "a ratio of 2 resumes some with the next version"
    for span in timeline.rounds[:5]:
        assert span.bubble_share is not None
        assert 0 <= span.bubble_share <= 1
        assert span.tail_s is not None
    assert found["steps"].steps == [1, 2, 3, 4, 5, 6]
    assert found["steps"].series["reward/mean"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert found["tail"].num_finished >= 6 * 8
    assert found["ratio"].ratio == status["settings"]["ratio"] == 2.0


async def test_time_of_a_round_is_all_spent(tmp_path: Path) -> None:
    settings = service_settings(tmp_path, rollout={"n": 2, "ratio": 2.0, "lookahead": 0, "max_lag": 4})
    async with running_service(settings) as service:
        headers = await service.open_trainer()
        await steps(service, 1, 6, headers)
        rounds = service.parts.watch.rounds[:5]
    for before, span in pairwise(rounds):
        assert sum(span.spent.values()) == pytest.approx(span.offered_at - before.offered_at, abs=0.02)


async def test_a_run_that_just_started_has_pictures(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path), lengths=lambda _: 60) as service:
        for name, kind in KINDS.items():
            response = await service.client.get(f"/v1/pictures/{name}")
            assert response.status_code == 200, response.text
            kind.model_validate_json(response.content)


async def test_what_runs_is_on_the_timeline(tmp_path: Path) -> None:
    engine = {"simulated": {"step_base_s": 0.02, "step_per_sequence_s": 0.0}}
    async with running_service(service_settings(tmp_path, engine=engine), lengths=lambda _: 60) as service:
        await service.until(lambda: service.engines[0].stats().tokens_generated > 100)
        body = (await service.client.get("/v1/pictures/timeline")).json()
    assert body["rounds"][-1]["offered_at"] is None
    assert {bar[5][-1][4] for bar in body["samples"]} == {"running"}
    assert len(body["samples"]) == 16
    assert all(bar[5][-1][7] for bar in body["samples"]), "tokens so far, with their version"


async def test_nothing_is_sent_again_that_did_not_change(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await steps(service, 1, 3, headers)
        await service.client.post("/v1/pause")
        first = await service.client.get("/v1/pictures/steps")
        tag = first.headers["etag"]
        again = await service.client.get("/v1/pictures/steps", headers={"If-None-Match": f'W/"x", {tag}'})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        await service.client.post(
            "/v1/trainers/metrics", json={"step": 4, "metrics": {"reward/mean": 1.0}}, headers=headers
        )
        changed = await service.client.get("/v1/pictures/steps", headers={"If-None-Match": tag})
        assert changed.status_code == 200
        assert changed.headers["etag"] != tag


async def test_pictures_are_painted_once_for_all_who_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    painted = []
    paint = book_module._paint
    monkeypatch.setattr(book_module, "_paint", lambda painter: painted.append(1) or paint(painter))
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await steps(service, 1, 3, headers)
        answers = await asyncio.gather(*(service.client.get("/v1/pictures/steps") for _ in range(50)))
    assert len({answer.content for answer in answers}) == 1
    assert len(painted) == 1


async def test_large_pictures_travel_packed_if_asked(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await steps(service, 1, 5, headers)
        url = "/v1/pictures/tail"
        plain = await service.client.get(url, headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        async with service.client.stream("GET", url, headers={"Accept-Encoding": "br, gzip"}) as packed:
            raw = b"".join([part async for part in packed.aiter_raw()])
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.headers["vary"] == "Accept-Encoding"
        assert len(raw) < len(plain.content) / 2
        assert set(json.loads(gzip.decompress(raw))) == set(plain.json())


@pytest.mark.parametrize(
    ("header", "takes"),
    [
        ("gzip", True),
        ("br;q=1.0, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0.001", True),
        ("gzip;q=0", False),
        ("gzip;q=0.000", False),
        ("", False),
        ("br", False),
        ("identity", False),
    ],
)
def test_encodings(header: str, takes: bool) -> None:
    assert _takes_gzip(header) is takes


async def test_the_timeline_is_bounded_and_bad_requests_are_sentences(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await steps(service, 1, 5, headers)
        few = (await service.client.get("/v1/pictures/timeline?rounds=2&max_samples=3")).json()
        assert len(few["samples"]) == 3
        assert few["num_left_out"] > 0
        assert len(few["rounds"]) in (2, 3)
        for bad in ("nonsense", "timeline?rounds=-1", "timeline?max_samples=1e9", "..%2Fstatus"):
            response = await service.client.get(f"/v1/pictures/{bad}")
            assert response.status_code in (404, 422), bad
            assert response.headers["content-type"] == "application/problem+json"


async def test_pictures_want_the_token(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path, service={"token": "secret"})) as service:
        for name in PICTURES:
            assert (await service.client.get(f"/v1/pictures/{name}")).status_code == 200
            no_token = await service.client.get(f"/v1/pictures/{name}", headers={"Authorization": "Bearer wrong"})
            assert no_token.status_code == 401


async def test_rates_and_counts_of_engines_are_in_the_status(tmp_path: Path) -> None:
    engine = {"simulated": {"step_base_s": 0.01, "step_per_sequence_s": 0.0}}
    async with running_service(service_settings(tmp_path, engine=engine), lengths=lambda _: 60) as service:
        await service.open_trainer()
        first = (await service.client.get("/v1/status")).json()["engines"][0]
        assert first["tokens_per_s"] is None
        await asyncio.sleep(1.1)
        second = (await service.client.get("/v1/status")).json()["engines"][0]
        assert second["tokens_per_s"] > 0
