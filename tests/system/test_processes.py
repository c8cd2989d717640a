"""Service and trainer as two processes: killed, stopped and started again."""

import json
import signal

import pytest

from protocol.states import SampleState

pytestmark = pytest.mark.timeout(600)


def spooled(run):
    """Digest by step of the batches that are not durable yet."""
    import hashlib

    files = (run.folder / "run" / "spool").glob("*.safetensors")
    return {path.name.split("-")[1]: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_killed_trainer_goes_on_from_its_checkpoint_and_the_ledger_balances(run):
    service = run.start("serve")
    trainer = run.start("train")
    run.until(lambda s: s.trained_step >= 3, service, trainer)
    trainer.process.send_signal(signal.SIGKILL)
    trainer.process.wait()
    before = spooled(run)
    status = run.until(lambda s: True, service)
    assert status.durable_step < status.trained_step or status.durable_step >= 2
    again = run.start("train")
    run.until(lambda s: s.trainer_epoch == 2, service, again)
    replayed = spooled(run)
    assert again.process.wait() == 0, again.tail()
    status = run.until(lambda s: True, service)
    assert status.durable_step == status.trained_step == 8
    assert status.ledger.consumed == 8 * 4
    assert status.ledger_error == 0
    kept = before.keys() & replayed.keys()
    assert {k: before[k] for k in kept} == {k: replayed[k] for k in kept}
    summary = json.loads((run.folder / "run" / "trainer" / "summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["groups_consumed"] == 32


def test_terminated_service_parks_everything_and_goes_on(run):
    service = run.start("serve", "--data.max_response_length=200")
    run.until(lambda s: s.samples[SampleState.RUNNING] > 0 and s.counters.get("tokens_appended", 0) > 0, service)
    assert service.stop() == 0, service.tail()
    again = run.start("serve", "--data.max_response_length=200")
    status = run.until(lambda s: s.offered > 0, again)
    assert status.service_epoch == 2
    assert status.counters["resumes"] > 0
    assert status.ledger_error == 0


def test_killed_service_resumes_from_checkpoints(run):
    service = run.start("serve", "--data.max_response_length=400")
    run.until(lambda s: s.counters.get("tokens_appended", 0) > 0, service)
    service.process.send_signal(signal.SIGKILL)
    service.process.wait()
    again = run.start("serve", "--data.max_response_length=400")
    trainer = run.start("train", "--trainer.total_training_steps=2", "--data.max_response_length=400")
    assert trainer.process.wait() == 0, trainer.tail()
    status = run.until(lambda s: True, again)
    assert status.ledger_error == 0
    assert status.counters["resumes"] > 0
    assert status.durable_step == 2


def test_two_ports_can_not_be_shared(run):
    service = run.start("serve")
    run.until(lambda s: True, service)
    second = run.start("serve", f"--run.dir={run.folder / 'other'}")
    assert second.process.wait() == 2
    assert "stop what uses it or set service.port" in second.tail()


def test_trainer_outlives_a_restart_of_the_service_and_saves_without_it(run):
    service = run.start("serve")
    trainer = run.start("train", "--trainer.total_training_steps=1000", "--trainer.save_freq=1000")
    run.until(lambda s: s.trained_step >= 1, service, trainer)
    assert service.stop() == 0, service.tail()
    again = run.start("serve")
    trained = run.until(lambda s: s.trained_step >= 3, again, trainer).trained_step
    assert again.stop() == 0, again.tail()
    assert trainer.stop() == 0, trainer.tail()
    saved = [int(p.name.split("-")[1]) for p in (run.folder / "run" / "trainer" / "checkpoints").glob("step-*")]
    assert max(saved) >= trained
