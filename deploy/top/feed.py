"""The service's events, and the pictures that go with them; whatever happens to the service, it goes on.

Always true: it raises only what a user must mend (a wrong token, an address of something else); a service that is away,
starting or being replaced is said to be away, with the reason, and is asked again.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from deploy.top.seen import Seen
from deploy.top.target import Target
from protocol.errors import DataError, UnauthorizedError, UnavailableError
from protocol.messages import Control, Problem, Status
from protocol.watching import Moments, Tail

ANSWER_S = 10.0  # statuses come once a second: a service that is silent for this long is as good as away
RETRY_S = 1.0  # a service that comes back is found within this
PICTURES_EVERY_S = 5.0  # they change once a round, and cost the service more than a status
HTTP_UNAUTHORIZED, HTTP_NOT_FOUND, HTTP_UNAVAILABLE = 401, 404, 503

_Answer = TypeVar("_Answer", bound=BaseModel)


class ServerEvent(NamedTuple):
    """One server-sent event."""

    name: str
    data: str


async def server_events(lines: AsyncIterator[str]) -> AsyncIterator[ServerEvent]:
    """Events of a stream of lines, by the rules of the HTML standard: comments and unknown fields are passed over."""
    name, data = "message", list[str]()
    async for line in lines:
        if not line:
            if data:
                yield ServerEvent(name, "\n".join(data))
            name, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)


class Feed:
    """Tells `seen` what the service says, and calls `changed` whenever there is something new to show."""

    def __init__(self, target: Target, seen: Seen, changed: Callable[[], None] = lambda: None) -> None:
        self._target = target
        self._seen = seen
        self._changed = changed
        self._client = target.client()
        self._pictures_due = 0.0

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def first(self, starting: bool = False) -> None:
        """The status, once. Raises UnavailableError if nothing listens, and what `follow` raises.

        A service that isn't ready yet raises it too, unless `starting` says that it will be waited for.
        """
        try:
            response = await self._client.get("/v1/status", timeout=ANSWER_S)
        except httpx.TransportError as error:
            raise UnavailableError(
                f"no rollout service answers at {self._target.shown} ({_reason(error)}): start one by `april serve`, "
                "or name its address or its RUN.toml"
            ) from error
        try:
            self._check(response)
        except UnavailableError as error:
            if not starting:
                raise
            self._seen.lost(str(error), time.time())
        else:
            self._seen.took(self._parsed(response.content, Status), time.time())

    async def pictures(self) -> None:
        """The pictures that go with the status; where the service has none, or is busy, there are none."""
        self._seen.tail = await self._picture("tail", Tail) or self._seen.tail
        self._seen.moments = await self._picture("moments", Moments) or self._seen.moments

    async def follow(self) -> None:
        """Follow the service for ever. Raises UnauthorizedError and DataError."""
        while True:
            try:
                async with self._client.stream("GET", "/v1/events", timeout=ANSWER_S) as response:
                    if not response.is_success:
                        await response.aread()
                    self._check(response)
                    async for event in server_events(response.aiter_lines()):
                        await self._heard(event)
                why = "it ended the stream: it stops, or was restarted"
            except UnavailableError as error:
                why = str(error)
            except httpx.TransportError as error:
                why = _reason(error)
            self._seen.lost(why, time.time())
            self._changed()
            await asyncio.sleep(RETRY_S)

    async def control(self, action: str) -> str:
        """Pause or resume; what came of it, in words."""
        try:
            response = await self._client.post(f"/v1/{action}", timeout=ANSWER_S)
            self._check(response)
            control = self._parsed(response.content, Control)
        except (httpx.TransportError, UnavailableError, UnauthorizedError, DataError) as error:
            return f"{action} failed: {error}"
        return "paused: what runs is parked" if control.paused else "resumed"

    async def _heard(self, event: ServerEvent) -> None:
        now = time.time()
        if event.name == "status":
            self._seen.took(self._parsed(event.data, Status), now)
            if not 0 <= self._pictures_due - now <= PICTURES_EVERY_S:  # a clock that jumps back must not stop them
                self._pictures_due = now + PICTURES_EVERY_S
                await self.pictures()
        elif event.name == "unavailable":
            self._seen.lost(str(json.loads(event.data)), now)
        else:
            return
        self._changed()

    async def _picture(self, name: str, kind: type[_Answer]) -> _Answer | None:
        try:
            response = await self._client.get(f"/v1/pictures/{name}", timeout=ANSWER_S)
            return kind.model_validate_json(response.content) if response.is_success else None
        except (httpx.TransportError, ValidationError):
            return None

    def _check(self, response: httpx.Response) -> None:
        """Raise UnauthorizedError or DataError for what a user must mend, UnavailableError for what passes."""
        if response.is_success:
            return
        detail = _detail(response)
        if response.status_code == HTTP_UNAUTHORIZED:
            raise UnauthorizedError(
                f"the service at {self._target.shown} wants its token: set APRIL_SERVICE__TOKEN, or name the RUN.toml "
                "that has it"
            )
        if response.status_code == HTTP_UNAVAILABLE or response.is_server_error:
            raise UnavailableError(detail)
        raise DataError(
            f"{self._target.shown} answers {response.status_code} to {response.request.url.path}: it is no rollout "
            "service; check the address"
        )

    def _parsed(self, content: bytes | str, kind: type[_Answer]) -> _Answer:
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            raise DataError(
                f"{self._target.shown} answers something else than a {kind.__name__} of this version "
                f"({error.errors()[0]['msg']}): check the address, and that service and april top are of one version"
            ) from error


def _detail(response: httpx.Response) -> str:
    try:
        return Problem.model_validate_json(response.content).detail
    except ValidationError:
        return f"HTTP {response.status_code} {response.reason_phrase}".strip()


def _reason(error: httpx.TransportError) -> str:
    """Why there is no answer, without a library's words for it."""
    if isinstance(error, httpx.TimeoutException):
        return f"no answer for {ANSWER_S:g} s"
    if isinstance(error, httpx.ConnectError):
        return "nothing listens there" if "refused" in str(error) or "attempts failed" in str(error) else str(error)
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return "it broke the connection off"
    return str(error) or type(error).__name__
