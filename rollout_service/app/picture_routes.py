"""Pictures of the run: what the page and the terminal draw."""

from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Response

from protocol.errors import NotFoundError
from protocol.watching import Moments, RatioPicture, Steps, Tail, Timeline
from rollout_service.app.access import require_token, running_service
from rollout_service.app.host import Running
from rollout_service.watch.timeline import DEFAULT_ROUNDS, DEFAULT_SAMPLES, MAX_SAMPLES

router = APIRouter(prefix="/v1/pictures", dependencies=[Depends(require_token)], tags=["operator"])

MAX_ROUNDS = 1000  # as many as are remembered


class PictureName(StrEnum):
    """What there is to look at."""

    TIMELINE = "timeline"
    TAIL = "tail"
    MOMENTS = "moments"
    STEPS = "steps"
    RATIO = "ratio"


@router.get(
    "/{name}",
    response_class=Response,
    responses={200: {"model": Timeline | Tail | Moments | Steps | RatioPicture}, 304: {"description": "unchanged"}},
)
async def get_picture(
    name: PictureName,
    service: Annotated[Running, Depends(running_service)],
    rounds: Annotated[int, Query(ge=0, le=MAX_ROUNDS)] = DEFAULT_ROUNDS,
    max_samples: Annotated[int, Query(ge=0, le=MAX_SAMPLES)] = DEFAULT_SAMPLES,
    accept_encoding: Annotated[str, Header()] = "",
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """A picture as data. `rounds` and `max_samples` bound the timeline; the oldest samples are left out and counted."""
    book = service.board.pictures
    if book is None:
        raise NotFoundError("this service keeps nothing to draw: set service.watch = true and start it again")
    painted = await book.get(name.value, rounds, max_samples)
    headers = {"ETag": painted.tag, "Cache-Control": "private, no-cache", "Vary": "Accept-Encoding"}
    if painted.tag in (tag.strip().removeprefix("W/") for tag in if_none_match.split(",")):
        return Response(status_code=304, headers=headers)
    if painted.packed is not None and _takes_gzip(accept_encoding):
        return Response(painted.packed, media_type="application/json", headers=headers | {"Content-Encoding": "gzip"})
    return Response(painted.plain, media_type="application/json", headers=headers)


def _takes_gzip(accept_encoding: str) -> bool:
    """By RFC 9110: named, and not with a weight of zero."""
    for word in accept_encoding.split(","):
        coding, _, parameters = word.partition(";")
        if coding.strip().lower() in ("gzip", "*"):
            weight = parameters.partition("=")[2].strip() or "1"
            return weight.strip("0.") != ""
    return False
