"""An engine without a model: lengths from a distribution, time from a latency model, tokens that prove provenance.

Always true:
- a token is a function of (sample, position, version) and of how many words there are, and its log-probability of the
  first three: loss, duplication, reordering and a wrong version label can all be found from what was delivered;
- the length of a response is a function of (run seed, sample), so a resumed sample ends where it would have ended; one
  that goes on under another id is as long as those are that get so far, so that pooling samples shortens no tail;
- one task advances every running sequence together, and no more than `slots` of them; the others wait in order;
- it has no KV cache: what it says about one is what a real engine would say.
"""

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import numpy as np

from protocol.errors import EngineDeadError, EngineError
from protocol.manifest import verify_manifest
from protocol.samples import NO_LOGPROBS, NO_TOKENS, Logprobs, Tokens
from protocol.settings.run import RunSettings
from rollout_service.engines.gate import Gate
from rollout_service.engines.interface import Chunk, EngineStats, GenerationRequest, StreamEnd
from rollout_service.engines.streams import StreamTable
from rollout_service.engines.vllm_arguments import check_request
from rollout_service.engines.vocabulary import known_tokens

END_TOKEN = 0
NUM_TOKENS = 50_000  # ids 1 .. NUM_TOKENS are words, or as many as the model in model.path knows if these are fewer
MIN_STEP_S = 1e-5  # a step of no time at all would finish every response before anybody could cut it
MIN_TICK_S = 0.002  # steps shorter than this are taken several at a time: waking the streams costs more
MIX_POSITION, MIX_VERSION = 0x9E3779B1, 0x85EBCA77  # odd 32-bit constants with well-spread bits
MAX_LOGPROB = 8.0
MAX_DRAWS = 1000  # of a length that is longer than what there is: one in a thousand gets so far, or it ends
BLOCK_TOKENS = 64  # tokens that are computed at once: one at a time costs thirty times as much


def simulated_tokens(sample_id: str, start: int, count: int, version: int, num_tokens: int = NUM_TOKENS) -> Tokens:
    """Tokens [count] that `version` writes at positions start .. start+count of a response, its end not considered."""
    return (_mix(sample_id, start, count, version) % num_tokens + 1).astype(np.int32)


def simulated_logprobs(sample_id: str, start: int, count: int, version: int) -> Logprobs:
    """Log-probabilities [count] of those tokens, in (-MAX_LOGPROB, 0]."""
    share = (_mix(sample_id, start, count, version) >> np.uint32(8)) / np.float64(1 << 24)  # in [0, 1)
    return (-MAX_LOGPROB * share).astype(np.float32)


def simulated_length(run_seed: int, sample_id: str, median: float, sigma: float, longer_than: int = 0) -> int:
    """Length of the whole response, its end token included: lognormal, from the run's seed and the sample's id.

    It is the first of a series of draws that is `longer_than` the tokens that there are: the same at every resume.
    """
    for draw in range(MAX_DRAWS):
        named = f"{run_seed}/{sample_id}/{draw}" if draw else f"{run_seed}/{sample_id}"
        digest = hashlib.blake2b(named.encode(), digest_size=8).digest()
        uniform = (int.from_bytes(digest, "little") + 0.5) / 2.0**64
        length = max(1, round(math.exp(math.log(median) + sigma * NormalDist().inv_cdf(uniform))))
        if length > longer_than:
            return length
    return longer_than + 1


