"""Who may call: a bearer token or the page's cookie when a token is set, and bodies of bounded size."""

from typing import Annotated

from fastapi import Header, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.messages import MAX_STEP, TRAINER_EPOCH_HEADER
from rollout_service.app.host import Host, Running
from rollout_service.app.problems import problem
from rollout_service.dashboard.login import Door


def host_of(request: Request) -> Host:
    """The host that this app serves."""
    host = request.app.state.host
    assert isinstance(host, Host), "build_app sets it"
    return host


def running_service(request: Request) -> Running:
    """The running service; 503 while it starts."""
    return host_of(request).running


def door_of(request: Request) -> Door:
    """What decides on who may call."""
    door = request.app.state.door
    assert isinstance(door, Door), "build_app sets it"
    return door


def require_token(request: Request) -> None:
    """401 unless the configured bearer token or the page's cookie was sent; without a token, this machine may call."""
    door_of(request).check(request)


TrainerEpoch = Annotated[int, Header(alias=TRAINER_EPOCH_HEADER, ge=1, le=MAX_STEP)]


class BodyLimit:
    """ASGI middleware: 413 for bodies larger than `max_bytes`, declared or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 413."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message["type"] == "http.request" and message.get("more_body", False)
            if len(body) > self._max_bytes:
                too_large = f"the request body is larger than service.max_body_bytes = {self._max_bytes}"
                return await problem(413, "request", too_large)(scope, receive, send)
        replayed = False

        async def replay() -> dict[str, object]:
            nonlocal replayed
            if replayed:
                return dict(await receive())
            replayed = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self._app(scope, replay, send)
