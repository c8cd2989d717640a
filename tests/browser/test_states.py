"""What the page says when something is missing, strange, or away."""

import json
import re
from collections.abc import Generator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the page in a browser")

from tests.browser.live import LiveService, Watched, live_service, open_live, scroll_through, until, watched_page
from tests.support import pictures

TOKEN = "s3cret token"
PATCH = """async () => {
  const headers = { 'Content-Type': 'application/json' };
  return (await fetch('../v1/settings', { method: 'PATCH', body: '{"ratio": 1.25}', headers })).status;
}"""


@pytest.fixture(scope="module")
def early(folder: Path) -> Generator[LiveService]:
    """No trainer, and responses that take minutes: no round is over."""
    slow = {"simulated": {"step_base_s": 1.0, "step_per_sequence_s": 0.0}}
    with live_service(folder, trains=False, tokens=60, sections={"engine": slow}) as service:
        yield service


def test_a_run_that_only_just_started_says_what_is_so(chromium, early: LiveService) -> None:
    with watched_page(chromium) as watched:
        open_live(watched, early)
        page = watched.page
        scroll_through(page)
        until(lambda: "0 finished" in watched.text("#tail-note"))
        assert re.search(r"No response is finished yet|finished responses\s+–", watched.text("#tail-table"))
        assert "No step has been trained yet" in watched.text("#reward .plot")
        assert watched.text("#eval-reward .plot").startswith("Nothing was evaluated yet")
        assert "No round is over yet" in watched.text("#bubble-rounds .plot")
        assert "Nothing was changed yet" in watched.text("#audit")
        assert watched.field("trained_step") == "0"
        assert watched.text("#verdict-sentence") == early.get("/v1/status")["verdict"]["sentence"]
        assert "NaN" not in watched.text("body")
        assert "undefined" not in watched.text("body")


def test_a_clock_that_jumped_makes_no_time_negative(chromium, early: LiveService) -> None:
    line = json.loads(pictures.timeline(200).model_dump_json())
    line["now"] -= 3600
    for bar in line["samples"][::3]:
        bar[5][-1][3] -= 3600
        bar[5][-1][6] = -5.0
    for span in line["rounds"][::2]:
        span["started_at"] += 3600
        span["running"] = [[-at, n] for at, n in span["running"]]
    with watched_page(chromium) as watched:
        answer(watched, "timeline", line)
        open_live(watched, early)
        page = watched.page
        page.locator("#timeline summary").click()
        until(lambda: page.locator("#rounds-table tbody tr").count() == len(line["rounds"]))
        page.focus("#timeline-canvas")
        for _ in range(10):
            page.keyboard.press("ArrowDown")
            assert not re.search(r"[-−]\d", watched.text("#timeline-readout").replace("engine-0", ""))
        assert not re.search(r"[-−]\d[\d.]* (ms|s|min|h)\b", watched.text("#timeline"))


def answer(watched: Watched, name: str, body: object) -> None:
    """A picture that isn't the service's."""
    watched.page.route(f"**/v1/pictures/{name}*", lambda route: route.fulfill(json=body))


def test_nothing_at_all_is_drawn_without_a_fault(chromium, early: LiveService) -> None:
    """Pictures of a run without a single sample."""
    nothing = {
        "timeline": {"now": 1.8e9, "rounds": [], "samples": [], "installs": [], "trained": [], "num_left_out": 0},
        "moments": {"at": [], "series": {}},
        "steps": {"steps": [], "series": {}},
    }
    with watched_page(chromium) as watched:
        for name, body in nothing.items():
            answer(watched, name, body)
        watched.page.goto(f"{early.url}/dashboard")
        watched.page.wait_for_selector('[data-link="live"]')
        until(lambda: any("pictures/timeline" in address for address in watched.addresses))
        assert watched.text("#timeline-empty") == "No round has run yet."
        for button in watched.page.locator("[data-timeline]").all():
            button.click()
        watched.page.focus("#timeline-canvas")
        for key in ("ArrowDown", "ArrowUp", "+", "-", "0", "Enter", "ArrowLeft"):
            watched.page.keyboard.press(key)
        assert watched.text("#groups-table") == "No group yet."


