"""Services as processes, and pages that remember what went wrong in them."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, ConsoleMessage, Page

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0  # of a machine that does much else; no test passes by waiting for it
POLL_S = 0.05
VENDORED_AXE = Path(__file__).parent / "vendor" / "axe.min.js"
SERIOUS = ("serious", "critical")


class LiveService:
    """A process of `live_service.py`; what it was started with is kept, so that it can be killed and started again."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self.prefix = options.get("sections", {}).get("service", {}).get("root_path", "")
        self.token = options.get("sections", {}).get("service", {}).get("token")
        self.start()

    def start(self) -> None:
        """Start it; again at the same port."""
        words = [sys.executable, "-m", "tests.browser.live_service", str(self._folder), json.dumps(self._options)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self._options["port"] = int(self._process.stdout.readline())

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return f"http://127.0.0.1:{self._options['port']}{self.prefix}"

    def kill(self) -> None:
        """SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def stop(self) -> None:
        """In order; nothing may go wrong at the end."""
        if self._process is not None:
            self._process.communicate(timeout=PATIENCE_S)
            assert self._process.returncode == 0

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """As a program that holds the token."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return httpx.request(method, self.url + path, headers=headers, timeout=PATIENCE_S, **more).raise_for_status()

    def get(self, path: str) -> Any:
        """JSON of a route."""
        return self.request("GET", path).json()

    def pause(self) -> None:
        """Until nothing runs and nothing changes."""
        self.request("POST", "/v1/pause")
        until(lambda: self.request("POST", "/v1/pause").json()["safe_to_stop"])

    def resume(self) -> None:
        """Generate again."""
        self.request("POST", "/v1/resume")


@contextmanager
def live_service(folder: Path, **options: Any) -> Generator[LiveService]:
    """A running service."""
    service = LiveService(folder, **options)
    try:
        yield service
        service.stop()
    finally:
        service.kill()


def until(condition: Callable[[], Any]) -> Any:
    """Ask until it is so; what it answered."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it did not become so"
        time.sleep(POLL_S)
    return answer


def settles(ask: Callable[[], Any], expected: Any) -> None:
    """Ask until it is `expected`; where it stays something else the difference is seen."""
    deadline = time.monotonic() + PATIENCE_S
    while (answer := ask()) != expected and time.monotonic() < deadline:
        time.sleep(POLL_S)
    assert answer == expected, f"{answer!r} instead of {expected!r}"


class Watched:
    """A page, what its console complained about, and every address that it asked for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.addresses: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}\n{error.stack}"))
        page.on("request", lambda request: self.addresses.append(request.url))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text} {message.location}")

    def text(self, selector: str) -> str:
        """What an element says."""
        return self.page.locator(selector).inner_text()

    def field(self, name: str) -> str:
        """A number on top."""
        return self.text(f'[data-field="{name}"]')


@contextmanager
def watched_page(browser: Browser, quiet: bool = True, **context: Any) -> Generator[Watched]:
    """A page in a context of its own. `quiet`: nothing may go wrong in it."""
    inside = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | context))
    inside.set_default_timeout(1000 * PATIENCE_S)
    try:
        watched = Watched(inside.new_page())
        yield watched
        assert not quiet or not watched.complaints, "\n".join(watched.complaints)
    finally:
        inside.close()


def scroll_through(page: Page) -> list[str]:
    """Look at every chart, since one is drawn when it is looked at; those that still have no drawing."""
    for figure in page.locator("figure.chart").all():
        figure.scroll_into_view_if_needed()
    undrawn = page.locator("figure.chart:not(:has(.uplot))")
    return [str(name) for name in undrawn.evaluate_all("figures => figures.map((figure) => figure.id)")]


def view_of(page: Page) -> dict[str, Any]:
    """What the timeline looks at: from, to, top, row, follow, samples."""
    return json.loads(page.get_attribute("#timeline-canvas", "data-view") or "{}")


def open_live(watched: Watched, service: LiveService) -> None:
    """Open the page and wait until it is live and has drawn its timeline."""
    watched.page.goto(f"{service.url}/dashboard")
    watched.page.wait_for_selector('[data-link="live"]')
    watched.page.wait_for_selector("#timeline-canvas[data-view]")


def findings(page: Page) -> list[str]:
    """What axe finds that is serious or worse: rule, what it is about, and where."""
    page.evaluate(VENDORED_AXE.read_text())
    found = page.evaluate("async () => (await axe.run(document)).violations")
    return [
        f"{rule['id']} ({rule['impact']}): {rule['help']}: {[node['target'] for node in rule['nodes']][:5]}"
        f" {rule['nodes'][0].get('failureSummary', '')}"
        for rule in found
        if rule["impact"] in SERIOUS
    ]
