"""Connections over real sockets: those that say nothing of use are closed, and there is a most."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import uvicorn
from colour_server import ColourModel
from PIL import Image

from captioner.serving.app import create_app
from captioner.serving.connections import limited
from captioner.serving.limits import Limits

pytestmark = pytest.mark.slow  # they wait for timeouts of the server

PATIENCE = 30  # seconds until a test that waits for the server gives up
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
            protocol = limited(limits)
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


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer."""
    file = connection.makefile("rb")
    status = int(file.readline().split()[1])
    headers = {}
    while line := file.readline().strip():
        name, _, value = line.decode().partition(": ")
        headers[name.lower()] = value
    return status, headers, file.read(int(headers["content-length"]))


def closed(connection: socket.socket) -> bool:
    """Whether the other side closes it, before patience ends."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("said", [b"", b"POST /v1/cap", b"GET / HTTP/1.1\r\nHost: loc"])
def test_half_a_head_is_not_waited_for(serve, said: bytes) -> None:
    connection = serve(timeout=0.3)()

    connection.sendall(said)

    assert closed(connection)


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(serve) -> None:
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
    raise AssertionError("it was waited for")


def test_the_next_head_has_its_time_too(serve) -> None:
    connect = serve()
    connection = connect()
    connection.sendall(head(len(photo())) + photo())
    assert answer(connection)[0] == 200
    connect.protocol.limits = Limits(timeout=0.5)  # from the next answer on
    connection.sendall(head(len(photo())) + photo())
    assert answer(connection)[0] == 200

    connection.sendall(b"GET / HT")

    assert closed(connection)


def test_a_connection_serves_one_request_after_another(serve) -> None:
    connection = serve()()
    for _ in range(3):
        connection.sendall(head(len(photo())) + photo())
        status, _, body = answer(connection)
        assert status == 200
        assert json.loads(body)["captions"]
    connection.sendall((head(len(photo())) + photo()) * 2)  # and two at once
    assert [answer_status(connection) for _ in range(2)] == [200, 200]


def answer_status(connection: socket.socket) -> int:
    """One answer read byte by byte, so that nothing of the next is taken."""
    told = b""
    while not told.endswith(b"\r\n\r\n"):
        told += connection.recv(1)
    length = int(told.lower().partition(b"content-length: ")[2].split()[0])
    while length:
        length -= len(connection.recv(length))
    return int(told.split()[1])


@pytest.mark.parametrize(
    "start",
    [
        head(10**12),
        head(None, "?beem=1"),
        head(None).replace(b"Host: localhost", b"Host: evil.example"),
    ],
)
def test_who_goes_on_sending_after_a_refusal_is_cut_off(serve, start: bytes, monkeypatch) -> None:
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

    assert sent < most  # what the sockets' own buffers hold comes on top of the bound


@pytest.mark.parametrize("query", ["", "?beem=1"])
def test_who_is_refused_while_sending_sees_the_answer_and_may_go_on(
    serve, query: str, monkeypatch
) -> None:
    """A body that is too large, or not looked at, but ends: the connection lives on."""
    monkeypatch.setattr("captioner.serving.connections.DRAIN_SECONDS", PATIENCE)
    connection = serve(max_bytes=1000)()
    for _ in range(3):
        connection.sendall(head(5 << 20, query))
        connection.sendall(b"x" * (5 << 20))
        status, headers, _ = answer(connection)
        assert status == (422 if query else 413)
        assert "connection" not in headers
    connection.sendall(head(len(photo())) + photo())
    assert answer(connection)[0] == 200


def test_who_stops_sending_after_a_refusal_is_let_go(serve, monkeypatch) -> None:
    monkeypatch.setattr("captioner.serving.connections.DRAIN_SECONDS", 0.2)
    connection = serve()()
    connection.sendall(head(10**12) + b"x")

    status, headers, _ = answer(connection)

    assert status == 413
    assert headers["connection"] == "close"
    assert closed(connection)


def test_who_waits_to_be_asked_for_the_body_is_refused_at_once(serve) -> None:
    """curl does so with large files: they are never sent."""
    connection = serve()()
    asking = head(10**12).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
    connection.sendall(asking)

    status, headers, _ = answer(connection)

    assert status == 413  # not 100
    assert headers["connection"] == "close"
    assert closed(connection)


def test_there_is_a_most_of_connections(serve) -> None:
    connect = serve(max_connections=3)
    held = [connect() for _ in range(3)]
    for connection in held:  # they are known to be there
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(connection)[0] == 200

    status, headers, body = answer(connect())

    assert status == 503
    assert headers["retry-after"]
    assert "3 connections are open" in json.loads(body)["error"]
    held.pop().close()
    for _ in range(100):
        connection = connect()
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if answer(connection)[0] == 200:
            return
    raise AssertionError("the place that was left is not given away")


@pytest.mark.parametrize("said", [b"\x16\x03\x01\x00\xa5\x01\r\n\r\n", b"GET\r\n\r\n"])
def test_what_is_not_http_is_refused_like_everything(serve, said: bytes) -> None:
    connection = serve()()

    connection.sendall(said)

    status, headers, body = answer(connection)
    assert status == 400
    assert "not HTTP" in json.loads(body)["error"]
    assert headers["x-content-type-options"] == "nosniff"
    assert closed(connection)
