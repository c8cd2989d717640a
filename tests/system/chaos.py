"""The whole system under random faults: `python -m tests.system.chaos --seconds 60 --seed 1`.

Redis behind a proxy, the service with its engine and its reward workers, and scripted trainers run as processes, are
killed, stopped, cut off and started again, and write down what they see; afterwards a checker decides from the
histories alone whether each promise was kept (tests/support/history.py). A promise that nothing in the run put to the
test is reported as not observed. `--engine vllm` runs the same on vLLM with a tiny model, which takes longer. Exit code
1 on a violation.

Always true: after the last fault the system must come to rest by itself: it trains some steps more, everything ends in
order, and only then is the history judged. What doesn't come to rest is a violation too.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from deploy.demo.byte_model import make_tokenizer
from protocol.messages import Status
from tests.support.chaos_report import Report, show
from tests.support.cluster import System, Watcher, open_system
from tests.support.history import judge
from tests.support.journal import Record, read_history
from tests.support.nemesis import Nemesis
from tests.support.recovery import recoveries, service_start_s, undisturbed_step_s
from tests.support.run_history import Violation
from tests.support.scenes import POOLING, TOML, VLLM_TOML
from tests.support.scripted_trainer import FENCED_EXIT

STEPS_AFTERWARDS = 4
FAULTS_A_LINE = 10  # of progress
MIN_WIDTH = 110  # of the tables, also in a file
SUPERVISE_EVERY_S = 0.05


@dataclass(frozen=True)
class Scene:
    """What runs, and what may happen to it."""

    toml: str = TOML
    only: tuple[str, ...] = ()
    """Faults to choose from; all if empty."""
    recovery_s: float = 30.0
    """How long a fault may wait for the one before to be recovered from."""
    rest_s: float = 120.0
    """How long the system may take to come to rest."""
    overrides: tuple[str, ...] = ()


SIMULATED = Scene()
# A real engine takes half a minute to start on two cores: fewer kinds of faults, more patience.
VLLM = Scene(
    VLLM_TOML,
    ("engine killed", "engine stopped", "service killed", "redis killed", "trainer killed", "reward worker killed"),
    recovery_s=120.0,
    rest_s=300.0,
)


def run_chaos(
    folder: Path,
    model: Path,
    seed: int,
    seconds: float,
    num_faults: int | None,
    scene: Scene = SIMULATED,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Faults for `seconds`, or until there were `num_faults`; then rest, and judgement. `say` is told how far it is."""
    with open_system(folder, model, scene.toml, scene.overrides) as system:
        nemesis = Nemesis(system, seed, scene.only)
        system.start_service()
        system.start_trainer()
        watcher = Watcher(system)
        watcher.start()
        began = time.monotonic()
        try:
            system.until(lambda s: s.trained_step >= 1)
            _strike(system, nemesis, began + seconds, num_faults, scene.recovery_s, say)
            say("no more faults; it must come to rest by itself")
            problems = _come_to_rest(system, nemesis, scene.rest_s)
        finally:
            watcher.end()
        problems += _end(system)
        system.record_final()
        records, batches = read_history(system.history_folder)
        verdicts = judge(records, batches, problems)
        live = next(verdict for verdict in verdicts if verdict.promise == "liveness")
        live.seen = {"rests reached after the last fault": int(not problems)}
        final = next((record for record in records if record["kind"] == "final"), {})
        usual = undisturbed_step_s(records), service_start_s(records)
        took_s = time.monotonic() - began
        return Report(seed, took_s, nemesis.done, recoveries(records), *usual, verdicts, final, _numbers(records))


def _strike(
    system: System,
    nemesis: Nemesis,
    until_s: float,
    num_faults: int | None,
    recovery_s: float,
    say: Callable[[str], None],
) -> None:
    while nemesis.num_done < num_faults if num_faults else time.monotonic() < until_s:
        if nemesis.lets_recover():
            _recover(system, nemesis, recovery_s)
        _supervise(system, nemesis, nemesis.pause_s())
        nemesis.strike()
        if nemesis.num_done % FAULTS_A_LINE == 0:
            say(f"{nemesis.num_done} faults{f' of {num_faults}' if num_faults else ''}")


