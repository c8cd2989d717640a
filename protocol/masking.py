"""Secrets are never shown: what counts as one, and what stands in its place."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, SecretStr

MASK = "********"
MIN_SECRET_LENGTH = 4  # a shorter one is a part of too many words; nobody guards anything by it
# A value whose name ends so is taken for a secret, wherever it stands: reward.settings and engine.extra hold anything.
SECRET_NAME = re.compile(
    r"(password|passwd|secret|credentials?|api_?key|access_?key|private_?key|token|authorization)$", re.IGNORECASE
)
URL_SECRET = re.compile(r"(?<=://)[^/@\s]+@")  # user:password@ of an address


def mask_text(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without what stands before the `@` of an address, and without any of `secrets`."""
    if "://" in text:
        text = URL_SECRET.sub(f"{MASK}@", text)
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, MASK)
    return text


def mask_value(name: str, value: Any, secrets: Sequence[str] = ()) -> Any:
    """`value`, or what may be shown of it if it is a secret, or holds one, going by names and by `secrets`."""
    if isinstance(value, str):
        return MASK if SECRET_NAME.search(name) else mask_text(value, secrets)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {key: mask_value(str(key), item, secrets) for key, item in items}
    if isinstance(value, list | tuple):
        return [mask_value(name, item, secrets) for item in cast("Sequence[Any]", value)]
    return value


def secrets_of(settings: BaseModel) -> tuple[str, ...]:
    """The secret values that `settings` hold, longest first: a short one may be a part of a long one."""
    found = {secret for secret in _secrets(settings) if len(secret) >= MIN_SECRET_LENGTH}
    return tuple(sorted(found, key=lambda secret: (-len(secret), secret)))


def _secrets(section: BaseModel) -> Iterator[str]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _secrets(value)
        elif isinstance(value, SecretStr):
            yield value.get_secret_value()
        elif isinstance(value, str) and SECRET_NAME.search(name):
            yield value
