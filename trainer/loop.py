"""The trainer's life: restore, open a session, publish, then lease, train, publish, save and acknowledge, step by step.

Always true:
- a step is acknowledged only after a checkpoint that holds it is whole on the disk; a trainer that dies anywhere goes
  on from its last checkpoint, is served the same batches again, and counts each once;
- weights are published right after the step that made them and before anything slower, so that the service can go on;
- all ranks do the same thing at the same time: rank 0 decides and tells (`Directive`), the others follow;
- a request to stop (SIGTERM) is obeyed between steps: checkpoint, acknowledge, exit 0.
"""

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from protocol.batch import Batch, decode_batch
from protocol.errors import AprilError, DataError, FencedError, SettingsError, TrainingError, UnavailableError
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import Evaluation
from protocol.settings import RunSettings
from protocol.settings.trainer_rules import warmup_notes, warmup_problem
from trainer.checkpoint import Checkpoints
from trainer.client import ServiceClient, Stopped
from trainer.critic import Critic
from trainer.distributed import Ranks
from trainer.engine import ModuleEngine, PolicyEngine
from trainer.evaluation import Evaluator, evaluation_metrics
from trainer.fetch import BatchFetcher
from trainer.loggers import Trackers, check_libraries, open_trackers
from trainer.metrics import add_to_totals, batch_metrics, finite
from trainer.prometheus import Exporter, NoExporter, open_exporter
from trainer.publish import Publisher
from trainer.sources import SourceReport
from trainer.step_spans import StepSpans
from trainer.summary import Totals
from trainer.update import Updater

LOG = logging.getLogger("april.trainer")

MAX_STEPS_WITHOUT_UPDATE = 3  # one bad batch happens; three in a row mean that the run is broken
UPDATER_STATE = "updater"  # name in a checkpoint
LOOK_EVERY_S = 0.25  # while waiting for a batch: how soon a stop or a failed install is noticed


@dataclass(frozen=True, slots=True)
class Directive:
    """What rank 0 tells all ranks to do next: `train` (a batch follows), `publish` (again), `stop`, or `fail`."""

    kind: str
    message: str = ""


@dataclass(slots=True)
class Main:
    """What rank 0 has besides what every rank has."""

    client: ServiceClient
    fetcher: BatchFetcher[Batch | bytes]
    evaluator: Evaluator
    trackers: Trackers = field(default_factory=Trackers)
    sources: SourceReport = field(default_factory=SourceReport)
    exporter: Exporter = field(default_factory=NoExporter)


