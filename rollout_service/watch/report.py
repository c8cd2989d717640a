"""All of a run from its folder: the same pictures that a running service shows, by the same code."""

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from protocol.errors import AprilError, DataError
from protocol.settings import RunSettings
from protocol.watching import Predicted, RatioPicture, RunReport
from rollout_service.watch.as_trace import trace_of
from rollout_service.watch.folder import METRICS_NAME, Progress, TraceFolder, step_lines
from rollout_service.watch.forecast_job import do_job, make_job
from rollout_service.watch.moments import moments
from rollout_service.watch.observed import Choices, Observed
from rollout_service.watch.recent import View, Watch
from rollout_service.watch.record import SETTINGS_NAME, VERSIONS_NAME, read_record
from rollout_service.watch.round_spans import with_spent
from rollout_service.watch.steps import StepHistory
from rollout_service.watch.tail import tail
from rollout_service.watch.timeline import timeline
from rollout_service.watch.verdict import NUM_ROUNDS, judge

TIMELINE_ROUNDS = 30  # of a report: it is one file, and a browser opens it whole
TIMELINE_SAMPLES = 20_000
FACTS_OF_STEPS = ("reward/mean", "eval/reward", "off_policy/token_share", "importance/ess", "response/length_mean")


class _Totals:
    """Counts over the whole trace, however much of it is remembered."""

    def __init__(self) -> None:
        self.num_lines = self.num_attempts = self.num_finished = self.num_parked = self.num_lost = 0
        self.num_tokens = self.num_rounds = self.num_failed = self.num_unwritten = 0
        self.first_round: int | None = None
        self.first_at: float | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """One line."""
        self.num_lines += 1
        match line["kind"]:
            case "attempt":
                self.num_attempts += 1
                self.num_finished += line["end"] in ("stop", "length")
                self.num_parked += line["end"] == "parked"
                self.num_lost += line["end"] == "lost"
                self.num_tokens += sum(segment[1] for segment in line["segments"])
                self.first_at = min(self.first_at or line["started_at"], line["started_at"])
            case "score":
                self.num_failed += line["failed"] is not None
            case "round":
                self.num_rounds += 1
                self.first_round = self.first_round or line["round"]
            case "lost":
                self.num_unwritten += line["num_lines"]
            case _:
                pass

    def notes(self) -> list[str]:
        """What the totals lack."""
        notes: list[str] = []
        if self.first_round is not None and self.first_round > 1:
            notes.append(
                f"the trace begins at round {self.first_round}: what was before is gone (trace.max_files) or was not "
                "traced, and the totals are of the rest"
            )
        if self.num_unwritten:
            are = "line was" if self.num_unwritten == 1 else "lines were"
            notes.append(f"{self.num_unwritten} {are} not written, since the disk was too slow: the totals lack them")
        return notes


def run_report(run_dir: Path, progress: Progress | None = None, predict: bool = True) -> RunReport:
    """The report of a run's folder. `predict`: simulate other ratios, which takes some seconds.

    Raises DataError with what is missing: no folder, no trace, a trace without a line.
    """
    if not run_dir.is_dir():
        raise DataError(f"there is no folder {run_dir}: name a run's folder, such as runs/NAME")
    folder, watch, totals = TraceFolder(run_dir), Watch(), _Totals()
    for line in folder.lines(progress):
        if folder.header is not None and folder.header.limits is not None:
            watch.limits = folder.header.limits
        watch.put(line)
        totals.add(line)
    header = folder.header
    if header is None or not totals.num_lines:
        if folder.notes:
            raise DataError(f"the trace in {run_dir} has nothing to read: {'; '.join(folder.notes)}")
        raise DataError(f"the trace in {run_dir} is empty: let the run offer a batch first")
    notes = [*folder.notes, *totals.notes()]
    if folder.num_lives > 1:
        notes.append(f"the service was started {folder.num_lives} times")
    shown = read_record(run_dir, SETTINGS_NAME)
    if shown is None:
        notes.append("the run's settings were not kept in its folder")
    settings = _settings(shown)
    steps = watch.steps
    for step, metrics in step_lines(_trainer_dir(run_dir, shown) / METRICS_NAME, notes):
        steps.put(step, metrics)
    view = watch.view(watch.last_at)
    if view.num_left_out:
        are = "is" if view.num_left_out == 1 else "are"
        notes.append(f"the pictures are of the last {len(view.samples)} responses; {view.num_left_out} {are} older")
    choices = _choices(view, settings)
    rounds = with_spent(view.rounds, view.installs)[-NUM_ROUNDS:]
    verdict = judge(
        Observed(
            choices=choices,
            rounds=rounds,
            scores=watch.scores_since(rounds[0].started_at if rounds else 0.0),
            steps=steps.last(NUM_ROUNDS),
            install_s=watch.mean_install_s(),
            reward_s=watch.mean_reward_s(),
        )
    )
    return RunReport(
        run=header.run,
        made_at=time.time(),
        versions={str(k): str(v) for k, v in (read_record(run_dir, VERSIONS_NAME) or {}).items()},
        settings=dict(shown or {}),
        verdict=verdict,
        facts=_facts(view, totals, steps),
        timeline=timeline(view, TIMELINE_ROUNDS, TIMELINE_SAMPLES),
        tail=tail(view),
        moments=moments(view),
        steps=steps.picture(),
        ratio=_ratio(view, header.run, choices, settings, run_dir, predict),
        notes=notes,
    )


