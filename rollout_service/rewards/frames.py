"""What the service and a scorer's worker say to each other: JSON behind a four-byte length, over two pipes.

Always true: a frame is plain ASCII JSON, so that text with lone surrogates survives, and nothing that is read is ever
executed. A reply beyond `MAX_REPLY_BYTES` means that the stream is out of step; the worker is then given up.
"""

import asyncio
import json
import struct
from typing import IO, Any

HEADER = struct.Struct("!I")
MAX_REPLY_BYTES = 4 << 20  # replies are numbers and short messages: more is not one of ours
MAX_MESSAGE_CHARS = 500  # of an exception: enough to see what it was, and it is stored with the sample


class FrameError(Exception):
    """What was read is not a frame; the stream is out of step."""


def encode_frame(message: dict[str, Any]) -> bytes:
    """A frame of `message`."""
    body = json.dumps(message).encode("ascii")
    return HEADER.pack(len(body)) + body


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next frame of a blocking stream; None when it has ended."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    size = HEADER.unpack(header)[0]
    body = stream.read(size)
    return _decode(body) if len(body) == size else None


async def read_reply(stream: asyncio.StreamReader) -> dict[str, Any]:
    """The next frame of a worker. Raises `IncompleteReadError` at its end, `FrameError` for anything else."""
    size = HEADER.unpack(await stream.readexactly(HEADER.size))[0]
    if size > MAX_REPLY_BYTES:
        raise FrameError(f"a reply of {size} bytes")
    return _decode(await stream.readexactly(size))


def describe(error: BaseException) -> str:
    """Type and message of an exception on one short line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "…"


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise FrameError("a frame that is not JSON") from error
    if not isinstance(message, dict):
        raise FrameError("a frame that is not an object")
    return message
