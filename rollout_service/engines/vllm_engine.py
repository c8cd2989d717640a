"""vLLM's AsyncLLM as one replica, in this process; the same code on CPU and GPU.

Always true:
- a request is in the table of streams from its first step to its end, and an abort reaches it in every state of that
  way: before it came, at the gate, while vLLM registers it, and after;
- no request passes the gate while the engine is held, so an install sees no new ones;
- weights change only while vLLM is paused, and with the prefix cache on only while no request runs;
- `version` changes after the weights are loaded and checked, and before a token is written by them.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

from protocol.errors import EngineDeadError, EngineError
from protocol.settings.run import RunSettings
from rollout_service.engines.checkpoint import end_token_ids
from rollout_service.engines.gate import Gate
from rollout_service.engines.interface import Chunk, EngineStats, GenerationRequest, StreamEnd
from rollout_service.engines.streams import StreamTable
from rollout_service.engines.vllm_arguments import check_request, engine_seed, model_folder
from rollout_service.engines.vllm_outputs import VllmStream, chunks_of, empty_chunk, engine_input, sampling_parameters
from rollout_service.engines.vllm_process import VllmProcess
from rollout_service.engines.vllm_weights import VllmWeights, Weights


class VllmEngine:
    """One replica on vLLM. `settings.engine` and `settings.model` say which model and how."""

    def __init__(self, settings: RunSettings, worker: str) -> None:
        self._settings = settings
        self._worker = worker
        self._process: VllmProcess | None = None
        self._weights = VllmWeights(model_folder(settings))
        self._streams = StreamTable[VllmStream]()
        self._gate = Gate()
        self._changing = asyncio.Lock()
        self._end_ids: tuple[int, ...] = ()
        self._epoch = 0
        self._num_restarts = 0
        self._tokens_generated = 0

    @property
    def worker(self) -> str:
        """Id of this replica, unique within the service."""
        return self._worker

    @property
    def slots(self) -> int:
        """Sequences that it decodes at once."""
        return self._settings.engine.max_num_seqs

    @property
    def takes_seeds(self) -> bool:
        """Whether requests may carry a seed: vLLM on CPU dies of one when a prompt is prefilled in chunks."""
        return self._process is not None and not self._process.on_cpu

    @property
    def process_ids(self) -> list[int]:
        """Ids of the engine's core processes."""
        return self._process.process_ids if self._process is not None else []

    def stats(self) -> EngineStats:
        """State of this replica, without waiting."""
        return EngineStats(
            worker=self._worker,
            epoch=self._epoch,
            slots=self.slots,
            num_running=len(self._streams),
            version=self._weights.active.version,
            alive=self._process is not None and self._process.alive,
            tokens_generated=self._tokens_generated,
            num_restarts=self._num_restarts,
            kv_use=self._process.kv.use if self._process is not None else None,
            num_preemptions=self._process.kv.num_preemptions if self._process is not None else None,
        )

    # Life

    async def start(self) -> None:
        """Load the model as it starts (version 0). Raises EngineError with what to do."""
        async with self._changing:
            await self._weights.inspect()
            self._end_ids = await asyncio.to_thread(end_token_ids, model_folder(self._settings))
            await self._start_process(Weights(None, 0))

    async def restart(self, path: Path | None, version: int) -> None:
        """After the engine died: start it again with the weights of `version` (None: the model as it starts)."""
        async with self._changing:
            await self._stop_process()
            await self._start_process(Weights(path, version))
            self._num_restarts += 1

    async def close(self) -> None:
        """Stop the replica and its processes; streams that are open end with `EngineDeadError`."""
        await self._stop_process()

    async def _start_process(self, weights: Weights) -> None:
        seed = engine_seed(self._settings.run.seed, self._worker, self._epoch)
        process = await VllmProcess.start(self._settings, self._worker, seed)
        try:
            await self._weights.begin(process, weights)
        except BaseException:
            await process.stop()
            raise
        self._process = process
        self._epoch += 1

    async def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._gate.wake()
        for stream in self._streams.values():
            if stream.queue is not None:
                stream.queue.put(process.death())
        await process.stop()

    def _living(self) -> VllmProcess:
        if self._process is None or not self._process.alive:
            raise EngineDeadError(f"engine {self._worker} does not run; start or restart it first")
        return self._process

    # Generation

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream the response to one request."""
        check_request(request, self._living().max_model_len, self.takes_seeds)
        stream = VllmStream(request, self._weights.active.version)
        stream.aborted = self._streams.open(request.request_id, stream)
        try:
            async with aclosing(self._run(stream)) as chunks:
                async for chunk in chunks:
                    self._tokens_generated += len(chunk.tokens)
                    yield chunk
        finally:
            self._streams.close(request.request_id)

    async def _run(self, stream: VllmStream) -> AsyncGenerator[Chunk, None]:
        while self._gate.is_closed and not stream.aborted:
            await self._gate.wait(stream.request.request_id)
        process = self._living()
        stream.entered, stream.version = True, self._weights.active.version
        if stream.aborted:
            yield empty_chunk(stream.version, StreamEnd.ABORT)
            return
        ended = False
        try:
            with process.errors():
                await self._register(process, stream)
                while not ended:
                    output = stream.queue.get_nowait() or await stream.queue.get()
                    ended = bool(output.finished)
                    for chunk in chunks_of(stream, output):
                        yield chunk
        finally:
            if not ended and process.alive:
                await process.llm.abort(stream.request.request_id)

    async def _register(self, process: VllmProcess, stream: VllmStream) -> None:
        request = stream.request
        parameters = sampling_parameters(request, self._end_ids)
        stream.queue = await process.llm.add_request(request.request_id, engine_input(request), parameters)
        state = process.llm.output_processor.request_states.get(stream.queue.request_id)
        stream.labels = state.weight_version_starts if state is not None else None
        if stream.aborted:  # vLLM loses an abort that comes while it registers the request
            await process.llm.abort(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their streams deliver what there is and end with `abort`."""
        registered: list[str] = []
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is None:
                self._streams.remember_abort(request_id)
                continue
            stream.aborted = True
            self._gate.wake(request_id)
            if stream.queue is not None:
                registered.append(request_id)
        if registered and self._process is not None and self._process.alive:
            await self._process.guard(self._process.llm.abort(registered))

    async def wait_idle(self) -> None:
        """Return when no request runs."""
        await self._streams.wait_idle()

    # Weights

    async def prepare(self, path: Path) -> None:
        """Check the weights in `path` as far as that needs no engine, before anything is held. Raises WeightsError."""
        await self._weights.prepare(path)

    async def hold(self) -> None:
        """Write no token until `release`; holds nest. Running requests keep their place, new ones wait."""
        process = self._living()
        if self._gate.close():
            try:
                await process.guard(process.llm.pause_generation(mode="keep", clear_cache=False))
            except BaseException:
                self._gate.open()
                raise

    async def release(self) -> None:
        """Undo one `hold`."""
        try:
            if self._gate.is_last and self._process is not None and self._process.alive:
                await self._process.guard(self._process.llm.resume_generation())
        finally:
            self._gate.open()

    async def install(self, path: Path, version: int) -> None:
        """Load the weights in `path`, check them against its manifest, reset the prefix cache, become `version`.

        With requests running it keeps them and their KV cache, which the prefix cache must be off for. Raises
        WeightsError or EngineError; the weights and the version are then what they were.
        """
        await asyncio.shield(self._switch(Weights(path, version)))

    async def revert(self) -> None:
        """Put back the weights and the version from before the last install. Raises `EngineError`."""
        if self._weights.previous is None:
            raise EngineError(f"engine {self._worker} has no weights to go back to; restart it with those it needs")
        await asyncio.shield(self._switch(self._weights.previous))

    async def _switch(self, weights: Weights) -> None:
        async with self._changing:
            process = self._living()
            await self._weights.prepare(weights.path)
            await self.hold()
            try:
                running = [stream for stream in self._streams.values() if stream.entered]
                if running and self._settings.engine.enable_prefix_caching:
                    raise EngineError(
                        f"{len(running)} requests run on engine {self._worker}: park them before the install, or set "
                        "engine.enable_prefix_caching = false to keep them over it"
                    )
                await self._weights.switch(process, weights, reset_cache=not running)
                for stream in running:
                    stream.kept = True
            finally:
                await self.release()
