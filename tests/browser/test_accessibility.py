"""No serious finding of axe-core, in both themes and on every kind of page."""

from collections.abc import Generator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the page in a browser")

from rollout_service.dashboard.report import render_report
from tests.browser.live import LiveService, findings, live_service, open_live, scroll_through, until, watched_page
from tests.support import pictures

THEMES = ("light", "dark")


@pytest.fixture(scope="module")
def service(folder: Path) -> Generator[LiveService]:
    """Long enough under way that everything has something to show."""
    with live_service(folder) as service:
        until(lambda: service.get("/v1/status")["trained_step"] >= 6)
        service.pause()
        service.request("PATCH", "/v1/settings", json={"ratio": 1.75})
        yield service


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.slow)])
def test_the_page(chromium, service: LiveService, theme: str, width: int) -> None:
    with watched_page(chromium, color_scheme=theme, viewport={"width": width, "height": 900}) as watched:
        open_live(watched, service)
        scroll_through(watched.page)
        for details in watched.page.locator("details").all():
            details.evaluate("(details) => { details.open = true; }")
        watched.page.wait_for_selector("#reward .numbers table")
        watched.page.wait_for_selector("#audit table")
        assert findings(watched.page) == []


@pytest.mark.parametrize("theme", THEMES)
def test_a_group(chromium, service: LiveService, theme: str) -> None:
    group = service.get("/v1/pictures/timeline")["samples"][0][1]
    with watched_page(chromium, color_scheme=theme) as watched:
        watched.page.goto(f"{service.url}/dashboard/groups/{group}")
        watched.page.wait_for_selector("span.t")
        for tint in ("version", "log-prob"):
            watched.page.get_by_label(tint, exact=True).check()
            watched.page.locator("span.t").first.hover()
            assert findings(watched.page) == []


@pytest.mark.parametrize("theme", THEMES)
def test_a_group_that_is_not_there(chromium, service: LiveService, theme: str) -> None:
    with watched_page(chromium, quiet=False, color_scheme=theme) as watched:
        watched.page.goto(f"{service.url}/dashboard/groups/none")
        assert findings(watched.page) == []


@pytest.mark.parametrize("theme", THEMES)
def test_the_login_and_the_report(chromium, tmp_path: Path, theme: str) -> None:
    sections = {"service": {"token": "right"}}
    with (
        live_service(tmp_path, sections=sections, trains=False) as locked,
        watched_page(chromium, quiet=False, color_scheme=theme) as watched,
    ):
        watched.page.goto(f"{locked.url}/dashboard")
        assert findings(watched.page) == []
        watched.page.fill("#token", "wrong")
        watched.page.keyboard.press("Enter")
        watched.page.wait_for_selector("#login-problem")
        assert findings(watched.page) == []
    file = tmp_path / "report.html"
    file.write_text(render_report(pictures.report()))
    with watched_page(chromium, color_scheme=theme) as watched:
        watched.page.goto(file.as_uri())
        watched.page.wait_for_selector("#timeline-canvas[data-view]")
        scroll_through(watched.page)
        assert findings(watched.page) == []
