"""Throughput against off-policy share: a PNG, and an HTML page that needs nothing but a browser.

Always true: the page loads nothing from anywhere, and whatever text is in it was escaped.
"""

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from rollout_service.tuning.report_files import write_report

Row = Mapping[str, Any]

WIDTH, HEIGHT, MARGIN = 760, 460, 64  # of the drawing, in CSS pixels
COLOURS: tuple[str, ...] = ("#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706", "#0891b2")


def write_png(rows: Sequence[Row], title: str, path: Path) -> None:
    """The plot as an image. Raises SettingsError if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError("a PNG needs matplotlib: install it, or write the plot as --html") from error
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for colour, (name, points) in zip(_colours(), _series(rows).items(), strict=False):
        axes.plot(
            [r["off_policy_share"] for r in points], [r["tokens_per_s"] for r in points], "o-", color=colour, label=name
        )
        for row in points:
            at = (row["off_policy_share"], row["tokens_per_s"])
            axes.annotate(f"{row['ratio']:g}", at, (5, 5), textcoords="offset points", fontsize=8)
    axes.set_xlabel("off-policy share of trained tokens")
    axes.set_ylabel("useful tokens/s")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_report(path, image.getvalue())


def write_html(rows: Sequence[Row], title: str, sentences: Sequence[str], path: Path) -> None:
    """The plot and the table as one page."""
    write_report(path, html_page(rows, title, sentences).encode())


def html_page(rows: Sequence[Row], title: str, sentences: Sequence[str]) -> str:
    """The page: an SVG whose points tell their numbers when they are pointed at, then the numbers."""
    paragraphs = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><h1>{html.escape(title)}</h1>"
        f"{_svg(rows)}{paragraphs}{_table(rows)}</html>\n"
    )


STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "svg{max-width:100%;height:auto}text{fill:currentColor;font-size:12px}line{stroke:currentColor;opacity:.25}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.25rem .6rem;text-align:right;"
    "border-bottom:1px solid #8884}h1{font-size:1.2rem}"
)

TABLE_COLUMNS = (
    ("ratio", "ratio", "g"),
    ("policy", "policy", "s"),
    ("lookahead", "lookahead", "d"),
    ("tok/s", "tokens_per_s", ".0f"),
    ("speed-up", "speed_up", ".3f"),
    ("bubble", "bubble_share", ".1%"),
    ("off-policy", "off_policy_share", ".1%"),
    ("mean lag", "mean_lag", ".2f"),
    ("largest lag", "largest_lag", "d"),
    ("re-prefilled tok/round", "reprefilled_tokens", ".0f"),
)


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{html.escape(name)}" for name, _, _ in TABLE_COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(format(row[key], kind))}" for _, key, kind in TABLE_COLUMNS) for row in rows
    )
    return f"<table><tr>{head}{body}</table>"


def _svg(rows: Sequence[Row]) -> str:
    top = max(row["tokens_per_s"] for row in rows) * 1.1

    def place(row: Row) -> tuple[float, float]:
        x = MARGIN + row["off_policy_share"] * (WIDTH - 2 * MARGIN)
        return round(x, 1), round(HEIGHT - MARGIN - row["tokens_per_s"] / top * (HEIGHT - 2 * MARGIN), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="useful tokens per second by off-policy share">']
    parts += _axes(top)
    for index, (colour, (name, points)) in enumerate(zip(_colours(), _series(rows).items(), strict=False)):
        line = " ".join(f"{x},{y}" for x, y in map(place, points))
        parts.append(f'<polyline points="{line}" fill=none stroke="{colour}" stroke-width=2 />')
        parts += [_dot(row, *place(row), colour) for row in points]
        y = MARGIN / 2 + 16 * index
        parts.append(f'<circle cx={WIDTH - 200} cy={y} r=5 fill="{colour}" />')
        parts.append(f"<text x={WIDTH - 188} y={y + 4}>{html.escape(name)}</text>")
    return "".join(parts) + "</svg>"


def _axes(top: float) -> list[str]:
    parts: list[str] = []
    for tick in range(6):
        x = MARGIN + tick / 5 * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - tick / 5 * (HEIGHT - 2 * MARGIN)
        parts.append(f"<line x1={x:.0f} y1={MARGIN} x2={x:.0f} y2={HEIGHT - MARGIN} />")
        parts.append(f"<line x1={MARGIN} y1={y:.0f} x2={WIDTH - MARGIN} y2={y:.0f} />")
        parts.append(f"<text x={x:.0f} y={HEIGHT - MARGIN + 18} text-anchor=middle>{tick * 20} %</text>")
        parts.append(f"<text x={MARGIN - 8} y={y + 4:.0f} text-anchor=end>{tick / 5 * top:.0f}</text>")
    parts.append(f"<text x={WIDTH / 2} y={HEIGHT - 18} text-anchor=middle>off-policy share of trained tokens</text>")
    parts.append(f"<text x={MARGIN} y={MARGIN - 14}>useful tokens/s</text>")
    return parts


def _dot(row: Row, x: float, y: float, colour: str) -> str:
    told = (
        f"ratio {row['ratio']:g}, {row['policy']}, lookahead {row['lookahead']}: {row['tokens_per_s']:.0f} tok/s, "
        f"{row['off_policy_share']:.1%} off-policy, mean lag {row['mean_lag']:.2f}"
    )
    label = f"<text x={x + 8} y={y - 6}>{row['ratio']:g}</text>"
    return f'<circle cx={x} cy={y} r=5 fill="{colour}"><title>{html.escape(told)}</title></circle>{label}'


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """One line for each policy and lookahead, by ratio."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["ratio"]):
        found.setdefault(f"{row['policy']}, lookahead {row['lookahead']}", []).append(row)
    return found


def _colours() -> list[str]:
    return list(COLOURS) * 8
