"""Which service to look at: an address, or the one that a RUN.toml describes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from protocol.errors import SettingsError
from protocol.masking import mask_text
from protocol.settings import load_settings

HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Target:
    """Where the service answers, and the token that it wants, if any."""

    url: str
    token: str | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The address for people: without a login."""
        return mask_text(self.url)

    def client(self) -> httpx.AsyncClient:
        """A client of it."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers)


def find_target(word: str | None, overrides: Sequence[str] = ()) -> Target:
    """The service at an address (`http://…`, HOST:PORT), of a RUN.toml, or of the environment and the defaults.

    The token is that of the settings: APRIL_SERVICE__TOKEN, or what RUN.toml says.
    """
    address = word if word and _is_address(word) else None
    settings = load_settings(None if word is None or address else Path(word), overrides)
    secret = settings.service.token
    token = settings.trainer.token or (secret.get_secret_value() if secret else None)
    return Target(_checked(_with_scheme(address or settings.trainer.service_url).rstrip("/")), token)


def _is_address(word: str) -> bool:
    if "://" in word:
        if not word.startswith(("http://", "https://")):
            raise SettingsError(f"{mask_text(word)} is no address of a service: it begins with http:// or https://")
        return True
    host, colon, port = word.rpartition(":")
    return bool(host and colon) and port.isdecimal() and not Path(word).exists()


def _checked(address: str) -> str:
    """The address, if a connection to it can be tried at all."""
    try:
        url = httpx.URL(address)
        reachable = bool(url.host) and (url.port is None or 0 < url.port <= HIGHEST_PORT)
    except (httpx.InvalidURL, ValueError):
        reachable = False
    if not reachable:
        shown = mask_text(address)
        raise SettingsError(
            f"{shown!r} is no address of a service: it has a host and a port up to {HIGHEST_PORT}, such as "
            "http://127.0.0.1:8040"
        )
    return address


def _with_scheme(address: str) -> str:
    return address if "://" in address else f"http://{address}"
