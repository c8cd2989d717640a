"""Pictures of the page and of the report, from a real run: `make screenshots` writes those that the docs show.

It needs Playwright and a Chromium, which no other part does. Always true: what is photographed is a run like that of
`april demo`, with a service, a trainer and a Redis of its own, all of which have ended when this has.
"""

import secrets
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import click
import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from buffer.embedded import EmbeddedRedis
from deploy.console import run_reporting_errors
from deploy.processes import Child, start_april
from protocol.errors import AprilError, SettingsError
from protocol.messages import Status
from protocol.settings import load_settings
from protocol.watching import SampleBar, Timeline

CHROMIUM = Path("/usr/bin/chromium")  # Debian's
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NUM_STEPS = 30  # the held-out reward has risen and every chart has a line by then
LONGER = ("--trainer.total_training_steps=1000", "--trainer.test_freq=12")  # it goes on while it is photographed
STEP_TIMEOUT_S = 1800.0  # of all steps, on a machine that does other things, too
POLL_S = 1.0
SETTLE_MS = 6000  # pictures are fetched one after another, each of them once in some seconds
MAX_TRIES = 10  # the page is live, and what is above a part may grow by a line
CHART_MS = 500  # a chart is drawn when it is scrolled to
MAX_BYTES = 240 * 1024  # a dozen of them are loaded with one page of the docs
NUM_COLOURS = 256  # as many as a palette can have
MAX_ASKED = 100  # groups that may be gone
PIXEL_RATIO = 1.5  # text is sharp on a fine screen, and the file still small

Theme = Literal["light", "dark"]


class PhotographError(AprilError):
    """The run did not come to where it can be photographed."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture: of the element `part`, or of what a window of this size shows without scrolling.

    `hover`: over which element the pointer is, and `hover_at` where in it, else in its middle.
    """

    name: str
    part: str | None = None
    theme: Theme = "light"
    width: int = 1280
    height: int = 800
    hover: str | None = None
    hover_at: tuple[int, int] | None = None


PHONE = (390, 844)
TIMELINE = "#timeline-canvas"
A_BAR = (600, 46)  # likely: upper lanes are the busiest
CHARACTER = ".tokens .t:nth-child(12)"
PARTS = ("timeline", "tail", "running", "buffer", "off-policy", "training", "evaluation", "ratio", "groups")
PAGE_SHOTS = (
    Shot("page"),
    Shot("page-dark", theme="dark"),
    Shot("page-phone", None, "light", *PHONE),
    Shot("page-phone-dark", None, "dark", *PHONE),
    Shot("timeline-phone", "timeline", "dark", *PHONE),
    Shot("off-policy-dark", "off-policy", "dark"),
    Shot("timeline", "timeline", hover=TIMELINE, hover_at=A_BAR),
    *(Shot(part, part) for part in PARTS if part not in ("timeline", "groups")),
)
LOGIN_SHOTS = (Shot("login", height=420),)
GROUP_SHOTS = (Shot("group", hover=CHARACTER), Shot("group-phone", None, "dark", *PHONE))
REPORT_SHOTS = (Shot("report"),)


def every(shots: Iterable[Shot], parts: tuple[str, ...] = ()) -> Iterator[Shot]:
    """The same and each of `parts` at both widths in both themes: to look at, too many to keep."""
    name = next(iter(shots)).name
    themes: tuple[Theme, Theme] = ("light", "dark")
    for theme in themes:
        for width, height in ((1280, 800), PHONE):
            for part in (None, *parts):
                yield Shot(f"{name}{f'-{part}' if part else ''}-{width}-{theme}", part, theme, width, height)


@dataclass(frozen=True, slots=True)
class Run:
    """A run that goes on: the address of its service, the token, its folder."""

    url: str
    token: str
    folder: Path


