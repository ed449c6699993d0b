"""TLS: invalid files, and clients that stop in a handshake or at the end of a session."""

from __future__ import annotations

import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from certificates import self_signed

from chairlift import AsyncLLM
from chairlift.errors import ConfigError
from chairlift.server.access.access_options import AccessOptions
from chairlift.server.http.http_protocol import uvicorn_config
from support.running_server import RunningServer, run_server, until_closed


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def server(tiny_llm: Callable[..., AsyncLLM], pair: tuple[Path, Path]) -> Iterator[RunningServer]:
    with run_server(tiny_llm(max_num_seqs=1), "tiny", tls=pair) as running:
        running.slow_down(0.005)
        yield running


@pytest.fixture
def trusting(pair: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(pair[0]))


def load(certfile: Path, keyfile: Path) -> ssl.SSLContext | None:
    """Load the files as a server does."""
    AccessOptions(ssl_certfile=certfile, ssl_keyfile=keyfile)
    return uvicorn_config(None, ssl_certfile=certfile, ssl_keyfile=keyfile).ssl


def start_tls(server: RunningServer, context: ssl.SSLContext, receive_buffer: int | None = None) -> ssl.SSLSocket:
    return context.wrap_socket(server.connect(receive_buffer), server_hostname="127.0.0.1")


def client_hello(server_name: bytes) -> bytes:
    """The first record of a TLS 1.2 client."""

    def extension(kind: int, content: bytes) -> bytes:
        return struct.pack("!HH", kind, len(content)) + content

    names = struct.pack("!HBH", len(server_name) + 3, 0, len(server_name)) + server_name
    extensions = extension(0, names) + extension(10, b"\0\2\0\x17") + extension(13, b"\0\2\4\3")
    body = b"\3\3" + bytes(32) + b"\0" + b"\0\2\xc0\x2b" + b"\1\0" + struct.pack("!H", len(extensions)) + extensions
    message = b"\1" + struct.pack("!I", len(body))[1:] + body
    return b"\x16\3\1" + struct.pack("!H", len(message)) + message


def test_a_key_of_another_certificate_is_rejected(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, other_key = self_signed(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"cannot be used \(KEY_VALUES_MISMATCH\): give complete PEM files of a certificate and its key$",
    ):
        load(pair[0], other_key)


def test_an_encrypted_key_is_rejected_without_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is encrypted, and a server cannot prompt for a passphrase: decrypt it"):
        load(*self_signed(tmp_path, passphrase=b"secret"))


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"hello\n"])
def test_files_without_pem_are_rejected_with_their_names(
    pair: tuple[Path, Path], tmp_path: Path, content: bytes
) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_bytes(content)
    for files in ((junk, pair[1]), (pair[0], junk), (pair[1], pair[0])):
        with pytest.raises(ConfigError, match=r"ssl_certfile=.* and ssl_keyfile=.* cannot be used .*complete PEM"):
            load(*files)


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile"])
def test_a_file_that_cannot_be_read_is_named_alone(tmp_path: Path, name: str) -> None:
    files = dict(zip(("ssl_certfile", "ssl_keyfile"), self_signed(tmp_path), strict=True))
    files[name].unlink()
    with pytest.raises(ConfigError) as caught:
        load(*files.values())
    assert str(caught.value) == f"{name}={files[name]} cannot be read (No such file or directory): give a readable file"


def test_300_unfinished_handshakes_do_not_delay_a_request(server: RunningServer, trusting: ssl.SSLContext) -> None:
    with ExitStack() as connections:
        for _ in range(300):
            connections.enter_context(server.connect()).sendall(client_hello(b"a.b")[:60])
        assert httpx.get(f"{server.url}/health", verify=trusting).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", bytes(range(256)) * 20, b"\0" * 3000, client_hello(b"a" * 5000)],
    ids=["plain HTTP", "random bytes", "zeros", "a name of 5,000 characters"],
)
def test_bytes_that_are_no_handshake_end_the_connection(
    server: RunningServer, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    connection = server.connect()
    connection.sendall(sent)
    assert b"HTTP/1.1" not in until_closed(connection)
    assert not caplog.records, "no traceback in the log"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_versions_of_tls_are_rejected(
    server: RunningServer, trusting: ssl.SSLContext, version: ssl.TLSVersion
) -> None:
    trusting.minimum_version = trusting.maximum_version = version
    trusting.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        start_tls(server, trusting)
