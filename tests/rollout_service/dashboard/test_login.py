"""Who may open the page, and what its cookie lets a browser do."""

import asyncio
import re
from pathlib import Path

import pytest

from protocol.errors import UnauthorizedError
from rollout_service.app.build import build_app
from rollout_service.app.host import Host
from rollout_service.dashboard.login import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    MAX_DELAYED,
    MAX_SESSIONS,
    SESSION_S,
    Guesses,
    PageSessions,
)
from tests.rollout_service.dashboard.browsers import ORIGIN, TOKEN, browser, log_in, settings_with_token, starting_page
from tests.support.service import running_service, service_settings


async def test_the_token_opens_the_page_once_it_is_typed_in(tmp_path: Path) -> None:
    async with running_service(settings_with_token(tmp_path)) as service, browser(build_app(service.host)) as client:
        sent_away = await client.get("/dashboard")
        assert (sent_away.status_code, sent_away.headers["location"]) == (303, "dashboard/login")
        form = await client.get("/dashboard/login")
        assert form.status_code == 200
        assert 'type="password"' in form.text
        let_in = await log_in(client)
        assert (let_in.status_code, let_in.headers["location"]) == (303, "../dashboard")
        page = await client.get("/dashboard")
        assert page.status_code == 200
        assert "Round timeline" in page.text
        assert "Log out" in page.text
        again = await client.get("/dashboard/login")
        assert (again.status_code, again.headers["location"]) == (303, "../dashboard")


@pytest.mark.parametrize("wrong", ["", "wrong", f"{TOKEN}x", TOKEN[:-1], "ü", "\0"])
async def test_a_wrong_token_opens_nothing(tmp_path: Path, wrong: str) -> None:
    async with browser(build_app(Host(settings_with_token(tmp_path)))) as client:
        refused = await log_in(client, wrong)
        assert refused.status_code == 401
        assert "not the token" in refused.text
        assert "set-cookie" not in refused.headers
        assert (await client.get("/dashboard")).status_code == 303


async def test_the_cookie_is_not_the_token_and_out_of_reach(tmp_path: Path) -> None:
    async with browser(build_app(Host(settings_with_token(tmp_path)))) as client:
        plain = (await log_in(client)).headers["set-cookie"]
    assert TOKEN not in plain
    name, _, flags = plain.partition("=")
    assert name == "april-test"
    words = {word.strip().lower() for word in flags.split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/", f"max-age={SESSION_S:.0f}"} <= words
    assert "secure" not in words
    async with browser(build_app(Host(settings_with_token(tmp_path))), "https://test") as client:
        safe = (
            await client.post("/dashboard/login", data={"token": TOKEN}, headers={"Origin": "https://test"})
        ).headers
    assert "secure" in safe["set-cookie"].lower()


async def test_logging_out_ends_the_session_and_not_only_the_cookie(tmp_path: Path) -> None:
    async with running_service(settings_with_token(tmp_path)) as service, browser(build_app(service.host)) as client:
        await log_in(client)
        stolen = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        assert (await client.get("/v1/status")).status_code == 200
        left = await client.post("/dashboard/logout", headers=ORIGIN)
        assert left.status_code == 303
        assert not client.cookies
        assert (await client.get("/v1/status", headers={"Cookie": stolen})).status_code == 401


async def test_every_route_wants_token_or_cookie_and_a_change_by_cookie_its_own_page(tmp_path: Path) -> None:
    async with running_service(settings_with_token(tmp_path)) as service:
        app = build_app(service.host)
        routes = sorted(
            (method, re.sub(r"\{name\}", "tail", re.sub(r"\{(?!name)\w+(:path)?\}", "1", path)))
            for path, methods in app.openapi()["paths"].items()
            for method in methods
            if path not in ("/healthz", "/readyz")
        )
        assert len(routes) > 15
        async with browser(app) as client:
            for method, path in routes:
                answer = await client.request(method, path)
                assert answer.status_code == 401, (method, path)
                assert "service wants its token" in answer.json()["detail"]
            await log_in(client)
            service.host.running.board.stop()  # so that the stream of events ends
            for method, path in sorted(routes, key=lambda route: route[0] == "post"):
                here = await client.request(method, path, headers=ORIGIN)
                assert here.status_code not in (401, 500), (method, path, here.text)
                if method != "get":
                    for elsewhere in ({}, {"Origin": "http://evil"}, {"Sec-Fetch-Site": "cross-site"} | ORIGIN):
                        refused = await client.request(method, path, headers=elsewhere)
                        assert refused.status_code == 401, (method, path, elsewhere)
                        assert "another site" in refused.json()["detail"]


async def test_the_ratio_changes_by_cookie_and_not_without(tmp_path: Path) -> None:
    async with running_service(settings_with_token(tmp_path)) as service, browser(build_app(service.host)) as client:
        refused = await client.patch("/v1/settings", json={"ratio": 1.5}, headers=ORIGIN)
        assert refused.status_code == 401
        await log_in(client)
        for site in ("cross-site", "same-site"):
            evil = await client.patch("/v1/settings", json={"ratio": 1.5}, headers={"Sec-Fetch-Site": site})
            assert evil.status_code == 401
        assert service.parts.control.ratio == 2.0
        changed = await client.patch("/v1/settings", json={"ratio": 1.5}, headers={"Sec-Fetch-Site": "same-origin"})
        assert changed.status_code == 200
        assert [change["changes"] for change in changed.json()["audit"]] == [{"ratio": [2.0, 1.5]}]
        assert service.parts.control.ratio == 1.5


async def test_without_a_token_this_machine_is_open_and_other_sites_are_not(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path)) as service, browser(build_app(service.host)) as client:
        assert (await client.get("/dashboard")).status_code == 200
        assert (await client.post("/v1/pause")).status_code == 200, "a program sends no origin"
        for elsewhere in ({"Origin": "http://evil"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
            assert (await client.post("/v1/resume", headers=elsewhere)).status_code == 401
        assert service.parts.control.paused
        assert (await client.get("/dashboard/login")).headers["location"] == "../dashboard"


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("localhost:8040", 200),
        ("127.0.0.1:8040", 200),
        ("[::1]:8040", 200),
        ("10.1.2.3", 200),
        ("gpu-7", 200),
        ("april.localhost", 200),
        ("runs.example.org", 200),
        ("evil.example.com", 401),
        ("127.0.0.1.evil.example.com", 401),
        ("evil.example.com:8040", 401),
    ],
)
async def test_a_name_that_was_bent_to_this_machine_is_refused(tmp_path: Path, name: str, status: int) -> None:
    async with starting_page(tmp_path, allowed_hosts=["runs.example.org"]) as client:
        page = await client.get("/dashboard", headers={"Host": name})
        assert page.status_code == status
        group = await client.get("/dashboard/groups/g1", headers={"Host": name})
        assert group.status_code == (503 if status == 200 else 401)
        api = await client.get("/v1/status", headers={"Host": name})
        assert api.status_code == (503 if status == 200 else 401)


