"""The report: one file that loads nothing, runs what it carries and nothing that a run wrote."""

import json
import re

import pytest

from protocol.watching import RunReport
from rollout_service.dashboard.assets import bundle, content_hash
from rollout_service.dashboard.report import flat_settings, render_report
from tests.rollout_service.dashboard.browsers import Markup
from tests.support import pictures

EVIL = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & \u2028"


@pytest.fixture(scope="module")
def evil_report() -> tuple[RunReport, str]:
    line = pictures.timeline(200)
    line = line.model_copy(update={"samples": [bar._replace(prompt=EVIL) for bar in line.samples]})
    verdict = pictures.report().verdict.model_copy(update={"sentence": EVIL, "advice": EVIL})
    settings = {"run": {"name": EVIL, EVIL: [EVIL]}}
    report = pictures.report(run=EVIL, timeline=line, notes=[EVIL], verdict=verdict, settings=settings)
    return report, render_report(report)


def test_it_loads_nothing(evil_report: tuple[RunReport, str]) -> None:
    markup = Markup(evil_report[1])
    assert all(address.startswith("#") for address in markup.addresses)
    assert not [tag for tag, _ in markup.elements if tag in ("img", "iframe", "object", "embed", "link", "base")]
    assert "@import" not in evil_report[1]
    assert not re.search(r"url\((?!#|data:)", evil_report[1])


def test_its_policy_names_exactly_the_scripts_and_styles_in_it(evil_report: tuple[RunReport, str]) -> None:
    html = evil_report[1]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].replace("&#39;", "'").split("; "))
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [content_hash(script) for script in scripts]
    assert rules["style-src"].split() == [content_hash(style) for style in styles]
    assert len(scripts) == len(styles) == 3


def test_what_a_run_wrote_stays_text(evil_report: tuple[RunReport, str]) -> None:
    report, html = evil_report
    assert html.count("<script>alert") == 0
    assert "<img" not in html
    assert "<!--" not in html
    data = re.search(r'id="report-data">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    drawn = json.loads(data[1])
    assert drawn["timeline"]["samples"][0][2] == EVIL
    assert drawn == json.loads(report.model_dump_json(include=set(drawn)))
    assert EVIL in Markup(html).text


def test_a_report_without_a_ratio_has_no_section_for_it() -> None:
    html = render_report(pictures.report(ratio=None, notes=["the trace has no rounds"]))
    assert 'href="#ratio"' not in html
    assert "the trace has no rounds" in html


def test_settings_are_written_as_in_a_run_file() -> None:
    nested = {"run": {"name": "x"}, "engine": {"simulated": {"median_tokens": 4}}, "list": [1, "ü"], "none": None}
    assert list(flat_settings(nested)) == [
        ("run.name", '"x"'),
        ("engine.simulated.median_tokens", "4"),
        ("list", '[1, "ü"]'),
        ("none", "null"),
    ]


@pytest.mark.parametrize("entry", ["app.js", "group.js", "report.js"])
def test_modules_join_into_one_script(entry: str) -> None:
    script = bundle(entry)
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names))
