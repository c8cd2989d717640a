"""What can be said of a run without simulating it, each with where it holds.

Conservation (Little, Oper. Res. 9, 1961): if N' groups are in flight at the start of every round, nothing is refilled
or dropped, and N leave in each, then N' - N stay after each round, and a group stays for ratio - 1 rounds on average.

A full engine, with no lookahead and a trainer that takes no time: every step writes a token into each of S slots, so a
batch of tokens takes T = tokens of a batch / S steps, and versions change every T steps. A group that started together
is trained when its longest response is done; a token that has r steps to go until then sees r / T changes on average,
and none with probability max(0, 1 - r / T), since where a round's end falls is independent of it:

    mean lag          = E[sum over tokens of r / T] / E[tokens of a group]
    off-policy share  = 1 - E[sum over tokens of max(0, 1 - r / T)] / E[tokens of a group]

T falls as S / (N n), slots over the samples of a batch, rises: that number decides how off-policy a full engine is.

The closed forms of Applied Compute ("Predicting and Controlling Staleness in Fully Asynchronous RL Training", 2026) are
for another system: rollouts are never cut, and a queue of bounded capacity stands between engines and trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_service.tuning.engine_model import EngineModel
from rollout_service.tuning.workload import PromptLengths, Workload

NUM_PROMPTS = 2000  # drawn for the expectations: their standard error is then about 2 % for tails as heavy as e^2


@dataclass(frozen=True, slots=True)
class FullEngine:
    """Predictions for an engine that is always full."""

    slots_per_sample: float
    rounds_in_engine: float
    off_policy_share: float
    mean_lag: float
    ceiling_tokens_per_s: float


def mean_start_age(target_groups: int, batch_groups: int) -> float:
    """Rounds that a trained group was in flight before the one that finished its batch."""
    return target_groups / batch_groups - 1


def draw_prompts(workload: Workload, num_samples: int, count: int = NUM_PROMPTS) -> list[PromptLengths]:
    """Prompts to take expectations over."""
    return [workload.prompt(index, num_samples) for index in range(count)]


def ceiling_tokens_per_s(engine: EngineModel, prompts: Sequence[PromptLengths]) -> float:
    """Tokens per second of an engine that is fed endlessly: full slots, or a full KV cache, and every prompt prefilled.

    A running sequence is met with its own length as weight, half done on average.
    """
    lengths = np.array([length for p in prompts for length in p.lengths], np.float64)
    prompt_tokens = np.array([p.prompt_tokens for p in prompts for _ in p.lengths], np.float64)
    mean = float(lengths.mean())
    context = float((lengths * (prompt_tokens + lengths / 2)).mean()) / mean
    running = float(engine.slots)
    if engine.kv_tokens:
        running = min(running, max(1.0, engine.kv_tokens / context))
    step_s = engine.step_base_s + (engine.step_per_sequence_s + engine.step_per_context_token_s * context) * running
    prefill_s = engine.prefill_per_token_s * float(prompt_tokens.mean())
    return mean / (mean * step_s / running + prefill_s)


def full_engine(engine: EngineModel, prompts: Sequence[PromptLengths], batch_groups: int) -> FullEngine:
    """What holds while the engine is full."""
    num_samples = len(prompts[0].lengths)
    tokens_of_group = float(np.mean([sum(p.lengths) for p in prompts]))
    round_steps = tokens_of_group * batch_groups / engine.slots
    lag = fresh = 0.0
    for prompt in prompts:
        longest = max(prompt.lengths)
        lengths = np.array(prompt.lengths, np.float64)
        lag += float(np.sum(lengths * longest - lengths**2 / 2)) / round_steps
        fresh += float(np.sum(_fresh_tokens(lengths, longest, round_steps)))
    tokens = tokens_of_group * len(prompts)
    longest_of_group = float(np.mean([max(p.lengths) for p in prompts]))
    return FullEngine(
        slots_per_sample=engine.slots / (batch_groups * num_samples),
        rounds_in_engine=longest_of_group / round_steps,
        off_policy_share=1 - fresh / tokens,
        mean_lag=lag / tokens,
        ceiling_tokens_per_s=ceiling_tokens_per_s(engine, prompts),
    )


def _fresh_tokens(
    lengths: "np.ndarray[tuple[int], np.dtype[np.float64]]", longest: int, round_steps: float
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Integral over each response's tokens of max(0, 1 - r / T), r from longest - length to longest."""
    nearest = np.minimum(longest - lengths, round_steps)
    farthest = np.minimum(float(longest), round_steps)
    return (farthest - nearest) - (farthest**2 - nearest**2) / (2 * round_steps)