def _facts(view: View, totals: _Totals, steps: StepHistory) -> dict[str, float]:
    """Numbers that one asks for first, by name; what is not known is left out."""
    duration_s = view.now - totals.first_at if totals.first_at is not None else 0.0
    num_steps = steps.last_step or (view.trained[-1][0] if view.trained else 0)
    facts: dict[str, float] = {
        "duration_s": duration_s,
        "num_rounds": totals.num_rounds,
        **({"num_steps": num_steps} if num_steps else {}),
        "num_responses": totals.num_finished,
        "num_resumes": totals.num_parked + totals.num_lost,
        "num_failed": totals.num_failed,
        "num_tokens": totals.num_tokens,
    }
    if duration_s > 0:
        facts["tokens_per_s"] = totals.num_tokens / duration_s
    for name in ("bubble_share", "tail_s"):
        values = [getattr(span, name) for span in view.rounds if getattr(span, name) is not None]
        facts |= {name: fmean(values)} if values else {}
    series = steps.picture().series
    for name in FACTS_OF_STEPS:
        values = [value for value in series.get(name, []) if value is not None]
        facts |= {f"{name} (first)": values[0], f"{name} (last)": values[-1]} if values else {}
    return facts


def _ratio(
    view: View, run: str, choices: Choices, settings: RunSettings | None, run_dir: Path, predict: bool
) -> RatioPicture:
    answer: dict[str, Any] = {"predicted": [], "recommended": None, "reason": None, "note": "not simulated"}
    if predict:
        try:
            answer = do_job(make_job(trace_of(view, run), choices, settings, run_dir))
        except AprilError as error:
            answer["note"] = str(error)
    return RatioPicture(
        ratio=choices.ratio,
        lookahead=choices.lookahead,
        max_lag=choices.max_lag,
        recommended=answer["recommended"],
        reason=answer["reason"],
        predicted=[Predicted(**row) for row in answer["predicted"]],
        note=answer["note"],
    )


def _choices(view: View, settings: RunSettings | None) -> Choices:
    """As the run ended: the ratio of its last moment, the rest as it was started."""
    limits = view.limits
    last = next((m.values["ratio"] for m in reversed(view.moments) if m.values.get("ratio")), None)
    return Choices(
        ratio=last or (limits.ratio if limits else 1.0),
        lookahead=limits.lookahead if limits else 0,
        max_lag=limits.max_lag if limits else 0,
        train_batch_size=limits.train_batch_size if limits else 1,
        max_num_seqs=limits.slots // limits.num_replicas if limits else 1,
        num_reward_workers=settings.reward.num_workers if settings else 1,
    )


def _settings(shown: Mapping[str, Any] | None) -> RunSettings | None:
    """The settings again, if they are still ones: secrets are masked, and a newer version may know others."""
    if shown is None:
        return None
    try:
        return RunSettings(**shown)
    except (ValidationError, TypeError):
        return None


def _trainer_dir(run_dir: Path, shown: Mapping[str, Any] | None) -> Path:
    """Where the trainer wrote: in the run's folder, unless its settings said otherwise."""
    own = ((shown or {}).get("trainer") or {}).get("default_local_dir")
    return Path(own) if own and Path(own).is_dir() else run_dir / "trainer"
