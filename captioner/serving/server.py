"""Runs the application: granian's limits on connections, signals, draining.

    headers       granian closes a connection whose request headers, the next one's included, do not
                  arrive in time
    connections   granian accepts up to ``Limits.max_connections``; further ones wait
    bodies        the application refuses photos that do not arrive in time; `Drained` reads the
                  rest of a refused body, or else its client may not see the response
    responses     Linux closes a connection whose client does not read its response in time

On SIGTERM or Ctrl-C the server keeps listening while it drains, so that a client gets an answer
rather than a refused connection, and a load balancer sees that readiness has changed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fastapi import FastAPI
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server
from granian.utils.proxies import wrap_asgi_with_proxy_headers
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from captioner.errors import CaptionerError, ConfigError
from captioner.serving.keys import ApiKeys
from captioner.serving.observe import log_to_stderr
from captioner.serving.options import Limits, ServeOptions

logger = logging.getLogger("captioner.serving")

DRAIN_SECONDS = 5.0
"""Time limit for reading the rest of a refused body."""

DRAIN_BYTES = 64 << 20
"""Maximum number of bytes to read of a refused body."""

_CLOSE_SECONDS = 10.0
"""Time limit for sending the last responses, after the grace period."""
_POLL_SECONDS = 0.05


class Drained:
    """Wraps an application: the rest of a refused body is read before the response is sent.

    When a connection is closed with unread data, the operating system of the client may discard a
    response that has arrived.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        # A client that waits for 100 Continue does not send the body after an error.
        ended = headers.get("expect", "").lower() == "100-continue" or (
            "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
        )

        async def watched() -> Message:
            """The next message; notes the end of the body."""
            nonlocal ended
            message = await receive()
            ended = ended or not message.get("more_body", False)
            return message

        async def discard() -> None:
            """Read the rest of the body."""
            left = DRAIN_BYTES
            while not ended and left > 0:
                left -= len((await watched()).get("body", b""))

        async def send_after_body(message: Message) -> None:
            """Send a message; a refusal only after the body."""
            # A response with another status is sent while its request is read.
            if message.get("status", 200) >= 400 and message["status"] != 408 and not ended:
                with suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(discard(), DRAIN_SECONDS)
            await send(message)

        await self.app(scope, watched, send_after_body)


