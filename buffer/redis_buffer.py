"""The continuation buffer on Redis: what the service runs on.

Always true: each transition is one Lua script, in which Redis checks epochs, attempt and lengths before it writes; the
scripts of a run touch the keys of that run alone (`{namespace:run}:…`), so many runs share a Redis; and nothing is
kept here between calls but the service epoch, so that a new process goes on where the old one died. A call that gets no
answer is sent again while the buffer's patience lasts; Redis recognises it, and it has happened once.
"""

from collections.abc import Mapping, Sequence

from buffer.admission import Admission
from buffer.connection import check_run, check_server, make_run, open_link
from buffer.delivery import Delivery
from buffer.epochs import EpochKeeper
from buffer.generation import Generation
from buffer.interface import (
    BatchLease,
    CursorMove,
    GroupBrief,
    Limits,
    NewGroup,
    OpenedTrainer,
    Recount,
    SampleBrief,
    SampleLease,
    Snapshot,
)
from buffer.keys import Keys
from buffer.policies import Policies
from buffer.reading import Reading
from buffer.recount import Recounter
from buffer.scripts import Store
from protocol.messages import Policy, PolicyState, SettingsChange
from protocol.samples import Group, Reward, Sample, Segment
from protocol.states import DropReason, FailReason, FinishReason, GroupState

DEFAULT_MAX_CONNECTIONS = 32  # as in `buffer.max_connections`


