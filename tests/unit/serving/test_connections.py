"""Connection limits, over real sockets."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import uvicorn
from colour_server import ColourModel
from PIL import Image

from captioner.serving.app import create_app
from captioner.serving.connections import limited_protocol
from captioner.serving.limits import Limits

pytestmark = pytest.mark.slow  # they wait for timeouts of the server

PATIENCE = 30  # seconds that a test waits for the server
Connect = Callable[[], socket.socket]


def photo() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def serve() -> Iterator[Callable[..., Connect]]:
    """``serve(timeout=1)`` starts a server and returns a function that connects to it.

    The function's ``protocol`` is the class of the server's connections.
    """
    with ExitStack() as ending:

        def start(**options: float) -> Connect:
            limits = Limits(**options)  # type: ignore[arg-type]
            app = create_app(ColourModel(), limits)  # type: ignore[arg-type]
            protocol = limited_protocol(limits)
            config = uvicorn.Config(app, port=0, log_config=None, ws="none", http=protocol)
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run)
            thread.start()
            ending.callback(thread.join)
            ending.callback(setattr, server, "should_exit", True)
            for _ in range(10 * PATIENCE):
                if server.started:
                    break
                thread.join(0.1)
            address = server.servers[0].sockets[0].getsockname()

            def connect() -> socket.socket:
                made = socket.create_connection(address, timeout=PATIENCE)
                ending.enter_context(made)
                return made

            connect.protocol = protocol  # type: ignore[attr-defined]
            return connect

        yield start


def head(length: int | None = None, query: str = "") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST /v1/captions{query} HTTP/1.1\r\nHost: localhost\r\n{size}\r\n\r\n".encode()


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next response."""
    file = connection.makefile("rb")
    status = int(file.readline().split()[1])
    headers = {}
    while line := file.readline().strip():
        name, _, value = line.decode().partition(": ")
        headers[name.lower()] = value
    return status, headers, file.read(int(headers["content-length"]))


def closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection in time."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("data", [b"", b"POST /v1/cap", b"GET / HTTP/1.1\r\nHost: loc"])
def test_incomplete_headers_time_out(serve, data: bytes) -> None:
    connection = serve(timeout=0.3)()

    connection.sendall(data)

    assert closed(connection)


def test_slow_headers_time_out(serve) -> None:
    connection = serve(timeout=0.5)()
    connection.settimeout(0.05)
    connection.sendall(b"GET / HTTP/1.1\r\nX: ")

    for _ in range(20 * PATIENCE):
        try:
            connection.sendall(b"x")
            if connection.recv(1) == b"":
                return
        except TimeoutError:
            continue
        except ConnectionError:
            return
    raise AssertionError("the connection stayed open")


def test_headers_of_the_next_request_time_out(serve) -> None:
    connect = serve()
    connection = connect()
    connection.sendall(head(len(photo())) + photo())
    assert read_response(connection)[0] == 200
    connect.protocol.limits = Limits(timeout=0.5)  # from the next response on
    connection.sendall(head(len(photo())) + photo())
    assert read_response(connection)[0] == 200

    connection.sendall(b"GET / HT")

    assert closed(connection)


def test_keep_alive_and_pipelining(serve) -> None:
    connection = serve()()
    for _ in range(3):
        connection.sendall(head(len(photo())) + photo())
        status, _, body = read_response(connection)
        assert status == 200
        assert json.loads(body)["captions"]
    connection.sendall((head(len(photo())) + photo()) * 2)  # two at once
    assert [read_status(connection) for _ in range(2)] == [200, 200]


