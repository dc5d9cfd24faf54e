"""Limits on connections, and draining, over real sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import pytest
from colour_server import PATIENCE, png

pytestmark = pytest.mark.slow  # they wait for timeouts of the server


@pytest.fixture
def serve(listening) -> Callable[..., SimpleNamespace]:
    """``serve(timeout=1)`` starts a server; see ``listening``."""
    return listening


def head(length: int | None = None, path: str = "/v1/captions") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{size}\r\n\r\n".encode()


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next response, and no byte more."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        part = connection.recv(1)
        assert part, "closed without a response"
        data += part
    first, *lines = data.decode().strip().split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
    body = b""
    while len(body) < int(headers["content-length"]):
        body += connection.recv(int(headers["content-length"]) - len(body))
    return int(first.split()[1]), headers, body


def closed(connection: socket.socket, drip: bytes = b"") -> bool:
    """Whether the server closes the connection in time, although bytes keep coming."""
    connection.settimeout(0.05)
    for _ in range(20 * PATIENCE):
        try:
            connection.sendall(drip)
            if connection.recv(65536) == b"":
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize(
    ("data", "drip", "first"),
    [
        (b"", b"", True),
        (b"POST /v1/cap", b"x", True),
        (b"GET / HTTP/1.1\r\nHost: loc", b"x", False),
    ],
)
def test_slow_headers_time_out(serve, data, drip, first):
    connection = serve(timeout=0.5).connect()
    if not first:
        connection.sendall(head(len(png())) + png())
        assert read_response(connection)[0] == 200
    connection.sendall(data)

    assert closed(connection, drip)


def test_slow_bodies_time_out(serve):
    connection = serve(timeout=0.5).connect()
    connection.sendall(head(1000) + b"x")

    status, headers, body = read_response(connection)

    assert (status, headers["connection"]) == (408, "close")
    assert b"not received within 0.5 s" in body
    assert closed(connection)


def test_unread_responses_time_out(serve):
    """A client that does not read a long response does not keep its connection."""
    server = serve(timeout=1, max_connections=1)
    connection = server.connect()
    request = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection.sendall(request * 20)  # more than the sockets' buffers hold

    other = server.connect()  # waits for the only connection to be closed
    other.sendall(head(len(png())) + png())

    assert read_response(other)[0] == 200


def test_keep_alive_and_pipelining(serve):
    connection = serve().connect()
    for _ in range(3):
        connection.sendall(head(len(png())) + png())
        status, _, body = read_response(connection)
        assert status == 200
        assert json.loads(body)["captions"]
    connection.sendall((head(len(png())) + png()) * 2)  # two at once
    assert [read_response(connection)[0] for _ in range(2)] == [200, 200]


def test_connection_limit(serve):
    server = serve(max_connections=3, timeout=PATIENCE)
    held = [server.connect() for _ in range(3)]
    for connection in held:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(connection)[0] == 200
    fourth = server.connect()
    fourth.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    fourth.settimeout(0.5)
    with pytest.raises(TimeoutError):
        fourth.recv(1)

    held.pop().close()

    fourth.settimeout(PATIENCE)
    assert read_response(fourth)[0] == 200


@pytest.mark.parametrize("start", [head(10**12), head(None, "/v1/captions?beem=1")])
def test_endless_body_after_a_refusal_is_cut_off(serve, start, monkeypatch):
    monkeypatch.setattr("captioner.serving.server.DRAIN_BYTES", 1 << 20)
    connection = serve().connect()
    connection.sendall(start)
    sent, most, chunk = 0, 64 << 20, b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with suppress(ConnectionError):
        while sent < most:
            connection.sendall(chunk)
            sent += len(chunk)

    assert sent < most  # the limit plus the sockets' buffers


@pytest.mark.parametrize("query", ["", "?beem=1"])
def test_refused_upload_gets_its_response_and_keeps_the_connection(serve, query):
    connection = serve(max_bytes=1000).connect()
    for _ in range(3):
        connection.sendall(head(5 << 20, f"/v1/captions{query}"))
        connection.sendall(b"x" * (5 << 20))
        assert read_response(connection)[0] == (422 if query else 413)
    connection.sendall(head(len(png())) + png())
    assert read_response(connection)[0] == 200


def test_draining_completes_accepted_requests(serve):
    """The batch in progress and an upload that is not complete; new requests are refused."""
    server = serve()
    service = server.app.state.service
    server.model.gate.clear()
    running, sending = server.connect(), server.connect()
    running.sendall(head(len(png())) + png())
    assert server.model.entered.acquire(timeout=PATIENCE)
    sending.sendall(head(len(png())))
    while service.in_flight < 2:
        time.sleep(0.01)

    server.stop()
    while not service.draining:
        time.sleep(0.01)

    for path, status in {"/healthz": 200, "/readyz": 503, "/metrics": 200, "/": 200}.items():
        other = server.connect()
        other.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        found, headers, _ = read_response(other)
        assert found == status
        assert status == 200 or int(headers["retry-after"]) > 0
    sending.sendall(png())
    server.model.gate.set()
    assert read_response(running)[0] == read_response(sending)[0] == 200
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()
