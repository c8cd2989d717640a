"""Every metric of the rollout service: the collectors and docs/metrics.md are made from this."""

from protocol.collectors import Catalogue
from protocol.metric_spec import (
    COUNT_BUCKETS,
    SECONDS_BUCKETS,
    SHARE_BUCKETS,
    SHORT_SECONDS_BUCKETS,
    TOKEN_BUCKETS,
    MetricSection,
    counter,
    gauge,
    histogram,
)
from rollout_service.metrics.catalogue_counts import BUFFER, ENGINES, SERVICE

ROUNDS = MetricSection(
    "Rounds",
    (
        gauge("april_round", "The round that fills now; 0 between two rounds.", "rounds"),
        gauge("april_round_target_groups", "Groups that the round has in flight at the most, N'.", "groups"),
        gauge("april_round_ready_groups", "READY groups that the round's batch can take.", "groups"),
        gauge(
            "april_round_must_finish_groups",
            "Groups that must finish before the batch is offered, to keep max_lag.",
            "groups",
            worry="it is above 0 in most rounds: lower the ratio or the lookahead, or raise `rollout.max_lag`",
        ),
        histogram("april_round_seconds", "From the begin of a round to its offer.", "seconds", SECONDS_BUCKETS),
        histogram(
            "april_round_nth_finish_seconds",
            "From the begin of a round until N groups had finished in it; missing where surplus made up the batch.",
            "seconds",
            SECONDS_BUCKETS,
        ),
        histogram(
            "april_round_tail_seconds",
            "From the time at which 90 % of the batch was READY to the offer.",
            "seconds",
            SECONDS_BUCKETS,
            worry="it is a third of the round or more: raise the ratio (`april tune`)",
        ),
        histogram(
            "april_round_bubble_share",
            "Idle slots x time over all slots x time, of each round.",
            "share",
            SHARE_BUCKETS,
            worry="the median is above 0.3: raise the ratio, or lower `engine.max_num_seqs`",
        ),
        counter("april_slot_seconds_total", "Slots x time of finished rounds.", "seconds"),
        counter("april_idle_slot_seconds_total", "Slots x time in which nothing was decoded.", "seconds"),
        counter(
            "april_spent_seconds_total",
            "Time from offer to offer, by what it went to: `generating`, `tail`, `rewards`, `trainer` and so on.",
            "seconds",
            ("cause",),
            worry="another cause than `generating` has the largest share: that limits the run",
        ),
        histogram(
            "april_round_cut_seconds",
            "From the cut of a round to its offer: stragglers are aborted and parked.",
            "seconds",
            SHORT_SECONDS_BUCKETS,
            worry="it is more than a few percent of the round: the engine ends streams slowly, or Redis is slow",
        ),
        histogram(
            "april_park_seconds",
            "From the abort of a running sample until it is parked in the buffer.",
            "seconds",
            SHORT_SECONDS_BUCKETS,
            worry="it is above a second: the engine ends streams slowly, or Redis is slow",
        ),
        histogram("april_round_stragglers", "Samples that ran when a round was cut.", "samples", COUNT_BUCKETS),
        histogram(
            "april_round_surplus_groups", "Groups that finished beyond N, kept for later.", "groups", COUNT_BUCKETS
        ),
        counter(
            "april_reprefilled_tokens_total",
            "Tokens of prompt and response that resumed samples had prefilled again.",
            "tokens",
            worry="it grows as fast as `april_engine_tokens_total`: resuming costs too much, lower the ratio",
        ),
        histogram(
            "april_service_idle_seconds",
            "From the offer of a batch to the begin of the next round: waits for the trainer and installs.",
            "seconds",
            SECONDS_BUCKETS,
            worry="it is a large share of the time: the trainer limits the run, raise `rollout.lookahead`",
        ),
        gauge("april_ratio", "Over-provisioning ratio in force, N'/N.", "ratio"),
        gauge(
            "april_ratio_wanted",
            "Ratio that the controller wants; missing with autotune off.",
            "ratio",
            worry='it stays far from `april_ratio` with `rollout.autotune = "shadow"`: try what it wants',
        ),
        gauge("april_samples_ratio", "Samples started for each that a group wants, n'/n.", "ratio"),
        gauge("april_lookahead", "Batches that may be offered or leased while a round fills.", "batches"),
        gauge("april_max_lag", "Largest lag that a trained token may have.", "versions"),
    ),
)

