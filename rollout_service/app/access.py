"""Who may call: a bearer token when one is set, and bodies of bounded size."""

import hmac
from typing import Annotated

from fastapi import Header, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.errors import UnauthorizedError
from protocol.messages import MAX_STEP, TRAINER_EPOCH_HEADER
from rollout_service.app.host import Host, Running
from rollout_service.app.problems import problem


def host_of(request: Request) -> Host:
    """The host that this app serves."""
    host = request.app.state.host
    assert isinstance(host, Host), "build_app sets it"
    return host


def running_service(request: Request) -> Running:
    """The running service; 503 while it starts."""
    return host_of(request).running


def require_token(request: Request, authorization: Annotated[str | None, Header()] = None) -> None:
    """401 unless the configured bearer token was sent; no token configured: everyone on loopback may call."""
    token = host_of(request).settings.service.token
    if token is None:
        return
    expected = f"Bearer {token.get_secret_value()}"
    if authorization is None or not hmac.compare_digest(authorization.encode(), expected.encode()):
        raise UnauthorizedError(
            "this service wants its token: set APRIL_SERVICE__TOKEN for april train, or send"
            " 'Authorization: Bearer TOKEN'"
        )


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
