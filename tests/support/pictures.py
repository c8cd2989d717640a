"""Pictures of a run that never was, of any size: rounds of samples with a long tail, cuts, parks and installs."""

import math
import random
from itertools import count

from protocol.watching import (
    AttemptBar,
    Cause,
    InstallSpan,
    LengthBin,
    Limit,
    Moments,
    Predicted,
    Quantiles,
    RatioPicture,
    RoundSpan,
    RunReport,
    SampleBar,
    SegmentBar,
    Steps,
    Straggler,
    Tail,
    Timeline,
    Verdict,
)

BEGAN_AT = 1_790_000_000.0
SECONDS_PER_TOKEN = 0.02
NEAR_END = 0.9


def timeline(
    num_samples: int = 600, seed: int = 0, slots: int = 64, n: int = 8, began_at: float = BEGAN_AT
) -> Timeline:
    """Rounds until `num_samples` have started. In each, unfinished samples of the round before go on first."""
    rng = random.Random(seed)
    names, rounds, installs, trained = count(), [], [], []
    done: dict[str, SampleBar] = {}
    parked: list[tuple[SampleBar, int]] = []
    now, version = began_at, 0
    while len(done) < num_samples:
        number = len(rounds)
        starting, parked = parked, []
        while len(starting) < slots:
            name = next(names)
            bar = SampleBar(f"g{name // n:09d}:{name % n}", f"g{name // n:09d}", f"p:{name // n % 500}", None, None, [])
            starting.append((bar, max(4, int(rng.lognormvariate(4.0, 1.0)))))
        needed = sorted(tokens for _, tokens in starting)
        cut = now + needed[int(len(needed) * 0.62)] * SECONDS_PER_TOKEN
        ends = []
        for bar, tokens in starting:
            begin = now + rng.random() * 0.05
            had = sum(s.num_tokens for a in bar.attempts for s in a.segments)
            end = min(cut, begin + tokens * SECONDS_PER_TOKEN)
            wrote = max(1, int((end - begin) / SECONDS_PER_TOKEN))
            finished = end < cut
            how = "stop" if finished and tokens < 900 else "length" if finished else "parked"
            waited = begin - bar.attempts[-1].end if bar.attempts else 0.1
            attempt = AttemptBar(
                "engine-0", number, begin, end, how, had, waited, [SegmentBar(version, wrote, begin + 0.02, end)]
            )
            bar = bar._replace(
                attempts=[*bar.attempts, attempt], reward=float(rng.random() < 0.6) if finished else None
            )
            done[bar.sample] = bar
            ends.append(end - now)
            if not finished:
                parked.append((bar, tokens - wrote))
        offered = cut + 0.05
        rounds.append(_round(number, now, cut, offered, version, slots, ends, len(parked), n))
        now = offered + 0.02
        if number % 2 == 0:
            version += 1
            installs.append(InstallSpan(version=version, start=offered, end=now))
        trained.append((number + 1, now))
    return Timeline(now=now, rounds=rounds, samples=list(done.values()), installs=installs, trained=trained)


def _round(
    number: int,
    began: float,
    cut: float,
    offered: float,
    version: int,
    slots: int,
    ends: list[float],
    left: int,
    n: int,
) -> RoundSpan:
    ends = sorted(ends)
    running = [(0.0, 0), (0.05, len(ends)), *((end, len(ends) - i - 1) for i, end in enumerate(ends))]
    used = sum(ends) / (slots * (offered - began))
    return RoundSpan(
        round=number,
        started_at=began,
        cut_at=cut,
        offered_at=offered,
        active_version=version,
        slots=slots,
        ready_s=ends[::n],
        running=running,
        bubble_share=max(0.0, 1 - used),
        tail_s=ends[-1] - ends[int(NEAR_END * 0.6 * len(ends))],
        kv_use=0.4,
        num_preemptions=0,
        num_fresh=slots // n,
        num_dropped=number % 7 == 6,
        surplus_groups=number % 3,
        open_groups=left // n + 1,
        parked_samples=left,
        spent={
            Cause.GENERATING: used * (cut - began),
            Cause.TAIL: (1 - used) * (cut - began),
            Cause.CUT: offered - cut,
        },
    )


def tail(num: int = 400) -> Tail:
    """Of log-normal lengths."""
    rng = random.Random(1)
    lengths = sorted(rng.lognormvariate(4.0, 1.0) for _ in range(num))
    curve = [(float(round(v)), 1 - (i + 1) / num) for i, v in enumerate(lengths)]
    survival = [(v, s, max(0.0, s - 0.04), min(1.0, s + 0.04)) for v, s in curve]
    at = [lengths[int(q * (num - 1))] for q in (0.5, 0.9, 0.99, 1.0)]
    tokens = Quantiles(p50=at[0], p90=at[1], p99=at[2], largest=at[3])
    seconds = Quantiles(**{k: v * SECONDS_PER_TOKEN for k, v in tokens.model_dump().items()})
    return Tail(
        num_finished=num,
        num_unfinished=23,
        tokens=tokens,
        survival_tokens=tokens,
        finish_s=seconds,
        token_curve=curve,
        finish_curve=[(v * SECONDS_PER_TOKEN, s) for v, s in curve],
        trained_curve=[(v * 0.9, s) for v, s in curve],
        survival=survival,
        trained_tokens=71.0,
        dispatched_tokens=80.5,
        by_length=[
            LengthBin(
                shortest=2**i,
                longest=2 ** (i + 1) - 1,
                num_samples=40,
                mean_reward=0.9 - 0.08 * i,
                stop_share=1 - 0.03 * i,
            )
            for i in range(2, 10)
        ],
        stragglers=[Straggler(prompt="p:17", source="gsm8k", times_seen=4, mean_longest=873.5, num_parks=6)],
    )


