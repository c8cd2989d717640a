"""The report of a run as one file: styles, scripts and data inside, nothing loaded from anywhere."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from protocol.watching import RunReport
from rollout_service.dashboard.assets import assets, bundle, content_hash
from rollout_service.dashboard.facts import facts_shown
from rollout_service.dashboard.pages import templates

STYLES = ("vendor/uplot/uPlot.min.css", "tokens.css", "style.css")


def render_report(report: RunReport) -> str:
    """The HTML of `report`. Its policy lets in exactly the scripts and styles that it carries, by their digests."""
    styles = [assets()[name].text for name in STYLES]
    scripts = [assets()["theme.js"].text, assets()["vendor/uplot/uPlot.iife.min.js"].text, _closed(bundle("report.js"))]
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(content_hash, scripts))}",
            f"style-src {' '.join(map(content_hash, styles))}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return (
        templates()
        .get_template("report.html")
        .render(
            report=report,
            made_at=f"{datetime.fromtimestamp(report.made_at, UTC):%Y-%m-%d %H:%M:%S} UTC",
            facts=facts_shown(report.facts),
            settings=list(flat_settings(report.settings)),
            policy=policy,
            styles=styles,
            scripts=scripts,
            data=_data(report),
        )
    )


def flat_settings(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(`section.field`, value) of nested settings, as they are written in a RUN.toml."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat_settings(dict[str, object](value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, ensure_ascii=False, default=str)


def _data(report: RunReport) -> str:
    """What the script draws, as JSON that can't end its element."""
    text = report.model_dump_json(include={"verdict", "timeline", "tail", "moments", "steps", "ratio"})
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _closed(script: str) -> str:
    """In a scope of its own, strict like the modules it was made of."""
    closed = f'(() => {{\n"use strict";\n{script}\n}})();'
    assert "</script" not in closed.lower(), "a script of the page would end its own element"
    return closed
