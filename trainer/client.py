"""The trainer's side of the HTTP contract. Rank 0 alone holds one.

Always true: every call that changes something carries the session's epoch; while the service is away a call is
repeated with growing pauses until there was no answer for `wait_timeout_s`, and says so; a refusal is never repeated.
Repeating is safe because leases and acks are keyed by the step, and a policy or an evaluation that is asked for twice
only costs time.
"""

import hashlib
import logging
import threading
import time
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from protocol.batch import MEDIA_TYPE
from protocol.errors import (
    AprilError,
    ConflictError,
    DataError,
    FencedError,
    NotFoundError,
    RequestError,
    TrainingError,
    UnauthorizedError,
    UnavailableError,
    WeightsError,
)
from protocol.logs import bind_process
from protocol.messages import (
    BATCH_SHA256_HEADER,
    TRAINER_EPOCH_HEADER,
    Acked,
    Evaluation,
    LeaseBatch,
    OpenTrainer,
    Policy,
    Problem,
    PublishPolicy,
    StartEvaluation,
    Status,
    StepTrained,
    TrainerMetrics,
    TrainerSession,
)
from protocol.settings import RunSettings
from protocol.span_ids import TRACEPARENT, step_ids

LOG = logging.getLogger("april.trainer")

AWAY_STATUSES = frozenset({429, 502, 503, 504})  # a proxy's or the service's "not now"
NOT_READY_STATUS = 204
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0  # a service that comes back is found within this
POLL_WAIT_S = 20.0  # of one long poll: shorter than what proxies in between cut off
ANSWER_MARGIN_S = 30.0  # an answer that is this much later than asked for is not coming
STOPPING_PATIENCE_S = 3.0  # once asked to stop, do not wait longer for a service that is away
QUIET_S = 30.0  # between two messages that say what is waited for

_Answer = TypeVar("_Answer", bound=BaseModel)
_ERRORS: dict[str, type[AprilError]] = {
    kind.slug: kind for kind in (FencedError, ConflictError, NotFoundError, UnauthorizedError, WeightsError, DataError)
}


class Stopped(Exception):
    """A wait ended because the process was asked to stop."""


