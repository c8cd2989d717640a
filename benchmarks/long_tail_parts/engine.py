"""A real engine whose responses have the lengths that they are given.

The model is the demo's without its end of sequence, so that a response ends where its budget does, and the budget of a
request is what its length leaves. Everything else (scheduling, sampling, log-probs, aborts, resumes) is the engine's.
"""

import json
import random
import shutil
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from buffer.keys import split_sample_id
from deploy.demo.base_policy import default_cache_dir, make_base_policy
from protocol.manifest import write_manifest
from protocol.samples import NO_LOGPROBS, NO_TOKENS
from protocol.settings import RunSettings
from rollout_service.engines.interface import Chunk, GenerationRequest, StreamEnd
from rollout_service.engines.pool import EnginePool
from rollout_service.engines.replica import Replica
from rollout_service.tuning.workload import Workload

PROMPT_TOKENS = 24
LETTERS = range(97, 123)  # token ids of the demo's bytes


def endless_policy(folder: Path) -> Path:
    """The demo's base policy with no token that ends a response."""
    shutil.copytree(make_base_policy(default_cache_dir()), folder)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None, "pad_token_id": None}))
    (folder / "manifest.json").unlink()
    write_manifest(folder, step=0)
    return folder


def prompt_tokens(number: int) -> tuple[int, ...]:
    """Token ids of prompt `number`, all of one length and all different, so that no prefix cache helps."""
    return tuple(random.Random(number).choices(LETTERS, k=PROMPT_TOKENS))


@dataclass(slots=True)
class EngineWork:
    """What the engine did between two looks."""

    seconds: float = 0.0
    idle_slot_s: float = 0.0
    tokens: int = 0
    reprefilled: int = 0
    steps: int = 0


class ForcedPool(EnginePool):
    """A pool that ends each response at its length, and counts what runs."""

    def __init__(self, engines: Sequence[Replica], workload: Workload, group_samples: int) -> None:
        super().__init__(engines)
        self._workload, self._group_samples = workload, group_samples
        self._active = 0
        self._since_s = time.perf_counter()
        self._work = EngineWork()
        self._in_step: set[str] = set()

    def length(self, sample_id: str) -> int:
        """Response tokens of a sample: those of the prompt that was admitted as its group was."""
        group_id, index = split_sample_id(sample_id)
        number = int("".join(filter(str.isdigit, group_id)))
        return self._workload.prompt(number, self._group_samples).lengths[index]

    def look(self) -> EngineWork:
        """What the engine did since the last look."""
        self._count(0)
        work, self._work = self._work, EngineWork()
        self._in_step.clear()
        return work

    def _count_step(self, request_id: str, num_tokens: int) -> None:
        """A request that gets a token again tells that a step began: outputs come in the order of the steps."""
        if request_id in self._in_step or not self._in_step:
            self._work.steps += num_tokens
            self._in_step.clear()
        self._in_step.add(request_id)

    def _count(self, change: int) -> None:
        now_s = time.perf_counter()
        self._work.seconds += now_s - self._since_s
        self._work.idle_slot_s += (now_s - self._since_s) * max(0, self.slots - self._active)
        self._active, self._since_s = self._active + change, now_s

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream the response up to its length."""
        left = self.length(request.request_id.partition("@")[0]) - request.num_prefix_tokens
        if left <= 0:
            self.unassign(request.request_id)
            yield Chunk(NO_TOKENS, NO_LOGPROBS, self.version, StreamEnd.LENGTH)
            return
        if request.num_prefix_tokens:
            self._work.reprefilled += len(request.prompt_token_ids)
        forced = replace(request, sampling=replace(request.sampling, max_tokens=left))
        self._count(1)
        try:
            async with aclosing(super().generate(forced)) as chunks:
                async for chunk in chunks:
                    self._work.tokens += len(chunk.tokens)
                    if len(chunk.tokens):
                        self._count_step(request.request_id, len(chunk.tokens))
                    yield chunk
        finally:
            self._count(-1)


def pool_settings(model: Path, folder: Path, slots: int, longest: int, num_threads: int | None) -> RunSettings:
    """Settings of an engine that can hold `slots` sequences of `longest` tokens."""
    return RunSettings.model_validate(
        {
            "run": {"name": "long-tail", "dir": folder},
            "model": {"path": model},
            "data": {"max_prompt_length": PROMPT_TOKENS, "max_response_length": longest},
            "engine": {"max_num_seqs": slots, "num_threads": num_threads, "dtype": "float32"},
        }
    )
