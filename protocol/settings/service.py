"""Settings of the service process, its Redis, its weights and its delivery."""

from pathlib import Path

from pydantic import Field, SecretStr

from protocol.settings.base import Section

EMBEDDED = "embedded"


class ServiceSettings(Section):
    """The HTTP side of the rollout service."""

    host: str = "127.0.0.1"
    """Address to bind. Beyond loopback a `token` is required."""
    port: int = Field(default=8040, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    token: SecretStr | None = Field(default=None, min_length=1)
    """Bearer token for every route but health and readiness; better given as APRIL_SERVICE__TOKEN."""
    max_wait_s: float = Field(default=60.0, ge=0)
    """Longest wait of one long poll."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """Largest JSON request body."""


class BufferSettings(Section):
    """The Redis that keeps the continuation buffer."""

    url: str = EMBEDDED
    """`redis://`, `rediss://` or `unix://` address; `embedded` starts a redis-server in the run's folder."""
    password: SecretStr | None = None
    """Password of Redis; better given as APRIL_BUFFER__PASSWORD."""
    username: str | None = None
    """ACL user of Redis."""
    namespace: str = "april"
    """Prefix of every key."""
    sample_lease_s: float = Field(default=30.0, gt=0)
    """A running sample whose lease is not renewed for this long counts as orphaned."""
    max_connections: int = Field(default=32, ge=2)
    """Connections to Redis."""
    patience_s: float = Field(default=600.0, ge=0)
    """How long the service waits for a Redis that is away, slow or full before it gives up and ends."""
    wait_aof: bool = True
    """Leases, acks and policy activations wait until Redis' AOF has them on disk (WAITAOF, Redis 7.2 or Valkey)."""
    cluster: bool = False
    """`url` names a node of a Redis in Cluster mode; all keys of the run lie in one slot."""
    max_groups: int = Field(default=100_000, ge=1)
    """Most groups that are admitted and not yet trained."""
    max_bytes: int = Field(default=0, ge=0)
    """Most bytes of tokens that groups not yet trained may need, at full response length; 0 is no cap."""


class WeightsSettings(Section):
    """Policy versions on disk."""

    root: Path | None = None
    """Published weights must lie under this folder; by default `weights` in the run's folder."""
    num_kept: int = Field(default=2, ge=2)
    """Published versions kept on disk besides the active one (the one before is needed to undo a failed install)."""


class DeliverySettings(Section):
    """How leased batches are kept for replay."""

    spool_dir: Path | None = None
    """Encoded batches until they are durable at the trainer; by default `spool` in the run's folder."""
