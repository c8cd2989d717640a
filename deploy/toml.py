"""Settings as TOML text, with comments."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+$")


def toml_text(values: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """`values` as tables. What is None is written as a comment, because TOML has no null.

    `comments` has text by dotted name, written on the line above.
    """
    blocks: list[str] = []
    _table(values, [], comments or {}, blocks)
    return "\n\n".join(blocks) + "\n"


def _table(values: Mapping[str, Any], path: list[str], comments: Mapping[str, str], blocks: list[str]) -> None:
    lines: list[str] = []
    tables: list[tuple[str, Mapping[str, Any]]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            tables.append((name, cast(Mapping[str, Any], value)))
            continue
        note = comments.get(".".join([*path, name]))
        lines += [f"# {line}" for line in note.splitlines()] if note else []
        lines.append(f"# {_key(name)} is not set" if value is None else f"{_key(name)} = {_value(value)}")
    if lines:
        heading = [f"[{'.'.join(map(_key, path))}]"] if path else []
        if all(line.startswith("#") for line in lines):
            heading = [f"# {line}" for line in heading]  # a table without a value is no table
        blocks.append("\n".join(heading + lines))
    for name, table in tables:
        _table(table, [*path, name], comments, blocks)


def _key(name: str) -> str:
    return name if BARE_KEY.match(name) else _string(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value).items()
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in pairs if v is not None) + " }" if pairs else "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_value(item) for item in cast(Sequence[Any], value))}]"
    return _string(str(value))


def _float(value: float) -> str:
    if not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
    text = repr(value)
    return text if any(mark in text for mark in ".en") else f"{text}.0"


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too, and for halves of surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
