"""The scheduler's numbers as a run's settings give them."""

from protocol.settings import RunSettings
from protocol.settings.rollout import EngineBackend
from rollout_service.engines.checkpoint import kv_bytes_per_token, read_config
from rollout_service.scheduler.decisions import RoundLimits

NARROW_DTYPES = frozenset({"bfloat16", "float16", "half"})
BYTES_OF_NARROW, BYTES_OF_FLOAT32 = 2, 4  # `auto` counts as float32: too little room is better than preemptions


def limits_of_run(settings: RunSettings) -> RoundLimits:
    """What `data` and `rollout` say at the start; ratio and lookahead may change later."""
    rollout = settings.rollout
    return RoundLimits(
        batch_groups=settings.data.train_batch_size,
        group_samples=rollout.n,
        ratio=rollout.ratio,
        lookahead=rollout.lookahead,
        max_lag=rollout.max_lag,
        max_sample_failures=rollout.max_sample_failures,
        cut=rollout.cut,
        on_install=rollout.on_install,
        admission=rollout.admission,
        order=rollout.order,
        samples_ratio=rollout.samples_ratio,
    )


def kv_tokens_of(settings: RunSettings) -> int:
    """Tokens that the KV caches of all replicas hold; 0 unless `engine.kv_cache_memory_bytes` says so."""
    engine = settings.engine
    if engine.backend is EngineBackend.SIMULATED or engine.kv_cache_memory_bytes is None or settings.model.path is None:
        return 0
    width = BYTES_OF_NARROW if engine.dtype in NARROW_DTYPES else BYTES_OF_FLOAT32
    per_token = kv_bytes_per_token(read_config(settings.model.path), width)
    return engine.num_replicas * engine.kv_cache_memory_bytes // max(1, per_token)
