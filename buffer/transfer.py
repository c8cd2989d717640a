"""A run's whole state in a file, to move it to another Redis.

The file is text, one JSON object a line, UTF-8:

    {"format": "april-buffer", "version": 1, "schema": 3, "namespace": "april", "run": "april"}
    {"key": "meta", "type": "hash", "items": [["cursor", "12"], ...]}
    {"key": "ready", "type": "zset", "items": [["g000000007", "12884901889"], ...]}
    {"key": "t:g000000007.000", "type": "list", "items": [{"base64": "..."}, ...]}
    {"num_keys": 3, "sha256": "..."}

Keys are without the run's prefix, in order of their names. A string that isn't UTF-8 is written as `{"base64": ...}`.
The last line counts the keys and has the SHA-256 of all bytes before it. `schema` is the one of keys and bytes
(`buffer.connection`), `version` the one of this format; either unknown is refused, a schema that is taken over is not.

Always true: an exported state stood in Redis at one moment; an import writes into a run that isn't there or whose own
import was cut short, and nobody can open that run before the import is whole.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from redis.asyncio import Redis
from redis.exceptions import WatchError

from buffer.connection import SCHEMA_VERSION, TAKEN_OVER
from buffer.keys import expected_kind
from buffer.scripts import Arg, Store
from protocol.errors import ConflictError, DataError, NotFoundError

FORMAT, VERSION = "april-buffer", 1
IMPORTING = "importing"  # the schema of a run whose import isn't whole; as in lua/initialise.lua
READS = {"hash": ("HGETALL",), "list": ("LRANGE", 0, -1), "zset": ("ZRANGE", 0, -1, "WITHSCORES")}
MAX_EXPORTS = 3  # a run that changes during each of them is being worked on
KEYS_AT_ONCE = 200  # keys of one read: with samples of 8k tokens some 13 MB
ITEMS_AT_ONCE = 500  # items of one write, so that Redis answers others in between


def kind_of(name: str) -> str:
    """The Redis type of a run's key; raises DataError for a key that no run has."""
    kind = expected_kind(name)
    if kind is not None:
        return kind
    raise DataError(f"{name!r} is no key of a run: run `april buffer verify`")


async def export_run(store: Store, path: Path) -> int:
    """Write the run to `path`; the number of keys. Raises ConflictError if the run changes all the time."""
    partial = path.with_name(path.name + ".partial")
    for _ in range(MAX_EXPORTS):
        with partial.open("wb") as file:
            num_keys = await store.link.use(lambda client, file=file: _export(store, client, file))
        if num_keys is not None:
            partial.replace(path)
            return num_keys
    partial.unlink()
    raise ConflictError("the run changes while it is exported: drain its service and stop it first")


async def import_run(store: Store, path: Path) -> int:
    """Write the run in `path` to Redis; the number of keys.

    Raises DataError for a file that isn't whole or of an unknown version, ConflictError if the run is there already.
    """
    with path.open("rb") as file:
        num_keys = _check_file(file)
    await _take(store)
    with path.open("rb") as file:
        for line in _lines(file):
            if "key" in line:
                await _write(store, line["key"], [_decode(item) for item in line["items"]])
    await store.one("HSET", store.keys.named("meta"), "schema", SCHEMA_VERSION)
    await store.sync()
    return num_keys


async def _export(store: Store, client: Redis, file: BinaryIO) -> int | None:
    """The number of keys, or None if somebody wrote meanwhile: every transition writes one of the run's own keys."""
    async with client.pipeline(transaction=True) as guard:
        await guard.watch(*store.keys.of_run())
        names = await store.all_keys()
        if "meta" not in names:
            raise NotFoundError(f"there is no run {store.keys.run} in this Redis: see run.name and buffer.namespace")
        writer = _Writer(file)
        writer.write({"format": FORMAT, "version": VERSION, "schema": SCHEMA_VERSION, **_names(store)})
        for first in range(0, len(names), KEYS_AT_ONCE):
            part = names[first : first + KEYS_AT_ONCE]
            for name, reply in zip(part, await store.read(*(_read(store, n) for n in part)), strict=True):
                writer.write({"key": name, "type": kind_of(name), "items": _items(kind_of(name), reply)})
        writer.write({"num_keys": len(names), "sha256": writer.digest.hexdigest()})
        guard.multi()
        guard.execute_command("HLEN", store.keys.named("meta"))
        try:
            await guard.execute()
        except WatchError:
            return None
        return len(names)