def _mix(sample_id: str, start: int, count: int, version: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    base = int.from_bytes(hashlib.blake2b(sample_id.encode(), digest_size=4).digest(), "little")
    mixed = np.arange(start, start + count, dtype=np.uint32) * np.uint32(MIX_POSITION)
    mixed ^= np.uint32((base + version * MIX_VERSION) & 0xFFFFFFFF)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(MIX_VERSION)
    return mixed ^ (mixed >> np.uint32(13))


@dataclass(slots=True)
class SimulatedFaults:
    """What goes wrong, for tests. A fault is used up when it strikes."""

    fail_install: str | None = None
    """Reason for which the next install fails."""
    fail_requests: dict[str, int] = field(default_factory=dict[str, int])
    """Sample id -> how many more of its requests fail after their first token."""
    deadly: Callable[[GenerationRequest], bool] = lambda request: False
    """Whether the engine dies when this request is to get its next token. Such a fault is never used up."""
    hangs: bool = False
    """Whether the engine takes no steps, though it lives."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Tokens of one version from position `start` on."""

    start: int
    version: int
    tokens: Tokens
    logprobs: Logprobs


@dataclass(slots=True)
class _Sequence:
    request: GenerationRequest
    sample_id: str
    position: int
    remaining: int
    end: StreamEnd
    version: int
    num_tokens: int
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    entered: bool = False
    kept: bool = False
    done: bool = False
    """Nothing more will be written for it."""
    error: EngineError | None = None
    block: _Block | None = None

    def next_tokens(self, count: int, version: int) -> tuple[Tokens, Logprobs]:
        """The next `count` tokens and log-probs by `version`; moves the position."""
        block = self.block
        if block is None or block.version != version or self.position + count > block.start + len(block.tokens):
            size = max(count, BLOCK_TOKENS)
            tokens = simulated_tokens(self.sample_id, self.position, size, version, self.num_tokens)
            logprobs = simulated_logprobs(self.sample_id, self.position, size, version)
            self.block = block = _Block(self.position, version, tokens, logprobs)
        piece = slice(self.position - block.start, self.position - block.start + count)
        self.position += count
        return block.tokens[piece], block.logprobs[piece]


class SimulatedEngine:
    """One replica without a model. `lengths` gives the whole length of a sample's response, by its id."""

    def __init__(self, settings: RunSettings, worker: str, lengths: Callable[[str], int] | None = None) -> None:
        self._settings = settings
        self._model = settings.engine.simulated
        self._worker = worker
        self._lengths = lengths
        self._num_tokens = known_tokens(settings.model.path, NUM_TOKENS)
        self._streams = StreamTable[_Sequence]()
        self._running: dict[str, _Sequence] = {}
        self._queued: deque[_Sequence] = deque()
        self._gate = Gate()
        self._work = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None
        self._prefill_s = 0.0
        self._version = 0
        self._previous: int | None = None
        self._epoch = 0
        self._num_restarts = 0
        self._tokens_generated = 0
        self.faults = SimulatedFaults()

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
        """Seeds are taken and change nothing: its tokens are a function of the sample."""
        return True

    def stats(self) -> EngineStats:
        """State of this replica, without waiting."""
        return EngineStats(
            worker=self._worker,
            epoch=self._epoch,
            slots=self.slots,
            num_running=len(self._streams),
            version=self._version,
            alive=self._stepper is not None,
            tokens_generated=self._tokens_generated,
            num_restarts=self._num_restarts,
        )

    async def start(self) -> None:
        """Begin to take steps, at version 0."""
        self._begin(0)

    def _begin(self, version: int) -> None:
        self._version, self._previous = version, None
        self._epoch += 1
        self._stepper = asyncio.create_task(self._step_forever(), name=f"simulated-engine-{self._worker}")

    async def restart(self, path: Path | None, version: int) -> None:
        """After the engine died: start it again as `version`."""
        if path is not None:
            await asyncio.to_thread(verify_manifest, path)
        self.die()
        self._begin(version)
        self._num_restarts += 1

    async def close(self) -> None:
        """Stop taking steps; streams that are open end with `EngineDeadError`."""
        self.die()

    def die(self) -> None:
        """The engine is gone, as if its process had been killed; every stream ends with `EngineDeadError`."""
        stepper, self._stepper = self._stepper, None
        if stepper is not None:
            stepper.cancel()
        self._running.clear()
        self._queued.clear()
        for sequence in self._streams.values():
            sequence.error = EngineDeadError(f"engine {self._worker} is gone; restart it with the active weights")
            sequence.done = True
            sequence.ready.set()
        self._gate.wake()

    # Generation

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream the response to one request."""
        self._check_alive()
        check_request(request, self._settings.max_model_len, self.takes_seeds)
        sequence = self._sequence(request)
        aborted = self._streams.open(request.request_id, sequence)
        try:
            if aborted:
                self._finish(sequence, StreamEnd.ABORT)
            await self._enter(sequence)
            while True:
                await sequence.ready.wait()
                sequence.ready.clear()
                chunks, sequence.chunks = sequence.chunks, []
                for chunk in chunks:
                    yield chunk
                    if chunk.end is not None:
                        return
                if sequence.error is not None:
                    raise sequence.error
        finally:
            self._leave(sequence)
            self._streams.close(request.request_id)

    def _sequence(self, request: GenerationRequest) -> _Sequence:
        sample_id = request.request_id.split("@")[0]
        has = request.num_prefix_tokens
        whole = self._drawn_length(sample_id, has) if self._lengths is None else self._lengths(sample_id)
        left = max(1, whole - has)
        budget = request.sampling.max_tokens
        end = StreamEnd.STOP if left <= budget else StreamEnd.LENGTH
        return _Sequence(request, sample_id, has, min(left, budget), end, self._version, self._num_tokens)

    async def _enter(self, sequence: _Sequence) -> None:
        while self._gate.is_closed and not sequence.done:
            await self._gate.wait(sequence.request.request_id)
        if not sequence.done:
            sequence.entered, sequence.version = True, self._version
            self._queued.append(sequence)
            self._fill_slots()

    def _fill_slots(self) -> None:
        while self._queued and len(self._running) < self.slots:
            sequence = self._queued.popleft()
            if sequence.done:  # aborted while it waited for a slot
                continue
            self._running[sequence.request.request_id] = sequence
            self._prefill_s += self._model.prefill_per_token_s * len(sequence.request.prompt_token_ids)
            self._work.set()

    def _leave(self, sequence: _Sequence) -> None:
        sequence.done = True
        if self._running.pop(sequence.request.request_id, None) is not None:
            self._fill_slots()

    def _finish(self, sequence: _Sequence, end: StreamEnd) -> None:
        sequence.done = True
        sequence.chunks.append(Chunk(NO_TOKENS, NO_LOGPROBS, self._version, end))
        sequence.ready.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their streams deliver what there is and end with `abort`."""
        for request_id in request_ids:
            sequence = self._streams.get(request_id)
            if sequence is None:
                self._streams.remember_abort(request_id)
            elif not sequence.done:
                self._running.pop(request_id, None)
                self._finish(sequence, StreamEnd.ABORT)
                self._gate.wake(request_id)
        self._fill_slots()

    async def wait_idle(self) -> None:
        """Return when no request runs."""
        await self._streams.wait_idle()

    # Time

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._running or self._gate.is_closed or self.faults.hangs:
                self._work.clear()
                await self._work.wait()
            begun = loop.time()
            step_s = self._model.step_base_s + self._model.step_per_sequence_s * len(self._running)
            step_s = max(MIN_STEP_S, step_s)
            num_steps = max(1, round(MIN_TICK_S / step_s))
            due = begun + num_steps * step_s + self._prefill_s
            self._prefill_s = 0.0
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not self._gate.is_closed:
                self._advance(num_steps)

    def _advance(self, num_steps: int) -> None:
        if any(self.faults.deadly(sequence.request) for sequence in self._running.values()):
            self.die()
            return
        for request_id, sequence in list(self._running.items()):
            count = min(num_steps, sequence.remaining)
            if self._strikes(sequence):
                count = 1
                sequence.error = EngineError(f"request {request_id} failed in engine {self._worker}, as it was told to")
            self._write(sequence, count)
            if not sequence.remaining or sequence.error is not None:
                sequence.done = True
                del self._running[request_id]
            sequence.ready.set()
        self._fill_slots()

    def _write(self, sequence: _Sequence, count: int) -> None:
        tokens, logprobs = sequence.next_tokens(count, self._version)
        sequence.remaining -= count
        self._tokens_generated += count
        end = sequence.end if not sequence.remaining and sequence.error is None else None
        if end is StreamEnd.STOP:
            tokens[-1] = END_TOKEN
        kept = sequence.kept and self._version != sequence.version
        sequence.chunks.append(Chunk(tokens, logprobs, self._version, end, kept))

    def _strikes(self, sequence: _Sequence) -> bool:
        left = self.faults.fail_requests.get(sequence.sample_id, 0)
        if left:
            self.faults.fail_requests[sequence.sample_id] = left - 1
        return left > 0

    def _drawn_length(self, sample_id: str, longer_than: int) -> int:
        model = self._model
        return simulated_length(self._settings.run.seed, sample_id, model.median_tokens, model.sigma, longer_than)

    def _check_alive(self) -> None:
        if self._stepper is None:
            raise EngineDeadError(f"engine {self._worker} does not run; start or restart it first")

    # Weights

    async def prepare(self, path: Path) -> None:
        """Check the weights in `path` against their manifest, before anything is held. Raises WeightsError."""
        await asyncio.to_thread(verify_manifest, path)

    async def hold(self) -> None:
        """Write no token until `release`; holds nest. Running requests keep their place, new ones wait."""
        self._check_alive()
        self._gate.close()

    async def release(self) -> None:
        """Undo one `hold`."""
        self._gate.open()
        self._work.set()

    async def install(self, path: Path, version: int) -> None:
        """Check the weights in `path` against their manifest and become `version`."""
        await self._switch(path, version)

    async def revert(self) -> None:
        """Become the version from before the last install again. Raises `EngineError`."""
        if self._previous is None:
            raise EngineError(f"engine {self._worker} has no weights to go back to; restart it with those it needs")
        await self._switch(None, self._previous)

    async def _switch(self, path: Path | None, version: int) -> None:
        await self.hold()
        try:
            if path is not None:
                await asyncio.to_thread(verify_manifest, path)
            await asyncio.sleep(self._model.install_s)
            self._check_alive()
            reason, self.faults.fail_install = self.faults.fail_install, None
            if reason is not None:
                raise EngineError(f"engine {self._worker} could not install version {version}: {reason}")
            for sequence in self._streams.values():
                sequence.kept = sequence.kept or sequence.entered
            self._previous, self._version = self._version, version
        finally:
            await self.release()
