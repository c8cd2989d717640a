"""The page, its login, the page of one group, and the files that they load."""

import asyncio
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from protocol.errors import AprilError, NotFoundError, UnauthorizedError, UnavailableError
from protocol.messages import Status
from rollout_service.app.access import door_of, host_of
from rollout_service.app.host import Host
from rollout_service.app.operator_routes import get_group
from rollout_service.dashboard.assets import assets, digest
from rollout_service.dashboard.fields import status_fields
from rollout_service.dashboard.group import group_shown
from rollout_service.dashboard.login import Door
from rollout_service.dashboard.pages import page
from rollout_service.dashboard.tokens import visible

router = APIRouter(prefix="/dashboard", include_in_schema=False)

HostOf = Annotated[Host, Depends(host_of)]
DoorOf = Annotated[Door, Depends(door_of)]

IMMUTABLE = "public, max-age=31536000, immutable"  # the address has the content's digest in it
MAX_LOGIN_BYTES = 4096


@router.get("")
async def get_page(request: Request, host: HostOf, door: DoorOf) -> Response:
    """The page, with the state of now in it; without the cookie, the way to the login."""
    if not door.admits(request):
        return RedirectResponse("dashboard/login", 303)
    door.check_host(request)
    status, away = await _status(host)
    shown = {
        "run": host.settings.run.name,
        "status": status.model_dump(mode="json") if status else None,
        "fields": status_fields(status),
        "away": away,
        "has_login": door.token is not None,
    }
    return page("dashboard.html", ".", shown)


@router.get("/")
async def get_page_with_slash() -> Response:
    """The page has one address."""
    return RedirectResponse("../dashboard", 308)


@router.get("/login")
async def get_login(request: Request, host: HostOf, door: DoorOf) -> Response:
    """The form that asks for the token."""
    if door.admits(request):
        return RedirectResponse("../dashboard", 303)
    return _login(host, None, 200)


@router.post("/login")
async def post_login(request: Request, host: HostOf, door: DoorOf) -> Response:
    """Exchange the token for a cookie."""
    door.check_origin(request)
    body = await request.body()
    guess = parse_qs(body[:MAX_LOGIN_BYTES].decode(errors="replace")).get("token", [""])[0]
    if door.token is None:
        return RedirectResponse("../dashboard", 303)
    try:
        right = await door.guesses.check(guess, door.token)
    except UnauthorizedError as error:
        return _login(host, str(error), 429)
    if not right:
        return _login(host, "that is not the token of this service", 401)
    response = RedirectResponse("../dashboard", 303)
    door.let_in(request, response)
    return response


@router.post("/logout")
async def post_logout(request: Request, door: DoorOf) -> Response:
    """Close the session."""
    door.check(request)
    response = RedirectResponse("../dashboard", 303)
    door.let_out(request, response)
    return response


@router.get("/groups/{group_id}")
async def get_group_page(group_id: str, request: Request, host: HostOf, door: DoorOf) -> Response:
    """One group: its prompt, and each response token by token."""
    if not door.admits(request):
        return RedirectResponse("../login", 303)
    door.check_host(request)
    shown: dict[str, object] = {
        "run": host.settings.run.name,
        "group_id": visible(group_id),
        "has_login": door.token is not None,
    }
    try:
        service = host.running
        view = await get_group(group_id, service)
    except (NotFoundError, UnavailableError) as error:
        return page("problem.html", "../..", shown | {"problem": _why(error)}, error.status)
    group = await asyncio.to_thread(group_shown, view, service.parts.sample_parts.decode)
    return page("group.html", "../..", shown | {"group": group})


@router.get("/static/{at}/{name:path}")
async def get_asset(at: str, name: str) -> Response:
    """A script, a style or a picture of the page."""
    asset = assets().get(name)
    if asset is None:
        raise NotFoundError(f"the page has no file {name!r}")
    kept = IMMUTABLE if at == digest() else "no-cache"
    headers = {"Cache-Control": kept, "X-Content-Type-Options": "nosniff"}
    return Response(asset.content, media_type=asset.media_type, headers=headers)


async def _status(host: Host) -> tuple[Status | None, str | None]:
    """The state, or a sentence on why there is none now."""
    try:
        return await host.running.board.make(), None
    except UnavailableError as error:
        return None, str(error)


def _login(host: Host, problem: str | None, status_code: int) -> HTMLResponse:
    return page("login.html", "..", {"run": host.settings.run.name, "problem": problem}, status_code)


def _why(error: AprilError) -> str:
    if isinstance(error, NotFoundError):
        return (
            "There is no such group. A group is kept until the step that trained it is in a checkpoint of the trainer;"
            " then its tokens are gone from here."
        )
    return str(error)
