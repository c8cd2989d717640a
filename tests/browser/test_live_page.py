"""The page of a running service as a person uses it."""

import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the page in a browser")

from tests.browser.live import (
    LiveService,
    Watched,
    live_service,
    open_live,
    scroll_through,
    settles,
    until,
    view_of,
    watched_page,
)

MAX_TABLE_ROWS = 200  # charts.js: of the newest
HARMED = "document.title === 'run'"


@pytest.fixture(scope="module")
def service(folder: Path) -> Generator[LiveService]:
    """Shared by this module; its prompts are hostile."""
    with live_service(folder, evil=True) as service:
        until(lambda: service.get("/v1/status")["trained_step"] >= 6)
        yield service


@pytest.fixture
def watched(chromium, service: LiveService) -> Generator[Watched]:
    service.resume()
    with watched_page(chromium) as watched:
        open_live(watched, service)
        yield watched


def test_it_loads_from_here_alone_and_draws_everything(watched: Watched, service: LiveService) -> None:
    page = watched.page
    page.wait_for_selector("#verdict-sentence:not(:empty)")
    assert page.locator("figure.chart").count() > 20
    # A prediction takes more samples than a run has that only began; the simulated engine has no cache to speak of.
    settles(lambda: set(scroll_through(page)) - {"predicted", "kv-rounds"}, set())
    for name in scroll_through(page):
        assert watched.text(f"#{name} .plot"), "what isn't drawn says why"
    for name in ("timeline", "tail", "moments", "steps", "ratio"):
        assert any(f"/v1/pictures/{name}" in address for address in watched.addresses)
    outside = [a for a in watched.addresses if not a.startswith((service.url, "data:", "blob:"))]
    assert outside == []


def test_its_numbers_are_those_of_the_status_and_the_metrics(watched: Watched, service: LiveService) -> None:
    service.pause()
    status = service.get("/v1/status")
    metrics = dict(
        re.findall(r"^(\w+(?:{[^}]*})?) ([\d.e+-]+)$", service.request("GET", "/metrics").text, re.MULTILINE)
    )
    expected = {
        "trained_step": f"{status['trained_step']:,}",
        "durable_step": f"{status['durable_step']:,}",
        "active_version": str(status["active_version"]),
        "newest_version": str(status["newest_version"]),
        "parked": f"{status['samples']['parked']:,}",
        "ready": f"{status['ledger']['ready']:,}",
        "leased": f"{status['ledger']['leased']:,}",
        "ratio": f"{status['settings']['ratio']:g}",
        "running": f"0 / {sum(engine['slots'] for engine in status['engines'])}",
        "ledger_error": "0",
    }
    settles(lambda: {name: watched.field(name) for name in expected}, expected)
    assert int(watched.field("parked")) == float(metrics['april_samples{state="parked"}'])
    assert int(watched.field("ready")) == float(metrics['april_groups{state="ready"}'])
    assert int(watched.field("ledger_error")) == float(metrics["april_ledger_error"])
    assert float(watched.field("ratio")) == float(metrics["april_ratio"])
    assert watched.text("#verdict-sentence") == status["verdict"]["sentence"]
    ledger = status["ledger"] | {"error": 0}
    assert ledger_of(watched) == {name: f"{value:,}" for name, value in ledger.items()}


