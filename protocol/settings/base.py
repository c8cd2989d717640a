"""What all sections of settings share."""

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

NUMBERS = (int, float)


class Section(BaseModel):
    """One TOML table. Unknown keys fail; the docstring under a field is its help text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _check_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        """`true` is no 1: whoever writes it means another setting."""
        if info.field_name and _has_truth_value(value, cls.model_fields[info.field_name].annotation):
            raise ValueError("must be a number, and true or false is none")
        return value


def _has_truth_value(value: Any, annotation: Any) -> bool:
    """Whether `value` holds a truth value where `annotation` wants a number."""
    if isinstance(value, bool) and annotation in NUMBERS:
        return True
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _has_truth_value(value, arguments[0])
    if origin in (types.UnionType, typing.Union):
        return bool not in arguments and any(_has_truth_value(value, option) for option in arguments)
    if isinstance(value, list | tuple) and origin in (list, tuple):
        items = cast(list[Any], value)
        return any(_has_truth_value(item, kind) for item in items for kind in set(arguments))
    if isinstance(value, Mapping) and origin is dict:
        return any(_has_truth_value(item, arguments[1]) for item in cast(Mapping[Any, Any], value).values())
    return False