class TrainingLoop:
    """One run on this rank; `main` is None on all ranks but 0."""

    def __init__(
        self,
        settings: RunSettings,
        engine: PolicyEngine,
        updater: Updater,
        ranks: Ranks,
        client: ServiceClient | None,
        stop: threading.Event,
        critic: Critic | None = None,
    ) -> None:
        check_libraries(settings)
        self._settings = settings
        self._engines: list[ModuleEngine] = [engine] if critic is None else [engine, critic.engine]
        self._updater = updater
        self._ranks = ranks
        self._stop = stop
        self._checkpoints = Checkpoints(settings, ranks)
        self._publisher = Publisher(settings.weights_root, engine, ranks, client)
        # Several ranks are sent the bytes; one alone has the batch decoded while the one before it trains.
        prepare = _decoded if ranks.size == 1 else _as_it_is
        self._main = Main(client, BatchFetcher(client, prepare), Evaluator(client, self._publisher)) if client else None
        self._state = self._checkpoints.new_state()
        self._spans = StepSpans(settings, is_main=client is not None)
        self._total_steps = 0
        self._saved_step = 0
        self._steps_without_update = 0
        self._began = time.perf_counter()
        self._timings: dict[str, float] = {}

    def run(self) -> Totals:
        """Train to the end or until asked to stop; returns the totals, which rank 0 has right."""
        if self._main is None:
            return self._run()
        self._main.exporter = open_exporter(self._settings)
        try:
            return self._run()
        finally:
            self._main.exporter.close()

    def _run(self) -> Totals:
        self._state = self._checkpoints.restore(self._engines)
        self._updater.load_state(self._state.extra.get(UPDATER_STATE, {}))
        self._saved_step = self._state.step
        wall_before_s = self._state.totals.wall_s
        self._open()
        self._evaluate_before()
        try:
            stopped = self._train_steps(wall_before_s)
            self._save_and_acknowledge(wall_before_s)
            if not stopped:
                self._evaluate_after()
        finally:
            if self._main:
                self._main.trackers.close()
            self._spans.close()
        totals = self._state.totals
        totals.wall_s = wall_before_s + time.perf_counter() - self._began
        totals.publish_failures += self._publisher.take_failures()
        return totals

    def _open(self) -> None:
        """Open the session and publish the restored weights, unless the engines hold exactly those already."""
        settings = self._settings
        session = self._ranks.share(
            self._main.client.open_session(self._state.step, settings.trainer.accept_lost_buffer).model_dump()
            if self._main
            else None
        )
        if session["run"] != settings.run.name:
            raise SettingsError(
                f"the service at {settings.trainer.service_url} serves the run {session['run']!r} and this is "
                f"{settings.run.name!r}: set trainer.service_url or run.name"
            )
        if self._main and settings.trainer.resume_from_path:
            self._checkpoints.put_newer_aside(self._state.step)
        self._total_steps = planned_steps(settings, session["num_train_prompts"])
        if self._main and settings.trainer.total_training_steps is None:  # else it has been said
            for sentence in warmup_notes(settings, self._total_steps):
                LOG.warning("%s", sentence)
        for engine in self._engines:
            engine.total_steps = self._total_steps
        self._publisher.open(session["trainer_epoch"], session["policy_version"])
        if self._state.step or session["policy_version"]:
            self._publisher.publish(self._state.step)
        if self._main:
            self._main.trackers = open_trackers(settings, self._total_steps)
            self._main.exporter.planned(self._total_steps, self._state.step, self._state.totals)
            LOG.info("from step %d to %d on %d ranks", self._state.step, self._total_steps, self._ranks.size)

    def _train_steps(self, wall_before_s: float) -> bool:
        """Whether it ended because it was asked to stop."""
        while self._state.step < self._total_steps:
            self._timings = {}
            directive, delivered = self._next()
            if directive.kind == "stop":
                return True
            if directive.kind == "publish":
                self._publisher.publish(self._state.step, again=True)
                continue
            failpoint(Failpoint.AFTER_LEASE)
            began = time.perf_counter()
            self._train(self._received(delivered), began)
            if self._state.step % self._settings.trainer.save_freq == 0:
                self._save_and_acknowledge(wall_before_s)
        return False

    def _next(self) -> tuple[Directive, Batch | bytes | None]:
        """Rank 0's decision, on every rank; what the service delivered on rank 0."""
        stop = self._ranks.any_of(self._stop.is_set())
        delivered: Batch | bytes | None = None
        directive = Directive("stop")
        failure: Exception | None = None
        if self._main and not stop:
            try:
                with self._timed("wait"):
                    directive, delivered = self._wait_for_batch(self._main)
            except Exception as error:
                # The others are waiting to be told what to do: they are, before this rank ends.
                failure, directive = error, Directive("fail", str(error))
        directive = Directive(**self._ranks.share(asdict(directive)))
        if failure is not None:
            raise failure
        if directive.kind == "fail":
            raise TrainingError(f"rank 0 ended: {directive.message}")
        return directive, delivered

    def _received(self, delivered: Batch | bytes | None) -> Batch:
        """The batch on every rank, from what rank 0 was delivered."""
        if isinstance(delivered, Batch):
            return delivered
        return _decoded(self._state.step + 1, self._ranks.share_bytes(delivered))

    def _wait_for_batch(self, main: Main) -> tuple[Directive, Batch | bytes | None]:
        main.fetcher.request(self._state.step + 1)
        while not self._stop.is_set():
            try:
                delivered = main.fetcher.poll(LOOK_EVERY_S)
                if delivered is not None:
                    return Directive("train"), delivered
                if self._publisher.failed_install() is not None:
                    return Directive("publish"), None
            except Stopped:
                break
            except UnavailableError:
                if not self._stop.is_set():
                    raise
        return Directive("stop"), None

    def _train(self, batch: Batch, began: float) -> None:
        """One step, from the decoded batch to the reports."""
        step, held = self._state.step + 1, self._publisher.version
        if self._main and step < self._total_steps:
            self._main.fetcher.request(step + 1)
        with self._spans.part("update", step):
            report = self._updater.run(batch, step, held)
        failpoint(Failpoint.AFTER_OPTIMIZER_STEP)
        self._timings |= report.timings
        self._state.step = step
        self._state.groups[step] = [g.group_id for g in batch.header.groups]
        with self._timed("publish"):
            published = bool(report.num_updates) and self._publisher.publish(step)
            if self._main and not published:
                self._report_trained(self._main, step)
        metrics = batch_metrics(batch, held) | report.metrics
        self._count(batch, held, metrics, report.num_skipped)
        if self._main:
            self._timings["step"] = time.perf_counter() - began + self._timings.get("wait", 0.0)
            metrics |= {f"timing_s/{name}": value for name, value in self._timings.items()}
            metrics["tokens/per_s"] = metrics["tokens/trained"] / self._timings["step"]
            metrics["trainer/version"] = self._publisher.version
            metrics |= self._main.sources.metrics(batch, held)
            self._spans.step(step, self._timings["step"], held, self._state.groups[step], metrics)
            self._report(self._main, step, metrics)
            self._main.trackers.log_samples(step, batch)
        self._check_updates(bool(report.num_updates or not report.num_skipped), step)

    def _report_trained(self, main: Main, step: int) -> None:
        try:
            main.client.report_trained(step)
        except UnavailableError:
            if not self._stop.is_set():
                raise
            LOG.warning("step %d is trained, which the service, being away, is told at the next start", step)

    def _count(self, batch: Batch, held: int, metrics: dict[str, float], num_skipped: int) -> None:
        totals = self._state.totals
        add_to_totals(totals, batch, held, metrics)
        totals.nan_skips += num_skipped
        totals.publish_failures += self._publisher.take_failures()

    def _check_updates(self, healthy: bool, step: int) -> None:
        """A step may make no update because there was nothing to train on; here it counts if all were skipped."""
        self._steps_without_update = 0 if healthy else self._steps_without_update + 1
        if self._steps_without_update == MAX_STEPS_WITHOUT_UPDATE:
            raise TrainingError(
                f"loss or gradient was not finite in {MAX_STEPS_WITHOUT_UPDATE} steps in a row, the last was {step}: "
                "lower actor.optim.lr and start again; training goes on from the last checkpoint"
            )

    def _report(self, main: Main, step: int, metrics: dict[str, float]) -> None:
        test_freq = self._settings.trainer.test_freq
        if test_freq and step % test_freq == 0:
            main.evaluator.start(step)
            self._checkpoints.best.await_evaluation(step)
        done = main.evaluator.collect()
        if done:
            self._note_evaluation(*done)
            metrics |= evaluation_metrics(done[1]) | {"eval/step": float(done[0])}
        values = finite(metrics)
        main.exporter.trained(step, values, self._state.totals)
        main.trackers.log(step, values)
        try:
            main.client.report_metrics(step, values)
        except FencedError:
            raise
        except AprilError as error:
            LOG.warning("the service did not take the metrics of step %d: %s", step, error)

    def _save_and_acknowledge(self, wall_before_s: float) -> None:
        """A checkpoint and then the ack, unless the last checkpoint holds this step.

        Nor while steps fail: the weights may be ruined already, though they are finite, and what is acknowledged can't
        be trained on again. The run then goes on from the checkpoint before, with the same batches.
        """
        state = self._state
        if state.step == self._saved_step:
            return
        if self._steps_without_update:
            if self._main:
                LOG.warning("step %d is not saved, since it was not finite: the last checkpoint stays", state.step)
            return
        state.totals.wall_s = wall_before_s + time.perf_counter() - self._began
        state.extra[UPDATER_STATE] = self._updater.state()
        with self._timed("save"):
            self._checkpoints.save(self._engines, state)
        failpoint(Failpoint.AFTER_CHECKPOINT)
        self._saved_step = state.step
        self._state = state.model_copy(update={"groups": {}})
        if self._main:
            about = {"event": "saved", "step": state.step, "save_s": round(self._timings["save"], 3)}
            self._main.exporter.saved(state.step, self._timings["save"])
            LOG.info("step %d is saved (%.1f s)", state.step, self._timings["save"], extra=about)
            try:
                self._main.client.acknowledge(state.step)
            except UnavailableError:
                if not self._stop.is_set():
                    raise
                LOG.warning("step %d is saved but not acknowledged; the next start does that", state.step)
        failpoint(Failpoint.AFTER_ACK)

    def _evaluate_before(self) -> None:
        if self._main and self._settings.trainer.val_before_train and self._state.step == 0:
            self._state.totals.eval_reward_before = self._evaluate(self._main)

    def _evaluate_after(self) -> None:
        if not self._main:
            return
        try:
            done = self._main.evaluator.wait()
        except Stopped:
            return
        if done:
            self._note_evaluation(*done)
            self._log_evaluation(self._main, done[0], evaluation_metrics(done[1]))
        if self._settings.trainer.val_before_train:
            self._state.totals.eval_reward_after = self._evaluate(self._main)

    def _evaluate(self, main: Main) -> float | None:
        try:
            evaluation = main.evaluator.run(self._state.step)
        except Stopped:
            return None
        if evaluation is None:
            return None
        self._note_evaluation(self._state.step, evaluation)
        self._log_evaluation(main, self._state.step, evaluation_metrics(evaluation))
        return evaluation.mean_reward

    def _note_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Move the pointer to the best checkpoint, if this is it."""
        if evaluation.mean_reward is not None and self._checkpoints.evaluated(step, evaluation.mean_reward):
            LOG.info("step %d has the best held-out reward so far: %.4f", step, evaluation.mean_reward)

    def _log_evaluation(self, main: Main, step: int, metrics: dict[str, float]) -> None:
        main.trackers.log(step, finite(metrics))

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        began = time.perf_counter()
        # The wait is for the step that comes, everything else belongs to the one that was trained last.
        with self._spans.part(name, self._state.step + (name == "wait")):
            yield
        self._timings[name] = time.perf_counter() - began


def planned_steps(settings: RunSettings, num_train_prompts: int) -> int:
    """`total_training_steps`, or what `total_epochs` over the prompts make; raises `SettingsError` if that is none."""
    chosen = settings.trainer.total_training_steps
    if chosen is not None:
        return chosen
    steps = settings.trainer.total_epochs * num_train_prompts // settings.data.train_batch_size
    if steps < 1:
        raise SettingsError(
            f"{num_train_prompts} prompts make no batch of data.train_batch_size = {settings.data.train_batch_size}: "
            "lower it, or set trainer.total_training_steps"
        )
    problem = warmup_problem(settings, steps)
    if problem:
        raise SettingsError(problem)
    return steps


def _as_it_is(_: int, data: bytes) -> bytes:
    return data


def _decoded(step: int, data: bytes) -> Batch:
    batch = decode_batch(data)
    if batch.header.step != step:
        raise DataError(
            f"the service sent the batch of step {batch.header.step} for step {step}; start the trainer again"
        )
    return batch
