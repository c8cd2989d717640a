"""Settings of the service process, its Redis, its weights and its delivery."""

from pathlib import Path

from pydantic import Field, SecretStr, field_validator, model_validator

from protocol.settings.base import Section

EMBEDDED = "embedded"
MAX_PORT = 65536


class ServiceSettings(Section):
    """The HTTP side of the rollout service."""

    host: str = "127.0.0.1"
    """Address to bind. Beyond loopback a `token` is required."""
    port: int = Field(default=8040, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    token: SecretStr | None = Field(default=None, min_length=1)
    """Bearer token for every route but health and readiness; better given as APRIL_SERVICE__TOKEN."""
    dashboard: bool = True
    """Serve the page at /dashboard."""
    metrics: bool = True
    """Observe samples and rounds for `/metrics`; without it, it tells the state at the time of the scrape alone."""
    root_path: str = Field(default="", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    """Path prefix under which a proxy shows this service, such as /april."""
    allowed_hosts: list[str] = Field(default_factory=list[str])
    """Host names, besides this machine's own, under which a service without a token may be reached."""
    watch: bool = True
    """Keep what the pictures, the verdict and the waits of /dashboard, /v1/pictures and /v1/status need."""
    max_wait_s: float = Field(default=60.0, ge=0)
    """Longest wait of one long poll."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """Largest JSON request body."""


class SentinelSettings(Section):
    """Sentinels that name the master; `buffer.url` then gives scheme, login and database, its host is not used."""

    nodes: list[str] = Field(default_factory=list[str])
    """`HOST:PORT` of each Sentinel, three or more; empty: no Sentinel."""
    master: str = Field(default="mymaster", min_length=1)
    """Name under which the Sentinels watch the master."""
    password: SecretStr | None = None
    """Password of the Sentinels; better given as APRIL_BUFFER__SENTINEL__PASSWORD."""
    username: str | None = None
    """ACL user of the Sentinels."""
    wait_replicas: int = Field(default=0, ge=0)
    """Leases, acks and policy activations also wait until this many replicas have them in their AOF (`wait_aof`)."""

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, nodes: list[str]) -> list[str]:
        for node in nodes:
            host, _, port = node.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < MAX_PORT:
                raise ValueError(f"{node!r} is not HOST:PORT of a Sentinel, such as 10.0.0.5:26379")
        return nodes

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """The Sentinels as (host, port)."""
        parts = (node.rpartition(":") for node in self.nodes)
        return tuple((host.strip("[]"), int(port)) for host, _, port in parts)


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
    sentinel: SentinelSettings = Field(default_factory=SentinelSettings)
    """Sentinels to ask for the master."""
    ssl_ca_certs: Path | None = None
    """File of certificates that Redis' own is checked against, with `rediss://`; by default the system's."""
    ssl_certfile: Path | None = None
    """Certificate that this service shows to Redis, with `rediss://`."""
    ssl_keyfile: Path | None = None
    """Key of `ssl_certfile`."""
    max_groups: int = Field(default=100_000, ge=1)
    """Most groups that are admitted and not yet trained."""
    max_bytes: int = Field(default=0, ge=0)
    """Most bytes of tokens that groups not yet trained may need, at full response length; 0 is no cap."""
    max_pool_bytes: int = Field(default=1 << 30, ge=0)
    """Most bytes of samples that wait for their prompt to come up again (`rollout.samples_ratio`); the oldest go."""

    @model_validator(mode="after")
    def _check_address(self) -> "BufferSettings":
        scheme = self.url.partition("://")[0]
        if self.sentinel.nodes and (self.cluster or scheme not in ("redis", "rediss")):
            raise ValueError(
                "buffer.sentinel.nodes needs buffer.cluster = false and a redis:// or rediss:// buffer.url, whose host "
                "is not used"
            )
        if any((self.ssl_ca_certs, self.ssl_certfile, self.ssl_keyfile)) and scheme != "rediss":
            raise ValueError("buffer.ssl_ca_certs, ssl_certfile and ssl_keyfile need a rediss:// buffer.url")
        if self.sentinel.wait_replicas and not (self.sentinel.nodes and self.wait_aof):
            raise ValueError("buffer.sentinel.wait_replicas needs buffer.sentinel.nodes and buffer.wait_aof = true")
        return self


class WeightsSettings(Section):
    """Policy versions on disk."""

    root: Path | None = None
    """Published weights must lie under this folder; by default `weights` in the run's folder."""
    num_kept: int = Field(default=2, ge=2)
    """Published versions kept on disk besides the active one (the one before is needed to undo a failed install)."""


class TraceSettings(Section):
    """What the service writes down for `april tune` and `april simulate`: in `trace` in the run's folder."""

    enabled: bool = True
    """Write a trace: lengths, times and rewards of samples, and when rounds began, were cut and offered; no text."""
    max_file_bytes: int = Field(default=64 << 20, ge=64 << 10)
    """A file that has grown to this is followed by a new one."""
    max_files: int = Field(default=16, ge=2)
    """Files that are kept; the oldest are deleted."""


class DeliverySettings(Section):
    """How leased batches are kept for replay."""

    spool_dir: Path | None = None
    """Encoded batches until they are durable at the trainer; by default `spool` in the run's folder."""
