"""The boards of generation: the long tail, and the engines with the rewards."""

from deploy.grafana.model import GREEN, RED, YELLOW, Board, Panel, Query, Row
from deploy.grafana.queries import increase, mean, quantiles, rate, share, value

TAIL = Row(
    "The tail",
    (
        Panel(
            "Response lengths",
            "Tokens of finished responses. A p99 many times the p50 is what over-provisioning is for.",
            quantiles("april_sample_tokens"),
        ),
        Panel(
            "Response lengths, all of them",
            "How many responses of which length finished.",
            (Query("sum by (le) (increase(april_sample_tokens_bucket{@}[WINDOW]))", "{{le}}"),),
            kind="heatmap",
        ),
        Panel(
            "Cut off by length",
            "Share of responses that ended at `data.max_response_length`.",
            (
                Query(
                    'sum by (run) (rate(april_sample_tokens_count{@, finish="length"}[WINDOW])) / '
                    "sum by (run) (rate(april_sample_tokens_count{@}[WINDOW]))",
                    "{{run}} cut off",
                ),
            ),
            unit="percentunit",
            largest=1,
            steps=((None, GREEN), (0.2, YELLOW)),
        ),
        Panel(
            "Time to finish a sample",
            "From its first start to its end, parked time included.",
            quantiles("april_sample_seconds"),
            unit="s",
        ),
        Panel(
            "Time to finish a group",
            "From its admission until its last sample has a reward.",
            quantiles("april_group_seconds"),
            unit="s",
        ),
        Panel(
            "Time until N groups",
            "From the begin of the round. The whole round beside it: what lies between is the cut.",
            (
                mean("april_round_nth_finish_seconds", legend="N-th group"),
                mean("april_round_seconds", legend="offer"),
                mean("april_round_tail_seconds", legend="of it, after 90 %"),
            ),
            unit="s",
        ),
    ),
)

BUBBLE = Row(
    "What it costs",
    (
        Panel(
            "Bubble",
            "Idle decode slots x time over all slots x time, of each round.",
            quantiles("april_round_bubble_share"),
            unit="percentunit",
            largest=1,
        ),
        Panel("Stragglers", "Samples that ran when a round was cut.", quantiles("april_round_stragglers")),
        Panel(
            "Surplus",
            "Groups that finished beyond N, kept for the next batch.",
            quantiles("april_round_surplus_groups"),
        ),
        Panel("Cut", "From the cut of a round to its offer.", quantiles("april_round_cut_seconds"), unit="s"),
        Panel("Park", "From the abort of a sample until the buffer has it.", quantiles("april_park_seconds"), unit="s"),
        Panel(
            "Prefilled again",
            "Tokens that resumed samples had prefilled again, for each token generated.",
            (share("april_reprefilled_tokens_total", "april_engine_tokens_total", "prefilled again"),),
            unit="percentunit",
            steps=((None, GREEN), (1, YELLOW)),
        ),
    ),
)

RESUMED = Row(
    "Parked and resumed",
    (
        Panel(
            "Resumes of a sample", "How often a finished sample had been set aside.", quantiles("april_sample_resumes")
        ),
        Panel("Segments of a sample", "Stretches that it was written in.", quantiles("april_sample_segments")),
        Panel(
            "Time parked",
            "That a finished sample spent set aside, of those that ever were.",
            quantiles("april_sample_parked_seconds"),
            unit="s",
        ),
        Panel(
            "Wait for a first slot",
            "From a sample's admission to its first start.",
            quantiles("april_sample_queued_seconds"),
            unit="s",
        ),
        Panel(
            "Ratio",
            "In force, and what the controller wants (with `rollout.autotune`).",
            (
                value("april_ratio", legend="{{run}} in force"),
                value("april_ratio_wanted", legend="{{run}} wanted"),
                value("april_samples_ratio", legend="{{run}} samples ratio"),
            ),
        ),
        Panel(
            "Raced samples",
            "With `rollout.samples_ratio` above 1: mean tokens of the trained, and of the started.",
            (value("april_raced_mean_tokens", "samples"),),
        ),
    ),
)

LONG_TAIL = Board(
    "april-long-tail",
    "April: long tail",
    "How long responses are and take, what waiting for the last of them costs, and what is carried over.",
    (TAIL, BUBBLE, RESUMED),
)

REPLICAS = Row(
    "Replicas",
    (
        Panel(
            "Alive",
            "1 while the replica answers.",
            (value("april_engine_alive", "worker"),),
            kind="stat",
            width=6,
            steps=((None, RED), (1, GREEN)),
        ),
        Panel("Version", "That each replica serves.", (value("april_engine_version", "worker"),), kind="stat", width=6),
        Panel(
            "Restarts",
            "Of each replica over the window.",
            (increase("april_engine_restarts_total", "worker"),),
            kind="stat",
            width=6,
            steps=((None, GREEN), (0.5, YELLOW)),
        ),
        Panel(
            "Preemptions",
            "Requests set aside for want of KV cache, over the window.",
            (increase("april_engine_preemptions_total", "worker"),),
            kind="stat",
            width=6,
            steps=((None, GREEN), (0.5, YELLOW)),
        ),
        Panel("Tokens", "A second, of each replica.", (rate("april_engine_tokens_total", "worker"),)),
        Panel(
            "Sequences",
            "In each replica, of its slots.",
            (
                value("april_engine_running", "worker", legend="{{run}} {{worker}} running"),
                value("april_engine_slots", "worker", legend="{{run}} {{worker}} slots"),
            ),
        ),
        Panel(
            "KV cache",
            "Share that running requests hold.",
            (value("april_engine_kv_use", "worker"),),
            unit="percentunit",
            largest=1,
            steps=((None, GREEN), (0.95, RED)),
        ),
    ),
)

REWARDS = Row(
    "Rewards",
    (
        Panel(
            "Scoring",
            "From a finished sample to its reward, the wait for a worker included.",
            quantiles("april_reward_seconds", "scorer"),
            unit="s",
        ),
        Panel(
            "Failures",
            "Samples that could not be scored, over the window.",
            (increase("april_reward_failures_total", "scorer", "reason"),),
        ),
        Panel(
            "Waiting for a reward",
            "Samples that are scored or wait, and workers that were replaced over the window.",
            (
                value("april_reward_waiting", legend="{{run}} waiting"),
                increase("april_reward_worker_restarts_total", legend="{{run}} workers replaced"),
            ),
        ),
    ),
)

SERVICE = Row(
    "The service's process",
    (
        Panel(
            "CPU",
            "Cores that the process uses.",
            (Query('rate(process_cpu_seconds_total{@, job="april-service"}[WINDOW])', "{{run}} {{instance}}"),),
        ),
        Panel(
            "Memory",
            "Resident bytes.",
            (Query('process_resident_memory_bytes{@, job="april-service"}', "{{run}} {{instance}}"),),
            unit="bytes",
        ),
        Panel("Events", "That reached the round loop, a second.", (rate("april_events_total", "kind"),)),
        Panel("Scrape", "How long `/metrics` takes.", (value("april_scrape_seconds"),), unit="s"),
        Panel("Things waited for", "`/v1/status` names them.", (value("april_waits"),)),
        Panel(
            "Failed samples",
            "By reason, over the window.",
            (increase("april_sample_failures_total", "reason"),),
        ),
    ),
)

ENGINE = Board(
    "april-engine",
    "April: engines and rewards",
    "Replicas, their KV cache, scorers, and the service's own process.",
    (REPLICAS, REWARDS, SERVICE),
)
