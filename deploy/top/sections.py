"""What is so, section by section: a label, and lines that each make sense alone.

Everything here is text from numbers: no I/O, and the time is an argument. Colour only repeats what the words say.
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from rich.cells import cell_len
from rich.text import Text

from deploy.top.drawing import Glyphs, duration, number, size
from deploy.top.seen import Seen
from protocol.messages import EngineStatus, Status
from protocol.states import SampleState
from protocol.watching import Limit, Quantiles

BAR_WIDTH = 16
MIN_CURVE, MAX_CURVE, CURVE_WORDS = 8, 60, 32  # cells of a curve, and of what stands beside it
LAG_PREFIX = "lag/share_"
SMALL_SHARE = 0.005  # rounds to 0 %
BAD, WARN, GOOD, DIM, STRONG = "bold red", "yellow", "green", "dim", "bold"
SEPARATOR = "  "


@dataclass(slots=True)
class Section:
    """`least`: lines that are shown before any section gets more; `grows`: it may take what is left at the end."""

    label: str
    lines: list[Text] = field(default_factory=list[Text])
    least: int = 1
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """What a section is made from. `width`: of its lines; `now`: seconds since the epoch."""

    seen: Seen
    status: Status
    now: float
    width: int
    glyphs: Glyphs


def sections(seen: Seen, now: float, width: int, glyphs: Glyphs) -> list[Section]:
    """All that have something to say, the most important first."""
    if seen.status is None:
        return []
    look = Look(seen, seen.status, now, width, glyphs)
    return [made for make in MAKERS if (made := make(look)).lines]


def _rows(width: int, *parts: str | tuple[str, str] | None) -> list[Text]:
    """Parts with space between them, on as many lines as they need; a pair is (text, style)."""
    rows, row = list[Text](), Text()
    for part in parts:
        if part is None:
            continue
        words, style = part if isinstance(part, tuple) else (part, "")
        if len(row) and row.cell_len + len(SEPARATOR) + cell_len(words) > width:
            rows.append(row)
            row = Text()
        row.append(SEPARATOR if len(row) else "").append(words, style=style)
    return [*rows, row] if len(row) else rows


def _wrapped(sentence: str, width: int, style: str = "") -> list[Text]:
    return [Text(line, style=style) for line in textwrap.wrap(sentence, max(20, width))]


def _verdict(look: Look) -> Section:
    verdict = look.status.verdict
    if verdict is None:
        return Section("verdict", [Text("none: the service does not watch itself (service.watch = false)", style=DIM)])
    calm = verdict.limit in (Limit.GENERATION, Limit.STARTING)
    lines = _wrapped(verdict.sentence, look.width, GOOD if calm else WARN)
    lines += _wrapped(f"{look.glyphs.arrow} {verdict.advice}", look.width) if verdict.advice else []
    return Section("verdict", lines, least=min(len(lines), 4))


def _round(look: Look) -> Section:
    status, running = look.status, look.status.round
    state = "paused" if status.paused else "draining" if status.draining else None
    if running is None:
        return Section("round", [Text(state or "none runs", style=WARN if state else DIM)])
    batch, ready = int(status.settings.get("train_batch_size", 0)), max(0, running.num_ready)
    rows = _rows(
        look.width,
        (f"{running.round}", STRONG),
        look.glyphs.bar(ready, batch, BAR_WIDTH),
        f"{ready}/{batch} ready",
        f"target {running.target_groups}",
        f"must finish {running.num_must_finish}" if running.num_must_finish else None,
        duration(running.started_s_ago),
        (state, WARN) if state else None,
    )
    return Section("round", rows)


def _waits(look: Look) -> Section:
    """Times of waits are of the service's clock, so its own `now` tells how old they are."""
    waiting = [(f"{wait.who}: for {wait.waits_for}", wait.since) for wait in look.status.waiting]
    waiting = waiting or [(f"for {wait}", None) for wait in look.status.waits]
    aged = [words if since is None else f"{words}, {duration(look.status.now - since)}" for words, since in waiting]
    return Section("waits", [line for words in aged for line in _wrapped(words, look.width)])


