"""What the server renders: every state of the page, under a strict policy, behind a prefix, from hostile text."""

import json
import re
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from rollout_service.app.build import build_app
from rollout_service.dashboard.assets import assets, digest
from rollout_service.dashboard.pages import CONTENT_SECURITY_POLICY
from tests.rollout_service.dashboard.browsers import ORIGIN, TOKEN, Markup, browser, log_in, starting_page
from tests.support.service import TestService, running_service, service_settings

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\0\x1b[31m\u202eevil"
SECTIONS = {"verdict", "now", "waits", "engines", "timeline", "tail", "running", "buffer", "off-policy", "training"}
LAST_SECTIONS = {"evaluation", "ratio", "groups"}


async def one_step(service: TestService) -> str:
    """Train a step; a group of its batch."""
    headers = await service.open_trainer()
    batch = await service.batch(1, headers)
    return batch.header.groups[0].group_id


async def pages_of(client: httpx.AsyncClient, group: str) -> list[httpx.Response]:
    """Every kind of page there is, for whom is logged in and whom is not."""
    addresses = ("/dashboard", f"/dashboard/groups/{group}", "/dashboard/groups/none")
    before = [await client.get("/dashboard/login"), await log_in(client, "wrong")]
    await log_in(client)
    return [*before, *[await client.get(address) for address in addresses]]


async def test_every_page_is_under_a_strict_policy_and_keeps_it(tmp_path: Path) -> None:
    settings = service_settings(tmp_path, service={"token": TOKEN})
    async with running_service(settings, text=lambda i: EVIL) as service, browser(build_app(service.host)) as client:
        pages = await pages_of(client, await one_step(service))
    assert [page.status_code for page in pages] == [200, 401, 200, 200, 404]
    for page in pages:
        assert page.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "same-origin"
        assert page.headers["cache-control"] == "no-store"
        markup = Markup(page.text)
        assert markup.inline == [], page.url
        hosts = {urlsplit(urljoin(str(page.url), address)).netloc for address in markup.addresses}
        assert hosts == {"test"}
        ids = [found["id"] for _, found in markup.elements if found.get("id")]
        assert len(ids) == len(set(ids)), "an id names one element"


def test_the_policy_lets_nothing_in_that_is_not_served_here() -> None:
    rules = dict(rule.split(" ", 1) for rule in CONTENT_SECURITY_POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == rules["form-action"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert "unsafe" not in CONTENT_SECURITY_POLICY


async def test_the_page_without_its_script_has_the_numbers_of_now(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path)) as service:
        await one_step(service)
        await service.client.post("/v1/pause")
        await service.until(lambda: service.parts.loop.safe_to_stop)
        page = await service.client.get("/dashboard")
        status = (await service.client.get("/v1/status")).json()
    shown = dict(re.findall(r'data-field="(\w+)">([^<]*)<', page.text))
    assert shown["trained_step"] == str(status["trained_step"])
    assert shown["active_version"] == str(status["active_version"])
    assert shown["ratio"] == "2"
    assert shown["parked"] == str(status["samples"]["parked"])
    assert shown["ready"] == str(status["ledger"]["ready"])
    assert shown["leased"] == str(status["ledger"]["leased"]) == "4"
    assert shown["ledger_error"] == "0"
    assert "<noscript>" in page.text
    markup = Markup(page.text)
    assert {found.get("id") for _, found in markup.elements} >= SECTIONS | LAST_SECTIONS
    assert status["verdict"]["sentence"] in markup.text


async def test_a_service_that_starts_says_so(tmp_path: Path) -> None:
    async with starting_page(tmp_path) as client:
        page = await client.get("/dashboard")
        assert page.status_code == 200
        assert "it waits for the engines to start" in page.text
        assert 'role="alert" >' in page.text, "the sentence is not hidden"
        group = await client.get("/dashboard/groups/g1")
        assert group.status_code == 503
        assert "it waits for the engines to start" in group.text


async def test_a_group_page_shows_what_a_prompt_says_and_does_none_of_it(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path), text=lambda i: EVIL) as service:
        group = await one_step(service)
        page = await service.client.get(f"/dashboard/groups/{group}")
        view = (await service.client.get(f"/v1/groups/{group}")).json()
    assert page.status_code == 200
    assert "<script>alert" not in page.text
    assert "<img" not in page.text
    assert not set("\0\x1b\u202e") & set(page.text)
    markup = Markup(page.text)
    assert EVIL.replace("\0", "␀").replace("\x1b", "␛").replace("\u202e", "\ufffd") in markup.text
    data = [json.loads(text) for text in re.findall(r'class="token-data">(.*?)</script>', page.text)]
    assert len(data) == len(view["samples"]) == 2
    for shown, sample in zip(data, view["samples"], strict=True):
        tokens = [token for segment in sample["segments"] for token in segment["tokens"]]
        assert shown["ids"] == tokens
        assert shown["versions"] == [s["version"] for s in sample["segments"] for _ in s["tokens"]]
        assert shown["logprobs"] == [value for s in sample["segments"] for value in s["logprobs"]]
        assert "".join(shown["texts"]) == sample["text"]


@pytest.mark.parametrize("name", ["none", "%3Cscript%3Ealert(1)", "g%00", "ü", "x" * 3000])
async def test_a_group_that_is_not_there_is_a_page_that_says_so(tmp_path: Path, name: str) -> None:
    async with running_service(service_settings(tmp_path)) as service:
        page = await service.client.get(f"/dashboard/groups/{name}")
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert "There is no such group" in page.text
    assert "<script>alert" not in page.text
    assert "\0" not in page.text


@pytest.mark.parametrize("stripped", [True, False])
async def test_behind_a_prefix_every_link_and_the_cookie_stay_below_it(tmp_path: Path, stripped: bool) -> None:
    """A proxy may take the prefix off before it passes a request on, or leave it."""
    settings = service_settings(tmp_path, service={"token": TOKEN, "root_path": "/april"})
    async with running_service(settings) as service, browser(build_app(service.host)) as client:
        group = await one_step(service)
        sent = "" if stripped else "/april"
        away = await client.get(f"{sent}/dashboard")
        assert urljoin("http://test/april/dashboard", away.headers["location"]) == "http://test/april/dashboard/login"
        let_in = await client.post(f"{sent}/dashboard/login", data={"token": TOKEN}, headers=ORIGIN)
        assert "path=/april;" in let_in.headers["set-cookie"].lower()
        cookie = {"Cookie": let_in.headers["set-cookie"].split(";")[0]}
        for path in ("/dashboard", f"/dashboard/groups/{group}", "/dashboard/groups/none"):
            page = await client.get(f"{sent}{path}", headers=cookie)
            assert page.headers["content-type"].startswith("text/html")
            seen_at = f"http://test/april{path}"
            for address in Markup(page.text).addresses:
                url = urljoin(seen_at, address)
                assert url.startswith("http://test/april/"), (path, address)
                if "/static/" in url or url.endswith("/dashboard"):
                    assert (
                        await client.get(sent + urlsplit(url).path.removeprefix("/april"), headers=cookie)
                    ).is_success


async def test_a_page_that_is_switched_off_is_not_there(tmp_path: Path) -> None:
    async with starting_page(tmp_path, dashboard=False) as client:
        for path in ("/dashboard", "/dashboard/login", f"/dashboard/static/{digest()}/app.js"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/healthz")).status_code == 200


async def test_files_are_kept_for_ever_under_their_digest_alone(tmp_path: Path) -> None:
    async with starting_page(tmp_path) as client:
        for name, asset in assets().items():
            answer = await client.get(f"/dashboard/static/{digest()}/{name}")
            assert answer.content == asset.content
            assert answer.headers["content-type"].partition(";")[0] == asset.media_type
            assert "immutable" in answer.headers["cache-control"]
            assert answer.headers["x-content-type-options"] == "nosniff"
        older = await client.get("/dashboard/static/0123456789abcdef/app.js")
        assert older.headers["cache-control"] == "no-cache"
        for name in ("none.js", "%2e%2e/routes.py", "..%2f..%2f..%2fpyproject.toml", "vendor"):
            assert (await client.get(f"/dashboard/static/{digest()}/{name}")).status_code == 404, name


async def test_the_page_has_one_address(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path)) as service:
        answer = await service.client.get("/dashboard/")
    assert answer.status_code == 308
    assert urljoin("http://test/dashboard/", answer.headers["location"]) == "http://test/dashboard"


async def test_a_service_that_keeps_no_pictures_has_a_page_all_the_same(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path, service={"watch": False})) as service:
        page = await service.client.get("/dashboard")
        assert page.status_code == 200
        assert "does not watch itself (service.watch = false)" in page.text
        assert (await service.client.get("/v1/pictures/tail")).status_code == 404


async def test_no_token_is_left_in_a_page(tmp_path: Path) -> None:
    async with starting_page(tmp_path, token=TOKEN) as client:
        for page in await pages_of(client, "none"):
            assert TOKEN not in page.text
