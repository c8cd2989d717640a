"""Opening the buffer that a run's settings name."""

from dataclasses import dataclass

from buffer.codec import BYTES_PER_TOKEN
from buffer.connection import check_server, open_link
from buffer.embedded import EmbeddedRedis
from buffer.interface import Limits
from buffer.keys import Keys
from buffer.redis_buffer import RedisBuffer
from buffer.scripts import Store
from protocol.errors import NotFoundError
from protocol.settings.run import RunSettings
from protocol.settings.service import EMBEDDED


@dataclass(frozen=True, slots=True)
class Address:
    """Where the run's Redis is and who logs in."""

    url: str
    password: str | None
    username: str | None
    cluster: bool


async def open_buffer(settings: RunSettings, *, create: bool = True) -> tuple[RedisBuffer, EmbeddedRedis | None]:
    """The run's buffer, and the server if `buffer.url` is "embedded": close the one, then stop the other.

    Call it from the main thread: the embedded server ends with the thread that starts it. With `create` False a run
    that isn't there stays so: NotFoundError.
    """
    address, server = _find_server(settings, create)
    buffer = settings.buffer
    try:
        opened = await RedisBuffer.connect(
            address.url,
            password=address.password,
            username=address.username,
            namespace=buffer.namespace,
            run=settings.run.name,
            max_connections=buffer.max_connections,
            patience_s=buffer.patience_s,
            wait_aof=buffer.wait_aof,
            cluster=address.cluster,
            limits=limits_of(settings),
            create=create,
        )
    except BaseException:
        _stop(server)
        raise
    return opened, server


async def open_store(settings: RunSettings) -> tuple[Store, EmbeddedRedis | None]:
    """A store on the Redis of a run that isn't there yet: close its link, then stop the server."""
    address, server = _find_server(settings, create=True)
    keys = Keys(settings.buffer.namespace, settings.run.name)
    try:
        link = open_link(
            address.url, address.password, address.username, settings.buffer.max_connections, address.cluster, keys
        )
        try:
            await check_server(link, address.url, settings.buffer.wait_aof)
        except BaseException:
            await link.close()
            raise
    except BaseException:
        _stop(server)
        raise
    return Store(link), server


def limits_of(settings: RunSettings) -> Limits:
    """What may be admitted: the caps, and the bytes that a response of full length takes."""
    sample_bytes = settings.data.max_response_length * BYTES_PER_TOKEN
    return Limits(settings.buffer.max_groups, settings.buffer.max_bytes, sample_bytes)


def _find_server(settings: RunSettings, create: bool) -> tuple[Address, EmbeddedRedis | None]:
    buffer = settings.buffer
    if buffer.url != EMBEDDED:
        password = buffer.password.get_secret_value() if buffer.password else None
        return Address(buffer.url, password, buffer.username, buffer.cluster), None
    folder = settings.run_dir / "redis"
    if not create and not folder.is_dir():
        raise NotFoundError(f"{folder} is not there: start from the folder where the run was started, or see run.dir")
    server = EmbeddedRedis(folder).start()
    return Address(server.url, None, None, cluster=False), server


def _stop(server: EmbeddedRedis | None) -> None:
    if server is not None:
        server.stop()