def _engines(look: Look) -> Section:
    engines = look.status.engines
    lines = [line for engine in engines for line in _engine(look, engine)]
    if len(engines) > 1:
        running, slots = sum(engine.running for engine in engines), sum(engine.slots for engine in engines)
        rate = look.seen.rates[-1] if look.seen.rates else None
        total = _rows(look.width, (f"{running}/{slots} running", STRONG), _rate(rate), f"{len(engines)} replicas")
        lines = [*total, *lines]
    return Section("engines", lines)


def _engine(look: Look, engine: EngineStatus) -> list[Text]:
    return _rows(
        look.width,
        engine.worker,
        look.glyphs.bar(engine.running, engine.slots, BAR_WIDTH),
        f"{engine.running}/{engine.slots}",
        f"v{engine.version}",
        _rate(look.seen.tokens_per_s(engine.worker)),
        None if engine.kv_use is None else f"KV {engine.kv_use:.0%}",
        (f"{engine.num_preemptions} preempted", WARN) if engine.num_preemptions else None,
        (f"{engine.num_restarts} restarts", WARN) if engine.num_restarts else None,
        None if engine.alive else ("dead", BAD),
    )


def _rate(tokens_per_s: float | None) -> str | None:
    return None if tokens_per_s is None else f"{tokens_per_s:,.0f} tok/s"


def _curves(look: Look) -> Section:
    """A value a second, the newest at the right."""
    width = min(MAX_CURVE, look.width - CURVE_WORDS)
    if len(look.seen.running) < 2 or width < MIN_CURVE:
        return Section("lately")
    lines = list[Text]()
    for name, values in (("running", list(look.seen.running)), ("tok/s", list(look.seen.rates))):
        shown = values[-width:]
        if not shown:
            continue
        peak = (f"at most {max(shown):,.0f} in {duration(len(shown))}", DIM)
        lines += _rows(look.width, f"{name:7}", look.glyphs.curve(shown, width), peak)
    return Section("lately", lines, least=0)


def _tail(look: Look) -> Section:
    tail = look.seen.tail
    if tail is None or not tail.num_finished:
        return Section("tail")
    lines = _rows(look.width, "tokens ", *_quantiles(look, tail.tokens), f"of {tail.num_finished:,} responses")
    lines += _rows(look.width, "seconds", *_quantiles(look, tail.finish_s))
    if tail.trained_tokens is not None and tail.dispatched_tokens is not None:
        trained, dispatched = number(tail.trained_tokens), number(tail.dispatched_tokens)
        lines += _rows(look.width, f"mean length {trained} trained, {dispatched} of all that were started")
    return Section("tail", lines, least=2)


def _quantiles(look: Look, values: Quantiles) -> list[str]:
    named = (("p50", values.p50), ("p90", values.p90), ("p99", values.p99), ("max", values.largest))
    return [f"{name} {number(value, look.glyphs.none)}" for name, value in named]


def _buffer(look: Look) -> Section:
    status, ledger = look.status, look.status.ledger
    num_bytes = _last_moment(look.seen, "parked_bytes")
    parked = f"{status.samples.get(SampleState.PARKED, 0)} samples parked"
    lines = _rows(
        look.width,
        f"{ledger.open} open",
        f"{ledger.ready} ready",
        f"{ledger.leased} leased",
        # Moments are some seconds apart: one from before the cut says nothing of what is parked now.
        f"{parked} ({size(num_bytes)})" if num_bytes else parked,
        f"oldest waits {duration(status.oldest_waiting_s)}" if status.oldest_waiting_s else None,
    )
    balance = (f"OUT OF BALANCE by {status.ledger_error}", BAD) if status.ledger_error else ("in balance", DIM)
    counts = f"{ledger.admitted:,} admitted, {ledger.consumed:,} consumed, {ledger.dropped:,} dropped"
    kept = _rows(look.width, "ledger", counts, balance)
    return Section("buffer", [*kept, *lines] if status.ledger_error else [*lines, *kept])


