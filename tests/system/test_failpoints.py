"""A crash at every place where one matters: nothing is lost, nothing is trained on twice, and rounds go on."""

import contextlib
import hashlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.failpoints import EXIT_CODE, VARIABLE, Failpoint
from tests.support.cluster import System, open_system, until
from tests.support.history import check, judge
from tests.support.journal import read_history
from tests.support.scripted_trainer import FENCED_EXIT

pytestmark = pytest.mark.timeout(300)

TRAINER_PLACES = (
    Failpoint.AFTER_LEASE,
    Failpoint.MID_STEP,
    Failpoint.AFTER_OPTIMIZER_STEP,
    Failpoint.AFTER_CHECKPOINT,
    Failpoint.AFTER_ACK,
)
SERVICE_CRASHES = (
    "mid_cut=kill@3",
    "mid_park=kill@4",
    "mid_install=kill@1",
    "mid_offer=kill@1",
    "mid_offer=exit@2",
    "after_spool=kill@1",
)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[System]:
    """One run for all crashes of the trainer: each goes on from what the one before left."""
    with open_system(tmp_path_factory.mktemp("failpoints"), tiny_model_dir) as opened:
        yield opened


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[System]:
    """One run for all crashes of the service, under one trainer that outlives them."""
    with open_system(tmp_path_factory.mktemp("crashing"), tiny_model_dir) as opened:
        yield opened


def finish(system: System) -> None:
    """End everything in order and let the history decide."""
    for process in [*system.trainers, system.service]:
        assert process is not None
        assert process.end() in (0, FENCED_EXIT), process.tail()
    system.record_final()
    assert check(*read_history(system.history_folder)) == []


@pytest.mark.parametrize("passage", [1, 2])
@pytest.mark.parametrize("place", TRAINER_PLACES)
def test_trainer_killed_at_a_place_goes_on(system, place, passage):
    service = system.service or system.start_service()
    before = len(system.survived())
    trainer = system.start_trainer(f"{place}=kill@{passage}")
    until(lambda: not trainer.alive, service)
    assert trainer.popen.returncode == -signal.SIGKILL, trainer.tail()
    again = system.start_trainer("", f"--steps={before + 6}")
    until(lambda: not again.alive, service)
    assert again.popen.returncode == 0, again.tail()
    system.trainers.clear()
    status = system.until(lambda s: s.durable_step == before + 6, service)
    assert status.ledger_error == 0
    assert len(system.survived()) == before + 6
    records, batches = read_history(system.history_folder)
    assert check(records, batches) == []
    replayed = [r["step"] for r in records if r["kind"] == "call" and r["op"] == "lease" and r["outcome"] == "ok"]
    if place not in (Failpoint.AFTER_CHECKPOINT, Failpoint.AFTER_ACK):
        assert len(replayed) > len(set(replayed)), "no step was served again"


def test_nothing_was_lost_over_all_crashes_of_the_trainer(system):
    assert system.service is not None, "runs after the crashes"
    finish(system)


@pytest.mark.parametrize("crash", SERVICE_CRASHES)
def test_service_fails_at_a_place_that_it_reached_after_the_crash_before(crashing, crash):
    if not crashing.trainers:
        crashing.start_trainer()
    service = crashing.start_service(crash)
    until(lambda: not service.alive, *crashing.trainers)
    assert service.popen.returncode in (-signal.SIGKILL, EXIT_CODE), service.tail()
    assert check(*read_history(crashing.history_folder)) == []


def test_rounds_go_on_after_all_crashes_of_the_service(crashing):
    service = crashing.start_service()
    if not crashing.trainers:
        crashing.start_trainer()
    epoch = crashing.num_started["service"]
    status = crashing.until(lambda s: s.service_epoch == epoch, service, *crashing.trainers)
    reached = status.durable_step
    crashing.until(lambda s: s.durable_step >= reached + 4, service, *crashing.trainers)
    finish(crashing)