def free_address(host: str, port: int) -> tuple[str, int]:
    """The IP address of a host, and a port of it on which a server can listen.

    Raises:
        ConfigError: The host is unknown.
        CaptionerError: The port is in use or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(
            f"--host {host!r} is not a known address; give 127.0.0.1, 0.0.0.0, ..."
        ) from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            where = f"port {port} of {host}"
            if error.errno == errno.EADDRINUSE:
                line = f"{where} is in use; give another --port, or --port 0 for any free port"
            else:
                line = f"cannot listen on {where} ({error.strerror}); give another --port or --host"
            raise CaptionerError(line) from error
        return str(address[0]), int(probe.getsockname()[1])


class Running:
    """An application that is being served; ``await Running(...).serve()`` ends after `stop`."""

    def __init__(
        self, app: FastAPI, limits: Limits, address: tuple[str, int], proxies: Sequence[str] = ()
    ) -> None:
        """Prepare the server.

        Args:
            app: From ``create_app``.
            limits: The limits that the application has, too.
            address: IP address and port to listen on.
            proxies: Addresses and networks of proxies whose X-Forwarded-For is trusted.
        """
        self.service = app.state.service
        self.limits = limits
        self.address = address
        self.started = asyncio.Event()
        """Set when connections are accepted."""
        self.interrupted = False
        """Whether Ctrl-C has stopped it."""
        self._stopping = asyncio.Event()
        self._at_once = False
        target: ASGIApp = Drained(app)
        if proxies:
            target = wrap_asgi_with_proxy_headers(target, trusted_hosts=list(proxies))
        self._server = Server(
            target,
            *address,
            interface=Interfaces.ASGI,
            http=HTTPModes.http1,
            websockets=False,
            backpressure=limits.max_connections,
            http1_settings=HTTP1Settings(header_read_timeout=max(1, round(limits.timeout * 1000))),
            log_level=LogLevels.error,
        )

    def stop(self) -> None:
        """Stop after completing the accepted requests; called again: at once."""
        self._at_once = self._stopping.is_set()
        self._stopping.set()

    async def _listening(self) -> None:
        host, port = self.address
        while True:
            try:
                _, writer = await asyncio.open_connection(_reachable(host), port)
            except OSError:
                await asyncio.sleep(_POLL_SECONDS)
                continue
            writer.close()
            return

    async def serve(self) -> None:
        """Listen until `stop`, then drain."""
        serving = asyncio.create_task(self._server.serve())
        ready = asyncio.create_task(self._listening())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                raise CaptionerError("the HTTP server ended unexpectedly; see the log")
            _close_unread_responses(self.address[1], self.limits.timeout)
            host, port = self.address
            self.started.set()
            _announce(f"serving on http://{_shown(host)}:{port} (press Ctrl-C to stop)")
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
            self._server.stop()  # type: ignore[no-untyped-call]
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(serving, _CLOSE_SECONDS)
        finally:
            ready.cancel()
            stopping.cancel()

    async def _drain(self) -> None:
        """Refuse new requests, and wait until the accepted ones are completed."""
        service, grace = self.service, self.limits.grace
        service.draining = True
        if service.in_flight:
            _announce(
                f"completing {service.in_flight} requests within {grace:g} s (press Ctrl-C to stop "
                "now)"
            )
        end = asyncio.get_running_loop().time() + grace
        while service.in_flight and not self._at_once and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_POLL_SECONDS)
        service.close()


def run(
    app: FastAPI,
    options: ServeOptions,
    address: tuple[str, int],
    keys: ApiKeys | None,
) -> None:
    """Serve an application until SIGTERM or Ctrl-C; SIGHUP reads the keys again.

    Raises:
        KeyboardInterrupt: Ctrl-C has stopped it.
    """

    async def main() -> bool:
        running = Running(app, options, address, options.trust_proxy)
        log_to_stderr(options.log_format)  # granian has changed it
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            running.interrupted = True
            running.stop()

        loop.add_signal_handler(signal.SIGTERM, running.stop)
        loop.add_signal_handler(signal.SIGINT, interrupt)
        if keys is not None:
            loop.add_signal_handler(signal.SIGHUP, _reload, keys)
        await running.serve()
        return running.interrupted

    if asyncio.run(main()):
        raise KeyboardInterrupt


def _reload(keys: ApiKeys) -> None:
    """Read the API keys again; keep the present ones if the file is invalid."""
    try:
        keys.reload()
    except ConfigError as error:
        logger.error("%s; the previous %d API keys stay valid", error, len(keys))
    else:
        logger.info("reloaded %d API keys", len(keys))


def _close_unread_responses(port: int, seconds: float) -> None:
    """Let Linux close connections whose client does not read its response for some time.

    The option TCP_USER_TIMEOUT is inherited by accepted connections. granian does not hand out its
    listening socket, which is therefore looked up among the descriptors of this process.
    """
    if sys.platform != "linux":
        return
    for descriptor in Path("/proc/self/fd").iterdir():
        if not descriptor.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(descriptor.name))) as found:
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and found.family != socket.AF_UNIX and found.getsockname()[1] == port:
                milliseconds = max(1, round(seconds * 1000))
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _reachable(host: str) -> str:
    """An address at which a server that listens on ``host`` can be reached."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _shown(host: str) -> str:
    """The host as it appears in a URL."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _announce(message: str) -> None:
    sys.stderr.write(f"captioner: {message}\n")
    sys.stderr.flush()