@contextmanager
def demo_run(folder: Path) -> Generator[Run]:
    """A run of the demo that has trained NUM_STEPS steps and goes on until the block is left."""
    from deploy.demo.base_policy import default_cache_dir, make_base_policy
    from deploy.demo.launch import THREADS, wiring
    from deploy.demo.progress import reporting

    with as_file(files("deploy.demo") / "demo.toml") as run_toml, ExitStack() as stack:
        seed = load_settings(run_toml, []).run.seed
        with reporting("base policy") as progress:
            policy = make_base_policy(default_cache_dir(), seed, progress)
        redis = EmbeddedRedis(folder / "redis")
        redis.start()
        stack.callback(redis.stop)
        token = secrets.token_urlsafe(16)
        words = [str(run_toml), *wiring(folder, policy), *LONGER]
        url = load_settings(run_toml, words[1:]).trainer.service_url
        env = THREADS | {"APRIL_BUFFER__URL": redis.url, "APRIL_SERVICE__TOKEN": token}
        service = stack.enter_context(start_april("service", ["serve", *words], folder / "service.log", env))
        trainer = stack.enter_context(start_april("trainer", ["train", *words], folder / "trainer.log", env))
        _wait_for_steps(Run(url, token, folder), service, trainer)
        yield Run(url, token, folder)


def _wait_for_steps(run: Run, *children: Child) -> None:
    deadline = time.monotonic() + STEP_TIMEOUT_S
    with _client(run) as client:
        while time.monotonic() < deadline:
            for child in children:
                child.check_alive()
            try:
                response = client.get("/v1/status")
            except httpx.TransportError:  # it is still starting; check_alive tells if it died
                response = None
            if response and response.is_success:
                step = Status.model_validate(response.json()).trained_step
                if step >= NUM_STEPS:
                    return
            time.sleep(POLL_S)
    raise PhotographError(f"{NUM_STEPS} steps took more than {STEP_TIMEOUT_S:g} s: look at the logs in {run.folder}")


def _client(run: Run) -> httpx.Client:
    headers = {"Authorization": f"Bearer {run.token}"} if run.token else {}
    return httpx.Client(base_url=run.url, headers=headers, timeout=30)


def photograph(run: Run, out: Path, all_of_it: bool) -> None:
    """Take all pictures of `run` into the folder `out`."""
    if not CHROMIUM.exists():
        raise SettingsError(f"there is no {CHROMIUM}: install it, as with apt-get install chromium")
    page_shots = every(PAGE_SHOTS, PARTS) if all_of_it else PAGE_SHOTS
    group_shots = every(GROUP_SHOTS) if all_of_it else GROUP_SHOTS
    report_shots = every(REPORT_SHOTS, ("timeline", "settings")) if all_of_it else REPORT_SHOTS
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(CHROMIUM_FLAGS))
        cookies = _log_in(browser, run, out, every(LOGIN_SHOTS) if all_of_it else LOGIN_SHOTS)
        _take(browser, f"{run.url}/dashboard", page_shots, out, cookies)
        for shot in group_shots:
            if group := group_of_many_versions(run):
                _take(browser, f"{run.url}/dashboard/groups/{group}", [shot], out, cookies)
        _take(browser, report_of(run).as_uri(), report_shots, out, [])
        browser.close()


def group_of_many_versions(run: Run) -> str | None:
    """A group that is still kept, if possible with different rewards and a response that several versions wrote."""
    with _client(run) as client:
        shown = Timeline.model_validate(client.get("/v1/pictures/timeline").raise_for_status().json())
        samples: dict[str, list[SampleBar]] = {}
        for sample in shown.samples:
            if sample.reward is not None:
                samples.setdefault(sample.group, []).append(sample)
        newest_first = sorted(samples, reverse=True)  # a group goes when its step is in a checkpoint
        for group in sorted(newest_first, key=lambda name: _shows(samples[name]), reverse=True)[:MAX_ASKED]:
            if client.get(f"/v1/groups/{group}").is_success:
                return group
    return None


def _shows(samples: list[SampleBar]) -> int:
    """How much there is to see in a group."""
    versions = [{segment.version for stay in sample.attempts for segment in stay.segments} for sample in samples]
    return any(len(written) > 1 for written in versions) + (len({sample.reward for sample in samples}) > 1)


def report_of(run: Run) -> Path:
    """The report of the run as it is now."""
    from rollout_service.dashboard.report import render_report
    from rollout_service.watch.report import run_report

    path = run.folder / "report.html"
    path.write_text(render_report(run_report(run.folder)))
    return path


