"""Opening the buffer that a run's settings name."""

from buffer.embedded import EmbeddedRedis
from buffer.interface import ContinuationBuffer
from buffer.redis_buffer import RedisBuffer
from protocol.settings.run import RunSettings
from protocol.settings.service import EMBEDDED


async def open_buffer(settings: RunSettings) -> tuple[ContinuationBuffer, EmbeddedRedis | None]:
    """The run's buffer, and the server if `buffer.url` is "embedded": close the one, then stop the other.

    Call it from the main thread: the embedded server ends with the thread that starts it.
    """
    buffer = settings.buffer
    if buffer.url != EMBEDDED:
        password = buffer.password.get_secret_value() if buffer.password else None
        return await _connect(settings, buffer.url, password, buffer.username), None
    server = EmbeddedRedis(settings.run_dir / "redis").start()
    try:
        return await _connect(settings, server.url, None, None), server
    except BaseException:
        server.stop()
        raise


async def _connect(settings: RunSettings, url: str, password: str | None, username: str | None) -> RedisBuffer:
    return await RedisBuffer.connect(
        url,
        password=password,
        username=username,
        namespace=settings.buffer.namespace,
        run=settings.run.name,
        max_connections=settings.buffer.max_connections,
    )