def steps(num: int = 40) -> Steps:
    """The trainer's metrics, by their real names."""
    rng = random.Random(2)
    series: dict[str, list[float | None]] = {
        "reward/mean": [0.4 + 0.3 * (1 - math.exp(-i / 12)) + rng.gauss(0, 0.02) for i in range(num)],
        "reward/rewarded_and_stopped": [0.38 + 0.3 * (1 - math.exp(-i / 12)) + rng.gauss(0, 0.02) for i in range(num)],
        "response/length_mean": [30 + i / 3 for i in range(num)],
        "response/length_p50": [20 + i / 4 for i in range(num)],
        "response/length_p99": [150 + i for i in range(num)],
        "response/length_max": [200 + i for i in range(num)],
        "response/stopped_share": [0.97 for _ in range(num)],
        "response/truncated_share": [0.03 for _ in range(num)],
        "lag/share_0": [0.3 for _ in range(num)],
        "lag/share_1": [0.5 for _ in range(num)],
        "lag/share_2": [0.15 for _ in range(num)],
        "lag/share_3_4": [0.05 for _ in range(num)],
        "importance/ess": [0.93 + rng.gauss(0, 0.01) for _ in range(num)],
        "importance_by_lag/ess_0": [0.999 for _ in range(num)],
        "importance_by_lag/ess_1": [0.95 for _ in range(num)],
        "importance/clipped_share": [0.01 + rng.random() * 0.01 for _ in range(num)],
        "actor/pg_clipfrac": [0.02 for _ in range(num)],
        "off_policy/kl_behaviour_proximal": [0.002 + rng.random() * 0.001 for _ in range(num)],
        "mismatch_by_lag/mean_0": [0.0001 for _ in range(num)],
        "mismatch_by_lag/mean_1": [0.03 for _ in range(num)],
        "timing_s/step": [1.4 + rng.random() for _ in range(num)],
        "timing_s/wait": [rng.random() for _ in range(num)],
        "eval/reward": [0.44 + 0.007 * i if i % 10 == 0 else None for i in range(num)],
        "eval/length_mean": [31.0 + i if i % 10 == 0 else None for i in range(num)],
    }
    return Steps(steps=list(range(1, num + 1)), series=series)


def moments(num: int = 120, began_at: float = BEGAN_AT) -> Moments:
    """The buffer and the engines over time, by the names that the service gives them."""
    rng = random.Random(3)
    waves = [30 + 10 * math.sin(i / 9) for i in range(num)]
    series: dict[str, list[float | None]] = {
        "running": [60 - wave / 4 for wave in waves],
        "slots": [64.0] * num,
        "queued": [2.0] * num,
        "parked": [*waves],
        "scoring": [float(i % 3) for i in range(num)],
        "open": [wave / 4 for wave in waves],
        "ready": [float(i % 9) for i in range(num)],
        "leased": [8.0] * num,
        "ledger_error": [0.0] * num,
        "held_bytes": [2e6 + 1e5 * i for i in range(num)],
        "parked_bytes": [1e6 + 1e5 * wave for wave in waves],
        "oldest_waiting_s": [1 + rng.random() for _ in range(num)],
        "oldest_lag": [float(i % 4) for i in range(num)],
        "active_lag": [float(i % 2) for i in range(num)],
        "tokens_per_s": [4200 + 300 * rng.random() for _ in range(num)],
        "consumed_per_s": [4 + rng.random() for _ in range(num)],
    }
    return Moments(at=[began_at + 2.0 * i for i in range(num)], series=series)


def ratio() -> RatioPicture:
    """A recommendation with predictions."""
    predicted = [
        Predicted(
            ratio=r,
            speed_up=1 + 0.5 * (1 - math.exp(-(r - 1) * 2)),
            tokens_per_s=4000.0,
            off_policy_share=0.5 * (r - 1) / r,
            bubble_share=0.4 / r**2,
            mean_lag=r - 0.5,
        )
        for r in (1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
    ]
    return RatioPicture(
        ratio=2.0,
        lookahead=1,
        max_lag=4,
        recommended=1.5,
        reason="1.5 has 92 % of the best speed-up and a third fewer tokens of older versions",
        predicted=predicted,
        note="from the lengths of 400 samples",
    )


def report(**changes: object) -> RunReport:
    """All pictures in one."""
    line = timeline()
    verdict = Verdict(
        limit=Limit.TAIL,
        sentence="The tail limits this run: 31 % of slot time is idle while the last responses finish.",
        advice="Raise the ratio to 1.5.",
        measured={"bubble_share": 0.31, "tail_s": 2.4},
    )
    parts = {
        "run": "demo",
        "made_at": line.now,
        "versions": {"april-rollout": "0.1.0", "vllm": "0.32.0"},
        "settings": {"run": {"name": "demo", "seed": 0}, "rollout": {"ratio": 2.0, "n": 8}},
        "verdict": verdict,
        "facts": {"steps": 40.0, "tokens_generated": 123456.0, "off_policy_token_share": 0.4137},
        "timeline": line,
        "tail": tail(),
        "moments": moments(),
        "steps": steps(),
        "ratio": ratio(),
        "notes": [],
    }
    return RunReport.model_validate(parts | changes)
