"""Routes of operators: status, events, settings, pause and drain, groups, health, metrics."""

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from protocol.errors import UnavailableError
from protocol.messages import Control, GroupView, LiveSettings, SettingsView, Status
from rollout_service.app.access import host_of, require_token, running_service
from rollout_service.app.host import Host, Running
from rollout_service.views import view_group, with_tokens_of

router = APIRouter(prefix="/v1", dependencies=[Depends(require_token)], tags=["operator"])
metrics_router = APIRouter(dependencies=[Depends(require_token)], tags=["operator"])
probe_router = APIRouter(tags=["probes"])

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # a proxy must pass events on at once

Service = Annotated[Running, Depends(running_service)]
HostOf = Annotated[Host, Depends(host_of)]


@router.get("/status")
async def get_status(service: Service) -> Status:
    """State of the service."""
    return await service.board.make()


@router.get("/events", response_class=StreamingResponse)
async def get_events(service: Service) -> StreamingResponse:
    """Server-sent events: `status` once a second, `changed` with the names of pictures that would look different."""
    return StreamingResponse(service.board.events(), media_type="text/event-stream", headers=STREAM_HEADERS)


@router.get("/settings")
async def get_settings(service: Service) -> SettingsView:
    """Live settings and their audit record."""
    return await service.parts.control.view()


@router.patch("/settings")
async def patch_settings(body: LiveSettings, request: Request, service: Service) -> SettingsView:
    """Change live settings from the next decision on."""
    await service.parts.control.change(body, request.client.host if request.client else "unknown")
    return await service.parts.control.view()


@router.post("/pause")
async def pause(service: Service) -> Control:
    """Park what runs and generate nothing; installs, leases and acks go on."""
    service.parts.control.pause()
    return _control(service)


@router.post("/resume")
async def resume(service: Service) -> Control:
    """Generate again."""
    service.parts.control.resume()
    return _control(service)


@router.post("/drain")
async def drain(service: Service) -> Control:
    """Park everything; asked again, it says when it is safe to stop."""
    service.parts.control.drain()
    return _control(service)


@router.get("/groups/{group_id}")
async def get_group(group_id: str, service: Service) -> GroupView:
    """One group with its segments, versions, log-probs and rewards."""
    (group,) = await service.parts.buffer.groups([group_id])
    if group.step is not None and (batch := await service.parts.delivery.read_batch(group.step)):
        group = with_tokens_of(group, batch)
    return view_group(group, service.parts.sample_parts.decode)


@metrics_router.get("/metrics", response_class=Response)
async def get_metrics(host: HostOf, accept: Annotated[str, Header()] = "") -> Response:
    """Metrics for Prometheus: OpenMetrics if it is asked for; also while the service starts and Redis is away."""
    text, media_type = await host.metrics.scrape(accept)
    return Response(text, media_type=media_type)


@probe_router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@probe_router.get("/readyz")
async def readyz(host: HostOf) -> JSONResponse:
    """200 when the service can serve; 503 and what it waits for when it can't."""
    try:
        service = host.running
    except UnavailableError:
        return JSONResponse({"ready": False, "waits": [host.waits_for]}, 503)
    since = service.parts.sample_parts.buffer.waiting_since
    if since is not None:
        return JSONResponse({"ready": False, "waits": [f"Redis, for {time.time() - since:.0f} s"]}, 503)
    if (trouble := service.parts.delivery.trouble) is not None:
        return JSONResponse({"ready": False, "waits": [trouble]}, 503)
    return JSONResponse({"ready": True, "waits": list(service.parts.loop.scheduler.waits)}, 200)


def _control(service: Running) -> Control:
    parts = service.parts
    control = parts.control
    stopped = not control.generation_allowed and parts.loop.safe_to_stop
    return Control(paused=control.paused, draining=control.draining, safe_to_stop=stopped)