SAMPLES = MetricSection(
    "Samples and groups",
    (
        histogram(
            "april_group_seconds",
            "From a group's admission until the last sample that it needs has its reward.",
            "seconds",
            SECONDS_BUCKETS,
        ),
        histogram(
            "april_sample_seconds",
            "From a sample's first start until it finished, parked time included.",
            "seconds",
            SECONDS_BUCKETS,
            worry="p99 is many rounds: some prompts never end, see the stragglers on the dashboard",
        ),
        histogram(
            "april_sample_queued_seconds",
            "From a sample's admission to its first start.",
            "seconds",
            SHORT_SECONDS_BUCKETS,
        ),
        histogram(
            "april_sample_parked_seconds",
            "Time that a finished sample spent set aside, of those that ever were.",
            "seconds",
            SECONDS_BUCKETS,
        ),
        histogram("april_sample_segments", "Segments of a finished sample.", "segments", COUNT_BUCKETS),
        histogram(
            "april_sample_resumes",
            "How often a finished sample went on after it was set aside.",
            "resumes",
            COUNT_BUCKETS,
            worry="p99 is above `rollout.max_lag`: the longest responses are carried over again and again",
        ),
        histogram(
            "april_sample_tokens",
            "Response tokens of a finished sample, by why it ended.",
            "tokens",
            TOKEN_BUCKETS,
            ("finish",),
            worry="the share of `length` grows: responses are cut off, raise `data.max_response_length`",
        ),
        counter("april_samples_scored_total", "Samples that have a reward.", "samples"),
        counter(
            "april_samples_failed_total",
            "Samples that failed.",
            "samples",
            worry="it grows: the log and `GET /v1/groups/{id}` say why",
        ),
        counter("april_sample_failures_total", "Samples that failed, by reason.", "samples", ("reason",)),
        counter("april_samples_resumed_total", "Samples that were resumed at least once.", "samples"),
        counter("april_samples_multi_version_total", "Scored samples that several versions wrote.", "samples"),
        counter("april_resumes_total", "Starts of samples that had tokens.", "resumes"),
        counter("april_tokens_appended_total", "Tokens that reached the buffer.", "tokens"),
        counter("april_surplus_groups_kept_total", "Groups that finished beyond N and were kept.", "groups"),
        counter(
            "april_raced_samples_trained_total", "With samples_ratio > 1: samples that made their groups.", "samples"
        ),
        counter("april_raced_samples_left_total", "The same: samples that their groups were READY without.", "samples"),
        counter("april_raced_tokens_trained_total", "The same: tokens of those that made their groups.", "tokens"),
        counter("april_raced_tokens_left_total", "The same: tokens of those that their groups did without.", "tokens"),
        gauge(
            "april_raced_mean_tokens",
            "Mean tokens in groups that start more samples than they want: of the trained, at least of the started.",
            "tokens",
            ("samples",),
            worry="`trained` is far below `started`: what is trained is biased to short responses",
        ),
    ),
)

POLICY = MetricSection(
    "Policy versions",
    (
        gauge("april_policy_active_version", "Version that the engines serve.", "versions"),
        gauge(
            "april_policy_newest_version",
            "Newest published version.",
            "versions",
            worry="it runs away from the active one: installs fail, the log says why",
        ),
        histogram(
            "april_policy_install_seconds", "Install of one version on every replica.", "seconds", SECONDS_BUCKETS
        ),
        histogram(
            "april_policy_stall_seconds",
            "Time in which nothing was generated because of an install.",
            "seconds",
            SECONDS_BUCKETS,
            worry="it is a tenth of the round or more: `rollout.on_install`, faster weights folder",
        ),
        counter(
            "april_policy_installs_total",
            "Installs by what came of them.",
            "installs",
            ("result",),
            worry="`failed` grows: `GET /v1/policies/{version}` says on which replica and why",
        ),
        counter(
            "april_batch_tokens_total",
            "Response tokens of delivered batches, by lag: of each token, the version that the trainer holds when it "
            "trains on the batch minus the one that wrote it.",
            "tokens",
            ("lag",),
            worry="most tokens are near `april_max_lag`: lower the ratio or the lookahead",
        ),
        gauge(
            "april_engine_drift",
            "|log p(trainer) - log p(engine)| on tokens of the very same weights, mean of the last step that had some.",
            "nats",
            worry="it is above 0.05, or grows: engine and trainer don't compute the same policy any more",
        ),
    ),
)

DELIVERY = MetricSection(
    "Delivery and trainer",
    (
        gauge("april_batches_offered", "Batches offered and not leased.", "batches"),
        gauge("april_batches_leased", "Batches leased and not durable.", "batches"),
        gauge("april_trained_step", "Last step that the trainer reported as trained.", "steps"),
        gauge("april_durable_step", "Last step that is in a trainer checkpoint.", "steps"),
        gauge(
            "april_trainer_connected",
            "1 once a trainer has called this process, with a new session or an older one; it stays 1 when it ends.",
        ),
        gauge("april_trainer_epoch", "Trainer sessions opened so far.", "sessions"),
        histogram(
            "april_delivery_wait_seconds",
            "Long polls for a batch, from the request to the answer: `batch`, or `none` after the longest wait.",
            "seconds",
            SECONDS_BUCKETS,
            ("answer",),
        ),
        counter(
            "april_deliveries_total",
            "Batches sent: for the `first` time, or again as a `replay`.",
            "batches",
            ("kind",),
            worry="`replay` grows: the trainer is started again and again",
        ),
        counter(
            "april_trainer_idle_seconds_total",
            "Time that the trainer waited for batches, as it reported with its steps.",
            "seconds",
            worry="it grows by half a second a second: generation limits the run",
        ),
        gauge("april_trainer_metric", "The last value of each of the trainer's step metrics.", "", ("name",)),
    ),
)

REWARDS = MetricSection(
    "Rewards",
    (
        histogram(
            "april_reward_seconds",
            "From a finished sample to its reward or failure, by scorer, the wait for a free worker included.",
            "seconds",
            SHORT_SECONDS_BUCKETS,
            ("scorer",),
            worry="p99 is near `reward.timeout_s`: raise `reward.num_workers`, or make the scorer faster",
        ),
        counter(
            "april_reward_failures_total",
            "Samples that could not be scored, by scorer and reason.",
            "samples",
            ("scorer", "reason"),
            worry="`reward_timeout` grows: the scorer hangs on some responses",
        ),
        gauge(
            "april_reward_waiting",
            "Samples that are being scored or wait for a worker.",
            "samples",
            worry="it grows over rounds: rewards limit the run",
        ),
        counter("april_reward_worker_restarts_total", "Scorer processes that were killed or died.", "processes"),
    ),
)

SECTIONS = (SERVICE, ROUNDS, SAMPLES, BUFFER, POLICY, DELIVERY, REWARDS, ENGINES)
SERVICE_CATALOGUE = Catalogue(SECTIONS)
