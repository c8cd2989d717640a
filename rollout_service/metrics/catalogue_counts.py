"""The part of the catalogue that is counted elsewhere and read at the scrape: service, buffer, engines."""

from protocol.metric_spec import MetricSection, counter, gauge

SERVICE = MetricSection(
    "Service",
    (
        gauge("april_up", "1 while the process answers."),
        gauge(
            "april_ready",
            "1 when the service can serve: its parts have started and Redis answers.",
            worry="it is 0 for minutes: `/readyz` says what it waits for",
        ),
        gauge("april_run_info", "1, with the run's name and the version of this package.", "", ("name", "version")),
        gauge("april_service_epoch", "Services that have owned this run so far.", "services"),
        gauge("april_uptime_seconds", "Seconds since the service started.", "seconds"),
        gauge("april_paused", "1 while generation is paused or drained."),
        gauge("april_waits", "Things that the round loop waits for now; `/v1/status` names them.", "waits"),
        counter("april_events_total", "Events that reached the round loop, by kind.", "events", ("kind",)),
        gauge(
            "april_redis_waiting_seconds",
            "For how long Redis has not answered; 0 while it does. Other values are then the last known.",
            "seconds",
            worry="it is not 0: after `buffer.patience_s` the service ends",
        ),
        counter("april_redis_outages_total", "Scrapes that found Redis away after one that had found it.", "outages"),
        gauge(
            "april_status_age_seconds",
            "Age of the status that these values are of.",
            "seconds",
            worry="it is above a minute: Redis is away, or the event loop is blocked",
        ),
        gauge("april_scrape_seconds", "How long the answer to the scrape before took.", "seconds"),
    ),
)

BUFFER = MetricSection(
    "Ledger and buffer",
    (
        gauge("april_groups", "Groups by state.", "groups", ("state",)),
        counter("april_groups_dropped_total", "Groups dropped, by reason.", "groups", ("reason",)),
        gauge(
            "april_ledger_error",
            "Admitted groups that are in no state or in two.",
            "groups",
            worry="it is not 0: stop the run and call `april buffer verify`",
        ),
        gauge(
            "april_samples",
            "Samples of open groups by state.",
            "samples",
            ("state",),
            worry="`parked` grows round after round: the ratio is too high for the trainer's pace",
        ),
        gauge("april_parked_tokens", "Response tokens of the samples that wait to go on.", "tokens"),
        gauge("april_parked_bytes", "Bytes of their tokens and log-probs.", "bytes"),
        gauge(
            "april_oldest_waiting_seconds",
            "For how long the unfinished sample that waits longest has waited to go on.",
            "seconds",
            worry="it is many rounds: a sample is passed over",
        ),
        gauge(
            "april_oldest_lag",
            "Versions between the active one and the oldest token of a group in flight.",
            "versions",
            worry="it is near `april_max_lag`: rounds will have to wait for old groups",
        ),
        gauge("april_held_groups", "Groups admitted and not trained, counted against `buffer.max_groups`.", "groups"),
        gauge(
            "april_held_bytes",
            "Bytes that their samples may need at the worst, counted against `buffer.max_bytes`.",
            "bytes",
            worry="it is near `buffer.max_bytes`: nothing more is admitted",
        ),
        counter("april_pool_samples_total", "Samples that their groups were READY without.", "samples", ("what",)),
        gauge("april_pool_bytes", "Bytes of pooled samples.", "bytes"),
        gauge(
            "april_pool_ledger_error",
            "Pooled samples that are nowhere or in two places.",
            "samples",
            worry="it is not 0: stop the run and call `april buffer verify`",
        ),
        counter(
            "april_leases_expired_total",
            "Leases of running samples that nobody renewed in time.",
            "leases",
            worry="it grows while the service runs: its event loop is blocked, or `buffer.sample_lease_s` is too short",
        ),
        counter(
            "april_fenced_writes_total",
            "Writes of a superseded service, trainer or attempt, refused.",
            "writes",
            worry="it grows steadily: two services or trainers work on one run",
        ),
    ),
)

ENGINES = MetricSection(
    "Engines",
    (
        gauge(
            "april_engine_alive",
            "1 while the replica answers.",
            "",
            ("worker",),
            worry="it is 0 for a minute: the replica doesn't come back, the log says why",
        ),
        gauge("april_engine_slots", "Sequences that a replica decodes at once.", "samples", ("worker",)),
        gauge("april_engine_running", "Sequences in a replica.", "samples", ("worker",)),
        gauge("april_engine_version", "Version that a replica serves.", "versions", ("worker",)),
        counter("april_engine_tokens_total", "Tokens generated by a replica since it started.", "tokens", ("worker",)),
        counter(
            "april_engine_restarts_total",
            "Restarts of a replica after it died.",
            "restarts",
            ("worker",),
            worry="it grows: a prompt or the machine kills engines",
        ),
        gauge(
            "april_engine_kv_use",
            "Share of the KV cache that running requests hold; missing if the engine doesn't say.",
            "share",
            ("worker",),
            worry="it is at 1: requests are preempted, lower `engine.max_num_seqs` or give the cache more memory",
        ),
        counter(
            "april_engine_preemptions_total",
            "Requests that a replica set aside for want of KV cache; missing if the engine doesn't say.",
            "requests",
            ("worker",),
            worry="it grows: see `april_engine_kv_use`",
        ),
    ),
)
