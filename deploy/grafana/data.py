"""The boards of data: how off-policy it is, what the buffer holds, and what the trainer makes of it."""

from deploy.grafana.model import GREEN, RED, YELLOW, Board, Panel, Query, Row
from deploy.grafana.queries import increase, mean, quantiles, rate, share, step_metric, step_metrics, value

LAG = Row(
    "Lag",
    (
        Panel(
            "Tokens by lag",
            "Share of the delivered tokens, by versions between the one that wrote them and the one that is trained.",
            (
                Query(
                    "sum by (run, lag) (rate(april_batch_tokens_total{@}[WINDOW])) / on (run) group_left () "
                    "sum by (run) (rate(april_batch_tokens_total{@}[WINDOW])) > 0",
                    "{{run}} lag {{lag}}",
                ),
            ),
            unit="percentunit",
            stacked=True,
            largest=1,
        ),
        Panel(
            "Lag of trained tokens",
            "Mean and largest of the last step, and the bound.",
            (
                step_metric("lag/mean", "mean"),
                step_metric("lag/max", "largest"),
                value("april_max_lag", legend="{{run}} max_lag"),
            ),
        ),
        Panel(
            "Off-policy share",
            "Tokens that an older version than the trainer's wrote; and an older one than the end of their own sample, "
            "which is what partial rollouts add.",
            (
                step_metric("off_policy/token_share", "older than the trainer"),
                step_metric("off_policy/resumed_token_share", "older than their sample's end"),
            ),
            unit="percentunit",
            largest=1,
        ),
    ),
)

CORRECTION = Row(
    "What the correction sees",
    (
        Panel(
            "Effective sample size",
            "Kish's, as a share of the tokens: 1 is on-policy.",
            (step_metric("importance/ess", "all"), step_metrics("importance_by_lag/ess_.*")),
            unit="percentunit",
            steps=((None, RED), (0.5, GREEN)),
        ),
        Panel(
            "Decided by cap or band",
            "Share of tokens, all and by lag.",
            (step_metric("importance/clipped_share", "all"), step_metrics("importance_by_lag/clipped_share_.*")),
            unit="percentunit",
            steps=((None, GREEN), (0.1, YELLOW)),
        ),
        Panel(
            "Importance weights",
            "Mean (1 in expectation) and largest.",
            (step_metric("importance/mean", "mean"), step_metric("importance/max", "largest")),
        ),
        Panel(
            "KL of behaviour to proximal",
            "By k3 and k1, a token.",
            (
                step_metric("off_policy/kl_behaviour_proximal", "k3"),
                step_metric("off_policy/kl_behaviour_proximal_k1", "k1"),
            ),
        ),
        Panel(
            "Engine against trainer",
            "|log p - log b| on tokens of the very same weights: numerics alone. It must stay where it was.",
            (value("april_engine_drift"), step_metric("mismatch/lag0_max", "largest")),
            steps=((None, GREEN), (0.05, RED)),
        ),
        Panel(
            "Drift of the policy",
            "The same on older tokens, by lag.",
            (step_metrics("mismatch_by_lag/mean_.*"), step_metric("mismatch/drift_mean", "all")),
        ),
    ),
)

VERSIONS = Row(
    "Versions",
    (
        Panel(
            "Versions",
            "Served and newest.",
            (
                value("april_policy_active_version", legend="{{run}} active"),
                value("april_policy_newest_version", legend="{{run}} newest"),
            ),
        ),
        Panel(
            "Install",
            "Of a version on every replica, and the time in which nothing was generated for it.",
            (
                mean("april_policy_install_seconds", legend="install"),
                mean("april_policy_stall_seconds", legend="stall"),
            ),
            unit="s",
        ),
        Panel(
            "Installs", "By what came of them, over the window.", (increase("april_policy_installs_total", "result"),)
        ),
    ),
)

OFF_POLICY = Board(
    "april-off-policy",
    "April: off-policy",
    "How old the trained tokens are, what the correction makes of it, and how versions are installed.",
    (LAG, CORRECTION, VERSIONS),
)

HELD = Row(
    "What it holds",
    (
        Panel(
            "Groups",
            "By state. Admitted = open + ready + leased + consumed + dropped.",
            (Query('sum by (run, state) (april_groups{@, state=~"open|ready|leased"})', "{{run}} {{state}}"),),
        ),
        Panel(
            "Parked samples",
            "Beside what runs.",
            (Query('sum by (run, state) (april_samples{@, state=~"parked|running|queued"})', "{{run}} {{state}}"),),
        ),
        Panel(
            "Parked bytes",
            "Tokens and log-probs of what is parked, and the worst case that all samples may need.",
            (
                value("april_parked_bytes", legend="{{run}} parked"),
                value("april_held_bytes", legend="{{run}} may be needed"),
                value("april_pool_bytes", legend="{{run}} pooled"),
            ),
            unit="bytes",
        ),
        Panel(
            "Oldest",
            "How long the sample that waits longest has waited.",
            (value("april_oldest_waiting_seconds"),),
            unit="s",
        ),
        Panel(
            "Oldest lag",
            "Of a group in flight, and the bound.",
            (value("april_oldest_lag", legend="{{run}} oldest"), value("april_max_lag", legend="{{run}} max_lag")),
        ),
        Panel(
            "Must finish",
            "Groups that hold the round up, since they would be too old for the next.",
            (value("april_round_must_finish_groups"),),
        ),
    ),
)