class _Writer:
    """Lines of a file, and the digest of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self._file = file

    def write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        self.digest.update(data)
        self._file.write(data)


def _names(store: Store) -> dict[str, str]:
    return {"namespace": store.keys.namespace, "run": store.keys.run}


def _read(store: Store, name: str) -> tuple[Arg, ...]:
    command, *more = READS[kind_of(name)]
    return (command, store.keys.prefix + name, *more)


def _items(kind: str, reply: Any) -> list[Any]:
    match kind:
        case "hash":
            return [[_encode(field), _encode(value)] for field, value in sorted(reply.items())]
        case "zset":
            return [[_encode(m), _encode(score)] for m, score in zip(reply[::2], reply[1::2], strict=True)]
        case _:
            return [_encode(item) for item in reply]


def _encode(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _decode(item: Any) -> Any:
    if isinstance(item, list):
        return [_decode(part) for part in item]
    return base64.b64decode(item["base64"], validate=True) if isinstance(item, dict) else item.encode()


def _lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, 1):
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise DataError(f"line {number} is no JSON ({error}): export the run again") from error
        if not isinstance(fields, dict):
            raise DataError(f"line {number} is no JSON object: give a file that `april buffer export` wrote")
        yield fields


def _check_file(file: BinaryIO) -> int:
    """The number of keys of a file that is whole."""
    digest, num_keys, last = hashlib.sha256(), 0, b""
    header = next(_lines(file), {})
    if header.get("format") != FORMAT:
        raise DataError("this is no exported buffer: give a file that `april buffer export` wrote")
    for name, known in (("version", {VERSION}), ("schema", {SCHEMA_VERSION, TAKEN_OVER})):
        if header.get(name) not in known:
            raise DataError(
                f"the file has {name} {header.get(name)}, this release reads {max(known)}: use the one that wrote it"
            )
    file.seek(0)
    for line in file:
        digest.update(last)
        num_keys += bool(last)
        last = line
    end = next(_lines(BytesIO(last)), {})
    if (end.get("num_keys"), end.get("sha256")) != (num_keys - 1, digest.hexdigest()):
        raise DataError("the file is cut short or was changed: export the run again")
    return num_keys - 1


async def _take(store: Store) -> None:
    """Mark the run as being imported; raises ConflictError if there is one. What a cut import left is deleted."""
    meta = store.keys.named("meta")
    names = await store.all_keys()
    schema = await store.one("HGET", meta, "schema")
    if names and schema != IMPORTING.encode():
        raise ConflictError(
            f"there is a run {store.keys.run} with the prefix {store.keys.namespace} in this Redis already: "
            "import under another run.name, or into another Redis"
        )
    for name in names:
        if name != "meta":
            await store.one("UNLINK", store.keys.prefix + name)
    if schema is None and not await store.one("HSETNX", meta, "schema", IMPORTING):
        raise ConflictError("somebody else made this run just now: import under another run.name")


async def _write(store: Store, name: str, items: list[Any]) -> None:
    key, kind = store.keys.prefix + name, kind_of(name)
    if name == "meta":
        items = [item for item in items if item[0] != b"schema"]
    for first in range(0, len(items), ITEMS_AT_ONCE):
        part = items[first : first + ITEMS_AT_ONCE]
        match kind:
            case "hash":
                await store.one("HSET", key, *(value for item in part for value in item))
            case "zset":
                await store.one("ZADD", key, *(value for member, score in part for value in (score, member)))
            case _:
                await store.one("RPUSH", key, *part)
