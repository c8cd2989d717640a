"""Python data as JSON and back, tuples and keys that are not strings included.

Some scorers compare with `==` against what their generator made; a tuple that came back as a list would make every
right answer wrong. Plain JSON passes through unchanged.
"""

from typing import Any

from protocol.samples import Json

TUPLE, PAIRS = "$tuple", "$pairs"


def to_plain(value: Any) -> Json:
    """`value` as JSON. Raises TypeError for what is neither JSON nor a tuple or a mapping of it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {TUPLE: [to_plain(item) for item in value]}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: to_plain(item) for key, item in value.items()}
        return {PAIRS: [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def from_plain(value: Json) -> Any:
    """What `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE}:
        return tuple(from_plain(item) for item in value[TUPLE])
    if value.keys() == {PAIRS}:
        return {from_plain(key): from_plain(item) for key, item in value[PAIRS]}
    return {key: from_plain(item) for key, item in value.items()}