def test_a_service_that_is_killed_and_started_again_is_shown_by_the_same_page(chromium, tmp_path: Path) -> None:
    with live_service(tmp_path) as service, watched_page(chromium, quiet=False) as watched:
        until(lambda: service.get("/v1/status")["trained_step"] >= 3)
        open_live(watched, service)
        watched.page.evaluate("globalThis.loadedOnce = true")
        service.kill()
        watched.page.wait_for_selector('[data-link="away"]')
        banner = watched.text("#away")
        assert re.match(r"The service has been away for \d+ (ms|s)", banner), banner
        assert watched.page.locator("body.away").count() == 1
        service.start()
        watched.page.wait_for_selector('[data-link="live"]')
        assert watched.page.locator("body.away").count() == 0
        assert not watched.page.is_visible("#away")
        until(lambda: service.get("/v1/status")["trained_step"] >= 2)
        service.pause()
        step = str(service.get("/v1/status")["trained_step"])
        until(lambda: watched.field("trained_step") == step)
        newest = service.get("/v1/pictures/timeline")["rounds"][-1]["round"]
        watched.page.locator("#timeline summary").click()
        until(lambda: watched.page.locator("#rounds-table tbody th").first.inner_text() == str(newest))
        assert watched.page.evaluate("globalThis.loadedOnce"), "it was not loaded again"
        faults = [c for c in watched.complaints if "ERR_" not in c and "503" not in c]
        assert faults == [], "only what the browser itself says of a service that is away"


def test_with_a_token_the_page_is_behind_its_login_and_below_its_prefix(chromium, tmp_path: Path) -> None:
    sections = {"service": {"token": TOKEN, "root_path": "/april"}}
    with live_service(tmp_path, sections=sections) as service, watched_page(chromium, quiet=False) as watched:
        until(lambda: service.get("/v1/status")["trained_step"] >= 2)
        page = watched.page
        page.goto(f"{service.url}/dashboard")
        page.wait_for_url("**/april/dashboard/login")
        assert page.evaluate(PATCH) == 401
        assert service.get("/v1/settings")["ratio"] == 2.0
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#login-problem")
        assert "not the token" in page.inner_text("#login-problem")
        watched.complaints.clear()
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_url("**/april/dashboard")
        page.wait_for_selector('[data-link="live"]')
        page.wait_for_selector("#timeline-canvas[data-view]")
        assert page.evaluate("document.cookie") == ""
        page.locator("#ratio-input").fill("1.5")
        page.click("#ratio-apply")
        until(lambda: service.get("/v1/settings")["ratio"] == 1.5)
        assert "1.5" in page.inner_text("#audit tbody tr >> nth=0")
        page.locator("#groups-table tbody a").first.click()
        page.wait_for_selector("pre.tokens span.t")
        page.click("nav >> text=Run")
        page.wait_for_url("**/april/dashboard")
        assert all(address.startswith((service.url, "data:")) for address in watched.addresses), watched.addresses
        assert watched.complaints == []
        page.click("text=Log out")
        page.wait_for_url("**/april/dashboard/login")
        assert page.evaluate(PATCH) == 401
        assert service.get("/v1/settings")["ratio"] == 1.5


@pytest.mark.slow
def test_a_session_that_ended_leads_to_the_login(chromium, tmp_path: Path) -> None:
    with (
        live_service(tmp_path, sections={"service": {"token": TOKEN}}) as service,
        watched_page(chromium, quiet=False) as watched,
    ):
        page = watched.page
        page.goto(f"{service.url}/dashboard")
        page.fill("#token", TOKEN)
        page.click("text=Log in >> visible=true >> nth=-1")
        page.wait_for_selector('[data-link="live"]')
        service.kill()
        page.wait_for_selector('[data-link="away"]')
        service.start()
        page.wait_for_url("**/dashboard/login")
