"""What vLLM says of its KV cache after each step: how full it is, and how many requests it has preempted."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import StatLoggerFactory


@dataclass(slots=True)
class KvStats:
    """Of one engine since it started. `use`: share of the KV cache that running requests hold."""

    use: float = 0.0
    num_preemptions: int = 0


def stat_logger(into: KvStats) -> "StatLoggerFactory":
    """A logger for AsyncLLM that keeps the two numbers; vLLM's own loggers stay off."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class KvLogger(StatLoggerBase):
        """vLLM makes one for each engine core."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            del vllm_config, engine_index

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            """After each step."""
            del mm_cache_stats, engine_idx
            if scheduler_stats is not None:
                into.use = float(scheduler_stats.kv_cache_usage)
            if iteration_stats is not None:
                into.num_preemptions += int(iteration_stats.num_preempted_reqs)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return KvLogger
