"""Publishing: weights to a folder under the weights root, its manifest last, then the service is told.

Always true: a folder is written once and never changed; its name has step and trainer epoch, so a trainer that was
superseded cannot overwrite it; a version whose install failed is published once more; when that fails too, or the
weights can't be written, training goes on and the failure is counted.
"""

import logging
import re
import shutil
import time
from collections import deque
from pathlib import Path

from protocol.errors import AprilError, FencedError, NotFoundError, UnavailableError
from protocol.manifest import MANIFEST_NAME, write_manifest
from protocol.messages import Policy, PolicyState
from trainer.client import ServiceClient
from trainer.distributed import Ranks
from trainer.engine import PolicyEngine
from trainer.weights_file import write_weights

LOG = logging.getLogger("april.trainer")

WEIGHTS_NAME = "model.safetensors"
FOLDER_PATTERN = re.compile(r"step-\d{6,}-e\d+(-r\d+)?")
CHECK_EVERY_S = 2.0  # between two looks at how an install goes


class Publisher:
    """Publishes from all ranks; talks to the service on rank 0, which alone has a client."""

    def __init__(self, root: Path, engine: PolicyEngine, ranks: Ranks, client: ServiceClient | None) -> None:
        self.version = 0
        self._num_failures = 0
        self._root = root
        self._engine = engine
        self._ranks = ranks
        self._client = client
        self._epoch = 0
        self._pending: Policy | None = None
        self._retried = False
        self._checked_at = 0.0

    def open(self, epoch: int, version: int) -> None:
        """Begin a session; `version` is the newest that the service knows. Folders that were never finished go."""
        self._epoch, self.version = epoch, version
        if self._ranks.is_main:
            self._root.mkdir(parents=True, exist_ok=True)
            _remove_unfinished(self._root)

    def take_failures(self) -> int:
        """Publications that failed since the last call."""
        count, self._num_failures = self._num_failures, 0
        return count

    def publish(self, step: int, again: bool = False) -> bool:
        """Write and announce the weights after `step`; every rank calls it. Says whether the service has them."""
        folder = self._root / f"step-{step:06d}-e{self._epoch}{'-r1' if again else ''}"
        done = self._write_and_announce(folder, step) if self._ranks.is_main else self._take_part()
        self._retried = again
        answer = self._ranks.share({"done": done, "version": self.version})
        self.version = answer["version"]
        return answer["done"]

    def failed_install(self) -> int | None:
        """Rank 0: the step whose install has failed and is to be published again; asks at most every few seconds."""
        if self._pending is None or time.monotonic() - self._checked_at < CHECK_EVERY_S:
            return None
        return self.settle()

    def settle(self) -> int | None:
        """Rank 0: look now at how the newest version is; see `failed_install`."""
        pending = self._pending
        if pending is None:
            return None
        self._checked_at = time.monotonic()
        try:
            policy = self._require_client().policy(pending.version)
        except NotFoundError:
            self._pending = None
            return None
        if policy.state in (PolicyState.QUEUED, PolicyState.INSTALLING):
            return None
        self._pending = None
        if policy.state is not PolicyState.FAILED:
            return None
        self._num_failures += 1
        about = {"event": "install_failed", "version": policy.version, "step": policy.step}
        LOG.error("version %d (step %d) was not installed: %s", policy.version, policy.step, policy.error, extra=about)
        return None if self._retried else policy.step

    def _write_and_announce(self, folder: Path, step: int) -> bool:
        try:
            write_policy(self._engine, folder, step)
        except OSError as error:
            self._num_failures += 1
            shutil.rmtree(folder, ignore_errors=True)
            LOG.error("the weights after step %d can't be written to %s (%s); going on without", step, folder, error)
            return False
        client = self._require_client()
        try:
            self.settle()
            policy = client.publish(step, str(folder.resolve()))
        except UnavailableError:
            if not client.stop.is_set():
                raise
            LOG.warning("step %d: asked to stop while the service is away; the next start publishes its weights", step)
            return False
        except FencedError:
            raise
        except AprilError as error:
            self._num_failures += 1
            LOG.error("the service refused the weights after step %d: %s", step, error)
            return False
        self._pending, self.version = policy, policy.version
        return True

    def _take_part(self) -> bool:
        write_policy(self._engine, None, step=0)
        return True

    def _require_client(self) -> ServiceClient:
        assert self._client is not None, "only rank 0 speaks to the service"
        return self._client


def write_policy(engine: PolicyEngine, folder: Path | None, step: int) -> None:
    """Write the weights after `step` to `folder`, made anew, and their manifest last.

    Every rank calls it; those that write nothing say None. Raises `OSError`.
    """
    weights = engine.named_weights()
    try:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_weights(folder / WEIGHTS_NAME, engine.weight_shapes(), weights)
    finally:
        # Gathering a weight is a collective: every rank goes on to the last, also where nothing is or can be written.
        deque(weights, maxlen=0)
    if folder is not None:
        write_manifest(folder, step)


def _remove_unfinished(root: Path) -> None:
    for folder in root.iterdir():
        if FOLDER_PATTERN.fullmatch(folder.name) and not (folder / MANIFEST_NAME).exists():
            shutil.rmtree(folder, ignore_errors=True)