async def test_a_form_that_is_too_long_is_cut_and_a_strange_one_is_a_wrong_token(tmp_path: Path) -> None:
    async with browser(build_app(Host(settings_with_token(tmp_path)))) as client:
        strange = await client.post("/dashboard/login", content=b"token=%ff%00&" + b"x" * 100_000, headers=ORIGIN)
        assert strange.status_code == 401
        elsewhere = await client.post("/dashboard/login", data={"token": TOKEN}, headers={"Origin": "http://evil"})
        assert elsewhere.status_code == 401
        assert "set-cookie" not in elsewhere.headers


class Sleeps:
    """Remembers how long it was asked to sleep, and wakes when told to."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.wake = asyncio.Event()
        self.full = asyncio.Event()  # as many sleep as may

    async def __call__(self, delay_s: float) -> None:
        self.asked.append(delay_s)
        if len(self.asked) == MAX_DELAYED:
            self.full.set()
        await self.wake.wait()


async def test_guesses_are_answered_later_and_later_until_one_is_right() -> None:
    sleeps = Sleeps()
    sleeps.wake.set()
    guesses = Guesses(sleeps)
    for _ in range(8):
        assert not await guesses.check("wrong", TOKEN)
    assert sleeps.asked[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert max(sleeps.asked) == LONGEST_DELAY_S
    assert await guesses.check(TOKEN, TOKEN)
    assert len(sleeps.asked) == 8, "the right one isn't held back"
    assert not await guesses.check("wrong", TOKEN)
    assert sleeps.asked[-1] == FIRST_DELAY_S


async def test_many_guesses_at_once_are_not_looked_at() -> None:
    sleeps = Sleeps()
    guesses = Guesses(sleeps)
    held = [asyncio.create_task(guesses.check("wrong", TOKEN)) for _ in range(MAX_DELAYED)]
    await sleeps.full.wait()
    with pytest.raises(UnauthorizedError, match="wait some seconds"):
        await guesses.check(TOKEN, TOKEN)
    sleeps.wake.set()
    assert await asyncio.gather(*held) == [False] * MAX_DELAYED
    assert await guesses.check(TOKEN, TOKEN)


async def test_too_many_guesses_are_a_sentence_on_the_form(tmp_path: Path) -> None:
    app = build_app(Host(settings_with_token(tmp_path)))
    sleeps = Sleeps()
    app.state.door.guesses = Guesses(sleeps)
    async with browser(app) as client:
        held = [asyncio.create_task(log_in(client, "wrong")) for _ in range(MAX_DELAYED)]
        await sleeps.full.wait()
        answer = await log_in(client)
        assert answer.status_code == 429
        assert "Too many wrong tokens" in answer.text
        sleeps.wake.set()
        assert {response.status_code for response in await asyncio.gather(*held)} == {401}


def test_sessions_end_and_are_bounded() -> None:
    now = [0.0]
    sessions = PageSessions(lambda: now[0])
    first = sessions.open()
    assert sessions.holds(first)
    assert not sessions.holds(None)
    assert not sessions.holds("")
    now[0] = SESSION_S
    assert not sessions.holds(first)
    opened = [sessions.open() for _ in range(MAX_SESSIONS + 3)]
    assert len(set(opened)) == len(opened)
    assert not any(map(sessions.holds, opened[:3])), "the oldest have to log in again"
    assert all(map(sessions.holds, opened[3:]))
    sessions.close(opened[-1])
    sessions.close(None)
    assert not sessions.holds(opened[-1])
