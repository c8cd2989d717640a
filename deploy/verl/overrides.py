"""verl's overrides, `key=value` with Hydra's marks, as values."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.verl.shell import Note, Word
from protocol.errors import DataError

KEY = re.compile(
    r"(?P<mark>\+\+|\+|~)?(?P<key>[A-Za-z_]\w*(?:[./][A-Za-z_]\w*)+)(?:(?P<equals>=)(?P<value>.*))?$", re.DOTALL
)
NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$")
WORDS = {"true": True, "false": False, "null": None, "none": None}


@dataclass(frozen=True, slots=True)
class Override:
    """One parameter of a script. `mark` is Hydra's: `+` adds a key, `~` deletes one. `unknown`: see `Word`."""

    key: str
    text: str
    mark: str = ""
    unknown: tuple[str, ...] = ()
    line: int = 0

    @property
    def value(self) -> Any:
        """The value as verl's configuration would read it."""
        return parse_value(self.text)

    @property
    def problem(self) -> str | None:
        """Why the text says no value, if so."""
        unclosed = _unclosed(self.text)
        if unclosed:
            return f"verl would refuse {self.text!r}, since {unclosed}: mend the script"
        if "${" in self.text:
            return f"{self.text!r} is looked up in verl's own configuration: set it in RUN.toml"
        return None


def find_overrides(commands: Sequence[Sequence[Word]]) -> list[Override]:
    """Overrides of the command that starts verl; a later one of the same key replaces an earlier one.

    Raises `DataError` if no command has any.
    """
    return list({override.key: override for override in _overrides(find_command(commands))}.values())


def find_replaced(commands: Sequence[Sequence[Word]]) -> list[Note]:
    """A note for each override that a later one of the same key replaces."""
    found = _overrides(find_command(commands))
    last = {override.key: override for override in found}
    return [_replaced(override, last[override.key]) for override in found if last[override.key] is not override]


def find_command(commands: Sequence[Sequence[Word]]) -> Sequence[Word]:
    """The command that starts verl: the first with the most overrides. Raises `DataError` if no command has any."""
    best = max(commands, key=lambda words: len(_overrides(words)), default=())
    if not _overrides(best):
        raise DataError(
            "the script has no command with key=value overrides such as data.train_batch_size=1024; name the script "
            "that starts verl.trainer.main_ppo"
        )
    return best


def parse_value(text: str) -> Any:
    """`True`, `1e-6`, `null`, `[a,b]`, `{a: 1}`, JSON and quoted strings, else the text itself."""
    stripped = text.strip()
    if stripped.lower() in WORDS:
        return WORDS[stripped.lower()]
    if NUMBER.match(stripped):
        plain = stripped.replace("_", "")
        return int(plain) if re.fullmatch(r"[-+]?\d+", plain) else float(plain)
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        return stripped[1:-1]
    if stripped[:1] in ("[", "{") and stripped[-1:] == {"[": "]", "{": "}"}[stripped[0]]:
        return _collection(stripped)
    return text


def _overrides(words: Sequence[Word]) -> list[Override]:
    return [override for override in map(_override, words) if override is not None]


def _override(word: Word) -> Override | None:
    match = KEY.match(word.text.removeprefix("--"))
    if match is None or (match["equals"] is None and match["mark"] != "~"):
        return None
    key = match["key"].replace("/", ".") if match["equals"] is None else match["key"]
    return None if "/" in key else Override(key, match["value"] or "", match["mark"] or "", word.unknown, word.line)


def _replaced(override: Override, last: Override) -> Note:
    if override.mark == "~":
        if last.mark in ("+", "++"):
            return Note(override.line, f"~{override.key}", f"line {last.line} adds the key again, which counts")
        reason = f"line {last.line} sets the key again, which verl refuses without + in front: here it counts"
        return Note(override.line, f"~{override.key}", reason)
    told = "takes the key out again" if last.mark == "~" else "gives the key again"
    return Note(
        override.line, f"{override.mark}{override.key}={override.text}", f"line {last.line} {told}, and the last counts"
    )


def _unclosed(text: str) -> str | None:
    """The first bracket without its other half, or the quote around the value that is never closed."""
    opened: list[str] = []
    quote = ""
    for place, here in enumerate(text):
        if quote:
            quote = "" if here == quote and text[place - 1] != "\\" else quote
        elif here in "'\"" and (opened or place == 0):
            quote = here
        elif here in "[{":
            opened.append(here)
        elif here in "]}" and (not opened or opened.pop() != {"]": "[", "}": "{"}[here]):
            return f"{here} closes nothing"
    return f"{(quote or opened[-1])} is never closed" if quote or opened else None


def _collection(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        items = _split(text[1:-1])
    if text[0] == "[":
        return [parse_value(item) for item in items]
    pairs = [item.partition(":") for item in items]
    return {str(parse_value(name)): parse_value(value) for name, _, value in pairs}


def _split(text: str) -> list[str]:
    """At commas that are in no quotes and no brackets."""
    items, depth, quote = [""], 0, ""
    for here in text:
        if quote:
            quote = "" if here == quote else quote
        elif here in "'\"":
            quote = here
        depth += (here in "[{") - (here in "]}") if not quote else 0
        if here == "," and not depth and not quote:
            items.append("")
        else:
            items[-1] += here
    return [item.strip() for item in items if item.strip()]