def read_status(connection: socket.socket) -> int:
    """Read exactly one response, byte by byte up to its body."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        data += connection.recv(1)
    length = int(data.lower().partition(b"content-length: ")[2].split()[0])
    while length:
        length -= len(connection.recv(length))
    return int(data.split()[1])


@pytest.mark.parametrize(
    "start",
    [
        head(10**12),
        head(None, "?beem=1"),
        head(None).replace(b"Host: localhost", b"Host: evil.example"),
    ],
)
def test_endless_body_after_a_refusal_is_cut_off(serve, start: bytes, monkeypatch) -> None:
    monkeypatch.setattr("captioner.serving.connections.DRAIN_BYTES", 1 << 20)
    connection = serve()()
    connection.sendall(start)

    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    sent, most = 0, 64 << 20
    try:
        while sent < most:
            connection.sendall(chunk)
            sent += len(chunk)
    except ConnectionError:
        pass

    assert sent < most  # the limit plus the sockets' buffers


@pytest.mark.parametrize("query", ["", "?beem=1"])
def test_refused_upload_gets_its_response_and_keeps_the_connection(
    serve, query: str, monkeypatch
) -> None:
    """The rest of a finite refused body is drained, so the connection stays usable."""
    monkeypatch.setattr("captioner.serving.connections.DRAIN_SECONDS", PATIENCE)
    connection = serve(max_bytes=1000)()
    for _ in range(3):
        connection.sendall(head(5 << 20, query))
        connection.sendall(b"x" * (5 << 20))
        status, headers, _ = read_response(connection)
        assert status == (422 if query else 413)
        assert "connection" not in headers
    connection.sendall(head(len(photo())) + photo())
    assert read_response(connection)[0] == 200


def test_stalled_body_after_a_refusal_is_closed(serve, monkeypatch) -> None:
    monkeypatch.setattr("captioner.serving.connections.DRAIN_SECONDS", 0.2)
    connection = serve()()
    connection.sendall(head(10**12) + b"x")

    status, headers, _ = read_response(connection)

    assert status == 413
    assert headers["connection"] == "close"
    assert closed(connection)


def test_expect_100_continue_is_refused_at_once(serve) -> None:
    """curl uses it for large files, which are then never sent."""
    connection = serve()()
    request = head(10**12).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
    connection.sendall(request)

    status, headers, _ = read_response(connection)

    assert status == 413  # not 100
    assert headers["connection"] == "close"
    assert closed(connection)


def test_connection_limit(serve) -> None:
    connect = serve(max_connections=3)
    held = [connect() for _ in range(3)]
    for connection in held:  # so that the server has accepted them
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(connection)[0] == 200

    status, headers, body = read_response(connect())

    assert status == 503
    assert headers["retry-after"]
    assert "3 connections are open" in json.loads(body)["error"]
    held.pop().close()
    for _ in range(100):
        connection = connect()
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if read_response(connection)[0] == 200:
            return
    raise AssertionError("the closed connection was not replaced")


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x00\xa5\x01\r\n\r\n", b"GET\r\n\r\n"])
def test_malformed_http(serve, data: bytes) -> None:
    connection = serve()()

    connection.sendall(data)

    status, headers, body = read_response(connection)
    assert status == 400
    assert "not valid HTTP" in json.loads(body)["error"]
    assert headers["x-content-type-options"] == "nosniff"
    assert closed(connection)


def test_a_batch_may_take_longer_as_long_as_it_advances(serve, monkeypatch):
    """Its connection is not closed at the time limit of one photo, but when it stops advancing."""
    monkeypatch.setattr("captioner.serving.connections.SLACK_SECONDS", 0.0)
    head_of_part = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
    connection = serve(timeout=1)()
    connection.sendall(
        b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n"
        b"Accept: application/x-ndjson\r\nContent-Type: multipart/form-data; boundary=x\r\n\r\n"
    )
    start = time.monotonic()
    for _ in range(8):
        connection.sendall(head_of_part + photo() + b"\r\n")
        time.sleep(0.5)
    assert time.monotonic() - start > 2 * 1  # the limit of one photo
    received = b""
    while part := connection.recv(65536):
        received += part
        if b'"error"' in received:
            break
    assert received.count(b'"status":200') >= 7
    assert b"the next photo was not received within 1 s" in received
