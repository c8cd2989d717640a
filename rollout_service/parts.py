"""The parts of a running service, built in order and taken apart in the order written here.

Shutdown: evaluations, then the round loop (streams end, everything is parked), then the engines, the scorers, and the
buffer last, since all of the others write to it.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from transformers import PreTrainedTokenizerBase

from buffer.embedded import EmbeddedRedis
from buffer.interface import ContinuationBuffer, SampleLease
from buffer.open import open_buffer
from protocol.errors import SettingsError, UnavailableError
from protocol.logs import bind_process
from protocol.settings import RunSettings
from protocol.states import SampleState
from rollout_service.control import Control
from rollout_service.delivery import Delivery
from rollout_service.engines.checkpoint import end_token_ids, read_config
from rollout_service.engines.pool import EnginePool, build_pool
from rollout_service.epochs import EpochFile
from rollout_service.evaluation import Evaluations
from rollout_service.events import Mailbox
from rollout_service.identity import identity_of, warn_of_longer
from rollout_service.loop import RoundLoop
from rollout_service.policies import PolicyRegistry
from rollout_service.prompts.encode import load_tokenizer
from rollout_service.prompts.interface import PromptSet
from rollout_service.prompts.load import load_prompts
from rollout_service.prompts.order import build_order
from rollout_service.rewards.build import build_scorer
from rollout_service.rewards.labels import check_labels
from rollout_service.rewards.measured import MeasuredScorer
from rollout_service.samples import Decode, SampleParts
from rollout_service.tuning.trace_open import limits_of_settings, open_trace
from rollout_service.watch.recent import Watch
from rollout_service.watch.restore import restore_watch

log = logging.getLogger(__name__)

MAX_TOKEN_ID = 1 << 31  # token ids are int32


@dataclass(slots=True)
class ServiceParts:
    """Everything that a running service is made of."""

    settings: RunSettings
    buffer: ContinuationBuffer
    redis: EmbeddedRedis | None
    pool: EnginePool
    policies: PolicyRegistry
    delivery: Delivery
    evaluations: Evaluations
    control: Control
    loop: RoundLoop
    sample_parts: SampleParts
    num_train_prompts: int
    watch: Watch | None = None


@asynccontextmanager
async def open_parts(settings: RunSettings) -> AsyncGenerator[ServiceParts]:
    """Build the parts, cheap checks first; what was built is taken apart again, also when a later part fails."""
    tokenizer = await asyncio.to_thread(load_tokenizer, settings)
    prompts = await asyncio.to_thread(load_prompts, settings)
    await asyncio.to_thread(check_labels, [*prompts.train, *prompts.validation], settings)
    log.info("%d training and %d held-out prompts", len(prompts.train), len(prompts.validation))
    async with AsyncExitStack() as stack:
        buffer, redis = await open_buffer(settings)
        if redis:
            stack.callback(redis.stop)
        stack.push_async_callback(buffer.close)
        if redis and not redis.owned:
            raise SettingsError(
                f"another service runs on {settings.run_dir}, whose embedded Redis answers; stop it, or set another "
                "run.dir"
            )
        owner = f"{socket.gethostname()}:{os.getpid()}"
        epochs = EpochFile(settings.run_dir)
        service_epoch = await buffer.claim_service(owner, identity_of(settings), epochs)
        bind_process(service_epoch=service_epoch)
        await warn_of_longer(buffer, settings.data.max_response_length)
        scorer = build_scorer(settings)
        stack.push_async_callback(scorer.close)
        await scorer.start()
        trace = open_trace(settings, service_epoch)
        stack.callback(trace.close)
        pool = build_pool(settings)
        stack.push_async_callback(pool.close)
        await pool.start()
        mailbox = Mailbox()
        sample_parts = SampleParts(
            owner=owner,
            settings=settings,
            buffer=buffer,
            pool=pool,
            scorer=scorer,
            mailbox=mailbox,
            decode=_decoder(tokenizer),
            stop_token_ids=_stop_token_ids(settings),
            trace=trace,
        )
        parts = assemble_parts(settings, sample_parts, redis, prompts, service_epoch)
        await parts.policies.restore()
        if parts.watch is not None:
            await asyncio.to_thread(restore_watch, parts.watch, settings)
        stack.push_async_exit(partial(check_parked, parts.buffer, parts.loop.leases, service_epoch))
        stack.push_async_callback(parts.loop.close)
        stack.push_async_callback(parts.evaluations.close)
        yield parts


async def check_parked(
    buffer: ContinuationBuffer,
    leases: Callable[[], Sequence[SampleLease]],
    service_epoch: int,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Raise UnavailableError if a service that was asked to end leaves what it ran unparked; a failure says why itself.

    `leases`: of what ran in the engines. What was started in the buffer alone has lost no token.
    """
    ran = {lease.sample_id for lease in leases()}
    if isinstance(error, Exception) or not ran:
        return
    try:
        snapshot, samples = await buffer.snapshot(), await buffer.open_samples()
    except UnavailableError as away:
        raise UnavailableError(
            f"the service ended and can't tell whether all was parked: {away}; the next start goes on from what the "
            "buffer has"
        ) from away
    left = [s for s in samples if s.sample_id in ran and s.state is SampleState.RUNNING]
    if left and snapshot.service_epoch <= service_epoch:
        raise UnavailableError(
            f"the service ended with samples that are not parked ({len(left)}); the next start goes on from their last "
            "checkpoints"
        )


def assemble_parts(
    settings: RunSettings,
    sample_parts: SampleParts,
    redis: EmbeddedRedis | None,
    prompts: PromptSet,
    service_epoch: int,
) -> ServiceParts:
    """The parts over a buffer, a pool and a scorer that have started.

    The round loop and the samples wait for a Redis that is away; who asks over HTTP is told at once.
    """
    sample_parts = replace(sample_parts, scorer=MeasuredScorer(sample_parts.scorer))
    buffer, pool, mailbox = sample_parts.buffer, sample_parts.pool, sample_parts.mailbox
    quick = buffer.impatient()
    policies = PolicyRegistry(buffer, pool, settings.weights_root, settings.weights.num_kept)
    delivery = Delivery(quick, mailbox, settings.run.name, settings.data.train_batch_size, settings.spool_dir)
    evaluations = Evaluations(settings, sample_parts, prompts.validation)
    control = Control(settings.rollout, quick, mailbox)
    order = build_order(prompts.train, settings)
    watch = Watch(limits_of_settings(settings)) if settings.service.watch else None
    sample_parts.trace.batch_groups = settings.data.train_batch_size
    if watch is not None:
        sample_parts.trace.add_sink(watch.put)
    return ServiceParts(
        settings=settings,
        buffer=quick,
        redis=redis,
        pool=pool,
        policies=policies,
        delivery=delivery,
        evaluations=evaluations,
        control=control,
        loop=RoundLoop(sample_parts, order, policies, delivery, evaluations, control, service_epoch),
        sample_parts=sample_parts,
        num_train_prompts=len(prompts.train),
        watch=watch,
    )


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    return decode


def _stop_token_ids(settings: RunSettings) -> frozenset[int]:
    if settings.model.path is None:
        return frozenset(settings.rollout.stop_token_ids)
    vocabulary = int(read_config(settings.model.path).get("vocab_size") or MAX_TOKEN_ID)
    unknown = [token for token in settings.rollout.stop_token_ids if token >= vocabulary]
    if unknown:
        raise SettingsError(
            f"rollout.stop_token_ids has {unknown}, but the model's vocabulary ends at {vocabulary - 1}"
        )
    return frozenset([*settings.rollout.stop_token_ids, *end_token_ids(settings.model.path)])
