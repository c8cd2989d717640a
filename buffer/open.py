"""Opening the buffer that a run's settings name."""

from dataclasses import dataclass, field

from pydantic import SecretStr

from buffer.codec import BYTES_PER_TOKEN
from buffer.connection import check_run, check_server, make_run, open_link, warn_of_early_answers
from buffer.embedded import EmbeddedRedis
from buffer.interface import Limits
from buffer.keys import Keys
from buffer.link import Link
from buffer.redis_buffer import RedisBuffer
from buffer.scripts import Store
from buffer.sentinel import SentinelNodes
from protocol.errors import NotFoundError
from protocol.settings.run import RunSettings
from protocol.settings.service import EMBEDDED, SentinelSettings

TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")  # as redis-py calls them


@dataclass(frozen=True, slots=True)
class Address:
    """Where the run's Redis is and who logs in."""

    url: str
    password: str | None
    username: str | None
    cluster: bool
    sentinel: SentinelNodes | None = None
    tls: dict[str, str] = field(default_factory=dict[str, str])


async def open_buffer(settings: RunSettings, *, create: bool = True) -> tuple[RedisBuffer, EmbeddedRedis | None]:
    """The run's buffer, and the server if `buffer.url` is "embedded": close the one, then stop the other.

    Call it from the main thread: the embedded server ends with the thread that starts it. With `create` False a run
    that isn't there stays so: NotFoundError.
    """
    address, server = _find_server(settings, create)
    try:
        link = await _connect(settings, address)
        try:
            await (make_run if create else check_run)(Store(link))
            if create:
                await warn_of_early_answers(Store(link), address.url)
        except BaseException:
            await link.close()
            raise
    except BaseException:
        _stop(server)
        raise
    return RedisBuffer(Store(link, settings.buffer.patience_s), limits_of(settings)), server


async def open_store(settings: RunSettings) -> tuple[Store, EmbeddedRedis | None]:
    """A store on the Redis of a run that isn't there yet: close its link, then stop the server."""
    address, server = _find_server(settings, create=True)
    try:
        return Store(await _connect(settings, address)), server
    except BaseException:
        _stop(server)
        raise


async def _connect(settings: RunSettings, address: Address) -> Link:
    """A link to a Redis that is fit."""
    link = open_link(
        address.url,
        address.password,
        address.username,
        settings.buffer.max_connections,
        address.cluster,
        Keys(settings.buffer.namespace, settings.run.name),
        address.sentinel,
        address.tls,
    )
    try:
        await check_server(link, address.url, settings.buffer.wait_aof)
    except BaseException:
        await link.close()
        raise
    link.wait_replicas = settings.buffer.sentinel.wait_replicas
    return link


def limits_of(settings: RunSettings) -> Limits:
    """What may be admitted: the caps, and the bytes that a response of full length takes."""
    sample_bytes = settings.data.max_response_length * BYTES_PER_TOKEN
    buffer = settings.buffer
    return Limits(buffer.max_groups, buffer.max_bytes, sample_bytes, buffer.max_pool_bytes)


def _find_server(settings: RunSettings, create: bool) -> tuple[Address, EmbeddedRedis | None]:
    buffer = settings.buffer
    if buffer.url != EMBEDDED:
        files = {name: getattr(buffer, name) for name in TLS_FILES}
        tls = {name: str(path) for name, path in files.items() if path is not None}
        login = (_plain(buffer.password), buffer.username)
        return Address(buffer.url, *login, buffer.cluster, _sentinels(buffer.sentinel), tls), None
    folder = settings.run_dir / "redis"
    if not create and not folder.is_dir():
        raise NotFoundError(f"{folder} is not there: start from the folder where the run was started, or see run.dir")
    server = EmbeddedRedis(folder).start()
    return Address(server.url, None, None, cluster=False), server


def _sentinels(given: SentinelSettings) -> SentinelNodes | None:
    if not given.nodes:
        return None
    return SentinelNodes(given.addresses, given.master, _plain(given.password), given.username)


def _plain(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret else None


def _stop(server: EmbeddedRedis | None) -> None:
    if server is not None:
        server.stop()
