"""The overview: is it well, what limits it, how fast is it, does it learn."""

from deploy.grafana.model import GREEN, RED, YELLOW, Board, Panel, Query, Row
from deploy.grafana.queries import increase, mean, quantiles, rate, step_metric, step_metrics, value

BAD_ABOVE_0 = ((None, GREEN), (0.5, RED))
GOOD_AT_1 = ((None, RED), (1, GREEN))
YES_NO = (("0", "no"), ("1", "yes"))

HEALTH = Row(
    "Is it well",
    (
        Panel(
            "Ready",
            "Its parts have started and Redis answers. `/readyz` says what it waits for.",
            (Query("min by (run) (april_ready{@})", "{{run}}"),),
            kind="stat",
            width=3,
            steps=GOOD_AT_1,
            mappings=YES_NO,
        ),
        Panel(
            "Ledger error",
            "Groups (and pooled samples) that are in no state or in two. Must be 0.",
            (Query("max by (run) (abs(april_ledger_error{@}) + abs(april_pool_ledger_error{@}))", "{{run}}"),),
            kind="stat",
            width=3,
            steps=BAD_ABOVE_0,
        ),
        Panel(
            "Redis away",
            "For how long Redis has not answered.",
            (value("april_redis_waiting_seconds"),),
            unit="s",
            kind="stat",
            width=3,
            steps=((None, GREEN), (1, YELLOW), (30, RED)),
        ),
        Panel(
            "Engines alive",
            "Replicas that answer.",
            (Query("sum by (run) (april_engine_alive{@})", "{{run}}"),),
            kind="stat",
            width=3,
            steps=GOOD_AT_1,
        ),
        Panel(
            "Step trained", "Last step that the trainer reported.", (value("april_trained_step"),), kind="stat", width=3
        ),
        Panel(
            "Policy version",
            "Version that the engines serve.",
            (value("april_policy_active_version"),),
            kind="stat",
            width=3,
        ),
        Panel("Ratio", "N'/N in force.", (value("april_ratio"),), kind="stat", width=3),
        Panel(
            "Alerts",
            "Alert rules that fire now (deploy/prometheus/alerts.yml).",
            (Query('count by (run) (ALERTS{@, alertstate="firing"}) or 0 * max by (run) (april_up{@})', "{{run}}"),),
            kind="stat",
            width=3,
            steps=BAD_ABOVE_0,
        ),
    ),
)

LIMITS = Row(
    "What limits it",
    (
        Panel(
            "Where the time goes",
            "Seconds from offer to offer by cause, as a share. `generating` is the work itself; whatever else is large "
            "limits the run: `tail` a higher ratio, `trainer` a higher lookahead, `rewards` more workers.",
            (
                Query(
                    "sum by (run, cause) (rate(april_spent_seconds_total{@}[WINDOW])) / on (run) group_left () "
                    "sum by (run) (rate(april_spent_seconds_total{@}[WINDOW])) > 0",
                    "{{run}} {{cause}}",
                ),
            ),
            unit="percentunit",
            stacked=True,
            largest=1,
        ),
        Panel(
            "Who waits for whom",
            "Trainer: share of the time that it waited for batches. Service: that between an offer and the next round.",
            (
                rate("april_trainer_idle_seconds_total", legend="{{run}} trainer waits"),
                Query(
                    "sum by (run) (rate(april_service_idle_seconds_sum{@}[WINDOW]))",
                    "{{run}} service waits",
                ),
            ),
            unit="percentunit",
            steps=((None, GREEN), (0.5, YELLOW)),
        ),
        Panel(
            "Bubble",
            "Idle decode slots x time over all slots x time.",
            (
                Query(
                    "sum by (run) (rate(april_idle_slot_seconds_total{@}[WINDOW])) / "
                    "sum by (run) (rate(april_slot_seconds_total{@}[WINDOW]))",
                    "{{run}} idle slots",
                ),
            ),
            unit="percentunit",
            largest=1,
            steps=((None, GREEN), (0.3, YELLOW)),
        ),
    ),
)

SPEED = Row(
    "How fast is it",
    (
        Panel(
            "Tokens generated",
            "Tokens a second, over all replicas.",
            (rate("april_engine_tokens_total", legend="{{run}} tokens/s"),),
        ),
        Panel(
            "Rounds",
            "From the begin of a round to its offer.",
            (*quantiles("april_round_seconds"), mean("april_round_seconds")),
            unit="s",
        ),
        Panel(
            "Samples now",
            "Samples of open groups by state.",
            (Query("sum by (run, state) (april_samples{@})", "{{run}} {{state}}"),),
        ),
        Panel(
            "Groups",
            "Groups that became ready, and that were dropped, over the window.",
            (
                Query("sum by (run) (increase(april_group_seconds_count{@}[WINDOW]))", "{{run}} ready"),
                increase("april_groups_dropped_total", "reason", legend="{{run}} dropped: {{reason}}"),
            ),
        ),
        Panel(
            "Batches",
            "Offered: ready for the trainer. Leased: taken, not in a checkpoint yet.",
            (
                value("april_batches_offered", legend="{{run}} offered"),
                value("april_batches_leased", legend="{{run}} leased"),
            ),
        ),
        Panel(
            "Steps",
            "Trained, and durable (in a checkpoint).",
            (
                value("april_trained_step", legend="{{run}} trained"),
                value("april_durable_step", legend="{{run}} durable"),
            ),
        ),
    ),
)

LEARNING = Row(
    "Does it learn",
    (
        Panel(
            "Reward",
            "Of the trained batches, and of rewarded responses that ended by themselves: the first without the second "
            "is the commonest false success.",
            (
                step_metric("reward/mean", "mean"),
                step_metric("reward/rewarded_and_stopped", "rewarded and stopped"),
            ),
        ),
        Panel("Held-out reward", "Of the last evaluation.", (step_metrics("eval/reward.*"),)),
        Panel(
            "Response lengths",
            "Of the trained batches.",
            (step_metric("response/length_mean", "mean"), step_metric("response/length_p99", "p99")),
        ),
    ),
)

OVERVIEW = Board(
    "april-overview",
    "April: overview",
    "Is the run well, what limits it, how fast is it, does it learn.",
    (HEALTH, LIMITS, SPEED, LEARNING),
)
