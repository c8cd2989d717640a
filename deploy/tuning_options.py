"""What the options of the commands that tune take: lists of numbers, finite numbers, lists of names."""

import math
from collections.abc import Iterable
from typing import Any

import click

DEFAULT_RATIOS = "1,1.25,1.5,2,3"


class Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers with commas between them, each from `least` to `most`."""

    name = "NUMBER,..."

    def __init__(self, least: float, most: float, whole: bool = False) -> None:
        self._least, self._most, self._whole = least, most, whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Refuse what is no number or too small."""
        if isinstance(value, tuple):
            return value  # pyright: ignore[reportUnknownVariableType]  a default that was converted before
        found: list[float] = []
        for text in str(value).split(","):
            try:
                number = float(text)
            except ValueError:
                self.fail(f"{text!r} is no number: write them like {DEFAULT_RATIOS}", param, ctx)
            if not self._least <= number <= self._most:
                self.fail(f"{text.strip()} must be between {self._least:g} and {self._most:g}", param, ctx)
            if self._whole and number != int(number):
                self.fail(f"{text.strip()} must be a whole number", param, ctx)
            found.append(number)
        return tuple(dict.fromkeys(found))


class Finite(click.FloatRange):
    """A number in a range: not `nan`, which passes every comparison, and not `inf`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Refuse what is no number or out of range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} must be a finite number", param, ctx)
        return number


class Choices(click.ParamType[tuple[str, ...]]):
    """Names with commas between them, of a closed set."""

    name = "NAME,..."

    def __init__(self, known: Iterable[str]) -> None:
        self._known = tuple(known)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Refuse unknown names."""
        names = value if isinstance(value, tuple) else tuple(str(value).split(","))
        for name in names:
            if name not in self._known:
                self.fail(f"{name!r} is none of {', '.join(self._known)}", param, ctx)
        return tuple(dict.fromkeys(names))  # pyright: ignore[reportUnknownArgumentType]  names, as checked above