def _last_moment(seen: Seen, name: str) -> float | None:
    values = seen.moments.series.get(name, []) if seen.moments else []
    return values[-1] if values else None


def _policy(look: Look) -> Section:
    status = look.status
    rows = _rows(
        look.width,
        (f"v{status.active_version} active", STRONG),
        f"v{status.newest_version} newest" if status.newest_version != status.active_version else None,
        f"step {status.trained_step} trained",
        f"{status.durable_step} durable",
        f"{status.offered} offered" if status.offered else None,
        f"leased {_steps(status.leased_steps)}" if status.leased_steps else None,
        None if status.trainer_connected else ("no trainer yet", WARN),
    )
    return Section("policy", rows)


def _steps(steps: list[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _lag(look: Look) -> Section:
    """Shares of the trained tokens by lag; the buckets' names are the trainer's: `0`, `1`, `3_4`, `9_up`."""
    metrics = look.status.trainer_metrics
    shares = {name.removeprefix(LAG_PREFIX): share for name, share in metrics.items() if name.startswith(LAG_PREFIX)}
    ordered = sorted(shares.items(), key=lambda item: _lag_of(item[0]))
    parts = [f"{_lag_name(name)}: {share:.0%}" for name, share in ordered if share >= SMALL_SHARE]
    mean = metrics.get("lag/mean")
    if mean is not None:
        parts.append(f"mean {number(mean)}, bound {look.status.settings.get('max_lag', '?')}")
    return Section("lag", _rows(look.width, *parts))


def _lag_of(bucket: str) -> int:
    digits = "".join(c if c.isdecimal() else " " for c in bucket).split()
    return int(digits[0]) if digits else 0


def _lag_name(bucket: str) -> str:
    return bucket.replace("_up", "+").replace("_", "-")


STEP_PARTS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("reward/mean", lambda value: f"reward {value:.3f}"),
    ("importance/ess", lambda value: f"ESS {value:.3f}"),
    ("off_policy/token_share", lambda value: f"off-policy {value:.0%}"),
    ("importance/clipped_share", lambda value: f"clipped {value:.1%}"),
    ("response/truncated_share", lambda value: f"truncated {value:.0%}"),
    ("timing_s/step", lambda value: f"took {duration(value)}"),
    ("timing_s/wait", lambda value: f"waited {duration(value)}"),
    ("eval/reward", lambda value: f"held-out {value:.3f}"),
)


def _step(look: Look) -> Section:
    metrics = look.status.trainer_metrics
    return Section("step", _rows(look.width, *(show(metrics[name]) for name, show in STEP_PARTS if name in metrics)))


def _ratio(look: Look) -> Section:
    settings, autotune = look.status.settings, look.status.autotune
    samples_ratio = settings.get("samples_ratio", 1)
    rows = _rows(
        look.width,
        (f"{settings.get('ratio', '?')}", STRONG),
        f"samples {samples_ratio:g}" if samples_ratio != 1 else None,
        f"lookahead {settings.get('lookahead', '?')}",
        None if autotune.ratio is None else f"autotune ({autotune.mode}) wants {autotune.ratio:g}",
    )
    if autotune.ratio is not None and autotune.reason:
        rows += _wrapped(autotune.reason, look.width, DIM)
    return Section("ratio", rows)


def _events(look: Look) -> Section:
    lines = [
        Text.assemble((f"{datetime.fromtimestamp(event.at):%H:%M:%S}", DIM), SEPARATOR, event.text)
        for event in reversed(look.seen.events)
    ]
    return Section("events", lines, least=2, grows=True)


MAKERS: tuple[Callable[[Look], Section], ...] = (
    _verdict,
    _round,
    _waits,
    _engines,
    _tail,
    _buffer,
    _policy,
    _lag,
    _step,
    _ratio,
    _curves,
    _events,
)
