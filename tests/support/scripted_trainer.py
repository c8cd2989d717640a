"""A trainer without a model: what the real one says over HTTP, in the same order, for tests that kill it often.

Always true:
- its checkpoint is one JSON file per saved step, which appears whole; it holds the whole surviving history: for each
  step the SHA-256 of the batch's bytes and the ids of its groups;
- a step is acknowledged only after a checkpoint holds it; started again, it goes on from the newest checkpoint;
- while the service is away it repeats a call; once it is told that it was superseded, it tries everything once more
  (all of which must be refused), and ends with `FENCED_EXIT`.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from protocol.batch import MEDIA_TYPE, decode_batch
from protocol.failpoints import Failpoint, failpoint
from protocol.manifest import write_manifest
from protocol.messages import BATCH_SHA256_HEADER, TRAINER_EPOCH_HEADER
from tests.support.journal import Journal

FENCED_EXIT = 9
REFUSED_EXIT = 4
AWAY_STATUSES = (502, 503, 504)
PAUSE_S = 0.1
PATIENCE_S = 120.0
LONG_POLL_S = 5.0
STEP_CHANGE = 1e-3  # of one tensor, so that no two steps publish the same bytes
ANSWER_S = 20.0  # a stopped service answers after this at the latest, or is asked again


class Superseded(Exception):
    """A newer trainer has opened a session."""


class Refused(Exception):
    """A call was refused that the protocol allows."""


class ScriptedTrainer:
    """One life of the trainer."""

    def __init__(self, url: str, folder: Path, weights: Path, journal: Journal, model: Path | None) -> None:
        self.stopping = False
        self._model = model
        self.step = 0
        self.history: dict[str, list[Any]] = {}
        self._http = httpx.Client(base_url=url, timeout=ANSWER_S)
        self._folder = folder
        self._weights = weights
        self._journal = journal
        self._epoch = 0

    def run(self, num_steps: int, save_freq: int, train_s: float) -> None:
        """Train until `num_steps`, or until told to stop; then save and acknowledge."""
        saved = self._restore()
        session = self._call("open", "/v1/trainers", {"durable_step": self.step}).json()
        self._epoch = session["trainer_epoch"]
        self._journal.write("opened", epoch=self._epoch, step=self.step)
        if self.step or session["policy_version"]:
            self._publish()
        while not self.stopping and (not num_steps or self.step < num_steps):
            data = self._lease()
            if data is None:
                continue
            self._train(data, train_s)
            if self.step % save_freq == 0:
                saved = self._save_and_acknowledge()
        if saved != self.step:
            self._save_and_acknowledge()

    def try_everything(self) -> None:
        """What a superseded trainer may still do: nothing. Each call is recorded with its answer."""
        for name in ("lease", "publish", "trained", "ack"):
            try:
                {"lease": self._lease, "publish": self._publish, "trained": self._trained, "ack": self._ack}[name]()
            except (Superseded, Refused):
                continue

    def _train(self, data: bytes, train_s: float) -> None:
        failpoint(Failpoint.AFTER_LEASE)
        batch = decode_batch(data)
        time.sleep(train_s / 2)
        failpoint(Failpoint.MID_STEP)
        time.sleep(train_s / 2)
        failpoint(Failpoint.AFTER_OPTIMIZER_STEP)
        self.step += 1
        groups = [group.group_id for group in batch.header.groups]
        self.history[str(self.step)] = [hashlib.sha256(data).hexdigest(), groups]
        self._publish()

    def _restore(self) -> int:
        paths = sorted(self._folder.glob("step-*.json"))
        if paths:
            state = json.loads(paths[-1].read_text())
            self.step, self.history = state["step"], state["history"]
        return self.step

    def _save_and_acknowledge(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{self.step:06d}.json"
        partial = path.with_suffix(f".{os.getpid()}.partial")
        with partial.open("w") as file:
            json.dump({"step": self.step, "history": self.history}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        failpoint(Failpoint.AFTER_CHECKPOINT)
        self._ack()
        failpoint(Failpoint.AFTER_ACK)
        return self.step

    def _lease(self) -> bytes | None:
        body = {"step": self.step + 1, "wait_s": LONG_POLL_S}
        response = self._call("lease", "/v1/batches", body, {"Accept": MEDIA_TYPE})
        return response.content if response.status_code == 200 else None

    def _publish(self) -> None:
        folder = self._weights / f"step-{self.step:06d}-e{self._epoch}"
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self._policy_after(self.step), folder / "model.safetensors")
        write_manifest(folder, self.step)
        self._call("publish", "/v1/policies", {"step": self.step, "path": folder.name})

    def _policy_after(self, step: int) -> dict[str, np.ndarray]:
        """What stands for the policy after a step: of a real model the weights as it started, a little changed."""
        if self._model is None:
            return {"x": np.full(3, step, np.float32)}
        weights = load_file(self._model / "model.safetensors")
        name = min(weights)
        return weights | {name: weights[name] * np.float32(1 + STEP_CHANGE * step)}

    def _trained(self) -> None:
        self._call("trained", f"/v1/trainers/steps/{max(self.step, 1)}", None)

    def _ack(self) -> None:
        self._call("ack", f"/v1/batches/{max(self.step, 1)}/ack", None)

    def _call(
        self, op: str, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """One call, repeated while the service is away; what was answered is in the history."""
        headers = {TRAINER_EPOCH_HEADER: str(self._epoch)} | (headers or {}) if self._epoch else headers
        patient_until = time.monotonic() + PATIENCE_S
        while True:
            asked_at = time.monotonic()
            try:
                response = self._http.post(path, json=body, headers=headers)
            except httpx.TransportError as error:
                response, why = None, type(error).__name__
            else:
                why = str(response.status_code)
            if response is not None and response.status_code not in AWAY_STATUSES:
                return self._recorded(op, body, response, asked_at)
            if time.monotonic() > patient_until:
                raise TimeoutError(f"no answer to {op} of step {self.step} for {PATIENCE_S:g} s, the last was {why}")
            time.sleep(PAUSE_S)

    def _recorded(
        self, op: str, body: dict[str, Any] | None, response: httpx.Response, asked_at: float
    ) -> httpx.Response:
        fields: dict[str, Any] = {"op": op, "epoch": self._epoch, "step": (body or {}).get("step", self.step)}
        fields |= {"asked_at": asked_at, "status": response.status_code}
        if response.is_success:
            if op == "lease" and response.status_code == 200:
                fields["sha256"] = hashlib.sha256(response.content).hexdigest()
                fields["sha256_sent"] = response.headers[BATCH_SHA256_HEADER]
                self._journal.keep_batch(fields["sha256"], response.content)
            elif op == "open":
                fields["epoch"] = response.json()["trainer_epoch"]
            elif op == "publish":
                fields["version"] = response.json()["version"]
            self._journal.write("call", outcome="empty" if response.status_code == 204 else "ok", **fields)
            return response
        problem = response.json()
        fenced = problem["type"].endswith("fenced")
        self._journal.write("call", outcome="fenced" if fenced else "refused", detail=problem["detail"], **fields)
        raise (Superseded if fenced else Refused)(problem["detail"])


def main() -> int:
    """Run one life; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("url", "folder", "weights", "journal"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=0, help="0: until SIGTERM")
    parser.add_argument("--model", type=Path, help="folder of the model that an engine loads; without, a stand-in")
    parser.add_argument("--save-freq", type=int, default=2)
    parser.add_argument("--train-s", type=float, default=0.05)
    words = parser.parse_args()
    journal = Journal(Path(words.journal))
    trainer = ScriptedTrainer(words.url, Path(words.folder), Path(words.weights), journal, words.model)

    def stop(*_: object) -> None:
        trainer.stopping = True

    signal.signal(signal.SIGTERM, stop)
    try:
        trainer.run(words.steps, words.save_freq, words.train_s)
    except Superseded as error:
        print(f"superseded: {error}", file=sys.stderr)
        trainer.try_everything()
        return FENCED_EXIT
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