class RedisBuffer:
    """A `ContinuationBuffer` on Redis ≥ 7 or Valkey; make it with `connect`."""

    def __init__(self, store: Store, limits: Limits | None = None) -> None:
        self._store = store
        self._limits = limits or Limits()
        self._is_view = False
        self._admission = Admission(store, self._limits)
        self._generation = Generation(store, self._admission)
        self._delivery = Delivery(store)
        self._policies = Policies(store)
        self._reading = Reading(store)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        password: str | None = None,
        username: str | None = None,
        namespace: str = "april",
        run: str = "april",
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        patience_s: float = 0.0,
        wait_aof: bool = True,
        cluster: bool = False,
        limits: Limits | None = None,
        create: bool = True,
    ) -> "RedisBuffer":
        """Connect to a run's buffer, which is made if it isn't there, unless `create` is False.

        `patience_s`: how long later calls wait for a Redis that doesn't answer; connecting itself doesn't wait.
        `wait_aof`: whether leases, acks and policy activations wait for the AOF, where the server can.
        `cluster`: whether the address is that of a node of a Redis in Cluster mode.

        Raises RedisUnfitError if this Redis evicts, refuses the password, or holds data of another schema;
        UnavailableError if it doesn't answer; SettingsError for an address or a name that can't be used; NotFoundError
        if the run isn't there and may not be made.
        """
        link = open_link(url, password, username, max_connections, cluster, Keys(namespace, run))
        try:
            await check_server(link, url, wait_aof)
            await (make_run if create else check_run)(Store(link))
        except BaseException:
            await link.close()
            raise
        return cls(Store(link, patience_s), limits)

    @property
    def waiting_since(self) -> float | None:
        """See `ContinuationBuffer.waiting_since`."""
        return self._store.link.outage.waiting_since

    @property
    def store(self) -> Store:
        """What it reads and writes through; for `buffer.transfer`."""
        return self._store

    @property
    def waits_for_aof(self) -> bool:
        """Whether leases, acks and policy activations are on disk when they are answered."""
        return self._store.link.wait_aof

    def impatient(self) -> "RedisBuffer":
        """See `ContinuationBuffer.impatient`."""
        view = RedisBuffer(self._store.impatient(), self._limits)
        view._is_view = True
        return view

    # Owners

    async def claim_service(
        self, service_id: str, identity: Mapping[str, str] | None = None, epochs: EpochKeeper | None = None
    ) -> int:
        """See `ContinuationBuffer.claim_service`."""
        return await self._generation.claim_service(service_id, identity or {}, epochs)

    async def open_trainer(self, durable_step: int) -> OpenedTrainer:
        """See `ContinuationBuffer.open_trainer`."""
        return await self._delivery.open_trainer(durable_step)

    # Generation

    async def admit(self, groups: Sequence[NewGroup], version: int, cursor: CursorMove) -> list[Group]:
        """See `ContinuationBuffer.admit`."""
        admitted, with_pooled = await self._admission.admit(groups, version, cursor)
        found = {group.group_id: group for group in await self._reading.groups(sorted(with_pooled))}
        return [found.get(group.group_id, group) for group in admitted]

    async def start(self, sample_ids: Sequence[str], worker: str, lease_s: float) -> list[SampleLease]:
        """See `ContinuationBuffer.start`."""
        return await self._generation.start(sample_ids, worker, lease_s)

    async def renew(self, leases: Sequence[SampleLease], lease_s: float) -> list[SampleLease]:
        """See `ContinuationBuffer.renew`."""
        return await self._generation.renew(leases, lease_s)

    async def park_expired(self, limit: int) -> list[str]:
        """See `ContinuationBuffer.park_expired`."""
        return await self._generation.park_expired(limit)

    async def append(self, lease: SampleLease, piece: Segment) -> None:
        """See `ContinuationBuffer.append`."""
        await self._generation.append(lease, piece)

    async def park(self, lease: SampleLease, piece: Segment | None) -> None:
        """See `ContinuationBuffer.park`."""
        await self._generation.park(lease, piece)

    async def finish(self, lease: SampleLease, piece: Segment | None, reason: FinishReason) -> None:
        """See `ContinuationBuffer.finish`."""
        await self._generation.finish(lease, piece, reason)

    async def record_failure(self, lease: SampleLease, error: str, max_failures: int) -> GroupState | None:
        """See `ContinuationBuffer.record_failure`."""
        return await self._generation.record_failure(lease, error, max_failures)

    async def score(self, sample_id: str, reward: Reward, min_scored: int) -> GroupState:
        """See `ContinuationBuffer.score`."""
        return await self._generation.score(sample_id, reward, min_scored)

    async def fail(self, sample_id: str, reason: FailReason, error: str, min_scored: int) -> GroupState:
        """See `ContinuationBuffer.fail`."""
        return await self._generation.fail(sample_id, reason, error, min_scored)

    async def drop(self, group_id: str, reason: DropReason) -> None:
        """See `ContinuationBuffer.drop`."""
        await self._generation.drop(group_id, reason)

    async def expire_pooled(self, before_version: int) -> int:
        """See `ContinuationBuffer.expire_pooled`."""
        return await self._admission.expire_pooled(before_version)

    # Delivery

    async def offer(self, num_groups: int) -> bool:
        """See `ContinuationBuffer.offer`."""
        return await self._delivery.offer(num_groups)

    async def resize_offers(self, num_groups: int) -> int:
        """See `ContinuationBuffer.resize_offers`."""
        return await self._delivery.resize_offers(num_groups)

    async def lease_batch(self, step: int, trainer_epoch: int, num_groups: int) -> BatchLease | None:
        """See `ContinuationBuffer.lease_batch`."""
        return await self._delivery.lease_batch(step, trainer_epoch, num_groups)

    async def record_spool(self, step: int, sha256: str) -> None:
        """See `ContinuationBuffer.record_spool`."""
        await self._delivery.record_spool(step, sha256)

    async def mark_trained(self, step: int, trainer_epoch: int) -> int:
        """See `ContinuationBuffer.mark_trained`."""
        return await self._delivery.mark_trained(step, trainer_epoch)

    async def ack(self, step: int, trainer_epoch: int) -> list[BatchLease]:
        """See `ContinuationBuffer.ack`."""
        return await self._delivery.ack(step, trainer_epoch)

    # Policies

    async def publish_policy(self, step: int, path: str, trainer_epoch: int) -> Policy:
        """See `ContinuationBuffer.publish_policy`."""
        return await self._policies.publish(step, path, trainer_epoch)

    async def set_policy_state(
        self, version: int, state: PolicyState, error: str | None, install_s: float | None
    ) -> Policy:
        """See `ContinuationBuffer.set_policy_state`."""
        return await self._policies.set_state(version, state, error, install_s)

    async def policies(self) -> list[Policy]:
        """See `ContinuationBuffer.policies`."""
        return await self._policies.all()

    # Reading

    async def snapshot(self) -> Snapshot:
        """See `ContinuationBuffer.snapshot`."""
        return await self._reading.snapshot()

    async def open_samples(self) -> list[SampleBrief]:
        """See `ContinuationBuffer.open_samples`."""
        return await self._reading.open_samples()

    async def open_groups(self) -> list[GroupBrief]:
        """See `ContinuationBuffer.open_groups`."""
        return await self._reading.open_groups()

    async def count_longer(self, num_tokens: int) -> int:
        """See `ContinuationBuffer.count_longer`."""
        return await self._reading.count_longer(num_tokens)

    async def samples(self, sample_ids: Sequence[str]) -> list[Sample]:
        """See `ContinuationBuffer.samples`."""
        return await self._reading.samples(sample_ids)

    async def groups(self, group_ids: Sequence[str]) -> list[Group]:
        """See `ContinuationBuffer.groups`."""
        return await self._reading.groups(group_ids)

    async def batch_leases(self) -> list[BatchLease]:
        """See `ContinuationBuffer.batch_leases`."""
        return await self._delivery.batch_leases()

    async def recount(self) -> Recount:
        """See `ContinuationBuffer.recount`."""
        return await Recounter(self._store).recount()

    # Operator

    async def record_change(self, change: SettingsChange) -> None:
        """See `ContinuationBuffer.record_change`."""
        await self._policies.record_change(change)

    async def changes(self) -> list[SettingsChange]:
        """See `ContinuationBuffer.changes`."""
        return await self._policies.changes()

    async def close(self) -> None:
        """See `ContinuationBuffer.close`."""
        if not self._is_view:
            await self._store.link.close()
