"""Boards as data, and the JSON that Grafana reads (schema 39, Grafana 11).

An expression is written with `@` for the choice of the run and WINDOW for the time that is looked back on, such as
`rate(april_resumes_total{@}[WINDOW])`; Grafana fills both in from the variables on top of each board.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 39
DATA_SOURCE = {"type": "prometheus", "uid": "april-prometheus"}
RUN_FILTER = 'run=~"$run"'
WINDOW_VARIABLE = "$window"
WINDOWS = ("5m", "15m", "1h", "6h", "1d")
GRID_WIDTH = 24  # Grafana's
PANEL_HEIGHT = 8
STAT_HEIGHT = 4
GREEN, YELLOW, RED = "green", "yellow", "red"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression and what its series are called (Grafana's `{{label}}`)."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `steps`: (value, colour) from which on the colour holds; `kind`: Grafana's type of the panel."""

    title: str
    text: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    steps: tuple[tuple[float | None, str], ...] = ((None, GREEN),)
    stacked: bool = False
    largest: float | None = None
    mappings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard; `uid` is in its address and in links, so it stays."""

    uid: str
    title: str
    text: str
    rows: tuple[Row, ...]

    @property
    def queries(self) -> list[Query]:
        """All of them."""
        return [query for row in self.rows for panel in row.panels for query in panel.queries]


def filled_in(expr: str, run_filter: str, window: str) -> str:
    """An expression as Prometheus takes it."""
    return expr.replace("@", run_filter).replace("WINDOW", window)


def dashboard(board: Board, links: Sequence[Board]) -> dict[str, Any]:
    """The JSON model of a board."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.text,
        "tags": ["april"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_installs()]},
        "links": [_link(other) for other in links if other.uid != board.uid],
        "templating": {"list": [_run_variable(), _window_variable()]},
        "panels": _panels(board),
    }


def _panels(board: Board) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in board.rows:
        panels.append(_heading(len(panels) + 1, row.title, y))
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > GRID_WIDTH:
                x, y = 0, y + height
                height = 0
            tall = STAT_HEIGHT if panel.kind == "stat" else PANEL_HEIGHT
            panels.append(_panel(len(panels) + 1, panel, {"x": x, "y": y, "w": panel.width, "h": tall}))
            x, height = x + panel.width, max(height, tall)
        y += height
    return panels


def _heading(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    made = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATA_SOURCE,
        "gridPos": place,
        "targets": [_target(index, panel, query) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }
    return made


def _target(index: int, panel: Panel, query: Query) -> dict[str, Any]:
    target: dict[str, Any] = {
        "refId": chr(ord("A") + index),
        "datasource": DATA_SOURCE,
        "expr": filled_in(query.expr, RUN_FILTER, WINDOW_VARIABLE),
        "legendFormat": query.legend or "__auto",
        "range": panel.kind != "stat",
        "instant": panel.kind == "stat",
        "editorMode": "code",
    }
    if panel.kind == "heatmap":
        target["format"] = "heatmap"
    return target


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value, "color": colour} for value, colour in panel.steps],
        },
        "mappings": [_mapping(index, *mapping) for index, mapping in enumerate(panel.mappings)],
        "custom": _drawing(panel),
    }
    if panel.largest is not None:
        defaults["max"] = panel.largest
    if panel.kind != "timeseries":
        del defaults["custom"]
    if panel.unit in ("none", "short") and panel.kind == "timeseries" and not panel.stacked:
        del defaults["min"]  # rewards and losses go below zero
    return defaults


def _drawing(panel: Panel) -> dict[str, Any]:
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if panel.stacked else 0,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "showPoints": "never",
        "spanNulls": True,
        "thresholdsStyle": {"mode": "line" if len(panel.steps) > 1 else "off"},
    }


def _mapping(index: int, value: str, text: str) -> dict[str, Any]:
    return {"type": "value", "options": {value: {"text": text, "index": index}}}


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduced, "colorMode": "background", "graphMode": "none", "textMode": "auto"}
    if panel.kind == "heatmap":
        return {
            "calculate": False,
            "yAxis": {"unit": panel.unit},
            "color": {"mode": "scheme", "scheme": "Blues", "steps": 64, "scale": "exponential", "exponent": 0.5},
            "cellGap": 1,
            "tooltip": {"mode": "single", "yHistogram": False},
        }
    return {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "mean", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _installs() -> dict[str, Any]:
    """A line wherever a policy version became active."""
    return {
        "name": "policy versions",
        "datasource": DATA_SOURCE,
        "enable": False,
        "iconColor": "purple",
        "expr": filled_in("changes(april_policy_active_version{@}[1m]) > 0", RUN_FILTER, WINDOW_VARIABLE),
        "titleFormat": "a policy version became active",
    }


def _link(board: Board) -> dict[str, Any]:
    return {
        "title": board.title,
        "type": "link",
        "url": f"/d/{board.uid}",
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
    }


def _run_variable() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": "label_values(april_up, run)", "refId": "run"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _window_variable() -> dict[str, Any]:
    return {
        "name": "window",
        "label": "Looking back",
        "type": "custom",
        "query": ",".join(WINDOWS),
        "options": [{"text": w, "value": w, "selected": w == WINDOWS[1]} for w in WINDOWS],
        "current": {"text": WINDOWS[1], "value": WINDOWS[1]},
    }
