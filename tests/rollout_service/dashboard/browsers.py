"""A browser without a window: follows what a person does on the page, over the app of a running service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path

import httpx
from fastapi import FastAPI

from rollout_service.app.build import build_app
from rollout_service.app.host import Host
from tests.support.service import service_settings

TOKEN = "s3cret token"
ORIGIN = {"Origin": "http://test"}


def settings_with_token(folder: Path, **service):
    return service_settings(folder, service={"token": TOKEN} | service)


@asynccontextmanager
async def browser(app: FastAPI, base_url: str = "http://test") -> AsyncIterator[httpx.AsyncClient]:
    """Keeps cookies, follows no redirect by itself, carries no token."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
        yield client


@asynccontextmanager
async def starting_page(folder: Path, **service) -> AsyncIterator[httpx.AsyncClient]:
    """The page of a service that has only just started and has no engine yet."""
    host = Host(service_settings(folder, service=service))
    async with browser(build_app(host)) as client:
        yield client


async def log_in(client: httpx.AsyncClient, token: str = TOKEN, **headers: str) -> httpx.Response:
    """Sends the form of the login as a browser does."""
    return await client.post("/dashboard/login", data={"token": token}, headers=ORIGIN | headers)


class Markup(HTMLParser):
    """What of a page a strict policy is about, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._in_script: dict[str, str | None] | None = None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        self.addresses += [value for name, value in attrs if name in ("href", "src", "action") and value]
        self.inline += [f"<{tag} {name}>" for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag == "style":
            self.inline.append("<style>")
        if tag == "script":
            self._in_script = found

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._in_script = None

    def handle_data(self, data: str) -> None:
        self.text += data
        script = self._in_script
        if script is not None and data.strip() and script.get("type") != "application/json":
            self.inline.append(f"<script>: {data[:40]}")
