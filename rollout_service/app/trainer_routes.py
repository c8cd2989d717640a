"""Routes of the trainer: session, batches, steps, policies, evaluations, metrics."""

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Response
from fastapi.responses import JSONResponse

from protocol.batch import MEDIA_TYPE, batch_to_json, decode_batch
from protocol.messages import (
    BATCH_SHA256_HEADER,
    MAX_STEP,
    Acked,
    Evaluation,
    LeaseBatch,
    OpenTrainer,
    Policy,
    PublishPolicy,
    StartEvaluation,
    StepTrained,
    TrainerMetrics,
    TrainerSession,
)
from rollout_service.app.access import TrainerEpoch, host_of, require_token, running_service
from rollout_service.app.host import Host, Running

router = APIRouter(prefix="/v1", dependencies=[Depends(require_token)], tags=["trainer"])

Service = Annotated[Running, Depends(running_service)]
Step = Annotated[int, Path(ge=1, le=MAX_STEP)]


@router.post("/trainers")
async def open_trainer(body: OpenTrainer, service: Service) -> TrainerSession:
    """Open a trainer session; every older one is fenced from now on."""
    opened = await service.sessions.open(body.durable_step, body.accept_lost_buffer)
    service.board.session_opened(opened.durable_step)
    return opened


@router.post("/batches", response_model=None)
async def lease_batch(
    body: LeaseBatch,
    service: Service,
    host: Annotated[Host, Depends(host_of)],
    trainer_epoch: TrainerEpoch,
    accept: Annotated[str, Header()] = "application/json",
) -> Response:
    """The batch of a step, waiting for it: safetensors or JSON by `Accept`; 204 if it is not ready by then."""
    wait_s = min(body.wait_s, host.settings.service.max_wait_s)
    asked_s = time.monotonic()
    with service.board.long_poll(body.step) as poll:
        leased = await service.parts.delivery.lease(body.step, trainer_epoch, wait_s)
        poll.answered = leased is not None
    host.metrics.delivery.polled(time.monotonic() - asked_s, answered=leased is not None)
    service.board.heard_trainer()
    if leased is None:
        return Response(status_code=204)
    data, sha256 = leased
    headers = {BATCH_SHA256_HEADER: sha256}
    if MEDIA_TYPE in accept:
        return Response(data, media_type=MEDIA_TYPE, headers=headers)
    return JSONResponse(batch_to_json(decode_batch(data)), headers=headers)


@router.post("/trainers/steps/{step}")
async def step_trained(step: Step, service: Service, trainer_epoch: TrainerEpoch) -> StepTrained:
    """This step is trained."""
    return await service.sessions.trained(step, trainer_epoch)


@router.post("/batches/{step}/ack")
async def ack_batch(step: Step, service: Service, trainer_epoch: TrainerEpoch) -> Acked:
    """All steps up to this one are in a checkpoint."""
    return await service.sessions.ack(step, trainer_epoch)


@router.post("/policies", status_code=202)
async def publish_policy(body: PublishPolicy, service: Service, trainer_epoch: TrainerEpoch) -> Policy:
    """Publish weights; they are installed before the next round."""
    return await service.sessions.publish(body.step, body.path, trainer_epoch)


@router.get("/policies/{version}")
async def get_policy(version: Annotated[int, Path(ge=0, le=MAX_STEP)], service: Service) -> Policy:
    """Where a version is."""
    return await service.parts.policies.get(version)


@router.post("/evaluations", status_code=202)
async def start_evaluation(body: StartEvaluation, service: Service) -> Evaluation:
    """Evaluate the held-out prompts at the active version, or at the version asked for once it is active."""
    return service.parts.evaluations.start(body)


@router.get("/evaluations/{evaluation_id}")
async def get_evaluation(evaluation_id: str, service: Service) -> Evaluation:
    """How far an evaluation is, and its result."""
    return service.parts.evaluations.get(evaluation_id)


@router.post("/trainers/metrics", status_code=204)
async def trainer_metrics(
    body: TrainerMetrics, service: Service, host: Annotated[Host, Depends(host_of)], trainer_epoch: TrainerEpoch
) -> None:
    """The metrics of a step, shown beside the service's own."""
    await service.board.reported(body.step, body.metrics, trainer_epoch)
    host.metrics.delivery.reported(service.board.trainer_metrics, trainer_epoch)
