"""From a TOML file, the environment and the command line to `RunSettings`, or one clear sentence.

Precedence: command line, then environment, then file, then defaults.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource

from protocol.errors import SettingsError
from protocol.settings.run import RunSettings

ENV_PREFIX = "APRIL_"


class SettingInfo(NamedTuple):
    """What a user is told of one setting; `name` is dotted."""

    name: str
    help: str
    kind: str
    default: Any


def load_settings(path: Path | None, overrides: Sequence[str] = ()) -> RunSettings:
    """Settings of the run that `path` describes.

    `overrides` are `--section.field=value` words. Relative paths in the file are taken as they are, from the working
    folder. Raises `SettingsError` with what is wrong and the nearest valid name.
    """
    from_file = _read_toml(path) if path else {}
    from_words: dict[str, Any] = {}
    for word in overrides:
        _apply(from_words, *_split_override(word))
    for values in (from_file, _named_in_environment(), from_words):
        check_keys(values)
    try:
        from_environment = EnvSettingsSource(RunSettings)()
        return RunSettings(**_merge(_merge(from_file, from_environment), from_words))
    except ValidationError as error:
        raise SettingsError("; ".join(_sentences(error))) from error


def dump_settings(settings: RunSettings) -> dict[str, Any]:
    """Resolved settings as JSON, secrets masked."""
    return settings.model_dump(mode="json", exclude={"trainer": {"token"}})


def check_keys(values: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for a key that no section has, with the nearest one that exists."""
    names = [setting.name for setting in iter_fields()]
    for dotted in _flatten(values):
        if any(dotted == name or dotted.startswith(f"{name}.") for name in names):
            continue
        near = difflib.get_close_matches(dotted, names, n=1, cutoff=0.0)
        raise SettingsError(f"unknown setting {dotted}; did you mean {near[0]}?")


def iter_fields(model: type[BaseModel] = RunSettings, prefix: str = "") -> Iterator[SettingInfo]:
    """Every setting, section by section."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from iter_fields(kind, f"{prefix}{name}.")
        else:
            default = info.get_default(call_default_factory=True, validated_data={})
            yield SettingInfo(f"{prefix}{name}", info.description or "", _kind(kind), default)


def _kind(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(member.value) for member in annotation)
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "").replace("pathlib.", "").replace("protocol.settings.data.", "")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise SettingsError(f"{path} does not exist; name the TOML file that describes the run") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError, PermissionError) as error:
        raise SettingsError(f"{path} can't be read as TOML: {error}") from error


def _split_override(word: str) -> tuple[list[str], Any]:
    name, equals, text = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not equals or "." not in name:
        raise SettingsError(f"{word!r} is not an override; write --section.field=value")
    return name.split("."), _parse_value(text)


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _apply(values: dict[str, Any], path: list[str], value: Any) -> None:
    table = values
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise SettingsError(f"{'.'.join(path)} names a field of {part}, which is not a table")
    table[path[-1]] = value


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _named_in_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in os.environ.items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            _apply(values, name.removeprefix(ENV_PREFIX).lower().split("__"), text)
    return values


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _sentences(error: ValidationError) -> Iterator[str]:
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        yield f"{where}: {message}" if where else message
