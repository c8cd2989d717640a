"""Who may open the page: sessions behind a cookie, slowed guesses, and requests that another site made.

Always true: the cookie holds a random id and never the token; sessions live in this process alone, at most
MAX_SESSIONS of them, each for SESSION_S; a wrong guess is answered late, and while too many answers are held back no
guess is looked at; a request that changes something and comes from another site's page is refused.
"""

import asyncio
import hmac
import ipaddress
import secrets
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from protocol.errors import UnauthorizedError
from protocol.settings.service import ServiceSettings

SESSION_S = 7 * 24 * 3600.0  # people leave the page open for a run of days
MAX_SESSIONS = 256  # browsers of one team; the oldest has to log in again
FIRST_DELAY_S = 0.25  # a typing mistake costs nobody patience
LONGEST_DELAY_S = 8.0
MAX_DELAYED = 8  # with LONGEST_DELAY_S: one guess a second at most
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class PageSessions:
    """The browsers that have logged in."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at: dict[str, float] = {}

    def open(self) -> str:
        """The id of a new session."""
        now = self._clock()
        self._ends_at = {name: end for name, end in self._ends_at.items() if end > now}
        while len(self._ends_at) >= MAX_SESSIONS:
            del self._ends_at[next(iter(self._ends_at))]
        session = secrets.token_urlsafe(32)
        self._ends_at[session] = now + SESSION_S
        return session

    def holds(self, session: str | None) -> bool:
        """Whether this session is open."""
        return session is not None and self._ends_at.get(session, 0.0) > self._clock()

    def close(self, session: str | None) -> None:
        """Log out."""
        self._ends_at.pop(session or "", None)


class Guesses:
    """Checks tokens that were typed in."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._sleep = sleep
        self._num_delayed = 0
        self._delay_s = FIRST_DELAY_S

    async def check(self, guess: str, token: str) -> bool:
        """Whether `guess` is the token; a wrong one is answered late. Raises UnauthorizedError if too many wait."""
        if self._num_delayed >= MAX_DELAYED:
            raise UnauthorizedError("too many wrong tokens were tried just now: wait some seconds and try again")
        if hmac.compare_digest(guess.encode(), token.encode()):
            self._delay_s = FIRST_DELAY_S
            return True
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, LONGEST_DELAY_S)
        self._num_delayed += 1
        try:
            await self._sleep(delay_s)
        finally:
            self._num_delayed -= 1
        return False


class Door:
    """Decides on a request by its bearer token, its cookie and where it comes from. One for each process."""

    def __init__(self, service: ServiceSettings, run: str) -> None:
        self.sessions = PageSessions()
        self.guesses = Guesses()
        self.token = service.token.get_secret_value() if service.token else None
        self.cookie = f"april-{run}"  # cookies don't tell ports apart, and two runs may share a host
        self._path = service.root_path or "/"
        self._hosts = {service.host, *service.allowed_hosts}

    def admits(self, request: Request) -> bool:
        """Whether the request carries the token or the cookie of an open session; without a token, everyone's does."""
        if self.token is None:
            return True
        expected = f"Bearer {self.token}".encode()
        if hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
            return True
        return self.sessions.holds(request.cookies.get(self.cookie))

    def check(self, request: Request) -> None:
        """Raises UnauthorizedError with what to do unless the request is let in."""
        if not self.admits(request):
            raise UnauthorizedError(
                "this service wants its token: set APRIL_SERVICE__TOKEN for april train, or send"
                " 'Authorization: Bearer TOKEN'"
            )
        self.check_host(request)
        if request.method not in SAFE_METHODS and "authorization" not in request.headers:
            self.check_origin(request)

    def check_host(self, request: Request) -> None:
        """Without a token: refuse names that somebody may have bent to this machine (DNS rebinding)."""
        name = request.url.hostname or ""
        if self.token is None and not (name in self._hosts or _is_local_name(name)):
            raise UnauthorizedError(
                f"this service has no token and is not meant to be reached as {name!r}: set service.token, or name the "
                "host in service.allowed_hosts"
            )

    def check_origin(self, request: Request) -> None:
        """Refuse what a page of another site sent; programs send neither header, and hold no cookie."""
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        with_cookie = self.token is not None
        if site is not None:
            same = site in ("same-origin", "none")
        elif origin is not None:
            same = urlsplit(origin).netloc == request.headers.get("host")
        else:
            same = not with_cookie
        if not same:
            raise UnauthorizedError("this request comes from another site's page: use the page of this service")

    def let_in(self, request: Request, response: Response) -> None:
        """Open a session and give its cookie."""
        response.set_cookie(
            self.cookie,
            self.sessions.open(),
            max_age=int(SESSION_S),
            path=self._path,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )

    def let_out(self, request: Request, response: Response) -> None:
        """Close the session of this request."""
        self.sessions.close(request.cookies.get(self.cookie))
        response.delete_cookie(self.cookie, path=self._path, httponly=True, samesite="strict")


def _is_local_name(name: str) -> bool:
    """An address, or a name without dots: no domain of the Internet can be either."""
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
