"""The rollout service as a process.

Always true: it exits 0 only after SIGTERM or SIGINT and with everything parked; a part that fails ends the process with
a sentence and another exit code, also if a signal comes while that is under way. Routes answer 503 while the engines
start and while it stops.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from buffer.embedded import EmbeddedRedis
from protocol.errors import RedisUnfitError, SettingsError, UnavailableError
from protocol.heap import freeze_heap
from protocol.settings import RunSettings
from rollout_service.app.build import build_app
from rollout_service.app.host import Host
from rollout_service.identity import check_identity, claim_folder
from rollout_service.parts import open_parts
from rollout_service.progress import show_progress
from rollout_service.samples import renew_leases
from rollout_service.spans import ServiceSpans, TracedCalls, closing_tracing
from rollout_service.watch.record import write_record

if TYPE_CHECKING:
    from protocol.otel import Tracing

log = logging.getLogger(__name__)

REDIS_CHECK_INTERVAL_S = 1.0  # how long an embedded server that was killed stays away; looking costs a system call
SLOW_STOP_S = 15.0  # parking takes milliseconds: who waits for longer wants to know for what
SHUTDOWN_GRACE_S = 5  # long polls and event streams are cut after this; everything is parked by then


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the service decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to the service."""
        yield


def serve(settings: RunSettings) -> None:
    """Run the service until SIGTERM. Raises AprilError with what to do when it can't start or go on."""
    with contextlib.closing(bind(settings)) as listener:
        _check_folders(settings)
        check_identity(settings)
        with closing_tracing(settings) as tracing:
            asyncio.run(_serve(settings, listener, tracing))
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # all is parked: who asks again must not make it a failure


def bind(settings: RunSettings) -> socket.socket:
    """A listening socket; raises SettingsError if the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in settings.service.host else socket.AF_INET
    # With the protocol named: asyncio sends small answers at once only on sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.service.host, settings.service.port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"can't listen on {settings.service.host}:{settings.service.port} ({error.strerror}); stop what uses it or "
            "set service.port"
        ) from error
    return listener


def _check_folders(settings: RunSettings) -> None:
    for folder in (settings.run_dir, settings.weights_root, settings.spool_dir):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(
                f"can't write to {folder} ({error.strerror}); set run.dir to a folder that can"
            ) from error


async def _serve(settings: RunSettings, listener: socket.socket, tracing: "Tracing | None") -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    host = Host(settings)
    app = TracedCalls(build_app(host), tracing) if tracing else build_app(host)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=SHUTDOWN_GRACE_S
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    log.info("listening on http://%s:%d", *listener.getsockname()[:2])
    try:
        failing = asyncio.Event()
        working = asyncio.create_task(_work(host, tracing, failing))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({working, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not failing.is_set():  # else it is parking already, which a cancellation would cut short
            working.cancel()
        while not (await asyncio.wait({working}, timeout=SLOW_STOP_S))[0]:
            log.warning("stopping takes long; what still runs: %s", "; ".join(map(str, asyncio.all_tasks())))
        with contextlib.suppress(asyncio.CancelledError):
            await working
    finally:
        server.should_exit = True
        await serving


async def keep_redis(redis: EmbeddedRedis, patience_s: float) -> None:
    """Start the embedded server again when it has ended; nobody else would. What was acknowledged is in its AOF.

    Raises UnavailableError if it couldn't be started for `patience_s`, as on a disk that stays full.
    """
    since_s: float | None = None
    while True:
        await asyncio.sleep(REDIS_CHECK_INTERVAL_S)
        try:
            # In this thread: the server ends with the thread that started it.
            revived = redis.revive()
        except (UnavailableError, RedisUnfitError) as error:
            now_s = time.monotonic()
            if since_s is None:
                since_s = now_s
                log.warning(
                    "the embedded redis-server has ended and is tried to start again for buffer.patience_s = %g s: %s",
                    patience_s,
                    error,
                    extra={"event": "redis_ended"},
                )
            if now_s - since_s >= patience_s:
                raise UnavailableError(f"the embedded redis-server ended and did not start again: {error}") from error
            continue
        since_s = None
        if revived:
            log.warning("the embedded redis-server had ended and was started again")


async def _work(host: Host, tracing: "Tracing | None", failing: asyncio.Event) -> None:
    async with open_parts(host.settings) as parts:
        claim_folder(host.settings)
        write_record(host.settings)  # a service that is refused must not replace the record of the one that runs
        if tracing is not None:
            parts.sample_parts.trace.add_sink(ServiceSpans(tracing, host.settings.tracing.sample_share).put)
        host.started(parts)
        freeze_heap()
        board = host.running.board
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(parts.loop.run())
                tasks.create_task(parts.loop.watch())
                tasks.create_task(board.keep_waits())
                tasks.create_task(show_progress(board))
                tasks.create_task(renew_leases(parts.sample_parts, parts.loop.leases))
                if parts.redis is not None:
                    tasks.create_task(keep_redis(parts.redis, host.settings.buffer.patience_s))
        except Exception:
            failing.set()
            raise
        finally:
            host.stopping()
            await board.close()
            await parts.delivery.stop()
