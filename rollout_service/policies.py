"""Policy versions: published, installed on every replica, made active, cleaned up.

Always true:
- a version is active only after every replica has loaded and verified it; until then, and after a failure, every
  replica serves the version that was active before;
- `newest` and `pending` are what the buffer holds, since every change of a policy goes through here;
- weights are read only from under the weights root, and only from a folder whose manifest matches its files;
- published folders that are neither active, pending nor among the `num_kept` last active ones are deleted, but none
  outside the weights root: a run that was copied or imported names folders of the run it came from.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from buffer.interface import ContinuationBuffer
from protocol.errors import AprilError, ConflictError, NotFoundError, WeightsError
from protocol.failpoints import Failpoint, failpoint
from protocol.manifest import WeightsManifest, read_manifest, verify_manifest
from protocol.messages import Policy, PolicyState
from rollout_service.engines.pool import EnginePool

log = logging.getLogger(__name__)


class PolicyRegistry:
    """Publishes and installs; the round loop says when."""

    def __init__(self, buffer: ContinuationBuffer, pool: EnginePool, root: Path, num_kept: int) -> None:
        self._buffer = buffer
        self._pool = pool
        self._root = root
        self._num_kept = num_kept
        self._deleted: set[str] = set()
        self.newest = Policy(version=0, step=0, trainer_epoch=0, path="", state=PolicyState.ACTIVE)
        self.pending: Policy | None = None
        self.installed: Callable[[Policy], None] = lambda _: None
        """Told of each install that is over: the version is ACTIVE, or FAILED."""

    async def publish(self, step: int, path: str, trainer_epoch: int) -> Policy:
        """Check the folder and give it the next version. Raises WeightsError, FencedError, ConflictError.

        The very bytes of the newest version after the same step are no new version: a trainer that was started again
        publishes what it restored, and its tokens must not look older for that.
        """
        folder = self._inside_root(path)
        manifest = await asyncio.to_thread(verify_manifest, folder)
        if await asyncio.to_thread(self._is_newest, step, manifest):
            return self.newest
        policy = await self._buffer.publish_policy(step, str(folder), trainer_epoch)
        if policy.path != str(folder) and not await asyncio.to_thread(_holds, policy, manifest):
            raise ConflictError(
                f"step {step} is published already as version {policy.version}, from {policy.path}, and these are not "
                "the files in that folder: the version stays what it is; publish these after the next step"
            )
        await self.refresh()
        return policy

    def _is_newest(self, step: int, manifest: WeightsManifest) -> bool:
        newest = self.newest
        return newest.step == step and newest.state is not PolicyState.FAILED and _holds(newest, manifest)

    async def get(self, version: int) -> Policy:
        """One version; raises NotFoundError."""
        policy = next((p for p in await self._buffer.policies() if p.version == version), None)
        if policy is None:
            raise NotFoundError(f"policy version {version} is unknown; the newest is in /v1/status")
        return policy

    async def refresh(self) -> None:
        """Read from the buffer which version is newest and which waits; older waiting ones are superseded."""
        policies = await self._buffer.policies()
        waiting = [p for p in policies if p.state in (PolicyState.QUEUED, PolicyState.INSTALLING)]
        for policy in waiting[:-1]:
            await self._buffer.set_policy_state(policy.version, PolicyState.SUPERSEDED, None, None)
        self.newest = policies[-1]
        self.pending = waiting[-1] if waiting else None

    async def install(self, version: int) -> Policy:
        """Install a waiting version on every replica; FAILED with the reason if any replica can't."""
        policy = await self.get(version)
        await self._buffer.set_policy_state(version, PolicyState.INSTALLING, None, None)
        failpoint(Failpoint.MID_INSTALL)
        started_s = time.monotonic()
        try:
            await self._pool.install(Path(policy.path), version)
        except AprilError as error:
            about = {"event": "install_failed", "version": version, "step": policy.step}
            log.error("policy version %d was not installed: %s", version, error, extra=about)
            policy = await self._buffer.set_policy_state(version, PolicyState.FAILED, str(error), None)
            self.installed(policy)
            await self.refresh()
            return policy
        install_s = time.monotonic() - started_s
        policy = await self._buffer.set_policy_state(version, PolicyState.ACTIVE, None, install_s)
        self.installed(policy)
        await self.refresh()
        about = {"event": "installed", "version": version, "step": policy.step, "install_s": round(install_s, 3)}
        sentence = "policy version %d (step %d) is active, installed in %.2f s"
        log.info(sentence, version, policy.step, install_s, extra=about)
        await self._clean_up()
        return policy

    async def active(self) -> Policy:
        """The active version."""
        return next(p for p in reversed(await self._buffer.policies()) if p.state is PolicyState.ACTIVE)

    async def restore(self) -> None:
        """After a start: bring the replicas from the model as started to the version that was active."""
        policy = await self.active()
        if policy.version == 0:
            return
        if not await asyncio.to_thread(Path(policy.path).is_dir):
            raise WeightsError(
                f"policy version {policy.version} was active but {policy.path} is gone; put the folder back, or start "
                "a new run under another run.name"
            )
        await self._pool.install(Path(policy.path), policy.version)

    def _inside_root(self, path: str) -> Path:
        root = self._root.resolve()
        try:
            folder = (root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:  # no such folder, no path at all, a loop of links
            raise WeightsError("the path is not a folder under the weights root; publish a finished folder") from error
        if not folder.is_relative_to(root) or folder == root:
            raise WeightsError(f"{path} is not under the weights root {root}; publish a folder below it")
        if not folder.is_dir():
            raise WeightsError(f"{folder} is not a folder that the service can read; publish a finished folder")
        return folder

    def _under_root(self, paths: set[str]) -> set[str]:
        root = self._root.resolve()
        return {path for path in paths if (folder := Path(path).resolve()).is_relative_to(root) and folder != root}

    async def _clean_up(self) -> None:
        policies = await self._buffer.policies()
        installed = [p for p in policies if p.state in (PolicyState.ACTIVE, PolicyState.SUPERSEDED) and p.path]
        waiting = [p for p in policies if p.state in (PolicyState.QUEUED, PolicyState.INSTALLING)]
        kept = {p.path for p in [*installed[-self._num_kept - 1 :], *waiting]}
        ours = await asyncio.to_thread(self._under_root, {p.path for p in policies if p.path})
        gone = ours - kept - self._deleted
        for path in gone:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        self._deleted |= gone


def _holds(policy: Policy, manifest: WeightsManifest) -> bool:
    """Whether the policy's folder is there with these very files."""
    try:
        return bool(policy.path) and read_manifest(Path(policy.path)).files == manifest.files
    except WeightsError:
        return False
