"""Limits on connections, and draining, over real sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import suppress
from email.message import Message
from http.client import HTTPResponse

import pytest
from colour_server import PATIENCE, png

pytestmark = pytest.mark.slow  # they wait for timeouts of the server


def head(length: int | None = None, path: str = "/v1/captions") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{size}\r\n\r\n".encode()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


PHOTO = head(len(png())) + png()


def ask(connection: socket.socket, request: bytes = b"") -> tuple[int, Message, bytes]:
    """Return the status, headers and body of the next response."""
    connection.sendall(request)
    response = HTTPResponse(connection)
    response.begin()
    return response.status, response.headers, response.read()


def closed(connection: socket.socket, drip: bytes = b"") -> bool:
    """Return whether the server closes the connection in time, although bytes keep coming."""
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
def test_slow_headers_time_out(listening, data, drip, first):
    connection = listening(timeout=0.5).connect()
    if not first:
        assert ask(connection, PHOTO)[0] == 200
    connection.sendall(data)

    assert closed(connection, drip)


@pytest.mark.parametrize("path", ["/v1/captions", "/v1/batch", "/api/chat"])
def test_slow_bodies_time_out(listening, path):
    """The connection is closed at once, not when Python collects garbage."""
    connection = listening(timeout=0.5).connect()

    status, headers, body = ask(connection, head(1000, path) + b"x")

    assert (status, headers["connection"]) == (408, "close")
    assert b"not received within 0.5 s" in body
    assert closed(connection)


def test_unread_responses_time_out(listening):
    """A client that does not read a long response does not keep its connection."""
    server = listening(timeout=1, max_connections=1)
    # more than the sockets' buffers hold
    server.connect().sendall(get("/docs/swagger-ui-bundle.js") * 20)

    # waits for the only connection to be closed
    assert ask(server.connect(), PHOTO)[0] == 200


def test_keep_alive_and_pipelining(listening):
    connection = listening().connect()
    assert [ask(connection, PHOTO)[0] for _ in range(2)] == [200, 200]
    connection.sendall(PHOTO * 2)
    received = b""
    while received.count(b"HTTP/1.1 200") < 2:
        part = connection.recv(65536)
        assert part, received
        received += part


def test_connection_limit(listening):
    server = listening(max_connections=3, timeout=PATIENCE)
    held = [server.connect() for _ in range(3)]
    for connection in held:
        assert ask(connection, get("/healthz"))[0] == 200
    fourth = server.connect()
    fourth.sendall(get("/healthz"))
    fourth.settimeout(0.5)
    with pytest.raises(TimeoutError):
        fourth.recv(1)

    held.pop().close()

    fourth.settimeout(PATIENCE)
    assert ask(fourth)[0] == 200


@pytest.mark.parametrize("start", [head(10**12), head(None, "/v1/captions?beem=1")])
def test_endless_body_after_a_refusal_is_cut_off(listening, start, monkeypatch):
    monkeypatch.setattr("captioner.serving.server.DRAIN_BYTES", 1 << 20)
    connection = listening().connect()
    connection.sendall(start)
    sent, most, chunk = 0, 64 << 20, b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with suppress(ConnectionError):
        while sent < most:
            connection.sendall(chunk)
            sent += len(chunk)

    assert sent < most  # the limit plus the sockets' buffers


@pytest.mark.parametrize("query", ["", "?beem=1"])
def test_refused_upload_gets_its_response_and_keeps_the_connection(listening, query):
    connection = listening(max_bytes=1000).connect()
    for _ in range(3):
        refused = head(5 << 20, f"/v1/captions{query}") + b"x" * (5 << 20)
        assert ask(connection, refused)[0] == (422 if query else 413)
    assert ask(connection, PHOTO)[0] == 200


def test_requests_are_served_while_load_balancers_take_notice(listening):
    """With --drain-delay, readiness fails first. A second signal ends the wait."""
    server = listening(drain_delay=600)
    kept = server.connect()
    assert ask(kept, get("/readyz"))[0] == 200

    server.stop()
    while ask(server.connect(), get("/readyz"))[0] == 200:
        pass

    assert ask(server.connect(), get("/healthz"))[0] == 200
    status, headers, _ = ask(kept, PHOTO)
    assert (status, headers["connection"]) == (200, "close")  # the next one goes elsewhere
    for stopped in (server, listening(drain_delay=0.1)):
        stopped.stop()
        stopped.thread.join(PATIENCE)
        assert not stopped.thread.is_alive()


def test_a_process_that_stands_still_ends():
    code = """
import asyncio, time
from captioner.serving import server
server._STILL_SECONDS = 4
async def main():
    task = asyncio.create_task(server._watch())
    await asyncio.sleep(5)  # it runs
    print("runs", flush=True)
    time.sleep(600)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (1, "runs\n")


def test_draining_completes_accepted_requests(listening):
    """The batch in progress and an unfinished upload are completed; new requests are rejected."""
    server = listening()
    service = server.app.state.service
    server.model.gate.clear()
    running, sending = server.connect(), server.connect()
    running.sendall(PHOTO)
    assert server.model.entered.acquire(timeout=PATIENCE)
    sending.sendall(head(len(png())))
    while service.in_flight < 2:
        time.sleep(0.01)

    server.stop()
    while not service.draining:
        time.sleep(0.01)

    for path, status in {"/healthz": 200, "/readyz": 503, "/metrics": 200, "/": 200}.items():
        found, headers, _ = ask(server.connect(), get(path))
        assert found == status
        assert status == 200 or int(headers["retry-after"]) > 0
    sending.sendall(png())
    server.model.gate.set()
    assert ask(running)[0] == ask(sending)[0] == 200
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()