def ledger_of(watched: Watched) -> dict[str, str]:
    names, numbers = (watched.page.locator(f"#ledger {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, numbers, strict=True))


PIXELS_OF_SAMPLE = """async (picture) => {
  const script = document.querySelector('script[type=module]').src;
  const { layOut, firstAfter } = await import(script.replace('app.js', 'timeline_layout.js'));
  const model = layOut(picture);
  const canvas = document.getElementById('timeline-canvas');
  const view = JSON.parse(canvas.dataset.view);
  const all = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const found = [];
  for (let owner = 0; owner < model.samples.length; owner += 1) {
    const lane = model.laneOf[owner];
    const middles = new Map();
    for (let bar = model.offsets[lane]; bar < model.offsets[lane + 1]; bar += 1) {
      if (model.owners[bar] !== owner || model.kinds[bar] !== 0) continue;
      middles.set(model.versions[bar], (model.starts[bar] + model.ends[bar]) / 2);
    }
    if (middles.size < 2) continue;
    const y = Math.floor(20 + (lane + 0.4 - view.top) * view.row);
    const colours = [...middles].map(([version, at]) => {
      const x = Math.floor(((at - view.from) / (view.to - view.from)) * canvas.clientWidth);
      const [r, g, b] = all.subarray(4 * (y * canvas.width + x));
      const style = getComputedStyle(document.documentElement).getPropertyValue(`--v${version % 10}`).trim();
      const seen = '#' + [r, g, b].map((c) => c.toString(16).padStart(2, '0')).join('');
      return { version, x, y, seen, expected: style };
    });
    found.push({ sample: model.samples[owner][0], colours });
  }
  return found;
}"""


def resumed_samples(watched: Watched, service: LiveService) -> list[dict[str, Any]]:
    """Those of more than one version, with what their bars' middles look like when all is in view."""
    page = watched.page
    service.pause()
    picture = service.get("/v1/pictures/timeline")
    until(lambda: view_of(page)["samples"] == len(picture["samples"]))
    page.locator("#timeline").scroll_into_view_if_needed()
    page.click('[data-timeline="all"]')
    until(lambda: not view_of(page)["follow"])
    found = page.evaluate(PIXELS_OF_SAMPLE, picture)
    assert found, "a ratio of 2 resumes some with the next version"
    return found


def drawn_whole(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whose bars are wide enough to be seen: of bars within one pixel the last one is drawn and pointed at."""
    exact = [s for s in samples if all(c["seen"] == c["expected"] for c in s["colours"])]
    assert exact, samples[:3]
    return exact


def test_a_resumed_sample_has_the_colours_of_both_versions(watched: Watched, service: LiveService) -> None:
    exact = drawn_whole(resumed_samples(watched, service))
    assert len({c["seen"] for c in exact[0]["colours"]}) >= 2


def test_the_slider_changes_the_ratio_of_the_next_round_and_is_in_the_list(
    watched: Watched, service: LiveService
) -> None:
    page = watched.page
    before = service.get("/v1/settings")
    wanted = 1.5 if before["ratio"] != 1.5 else 2.5
    page.locator("#ratio-input").fill(str(wanted))
    assert page.inner_text("#ratio-output") == str(wanted)
    page.click("#ratio-apply")
    until(lambda: "from the next decision on" in page.inner_text("#ratio-said"))
    after = service.get("/v1/settings")
    assert after["ratio"] == wanted
    assert after["audit"][-1]["changes"] == {"ratio": [before["ratio"], wanted]}
    assert page.locator("#audit tbody tr").count() == len(after["audit"])
    row = page.locator("#audit tbody tr").first.inner_text()
    assert re.search(rf"ratio\s+{before['ratio']:g}\s+{wanted:g}\s+127\.0\.0\.1", row), row
    until(lambda: watched.field("ratio") == f"{wanted:g}")
    number = service.get("/v1/pictures/timeline")["rounds"][-1]["round"]
    until(lambda: service.get("/v1/pictures/timeline")["rounds"][-1]["round"] > number + 1)
    status = service.get("/v1/status")
    in_flight = status["ledger"]["open"] + status["ledger"]["ready"]
    assert in_flight <= wanted * status["settings"]["train_batch_size"]


def test_a_ratio_that_the_service_refuses_is_said_and_not_kept(watched: Watched, service: LiveService) -> None:
    page = watched.page
    most = float(page.locator("#ratio-input").get_attribute("max") or 0)
    settings = service.get("/v1/settings")
    assert most == settings["max_lag"] + 1 - settings["lookahead"]
    page.route(
        "**/v1/settings",
        lambda route: (
            route.fulfill(status=422, json={"detail": "ratio 9 needs max_lag >= 9"})
            if route.request.method == "PATCH"
            else route.continue_()
        ),
    )
    page.locator("#ratio-input").fill(str(most))
    page.click("#ratio-apply")
    until(lambda: "Not changed: ratio 9 needs max_lag >= 9" in page.inner_text("#ratio-said"))
    assert service.get("/v1/settings")["ratio"] == settings["ratio"]
    assert len(watched.complaints) == 1, "the browser itself reports a refused request"
    watched.complaints.clear()


def test_hostile_prompts_are_shown_and_do_nothing(watched: Watched, service: LiveService) -> None:
    page = watched.page
    page.locator("#groups-table tbody a").first.click()
    page.wait_for_selector("pre.tokens span.t")
    assert "<script>document.title='run'</script>" in page.inner_text("pre.text >> nth=0")
    assert "␀␛[31m\ufffd" in page.inner_text("pre.text >> nth=0")
    assert not page.evaluate(HARMED)
    assert page.locator("img").count() == 0


def test_tokens_are_tinted_by_version_or_log_prob_and_told_on_hover(watched: Watched, service: LiveService) -> None:
    page = watched.page
    service.pause()
    samples = service.get("/v1/pictures/timeline")["samples"]
    resumed = next(s for s in samples if len({segment[0] for attempt in s[5] for segment in attempt[7]}) > 1)
    page.goto(f"{service.url}/dashboard/groups/{resumed[1]}")
    article = page.locator("article", has_text=resumed[0])
    tints = article.locator("span.t").evaluate_all("spans => spans.map((s) => s.style.backgroundColor)")
    view = next(s for s in service.get(f"/v1/groups/{resumed[1]}")["samples"] if s["sample_id"] == resumed[0])
    versions = [segment["version"] for segment in view["segments"] for _ in segment["tokens"]]
    assert len(tints) == len(versions) == view["num_tokens"]
    assert len({(v, tint) for v, tint in zip(versions, tints, strict=True)}) == len(set(versions)) == len(set(tints))
    page.get_by_label("log-prob").check()
    by_logprob = article.locator("span.t").evaluate_all("spans => spans.map((s) => s.style.backgroundColor)")
    assert by_logprob != tints
    article.locator("span.t").nth(1).hover()
    logprob = [value for segment in view["segments"] for value in segment["logprobs"]][1]
    said = article.locator(".readout").inner_text()
    assert said.startswith("token 2 of ")
    assert f"version {versions[1]}" in said
    assert float(re.search(r"log-prob (-?[\d.e-]+)", said)[1]) == pytest.approx(logprob, rel=0.01)


def test_a_bar_tells_its_sample_and_opens_its_group(watched: Watched, service: LiveService) -> None:
    page = watched.page
    (resumed, *_) = drawn_whole(resumed_samples(watched, service))
    canvas = page.locator("#timeline-canvas")
    middle = {"x": resumed["colours"][0]["x"], "y": resumed["colours"][0]["y"]}
    canvas.hover(position=middle)
    page.wait_for_selector("#timeline-tip:not([hidden]) strong")
    assert page.inner_text("#timeline-tip strong") == resumed["sample"]
    versions = [str(c["version"]) for c in resumed["colours"]]
    assert set(versions) <= set(re.findall(r"v(\d+) × \d+", page.inner_text("#timeline-tip")))
    canvas.click(position=middle)
    page.wait_for_url("**/dashboard/groups/*")
    assert resumed["sample"] in page.inner_text("main")


def span_of(view: dict[str, Any]) -> float:
    return view["to"] - view["from"]


def changes_view(page, key: str, so: Callable[[dict[str, Any], dict[str, Any]], bool]) -> bool:
    before = view_of(page)
    page.keyboard.press(key)
    return until(lambda: so(before, view_of(page)))


def test_everything_can_be_done_with_the_keyboard(watched: Watched, service: LiveService) -> None:
    page = watched.page
    service.pause()
    reached: list[str] = []
    name = "document.activeElement.id || document.activeElement.dataset.timeline || document.activeElement.tagName"
    while "ratio-input" not in reached and len(reached) < 120:
        page.keyboard.press("Tab")
        reached.append(page.evaluate(name))
        if reached[-1] == "in":
            assert changes_view(page, "Enter", lambda before, after: span_of(after) < span_of(before))
        if reached[-1] == "timeline-canvas":
            assert changes_view(page, "ArrowLeft", lambda before, after: after["from"] < before["from"])
            page.keyboard.press("ArrowDown")
            assert "Enter opens its group" in page.inner_text("#timeline-readout")
    wanted = {"earlier", "later", "in", "out", "all", "follow", "timeline-canvas", "ratio-input"}
    assert wanted <= set(reached), reached
    ratio = page.locator("#ratio-input").input_value()
    page.keyboard.press("ArrowRight" if float(ratio) < 4 else "ArrowLeft")
    changed = page.locator("#ratio-input").input_value()
    assert changed != ratio
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    until(lambda: service.get("/v1/settings")["ratio"] == float(changed))


def test_charts_have_their_numbers_as_tables(watched: Watched, service: LiveService) -> None:
    page = watched.page
    service.pause()
    page.locator("#reward summary").click()
    rows = page.locator("#reward .numbers tbody tr")

    def agree() -> bool:  # the step that was being trained is reported after the pause
        steps, newest = service.get("/v1/pictures/steps"), rows.first.inner_text().split()
        reward = steps["series"]["reward/mean"][-1]
        assert rows.count() <= MAX_TABLE_ROWS
        return int(newest[0]) == steps["steps"][-1] and float(newest[1]) == pytest.approx(reward, rel=0.01)

    until(agree)


def test_the_theme_is_changed_and_remembered(watched: Watched) -> None:
    page = watched.page
    theme = "document.documentElement.dataset.theme"
    first = page.evaluate(theme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("[data-theme-toggle]")
    assert page.evaluate(theme) != first
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    page.reload()
    page.wait_for_selector('[data-link="live"]')
    assert page.evaluate(theme) != first


def test_no_script_no_matter(chromium, service: LiveService) -> None:
    service.pause()
    with watched_page(chromium, java_script_enabled=False) as watched:
        watched.page.goto(f"{service.url}/dashboard")
        assert "Scripts are off" in watched.text("main")
        status = service.get("/v1/status")
        assert watched.field("trained_step") == str(status["trained_step"])
        assert watched.text("#verdict-sentence") == status["verdict"]["sentence"]


def test_at_phone_width_nothing_is_cut_off(chromium, service: LiveService) -> None:
    with watched_page(chromium, viewport={"width": 390, "height": 844}) as watched:
        open_live(watched, service)
        width = "document.documentElement.scrollWidth"
        assert watched.page.evaluate(width) <= 390
