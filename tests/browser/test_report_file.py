"""The report as a file that somebody was sent: it draws, loads nothing, and runs nothing that a run wrote."""

from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the page in a browser")

from rollout_service.dashboard.report import render_report
from tests.browser.live import scroll_through, settles, watched_page
from tests.support import pictures

EVIL = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"


def test_it_draws_from_the_file_alone(chromium, tmp_path: Path) -> None:
    line = pictures.timeline(300)
    line = line.model_copy(update={"samples": [bar._replace(prompt=EVIL) for bar in line.samples]})
    file = tmp_path / "report.html"
    file.write_text(render_report(pictures.report(timeline=line, notes=[EVIL])))
    with watched_page(chromium) as watched:
        page = watched.page
        page.goto(file.as_uri())
        settles(lambda: scroll_through(page), [])
        page.focus("#timeline-canvas")
        page.keyboard.press("ArrowDown")
        assert EVIL in watched.text("#timeline-readout")
        page.click("[data-theme-toggle]")
        assert page.evaluate("document.title") == "demo · april report"
        assert page.locator("img").count() == 0
        assert [a for a in watched.addresses if not a.startswith(("data:", file.as_uri()))] == []
        assert page.locator("#settings tbody tr").count() == 4 + 2, "settings and versions"
