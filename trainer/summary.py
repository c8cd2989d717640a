"""Totals of a run, kept over restarts, and the summary made from them."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Totals(BaseModel):
    """Sums since the first step; they are saved in every checkpoint, so that a step that is replayed counts once."""

    model_config = ConfigDict(extra="forbid")
    steps: int = 0
    samples_trained: int = 0
    groups_consumed: int = 0
    samples_resumed: int = 0
    samples_multi_version: int = 0
    tokens_trained: int = 0
    off_policy_tokens: int = 0
    lag_sum: int = 0
    max_lag: int = 0
    eval_reward_before: float | None = None
    eval_reward_after: float | None = None
    nan_skips: int = 0
    publish_failures: int = 0
    wall_s: float = 0.0


class TrainingSummary(BaseModel):
    """What a run did; `off_policy_token_share` and `mean_lag` are over trained tokens."""

    model_config = ConfigDict(extra="forbid")
    steps: int
    samples_trained: int
    groups_consumed: int
    samples_resumed: int
    samples_multi_version: int
    tokens_trained: int
    off_policy_token_share: float
    mean_lag: float
    max_lag: int
    eval_reward_before: float | None
    eval_reward_after: float | None
    nan_skips: int
    publish_failures: int
    wall_s: float


def summarise(totals: Totals) -> TrainingSummary:
    """The summary of `totals`."""
    shared = totals.model_dump(exclude={"off_policy_tokens", "lag_sum"})
    tokens = max(1, totals.tokens_trained)
    return TrainingSummary(
        off_policy_token_share=totals.off_policy_tokens / tokens, mean_lag=totals.lag_sum / tokens, **shared
    )


def write_summary(path: Path, summary: TrainingSummary) -> None:
    """Write `summary` as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(summary.model_dump_json(indent=1) + "\n")
    partial.replace(path)