def _recover(system: System, nemesis: Nemesis, recovery_s: float) -> None:
    """Until a step is trained after now; not for ever, since a process may fail at its named place again and again."""
    deadline, before = time.monotonic() + recovery_s, None
    while time.monotonic() < deadline:
        _supervise(system, nemesis, SUPERVISE_EVERY_S)
        status = system.status()
        if status is None:
            continue
        before = status.trained_step if before is None else min(before, status.trained_step)
        if status.trained_step > before:
            return


def _supervise(system: System, nemesis: Nemesis, for_s: float) -> None:
    deadline = time.monotonic() + for_s
    while True:
        system.supervise(nemesis.arm)
        if time.monotonic() >= deadline:
            return
        time.sleep(SUPERVISE_EVERY_S)


def _come_to_rest(system: System, nemesis: Nemesis, patience_s: float) -> list[Violation]:
    """No more faults: the system must go on by itself."""
    nemesis.armed = False
    deadline = time.monotonic() + patience_s
    goal: int | None = None
    status: Status | None = None
    while time.monotonic() < deadline:
        _supervise(system, nemesis, SUPERVISE_EVERY_S)
        status = system.status() or status
        if status is None:
            continue
        goal = goal or status.durable_step + STEPS_AFTERWARDS
        if status.durable_step >= goal:
            return []
    waits = status.waits if status else ["the service does not answer"]
    tail = system.service.tail(12) if system.service else ""
    return [Violation("liveness", f"no {STEPS_AFTERWARDS} steps within {patience_s:g} s; waits: {waits}\n{tail}")]


def _end(system: System) -> list[Violation]:
    """End trainers and service in order; they must obey."""
    violations: list[Violation] = []
    for process in [*system.trainers, system.service]:
        assert process is not None, "it was started with the system"
        code = process.end()
        system.journal.write("ended", process=process.name, child=process.popen.pid, code=code)
        struck = process.armed and code == -signal.SIGKILL
        if code not in (0, FENCED_EXIT) and not struck:
            violations.append(Violation("liveness", f"the {process.name} ended with {code}:\n{process.tail(12)}"))
    return violations


def _numbers(records: list[Record]) -> dict[str, int]:
    lives = Counter(record["process"] for record in records if record["kind"] == "started")
    return {
        **{f"{name} lives": lives[name] for name in ("service", "trainer", "redis")},
        "engine lives": sum(record["kind"] == "engine" for record in records),
        "samples that could not be scored": sum(
            record["kind"] == "buffer" and record["op"] == "fail" and record["outcome"] == "ok" for record in records
        ),
    }


def make_tokenizer_only(folder: Path) -> None:
    """What the simulated engine needs of a model."""
    make_tokenizer().save_pretrained(folder)


def make_policy(folder: Path) -> None:
    """A random policy that vLLM loads in little time."""
    from deploy.demo.byte_model import make_model, save_policy

    save_policy(make_model(seed=0), folder)


def main() -> int:
    """Run from the command line; 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults happen (without --faults)")
    parser.add_argument("--faults", type=int, help="until this many faults have happened")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--engine", choices=("simulated", "vllm"), default="simulated")
    parser.add_argument("--pooling", action="store_true", help="with rollout.samples_ratio > 1 and few prompts")
    parser.add_argument("--json", type=Path, help="write the report as JSON")
    parser.add_argument("--dir", type=Path, help="folder for histories and logs [default: a new temporary one]")
    words = parser.parse_args()
    scene, make = (VLLM, make_policy) if words.engine == "vllm" else (SIMULATED, make_tokenizer_only)
    if words.pooling:
        scene = replace(scene, overrides=POOLING)
    folder = words.dir or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=max(MIN_WIDTH, Console().width))
    console.print(f"seed {words.seed}, histories in {folder}", highlight=False)
    make(folder / "model")
    began_s = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began_s:5.0f} s: {text}", highlight=False)

    report = run_chaos(folder, folder / "model", words.seed, words.seconds, words.faults, scene, say)
    show(report, console)
    if words.json:
        words.json.write_text(json.dumps(report.plain(), indent=2))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
