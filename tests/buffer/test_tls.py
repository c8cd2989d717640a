"""rediss:// with a certificate of its own authority, through a proxy that ends TLS in front of a real server."""

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from buffer.embedded import EmbeddedRedis
from buffer.open import open_buffer
from protocol.errors import SettingsError, UnavailableError
from protocol.settings import RunSettings
from tests.buffer.test_cluster import free_ports

READ_BYTES = 1 << 16


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    paths[1].write_bytes(private)
    return paths


@asynccontextmanager
async def tls_front(port: int, target: int, context: ssl.SSLContext) -> AsyncIterator[None]:
    """Ends TLS on `port` and passes everything on to `target`."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(READ_BYTES):
                writer.write(data)
                await writer.drain()
        except OSError:
            return
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(pump(reader, back[1]), pump(back[0], writer))

    server = await asyncio.start_server(accept, "127.0.0.1", port, ssl=context)
    try:
        yield
    finally:
        server.close()


@asynccontextmanager
async def secured(own: EmbeddedRedis, folder: Path, client_ca: Path | None = None) -> AsyncIterator[tuple[int, Path]]:
    """The port of a Redis behind TLS and the file of its authority; with `client_ca` clients show a certificate."""
    certificate, key = make_certificate(folder, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    port, plain = free_ports(2)
    set_port(own, plain)
    async with tls_front(port, plain, context):
        yield port, certificate


def set_port(own: EmbeddedRedis, port: int) -> None:
    """Let a server that listens on a unix socket listen on a port as well."""
    with redis.Redis.from_url(own.url) as client:
        client.execute_command("CONFIG", "SET", "port", port)


def settings(folder: Path, port: int, **buffer: Any) -> RunSettings:
    buffer = {"url": f"rediss://127.0.0.1:{port}"} | {name: str(value) for name, value in buffer.items()}
    return RunSettings.model_validate({"run": {"dir": folder}, "buffer": buffer})


async def test_a_server_is_trusted_by_the_given_authority(own_server: EmbeddedRedis, tmp_path: Path) -> None:
    async with secured(own_server, tmp_path) as (port, authority):
        buffer, _ = await open_buffer(settings(tmp_path, port, ssl_ca_certs=authority))
        assert await buffer.claim_service("one") == 1
        await buffer.close()


async def test_a_server_of_another_authority_is_refused(own_server: EmbeddedRedis, tmp_path: Path) -> None:
    other, _ = make_certificate(tmp_path, "other")
    async with secured(own_server, tmp_path) as (port, _):
        for files in ({"ssl_ca_certs": other}, {}):
            with pytest.raises(UnavailableError, match="certificate verify failed"):
                await open_buffer(settings(tmp_path, port, **files))


async def test_a_client_shows_its_certificate(own_server: EmbeddedRedis, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "client")
    async with secured(own_server, tmp_path, certificate) as (port, authority):
        shown = {"ssl_ca_certs": authority, "ssl_certfile": certificate, "ssl_keyfile": key}
        buffer, _ = await open_buffer(settings(tmp_path, port, **shown))
        assert await buffer.claim_service("one") == 1
        await buffer.close()
        with pytest.raises(UnavailableError, match="doesn't answer"):
            await open_buffer(settings(tmp_path, port, ssl_ca_certs=authority))


async def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"buffer.ssl_ca_certs = .*gone.crt is not a file: correct the path"):
        await open_buffer(settings(tmp_path, 1, ssl_ca_certs=tmp_path / "gone.crt"))