class ServiceClient:
    """HTTP client of one run. Threads may share it; `stop` ends waits for batches early."""

    def __init__(self, settings: RunSettings, stop: threading.Event) -> None:
        self.stop = stop
        self.epoch: int | None = None
        self._patience_s = settings.trainer.wait_timeout_s
        self._traced_run = settings.run.name if settings.tracing.on else None
        self._url = settings.trainer.service_url
        token = settings.trainer.token or (settings.service.token and settings.service.token.get_secret_value())
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=self._url, headers=headers, timeout=ANSWER_MARGIN_S)

    def open_session(self, durable_step: int, accept_lost_buffer: bool = False) -> TrainerSession:
        """Open a session; later calls carry its epoch, and older sessions are refused from now on."""
        body = OpenTrainer(durable_step=durable_step, accept_lost_buffer=accept_lost_buffer)
        session = self._post("/v1/trainers", body, TrainerSession)
        self.epoch = session.trainer_epoch
        bind_process(trainer_epoch=session.trainer_epoch)
        return session

    def lease_batch(self, step: int) -> bytes:
        """The encoded batch of `step`, however long it takes; raises `Stopped` when asked to stop."""
        waited_since = told = time.monotonic()
        while not self.stop.is_set():
            body = LeaseBatch(step=step, wait_s=min(POLL_WAIT_S, self._patience_s))
            timeout_s = body.wait_s + ANSWER_MARGIN_S
            response = self._call("POST", "/v1/batches", body, {"Accept": MEDIA_TYPE}, timeout_s, step)
            if response.status_code != NOT_READY_STATUS:
                return _verified(response, step)
            now = time.monotonic()
            if now - told > QUIET_S:
                told = now
                waited_s, about = now - waited_since, {"event": "waits", "step": step}
                LOG.info("step %d: no batch for %.0f s; %s", step, waited_s, self._reasons(), extra=about)
        raise Stopped

    def report_trained(self, step: int) -> StepTrained:
        """Say that `step` is trained, when no weights are published for it."""
        return self._post(f"/v1/trainers/steps/{step}", None, StepTrained, step)

    def acknowledge(self, step: int) -> Acked:
        """Say that all steps up to `step` are in a checkpoint."""
        return self._post(f"/v1/batches/{step}/ack", None, Acked, step)

    def publish(self, step: int, path: str) -> Policy:
        """Hand over the weights after `step`; the answer has their version."""
        return self._post("/v1/policies", PublishPolicy(step=step, path=path), Policy, step)

    def policy(self, version: int) -> Policy:
        """Where a version is."""
        return self._get(f"/v1/policies/{version}", Policy)

    def report_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of one step, for the service's dashboard."""
        self._call("POST", "/v1/trainers/metrics", TrainerMetrics(step=step, metrics=metrics), step=step)

    def start_evaluation(self, version: int) -> Evaluation:
        """Evaluate at `version`, as soon as it is active."""
        return self._post("/v1/evaluations", StartEvaluation(version=version), Evaluation)

    def evaluation(self, evaluation_id: str) -> Evaluation:
        """How far an evaluation is."""
        return self._get(f"/v1/evaluations/{evaluation_id}", Evaluation)

    def close(self) -> None:
        """Close connections."""
        self._http.close()

    def _post(self, path: str, body: BaseModel | None, answer: type[_Answer], step: int | None = None) -> _Answer:
        return _parsed(self._call("POST", path, body, step=step), answer)

    def _get(self, path: str, answer: type[_Answer]) -> _Answer:
        return _parsed(self._call("GET", path, None), answer)

    def _call(
        self,
        method: str,
        path: str,
        body: BaseModel | None,
        headers: dict[str, str] | None = None,
        timeout_s: float = ANSWER_MARGIN_S,
        step: int | None = None,
    ) -> httpx.Response:
        """`step`: the one whose span this call is a part of."""
        request: dict[str, Any] = {"headers": dict(headers or {}), "timeout": timeout_s}
        if self.epoch is not None:
            request["headers"][TRAINER_EPOCH_HEADER] = str(self.epoch)
            if self._traced_run is not None and step is not None:
                request["headers"][TRACEPARENT] = step_ids(self._traced_run, self.epoch, step).traceparent
        if body is not None:
            request["json"] = body.model_dump(mode="json", exclude_none=True)
        away_since = time.monotonic()
        pause_s, told = FIRST_PAUSE_S, 0.0
        while True:
            try:
                response = self._http.request(method, path, **request)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            else:
                if response.status_code not in AWAY_STATUSES:
                    return _accepted(response)
                reason = _detail(response)
            away_s = time.monotonic() - away_since
            if away_s > (STOPPING_PATIENCE_S if self.stop.is_set() else self._patience_s):
                raise UnavailableError(
                    f"the rollout service at {self._url} gave no answer for {away_s:.0f} s ({reason}); "
                    "start it, or set trainer.service_url or trainer.wait_timeout_s"
                )
            if not told or away_s - told > QUIET_S:
                told = away_s or FIRST_PAUSE_S
                about = {"event": "service_away", "reason": reason}
                sentence = "the rollout service at %s does not answer (%s); trying again"
                LOG.warning(sentence, self._url, reason, extra=about)
            self.stop.wait(pause_s) if not self.stop.is_set() else time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _reasons(self) -> str:
        try:
            waits = _parsed(_accepted(self._http.get("/v1/status")), Status).waits
        except (httpx.TransportError, AprilError):
            return "the service does not say why"
        return f"the service waits for: {', '.join(waits)}" if waits else "the service is filling it"


def _accepted(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    detail = _detail(response)
    slug = _slug(response)
    if slug == FencedError.slug:
        raise FencedError(f"{detail}; this trainer was superseded and stops")
    if slug in _ERRORS:
        raise _ERRORS[slug](detail)
    by_status = {401: UnauthorizedError, 404: NotFoundError, 409: ConflictError}
    kind = by_status.get(response.status_code, RequestError if response.is_client_error else TrainingError)
    raise kind(f"the rollout service answered {response.status_code} to {response.request.url.path}: {detail}")


def _problem(response: httpx.Response) -> Problem | None:
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:
        return None


def _detail(response: httpx.Response) -> str:
    problem = _problem(response)
    return problem.detail if problem else f"HTTP {response.status_code} {response.reason_phrase}".strip()


def _slug(response: httpx.Response) -> str:
    problem = _problem(response)
    return problem.type.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1] if problem else ""


def _parsed(response: httpx.Response, answer: type[_Answer]) -> _Answer:
    try:
        return answer.model_validate_json(response.content)
    except ValidationError as error:
        raise TrainingError(
            f"{response.request.url} answered something else than a {answer.__name__}; "
            "check trainer.service_url and that service and trainer are of one version"
        ) from error


def _verified(response: httpx.Response, step: int) -> bytes:
    expected = response.headers.get(BATCH_SHA256_HEADER)
    if expected and hashlib.sha256(response.content).hexdigest() != expected.lower():
        raise DataError(f"the batch of step {step} arrived with another checksum than it was sent with; start again")
    return response.content