FLOW = Row(
    "In and out",
    (
        Panel(
            "Groups in and out",
            "Over the window.",
            (
                Query('sum by (run) (delta(april_groups{@, state="admitted"}[WINDOW]))', "{{run}} admitted"),
                Query('sum by (run) (delta(april_groups{@, state="consumed"}[WINDOW]))', "{{run}} consumed"),
                increase("april_groups_dropped_total", legend="{{run}} dropped"),
            ),
        ),
        Panel(
            "Deliveries",
            "Batches sent over the window, and sent again after a restart of the trainer.",
            (increase("april_deliveries_total", "kind"),),
        ),
        Panel(
            "Long polls",
            "How long the trainer's requests for a batch took.",
            quantiles("april_delivery_wait_seconds"),
            unit="s",
        ),
        Panel(
            "Samples scored",
            "A second: all, resumed ones, and those that several versions wrote.",
            (
                rate("april_samples_scored_total", legend="{{run}} scored"),
                rate("april_samples_resumed_total", legend="{{run}} resumed"),
                rate("april_samples_multi_version_total", legend="{{run}} of several versions"),
            ),
        ),
        Panel("Pool", "Samples that their groups were ready without.", (increase("april_pool_samples_total", "what"),)),
    ),
)

PROMISES = Row(
    "Promises",
    (
        Panel(
            "Ledger error",
            "Must be 0.",
            (
                value("april_ledger_error", legend="{{run}} groups"),
                value("april_pool_ledger_error", legend="{{run}} pooled samples"),
            ),
            steps=((None, GREEN), (0.5, RED)),
        ),
        Panel(
            "Redis",
            "For how long it has not answered, and outages over the window.",
            (
                value("april_redis_waiting_seconds", legend="{{run}} away"),
                increase("april_redis_outages_total", legend="{{run}} outages"),
            ),
        ),
        Panel(
            "Refused and expired",
            "Writes of whoever was superseded, and leases that nobody renewed, over the window.",
            (
                increase("april_fenced_writes_total", legend="{{run}} fenced writes"),
                increase("april_leases_expired_total", legend="{{run}} leases expired"),
            ),
        ),
    ),
)

BUFFER = Board(
    "april-buffer",
    "April: buffer",
    "What the continuation buffer holds, what flows through it, and whether it keeps its promises.",
    (HELD, FLOW, PROMISES),
)

STEPS = Row(
    "Steps (of the trainer's own /metrics)",
    (
        Panel(
            "Step", "From the request for its batch to its report.", quantiles("april_trainer_step_seconds"), unit="s"
        ),
        Panel(
            "Parts of a step",
            "Seconds a second: what the trainer does with its time.",
            (
                Query(
                    "sum by (run, phase) (rate(april_trainer_phase_seconds_sum{@}[WINDOW]))",
                    "{{run}} {{phase}}",
                ),
            ),
            unit="percentunit",
            stacked=True,
        ),
        Panel(
            "Speed",
            "Response tokens trained a second, waits included.",
            (rate("april_trainer_tokens_total", legend="{{run}} tokens/s"),),
        ),
        Panel(
            "Since the last step",
            "A step that takes many times the others hangs.",
            (Query("time() - max by (run) (april_trainer_last_step_timestamp_seconds{@} > 0)", "{{run}}"),),
            unit="s",
        ),
        Panel(
            "Checkpoints",
            "Last step trained and last step saved.",
            (
                value("april_trainer_step", legend="{{run}} trained"),
                value("april_trainer_saved_step", legend="{{run}} saved"),
                value("april_trainer_total_steps", legend="{{run}} planned"),
            ),
        ),
        Panel(
            "What went wrong",
            "Over the window.",
            (
                increase("april_trainer_nonfinite_updates_total", legend="{{run}} updates not finite"),
                increase("april_trainer_publish_failures_total", legend="{{run}} publications failed"),
            ),
        ),
    ),
)

UPDATE = Row(
    "The update",
    (
        Panel("Policy loss", "Mean over tokens.", (value("april_trainer_actor_pg_loss"),)),
        Panel("Gradient norm", "Before clipping.", (value("april_trainer_actor_grad_norm"),)),
        Panel("Entropy", "A token. Towards 0 the policy collapses.", (value("april_trainer_actor_entropy"),)),
        Panel(
            "Decided by the clip",
            "Share of tokens.",
            (value("april_trainer_actor_pg_clipfrac"),),
            unit="percentunit",
            steps=((None, GREEN), (0.2, YELLOW)),
        ),
        Panel("Learning rate", "Of the actor.", (value("april_trainer_actor_lr"),)),
        Panel(
            "Samples",
            "Trained a second by this process, and tokens for each of them.",
            (
                rate("april_trainer_samples_total", legend="{{run}} samples/s"),
                share("april_trainer_tokens_total", "april_trainer_samples_total", "tokens a sample"),
            ),
        ),
    ),
)

TRAINER = Board(
    "april-trainer",
    "April: trainer",
    "What the trainer's time goes to and how its updates look; needs `trainer.metrics_port`.",
    (STEPS, UPDATE),
)
