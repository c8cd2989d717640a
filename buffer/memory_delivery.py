"""Delivery, trainer sessions and policies of a `MemoryStore`."""

from collections.abc import Callable
from dataclasses import replace

from buffer.checks import check_batch_size
from buffer.interface import BatchLease, OpenedTrainer
from buffer.memory_store import KEPT_POLICIES, MemoryStore
from protocol.errors import ConflictError, NotFoundError
from protocol.messages import Policy, PolicyState
from protocol.states import GroupState


class MemoryDelivery:
    """READY → LEASED → CONSUMED, and the versions; `owned` gives the store to the service that owns it."""

    def __init__(self, store: MemoryStore, owned: Callable[[], MemoryStore]) -> None:
        self.store = store
        self._owned = owned

    def open_trainer(self, durable_step: int) -> OpenedTrainer:
        """See `ContinuationBuffer.open_trainer`; a checkpoint ahead of the run moves the run's steps on."""
        store = self._owned()
        if durable_step < store.durable_step:
            raise ConflictError(
                f"steps up to {store.durable_step} are acknowledged, the checkpoint ends at step {durable_step}: "
                f"restore the checkpoint of step {store.durable_step} or a later one"
            )
        released = store.release(durable_step)
        store.trained_step = durable_step
        store.leased_step = max(store.leased_step, durable_step)
        store.trainer_epoch += 1
        return OpenedTrainer(store.trainer_epoch, durable_step, tuple(released))

    def offer(self, num_groups: int) -> bool:
        """See `ContinuationBuffer.offer`."""
        check_batch_size(num_groups)
        store = self._owned()
        spoken_for = store.offered * max(store.offer_size, num_groups)
        surplus = len(store.ready()) - spoken_for - num_groups
        if surplus < 0:
            return False
        store.counters["surplus_groups_kept"] += surplus
        store.offered, store.offer_size = store.offered + 1, num_groups
        return True

    def resize_offers(self, num_groups: int) -> int:
        """See `ContinuationBuffer.resize_offers`."""
        check_batch_size(num_groups)
        store = self._owned()
        store.offer_size = num_groups
        store.withdraw()
        return store.offered

    def lease_batch(self, step: int, trainer_epoch: int, num_groups: int) -> BatchLease | None:
        """See `ContinuationBuffer.lease_batch`."""
        check_batch_size(num_groups)
        store = self._owned()
        store.check_trainer(trainer_epoch)
        if step in store.leases:
            return next(lease for lease in store.current_leases() if lease.step == step)
        if step <= store.durable_step:
            raise ConflictError(f"step {step} is durable: ask for {store.leased_step + 1}")
        if step != store.leased_step + 1:
            raise ConflictError(
                f"the last leased step is {store.leased_step}: ask for step {store.leased_step + 1}, not {step}"
            )
        groups = store.ready()[:num_groups]
        if store.offered == 0 or len(groups) < num_groups:
            return None
        for group in groups:
            store.move_group(group, GroupState.LEASED)
            group.step = step
        known_step = max(store.newest_step, store.trained_step)
        version = store.newest_version + max(step - 1 - known_step, 0)
        store.leases[step] = BatchLease(step, tuple(g.group_id for g in groups), version, False, None)
        store.leased_step = step
        store.offered -= 1
        store.withdraw()
        return replace(store.leases[step], trained=step <= store.trained_step)

    def record_spool(self, step: int, sha256: str) -> None:
        """See `ContinuationBuffer.record_spool`."""
        store = self._owned()
        lease = store.leases.get(step)
        if lease is None:
            raise NotFoundError(f"step {step} has no lease: lease it first")
        if lease.sha256 is not None and lease.sha256 != sha256:
            raise ConflictError(f"step {step} was spooled as {lease.sha256}: serve those bytes")
        store.leases[step] = replace(lease, sha256=sha256)
        for group_id in lease.group_ids:
            for sample in store.groups[group_id].samples:
                sample.pieces.clear()

    def mark_trained(self, step: int, trainer_epoch: int) -> int:
        """See `ContinuationBuffer.mark_trained`."""
        store = self._step_of(step, trainer_epoch)
        store.trained_step = max(store.trained_step, step)
        return store.trained_step

    def ack(self, step: int, trainer_epoch: int) -> list[BatchLease]:
        """See `ContinuationBuffer.ack`."""
        store = self._step_of(step, trainer_epoch)
        if step <= store.durable_step:
            return []
        released = store.release(step)
        store.trained_step = max(store.trained_step, step)
        return released

    # Policies

    def publish_policy(self, step: int, path: str, trainer_epoch: int) -> Policy:
        """See `ContinuationBuffer.publish_policy`."""
        store = self._owned()
        store.check_trainer(trainer_epoch)
        for policy in store.policies.values():
            if policy.version > 0 and (policy.trainer_epoch, policy.step) == (trainer_epoch, step):
                if policy.state is PolicyState.FAILED:
                    policy.state, policy.path = PolicyState.QUEUED, path
                    policy.error = policy.install_s = None
                return policy.model_copy()
        store.newest_version += 1
        store.newest_step = step
        version = store.newest_version
        store.policies[version] = Policy(
            version=version, step=step, trainer_epoch=trainer_epoch, path=path, state=PolicyState.QUEUED
        )
        if version - KEPT_POLICIES != store.active_version:
            store.policies.pop(version - KEPT_POLICIES, None)
        return store.policies[version].model_copy()

    def set_policy_state(self, version: int, state: PolicyState, error: str | None, install_s: float | None) -> Policy:
        """See `ContinuationBuffer.set_policy_state`."""
        store = self._owned()
        policy = store.policies.get(version)
        if policy is None:
            raise NotFoundError(f"there is no policy version {version}: publish it first")
        if state is PolicyState.ACTIVE and version != store.active_version:
            if store.active_version in store.policies:
                store.policies[store.active_version].state = PolicyState.SUPERSEDED
            store.active_version = version
        policy.state, policy.error, policy.install_s = state, error, install_s
        return policy.model_copy()

    def policies(self) -> list[Policy]:
        """See `ContinuationBuffer.policies`."""
        return [policy.model_copy() for _, policy in sorted(self.store.policies.items())]

    def _step_of(self, step: int, trainer_epoch: int) -> MemoryStore:
        store = self._owned()
        store.check_trainer(trainer_epoch)
        if step > store.leased_step:
            raise ConflictError(f"step {step} was never leased, the last one is {store.leased_step}: lease it first")
        return store
