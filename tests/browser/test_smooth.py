"""Frames while the timeline is moved, with 50,000 samples and with none: how long they take is printed."""

import statistics
from collections.abc import Generator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the page in a browser")

from tests.browser.live import LiveService, Watched, live_service, open_live, until, view_of, watched_page
from tests.support import pictures

NUM_SAMPLES = 50_000
NUM_FRAMES = 90
MOST_TIMES_EMPTY = (
    4.0  # a frame with everything in it against one with nothing; a frame that draws them all takes hundreds
)

MOVE = """async (frames) => {
  const canvas = document.getElementById('timeline-canvas');
  const next = () => new Promise(requestAnimationFrame);
  const keys = ['ArrowLeft', 'ArrowLeft', '+', 'ArrowRight', '-', 'ArrowDown'];
  canvas.focus();
  const [took, painted] = [[], []];
  let before = await next();
  for (let i = 0; i < frames; i += 1) {
    canvas.dispatchEvent(new KeyboardEvent('keydown', { key: keys[i % keys.length], cancelable: true }));
    const now = await next();
    took.push(now - before);
    before = now;
    if (canvas.dataset.paintMs) painted.push(Number(canvas.dataset.paintMs));
  }
  return { took, painted };
}"""


@pytest.fixture(scope="module")
def service(folder: Path) -> Generator[LiveService]:
    """Its own pictures are replaced."""
    with live_service(folder, trains=False) as service:
        service.pause()
        yield service


def show(watched: Watched, service: LiveService, num_samples: int) -> None:
    """The page with a timeline of so many samples, all in view."""
    line = pictures.timeline(num_samples, slots=512) if num_samples else pictures.timeline(512, slots=512)
    if not num_samples:
        line = line.model_copy(update={"samples": line.samples[:1]})
    body = line.model_dump_json()
    watched.page.route(
        "**/v1/pictures/timeline*", lambda route: route.fulfill(body=body, content_type="application/json")
    )
    watched.page.bring_to_front()  # a page behind another draws nothing
    open_live(watched, service)
    watched.page.click('[data-timeline="all"]')
    until(lambda: not view_of(watched.page)["follow"])


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.slow
def test_fifty_thousand_samples_move_as_smoothly_as_none(chromium, service: LiveService) -> None:
    with watched_page(chromium) as empty, watched_page(chromium) as full:
        show(empty, service, 0)
        show(full, service, NUM_SAMPLES)
        assert view_of(full.page)["samples"] >= NUM_SAMPLES
        frames: dict[str, list[float]] = {"empty": [], "full": []}
        paints: dict[str, list[float]] = {"empty": [], "full": []}
        for _ in range(3):  # in turn, so that what else the machine does hits both
            for name, watched in (("empty", empty), ("full", full)):
                watched.page.bring_to_front()
                moved = watched.page.evaluate(MOVE, NUM_FRAMES)
                frames[name] += moved["took"]
                paints[name] += moved["painted"]
        colours = full.page.evaluate(
            "() => { const c = document.getElementById('timeline-canvas'); const d = c.getContext('2d')"
            ".getImageData(0, 30, c.width, c.height - 60).data; return new Set(new Uint32Array(d.buffer)).size; }"
        )
    for name in frames:
        print(
            f"{name}: frame {statistics.median(frames[name]):.1f} ms, p95 {percentile(frames[name], 0.95):.1f} ms;"
            f" painting {statistics.median(paints[name]):.2f} ms, p95 {percentile(paints[name], 0.95):.2f} ms"
        )
    assert colours > 5, "versions have colours"
    assert statistics.median(frames["full"]) <= MOST_TIMES_EMPTY * statistics.median(frames["empty"])