def test_trainer_that_was_stopped_and_superseded_changes_nothing_when_it_wakes(tmp_path, tiny_model_dir):
    with open_system(tmp_path, tiny_model_dir) as system:
        service = system.start_service()
        old = system.start_trainer("after_optimizer_step=stop@3")
        system.until(lambda s: s.trained_step == 2, service)
        until(lambda: state_of(old.popen.pid) == "T", service)
        new = system.start_trainer()
        system.until(lambda s: s.durable_step >= 4, service, new)
        old.go_on()
        until(lambda: not old.alive, service, new)
        assert old.popen.returncode == FENCED_EXIT, old.tail()
        system.until(lambda s: s.durable_step >= 6, service, new)
        system.trainers.remove(old)
        finish(system)
        calls = [r for r in read_history(system.history_folder)[0] if r["kind"] == "call" and r["outcome"] == "fenced"]
        assert {call["op"] for call in calls} == {"lease", "publish", "trained", "ack"}
        assert all("superseded by epoch 2" in call["detail"] for call in calls)


def test_killed_service_loses_at_most_a_checkpoint_interval_of_each_of_its_64_samples(tmp_path, tiny_model_dir):
    words = ("--data.max_response_length=2000", "--engine.simulated.median_tokens=2000", "--engine.simulated.sigma=0")
    words += ("--engine.max_num_seqs=64", "--data.train_batch_size=16")
    with open_system(tmp_path, tiny_model_dir, overrides=words) as system:
        service = system.start_service()
        system.until(lambda s: s.counters.get("tokens_appended", 0) > 64 * 100, service)
        system.kill(service)
        system.ended(service)
        again = system.start_service()
        after = system.until(lambda s: s.service_epoch == 2 and s.counters.get("resumes", 0) >= 64, again)
        assert after.ledger_error == 0
        assert again.end() == 0, again.tail()
        records, batches = read_history(system.history_folder)
    (flight,) = [r for r in records if r["kind"] == "flight" and r["pid"] == service.popen.pid]
    lengths = resumed_lengths(records, again.popen.pid)
    assert {row["sample"] for row in flight["rows"]} == set(lengths)
    assert len(lengths) == 64
    for row in flight["rows"]:
        assert row["stored"] <= lengths[row["sample"]] <= row["generated"]
    verdict = next(v for v in judge(records, batches) if v.promise == "G7")
    assert verdict.violations == []
    assert verdict.seen["samples that ran when a service died"] == 64
    assert verdict.seen["tokens lost with them"] == sum(r["generated"] - lengths[r["sample"]] for r in flight["rows"])


def resumed_lengths(records, pid):
    """Tokens of each sample when a service first started it again."""
    found = {}
    for record in records:
        if record["kind"] == "buffer" and record["op"] == "read" and record["pid"] == pid:
            for sample, _, length, _ in record["samples"]:
                found.setdefault(sample, length)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_trainer_killed_at_each_place_goes_on(run, monkeypatch):
    service = run.start("serve")
    words = ("--trainer.num_checkpoints_kept=100", "--trainer.total_training_steps=100")
    spooled: dict[str, str] = {}
    for number, place in enumerate(TRAINER_PLACES):
        monkeypatch.setenv(VARIABLE, f"{place}=kill@2")
        trainer = run.start("train", *words)
        while trainer.process.poll() is None:
            service.check_alive()
            see_spool(run.folder / "run" / "spool", spooled)
            time.sleep(0.02)
        assert trainer.process.returncode == -signal.SIGKILL, trainer.tail()
        assert run.until(lambda s: True, service).trainer_epoch == number + 1
    monkeypatch.delenv(VARIABLE)
    last = max(map(int, spooled)) + 1
    trainer = run.start("train", words[0], f"--trainer.total_training_steps={last}")
    assert trainer.process.wait() == 0, trainer.tail()
    status = run.until(lambda s: True, service)
    assert status.ledger_error == 0
    assert status.durable_step == last
    history = {}
    for path in sorted((run.folder / "run" / "trainer" / "checkpoints").glob("*/state.json")):
        history |= json.loads(path.read_text())["groups"]
    assert sorted(map(int, history)) == list(range(1, last + 1))
    groups = [group for ids in history.values() for group in ids]
    assert len(groups) == len(set(groups)) == status.ledger.consumed


def see_spool(folder: Path, seen: dict[str, str]) -> None:
    """Every batch that is spooled has the bytes that it had when it was first seen."""
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            step = path.name.split("-")[1]
            assert seen.setdefault(step, digest) == digest, f"the batch of step {step} has changed"


def state_of(pid: int) -> str:
    """The letter of a process' state: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
