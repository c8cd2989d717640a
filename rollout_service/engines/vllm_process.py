"""One vLLM engine with its processes: start, remote calls that notice its death, stop."""

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine, Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from protocol.errors import AprilError, EngineDeadError, EngineError
from protocol.settings.run import RunSettings
from rollout_service.engines.vllm_arguments import child_environment, engine_arguments, prepare_environment
from rollout_service.engines.vllm_stats import KvStats, stat_logger

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
DEATH_CHECK_INTERVAL_S = 0.2  # vLLM leaves a remote call pending when its core dies, so somebody has to look
SHUTDOWN_TIMEOUT_S = 5.0  # workers release memory and semaphores; a core that takes longer is killed

log = logging.getLogger(__name__)
# The environment belongs to the whole process, so engines of one service are started one after the other.
_starting = threading.Lock()


class VllmProcess:
    """Owns an AsyncLLM and the processes behind it."""

    def __init__(self, llm: "AsyncLLM", worker: str, on_cpu: bool, kv: KvStats) -> None:
        self.llm = llm
        self.kv = kv
        self.on_cpu = on_cpu
        self._worker = worker
        self._stopped = False

    @classmethod
    async def start(cls, settings: RunSettings, worker: str, seed: int) -> "VllmProcess":
        """Start the engine in a thread, so that the service goes on. Raises `EngineError` with what to do.

        vLLM's start can't be broken off: who is cancelled meanwhile waits for its end, and the engine is stopped.
        """
        started: list[VllmProcess] = []  # a thread that returned the engine itself would keep it alive
        starting = asyncio.create_task(asyncio.to_thread(cls._start, settings, worker, seed, started))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await _ended(starting)
            if started:
                await started.pop().stop()
            raise
        process = started.pop()
        try:
            await process.guard(process.llm.get_supported_tasks())  # kept by vLLM: later requests need not ask
            await process.call("april_follow", service_pid=os.getpid())
        except BaseException:
            await process.stop()
            raise
        return process

    @classmethod
    def _start(cls, settings: RunSettings, worker: str, seed: int, started: list["VllmProcess"]) -> None:
        with _starting:
            on_cpu = prepare_environment()
            arguments = engine_arguments(settings, on_cpu, seed)
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            try:
                with child_environment(settings, on_cpu, bool(arguments["enforce_eager"])):
                    kv = KvStats()
                    loggers = [stat_logger(kv)]
                    # Not by way of a local name: frames of this call stay behind in vLLM and would keep the engine.
                    started.append(
                        cls(
                            AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=loggers),
                            worker,
                            on_cpu,
                            kv,
                        )
                    )
            except TypeError as error:
                raise EngineError(f"vLLM does not know an argument in engine.extra: {error}") from error
            except Exception as error:
                raise EngineError(f"vLLM could not start engine {worker}: {_first_sentence(error)}") from error

    @property
    def alive(self) -> bool:
        """Whether the engine's core runs."""
        return not self._stopped and not self.llm.errored

    @property
    def max_model_len(self) -> int:
        """Context of the engine."""
        return int(self.llm.model_config.max_model_len)

    @property
    def process_ids(self) -> list[int]:
        """Ids of the core processes."""
        manager: Any = self.llm.engine_core.resources.engine_manager
        return [int(process.pid) for process in manager.processes] if manager is not None else []

    async def call(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of the worker extension on every worker."""
        return cast(list[Any], await self.guard(self.llm.collective_rpc(method, kwargs=kwargs)))

    async def guard(self, operation: Coroutine[Any, Any, T]) -> T:
        """Await an operation of the engine; raises `EngineDeadError` if its core dies, `EngineError` if it fails."""
        task = asyncio.ensure_future(operation)
        try:
            with self.errors():
                while not task.done():
                    await asyncio.wait({task}, timeout=DEATH_CHECK_INTERVAL_S)
                    if not task.done() and not self.alive:
                        raise self.death()
                return task.result()
        finally:
            task.cancel()

    @contextmanager
    def errors(self) -> Generator[None]:
        """Raise vLLM's errors as this project's."""
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        try:
            yield
        except AprilError:
            raise
        except VllmDeadError as error:
            raise self.death() from error
        except Exception as error:
            if not self.alive:
                raise self.death() from error
            raise EngineError(f"engine {self._worker} failed: {_first_sentence(error)}") from error

    def death(self) -> EngineDeadError:
        """The error of everything that waits for a dead engine."""
        return EngineDeadError(f"the process of engine {self._worker} is gone; restart it with the active weights")

    async def stop(self) -> None:
        """End the engine's processes; idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self.llm.output_handler is not None:
            self.llm.output_handler.cancel()  # else it reports an orderly end as the death of the engine
        manager: Any = self.llm.engine_core.resources.engine_manager
        processes = list(manager.processes) if manager is not None else []
        await asyncio.to_thread(self.llm.shutdown, SHUTDOWN_TIMEOUT_S)
        await asyncio.to_thread(_reap, processes)
        await asyncio.sleep(0)  # vLLM closes its sockets in a turn of this loop
        await asyncio.to_thread(_close_sockets, self.llm.engine_core.resources)


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait until `task` has ended, well or not, whoever cancels the wait: what it holds must be let go."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not task.cancelled() and task.exception() is not None:
        log.warning("an engine that was no longer wanted did not start: %s", task.exception())


def _reap(processes: list[Any]) -> None:
    """vLLM kills a core that doesn't end by itself, but leaves without waiting until its memory is free."""
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join(SHUTDOWN_TIMEOUT_S)


def _close_sockets(resources: Any) -> None:
    """End vLLM's ZeroMQ context and its I/O threads, which it leaves to the garbage collector."""
    for socket in (resources.output_socket, resources.input_socket):
        if socket is not None and not socket.closed:
            socket.close(linger=0)
    if resources.coordinator is None and not resources.ctx.closed:
        resources.ctx.term()


def _first_sentence(error: BaseException) -> str:
    """The first line of an error that vLLM or pydantic wrapped in several."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if not line.endswith("validation error for ModelConfig")]
    return (useful or [type(error).__name__])[0].removeprefix("Value error, ")
