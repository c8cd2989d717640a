"""The proxy does to connections what it says."""

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.tcp_proxy import Mode, TcpProxy


@pytest.fixture
def proxy() -> Iterator[TcpProxy]:
    """A proxy in front of a server that sends everything back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        with TcpProxy(listener.getsockname()[1]) as opened:
            yield opened
        listener.shutdown(socket.SHUT_RDWR)


ECHOED: list[bytes] = []


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        try:
            while data := connection.recv(1 << 16):
                ECHOED.append(data)
                connection.sendall(data)
        except OSError:
            return


def connect(proxy: TcpProxy) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
    client.sendall(b"hello")
    assert client.recv(5) == b"hello"
    return client


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_passes_everything_on_in_order(proxy):
    sent = bytes(range(256)) * 4096
    with connect(proxy) as client:
        threading.Thread(target=client.sendall, args=(sent,)).start()
        received = b""
        while len(received) < len(sent):
            received += client.recv(1 << 16)
        assert received == sent


def test_cut_closes_what_is_open_and_refuses_what_comes(proxy):
    with connect(proxy) as client:
        proxy.set(Mode.CUT)
        assert is_closed(client)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
        assert is_closed(client)
    proxy.set(Mode.PASS)
    connect(proxy).close()


def test_delay_changes_no_byte(proxy):
    with connect(proxy) as client:
        proxy.set(Mode.DELAY, 0.05)
        client.sendall(b"late")
        assert client.recv(4) == b"late"


@pytest.mark.parametrize(("mode", "arrives"), [(Mode.HALF_OPEN, True), (Mode.MUTE, False)])
def test_half_open_loses_answers_and_mute_loses_everything(proxy, mode, arrives):
    with connect(proxy) as client:
        ECHOED.clear()
        proxy.set(mode)
        client.sendall(b"request")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert (b"request" in ECHOED) == arrives
        client.settimeout(10)
        proxy.set(Mode.PASS)
        assert is_closed(client), "what was swallowed never comes"


def test_new_target_is_used_by_new_connections(proxy):
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=_serve, args=(other,), daemon=True).start()
        old = connect(proxy)
        proxy.target_port = other.getsockname()[1]
        proxy.drop_connections()
        assert is_closed(old)
        old.close()
        connect(proxy).close()
        assert proxy.num_connections == 2
        other.shutdown(socket.SHUT_RDWR)