def _log_in(browser: Browser, run: Run, out: Path, shots: Iterable[Shot]) -> list[dict[str, object]]:
    """Photograph the form, then log in through it as a person would; the cookies of the session."""
    _take(browser, f"{run.url}/dashboard", shots, out, [])
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{run.url}/dashboard")
    if page.locator("#token").count():
        page.fill("#token", run.token)
        page.click("button.main")
        page.wait_for_selector("#verdict")
    cookies = [dict(cookie) for cookie in context.cookies()]
    context.close()
    return cookies


def _take(browser: Browser, url: str, shots: Iterable[Shot], out: Path, cookies: list[dict[str, object]]) -> None:
    """Pictures of one page. Those of one window come from one load of it."""
    by_window: dict[tuple[Theme, int, int], list[Shot]] = {}
    for shot in shots:
        by_window.setdefault((shot.theme, shot.width, shot.height), []).append(shot)
    for (theme, width, height), taken in by_window.items():
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=PIXEL_RATIO
        )
        context.add_cookies(cookies)  # pyright: ignore[reportArgumentType]  as Playwright gave them
        page = context.new_page()
        page.on("console", lambda message: click.echo(f"console: {message.text}", err=True))
        page.on("pageerror", lambda error: click.echo(f"error on the page: {error}", err=True))
        page.goto(url)
        page.wait_for_timeout(SETTLE_MS)
        for shot in taken:
            save(_photo(page, shot), out / f"{shot.name}.png")
        context.close()


def _photo(page: Page, shot: Shot) -> bytes:
    if shot.part is None:
        page.evaluate("scrollTo(0, 0)")
        _hover(page, shot)
        return page.screenshot()
    page.evaluate("document.querySelector('.top').style.position = 'static'")  # it would lie over a tall part
    part = page.locator(f"#{shot.part}")
    for _ in range(MAX_TRIES):
        part.scroll_into_view_if_needed()
        _hover(page, shot)
        before = part.bounding_box()
        picture = part.screenshot()
        if part.bounding_box() == before:
            return picture
    raise PhotographError(f"#{shot.part} does not stand still: something above it changes its height all the time")


def _hover(page: Page, shot: Shot) -> None:
    if shot.hover and page.locator(shot.hover).count():
        x, y = shot.hover_at or (None, None)
        page.hover(shot.hover, position=None if x is None or y is None else {"x": x, "y": y})
    else:
        page.mouse.move(0, 0)
    page.wait_for_timeout(CHART_MS)


def save(picture: bytes, path: Path) -> None:
    """As a PNG of at most MAX_BYTES: a big one gets a palette, which costs it rare colours."""
    with Image.open(BytesIO(picture)) as image:
        whole = image.convert("RGB")
        whole.save(path, optimize=True)
        if path.stat().st_size > MAX_BYTES:
            whole.quantize(NUM_COLOURS, kmeans=1, dither=Image.Dither.NONE).save(path, optimize=True)
    click.echo(f"{path} {path.stat().st_size // 1024} KiB")


@click.command()
@click.option("--all", "all_of_it", is_flag=True, help="Every part at both widths in both themes.")
@click.option("--url", help="A service that runs already, instead of a demo of its own; with --run-dir.")
@click.option("--token", default="", envvar="APRIL_SERVICE__TOKEN", help="Of that service.")
@click.option("--run-dir", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Of that service.")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False), default=Path("docs/images"))
def main(all_of_it: bool, url: str | None, token: str, run_dir: Path | None, out: Path) -> None:
    """Photograph the page and the report of a run of the demo into the folder OUT [default: docs/images]."""

    def work() -> None:
        out.mkdir(parents=True, exist_ok=True)
        if url is not None:
            if run_dir is None:
                raise SettingsError("--url wants --run-dir, too: the report is made from the run's folder")
            photograph(Run(url.rstrip("/"), token, run_dir), out, all_of_it)
            return
        with TemporaryDirectory(prefix="april-screenshots-") as folder, demo_run(Path(folder)) as run:
            photograph(run, out, all_of_it)

    run_reporting_errors(work)


if __name__ == "__main__":
    main()
