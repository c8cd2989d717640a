"""Every metric of the trainer's own `/metrics`: the collectors and docs/metrics.md are made from this.

`STEP_METRICS` are the step metrics that have a series of their own; all of them, those included, are in
`april_trainer_step_metric` by name.
"""

from collections.abc import Mapping

from protocol.collectors import Catalogue
from protocol.metric_spec import SECONDS_BUCKETS, MetricSection, counter, gauge, histogram

PHASES = ("wait", "logprobs", "critic", "update", "publish", "save")
"""Parts of a step that are timed; each has a `timing_s/NAME`, but for `save`, which comes after the step's report."""

STEP_METRICS: Mapping[str, tuple[str, str, str]] = {
    "reward/mean": ("Mean reward of the step's samples.", "", "it falls, or rises while responses stop ending"),
    "reward/groups_without_spread": (
        "Share of groups whose samples all have the same reward: they teach nothing.",
        "share",
        "it is above 0.7: the prompts are too easy or too hard",
    ),
    "reward/rewarded_and_stopped": ("Share of samples that are rewarded and ended by themselves.", "share", ""),
    "response/length_mean": ("Mean response length.", "tokens", ""),
    "response/length_p99": ("99th percentile of response lengths.", "tokens", ""),
    "response/stopped_share": ("Share of responses that ended by themselves.", "share", "it falls"),
    "lag/mean": ("Mean lag of trained tokens.", "versions", ""),
    "lag/max": ("Largest lag of a trained token.", "versions", "it is `rollout.max_lag` in every step"),
    "off_policy/token_share": ("Share of trained tokens that an older version wrote.", "share", ""),
    "off_policy/resumed_token_share": ("Share that an older version wrote than the end of their sample.", "share", ""),
    "off_policy/kl_behaviour_proximal": ("KL of behaviour to proximal policy, by k3.", "nats", "it grows over steps"),
    "importance/mean": ("Mean importance weight, 1 in expectation.", "", "it is far from 1"),
    "importance/max": ("Largest importance weight.", "", ""),
    "importance/ess": (
        "Kish's effective sample size, as a share of the tokens.",
        "share",
        "it is below 0.5: the data is too far off-policy, lower the ratio or the lookahead",
    ),
    "importance/clipped_share": ("Share of tokens whose weight cap or band decided.", "share", "it is above 0.1"),
    "importance/left_out_share": ("Share of tokens that rejection or veto left out.", "share", "it is above 0.1"),
    "importance/not_finite_share": ("Share of tokens without a finite behaviour log-prob.", "share", "it is not 0"),
    "mismatch/lag0_mean": ("|log p - log b| on tokens of the very same weights, mean.", "nats", "it is above 0.05"),
    "mismatch/drift_mean": ("The same on older tokens: what the policy has moved since.", "nats", ""),
    "actor/pg_loss": ("Policy loss, mean over tokens.", "", ""),
    "actor/pg_clipfrac": ("Share of tokens that the clip decided.", "share", "it is above 0.2"),
    "actor/ppo_kl": ("KL of the proximal to the current policy.", "nats", ""),
    "actor/entropy": ("Entropy a token.", "nats", "it goes to 0: the policy collapses"),
    "actor/grad_norm": ("Gradient norm before clipping.", "", "it jumps by an order of magnitude"),
    "actor/lr": ("Learning rate.", "", ""),
    "tokens/trained": ("Response tokens of the step.", "tokens", ""),
    "tokens/per_s": ("Response tokens trained a second, waits included.", "tokens/s", ""),
    "eval/reward": ("Held-out reward of the last evaluation.", "", "it falls while the training reward rises"),
}


def series_name(metric: str) -> str:
    """`reward/mean` as `april_trainer_reward_mean`."""
    return f"april_trainer_{metric.replace('/', '_')}"


PROGRESS = MetricSection(
    "Trainer: progress",
    (
        gauge("april_trainer_up", "1 while rank 0 runs."),
        gauge("april_trainer_info", "1, with the run's name and the version of this package.", "", ("name", "version")),
        gauge("april_trainer_step", "Last step that is trained.", "steps"),
        gauge("april_trainer_total_steps", "Steps that the run will take.", "steps"),
        gauge("april_trainer_saved_step", "Last step that is in a checkpoint.", "steps"),
        gauge(
            "april_trainer_last_step_timestamp_seconds",
            "When the last step was trained, since the epoch; 0 before the first.",
            "seconds",
            worry="it is many steps ago: the service or the trainer hangs",
        ),
        counter("april_trainer_steps_total", "Steps trained by this process.", "steps"),
        counter("april_trainer_tokens_total", "Response tokens trained by this process.", "tokens"),
        counter("april_trainer_samples_total", "Samples trained by this process.", "samples"),
        histogram(
            "april_trainer_step_seconds",
            "A step, from the request for its batch to its report.",
            "seconds",
            SECONDS_BUCKETS,
        ),
        histogram(
            "april_trainer_phase_seconds",
            "Parts of a step: waiting for the batch, log-probs, critic, update, publish, and saving a checkpoint.",
            "seconds",
            SECONDS_BUCKETS,
            ("phase",),
            worry="`wait` is the largest: generation limits the run; `publish` is: use a faster weights folder",
        ),
        counter(
            "april_trainer_nonfinite_updates_total",
            "Updates left out because loss, gradient or advantage was not finite.",
            "updates",
            worry="it grows: lower `actor.optim.lr`",
        ),
        counter(
            "april_trainer_publish_failures_total",
            "Publications of weights that failed.",
            "versions",
            worry="it grows: the log says why; the data gets older meanwhile",
        ),
    ),
)

STEPS = MetricSection(
    "Trainer: the last step",
    (
        *(gauge(series_name(name), text, unit, worry=worry) for name, (text, unit, worry) in STEP_METRICS.items()),
        gauge("april_trainer_step_metric", "The last value of each step metric.", "", ("name",)),
    ),
)

TRAINER_SECTIONS = (PROGRESS, STEPS)
TRAINER_CATALOGUE = Catalogue(TRAINER_SECTIONS)
