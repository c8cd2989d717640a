"""Bars, curves and numbers as text; without Unicode where the terminal has none."""

from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.-=+*#@"
UNITS = ("B", "KB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What can be drawn with."""

    full: str = "█"
    empty: str = "░"
    levels: str = LEVELS
    dot: str = "·"
    arrow: str = "→"
    ellipsis: str = "…"
    none: str = "–"

    def plain(self, text: str) -> str:
        """`text` with the signs that this terminal has."""
        if self.levels == LEVELS:
            return text
        for sign, instead in (("·", "|"), ("→", "->"), ("…", "..."), ("–", "-"), ("×", "x")):
            text = text.replace(sign, instead)
        return text.encode("ascii", "replace").decode()

    def bar(self, value: float, largest: float, width: int) -> str:
        """A bar of `width` cells, filled by value / largest."""
        share = min(1.0, max(0.0, value / largest)) if largest > 0 else 0.0
        filled = round(share * width)
        return self.full * filled + self.empty * (width - filled)

    def curve(self, values: Sequence[float], width: int) -> str:
        """The last `width` values, one cell each, the largest of them at full height."""
        shown = list(values)[-width:]
        largest = max(shown, default=0.0)
        if largest <= 0:
            return self.levels[0] * len(shown)
        top = len(self.levels) - 1
        return "".join(self.levels[min(top, max(0, round(value / largest * top)))] for value in shown)


UNICODE = Glyphs()
ASCII = Glyphs(full="#", empty=".", levels=ASCII_LEVELS, dot="|", arrow="->", ellipsis="...", none="-")


def glyphs_for(encoding: str | None) -> Glyphs:
    """What a stream of `encoding` can show."""
    try:
        (LEVELS + "░·→…–×").encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def duration(seconds: float) -> str:
    """`7 s`, `3 min 12 s`, `5 h 3 min`, `2 d 4 h`; nothing is negative."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    seconds = max(60.0, seconds)
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours < 1:
        return f"{minutes} min {int(seconds % 60)} s"
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def size(num_bytes: float) -> str:
    """`1.2 MB`, in powers of 1000."""
    power = 0
    while num_bytes >= (999.5 if power == 0 else 999.95) and power < len(UNITS) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    return f"{num_bytes:.0f} {UNITS[power]}" if power == 0 else f"{num_bytes:.1f} {UNITS[power]}"


def number(value: float | None, none: str = "–") -> str:
    """A number in as many digits as people read."""
    if value is None:
        return none
    if value == int(value) or abs(value) >= 999.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.3g}"
