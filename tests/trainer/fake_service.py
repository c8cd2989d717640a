"""A rollout service for tests: real HTTP on a loopback port, synthetic batches, and a record of what it was asked.

It keeps the parts of the contract that a trainer can break: epochs fence, leases are keyed by the step, the same step
gives the same bytes, acks only move forward, a version is made for every published folder whose manifest holds.
"""

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from protocol.batch import MEDIA_TYPE, Batch, encode_batch
from protocol.errors import AprilError, ConflictError, FencedError, UnauthorizedError, UnavailableError, WeightsError
from protocol.manifest import verify_manifest
from protocol.messages import BATCH_SHA256_HEADER, PROBLEM_MEDIA_TYPE, TRAINER_EPOCH_HEADER, PolicyState, Problem

MakeBatch = Callable[[int, int], Batch]


@dataclass
class FakeService:
    """State and record of one run."""

    make_batch: MakeBatch
    run: str = "test"
    num_train_prompts: int = 12
    token: str | None = None
    trainer_epoch: int = 0
    durable_step: int = 0
    trained_step: int = 0
    policies: list[dict[str, Any]] = field(default_factory=list)
    leased: dict[int, bytes] = field(default_factory=dict)
    leases: list[tuple[int, int]] = field(default_factory=list)  # (epoch, step)
    acks: list[int] = field(default_factory=list)
    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    evaluations: list[int] = field(default_factory=list)  # versions
    events: list[str] = field(default_factory=list)
    away: int = 0  # the next so many requests get 503
    not_ready: int = 0  # the next so many leases get 204
    fail_installs: int = 0  # the next so many versions fail
    corrupt: bool = False  # send batches with a wrong checksum
    url: str = ""

    @property
    def active(self) -> dict[str, Any] | None:
        good = [p for p in self.policies if p["state"] == PolicyState.ACTIVE]
        return good[-1] if good else None

    def check(self, request: Request) -> None:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            raise UnauthorizedError("the bearer token is wrong; set trainer.token")
        if self.away:
            self.away -= 1
            raise UnavailableError("the service restarts")

    def fence(self, request: Request) -> None:
        self.check(request)
        epoch = int(request.headers[TRAINER_EPOCH_HEADER])
        if epoch != self.trainer_epoch:
            raise FencedError(f"trainer epoch {epoch} was superseded by {self.trainer_epoch}")

    def open_trainer(self, durable_step: int) -> dict[str, Any]:
        if durable_step < self.durable_step:
            raise ConflictError(f"durable_step {durable_step} is below the last ack {self.durable_step}")
        self.trainer_epoch += 1
        self.ack(durable_step)
        return {
            "trainer_epoch": self.trainer_epoch,
            "durable_step": self.durable_step,
            "policy_version": len(self.policies),
            "run": self.run,
            "num_train_prompts": self.num_train_prompts,
        }

    def lease(self, step: int) -> bytes:
        self.leases.append((self.trainer_epoch, step))
        if step not in self.leased:
            self.leased[step] = encode_batch(self.make_batch(step, len(self.policies)))
        return self.leased[step]

    def ack(self, step: int) -> None:
        self.durable_step = max(self.durable_step, step)
        self.acks.append(step)

    def publish(self, step: int, path: str) -> dict[str, Any]:
        manifest = verify_manifest(Path(path))
        if manifest.step != step:
            raise WeightsError(f"the manifest says step {manifest.step}")
        failed = self.fail_installs > 0
        self.fail_installs -= failed
        policy = {
            "version": len(self.policies) + 1,
            "step": step,
            "trainer_epoch": self.trainer_epoch,
            "path": path,
            "state": PolicyState.FAILED if failed else PolicyState.ACTIVE,
            "error": "replica 0 says no" if failed else None,
        }
        self.policies.append(policy)
        self.trained_step = max(self.trained_step, step)
        return policy


def make_app(service: FakeService) -> FastAPI:
    """The routes that a trainer calls."""
    app = FastAPI()

    @app.exception_handler(AprilError)
    async def problem(_: Request, error: AprilError) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        body = Problem(type=f"urn:april:{error.slug}", title=error.slug, status=error.status, detail=str(error))
        return JSONResponse(body.model_dump(), error.status, media_type=PROBLEM_MEDIA_TYPE)

    _route_steps(app, service)
    _route_policies(app, service)
    return app


def _route_steps(app: FastAPI, service: FakeService) -> None:
    @app.post("/v1/trainers")
    def trainers(request: Request, body: dict[str, int]) -> Any:
        service.check(request)
        service.events.append(f"open {body['durable_step']}")
        return service.open_trainer(body["durable_step"])

    @app.post("/v1/batches")
    def batches(request: Request, body: dict[str, float]) -> Response:
        service.fence(request)
        assert request.headers["accept"] == MEDIA_TYPE
        if service.not_ready:
            service.not_ready -= 1
            return Response(status_code=204)
        data = service.lease(int(body["step"]))
        checksum = hashlib.sha256(b"else" if service.corrupt else data).hexdigest()
        return Response(data, media_type=MEDIA_TYPE, headers={BATCH_SHA256_HEADER: checksum})

    @app.post("/v1/trainers/steps/{step}")
    def trained(request: Request, step: int) -> Any:
        service.fence(request)
        service.events.append(f"trained {step}")
        service.trained_step = max(service.trained_step, step)
        return {"step": step, "trained_step": service.trained_step}

    @app.post("/v1/batches/{step}/ack")
    def ack(request: Request, step: int) -> Any:
        service.fence(request)
        service.events.append(f"ack {step}")
        service.ack(step)
        return {"durable_step": service.durable_step, "num_groups": 0}

    @app.post("/v1/trainers/metrics")
    def metrics(request: Request, body: dict[str, Any]) -> Response:
        service.fence(request)
        service.metrics.append((body["step"], body["metrics"]))
        return Response(status_code=204)

    @app.get("/v1/status")
    def status() -> Response:
        return Response(status_code=404)


def _route_policies(app: FastAPI, service: FakeService) -> None:
    @app.post("/v1/policies")
    def policies(request: Request, body: dict[str, Any]) -> Any:
        service.fence(request)
        service.events.append(f"publish {body['step']}")
        return service.publish(body["step"], body["path"])

    @app.get("/v1/policies/{version}")
    def policy(request: Request, version: int) -> Any:
        service.check(request)
        return service.policies[version - 1]

    @app.post("/v1/evaluations")
    def evaluate(request: Request, body: dict[str, Any]) -> Any:
        service.fence(request)
        service.evaluations.append(len(service.policies))
        service.events.append("evaluate")
        return _evaluation(len(service.evaluations), service, "running")

    @app.get("/v1/evaluations/{name}")
    def evaluation(request: Request, name: int) -> Any:
        service.check(request)
        return _evaluation(name, service, "done")


def _evaluation(name: int, service: FakeService, state: str) -> dict[str, Any]:
    version = service.evaluations[name - 1]
    done = {"mean_reward": 0.25 + 0.125 * version, "mean_tokens": 9.0} if state == "done" else {}
    counts = {"num_samples": 4, "num_done": 4, "num_failed": 0}
    return {"id": str(name), "version": version, "state": state, **counts, **done}


@contextmanager
def serving(service: FakeService, port: int = 0) -> Iterator[FakeService]:
    """Serve on a loopback port for as long as the context lasts."""
    config = uvicorn.Config(make_app(service), log_level="error", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    service.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield service
    finally:
        server.should_exit = True
        thread.join()
        sock.close()
