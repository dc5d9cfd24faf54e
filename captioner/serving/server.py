"""The server process: it runs the application with granian, limits connections, and shuts down.

    headers       granian closes a connection if the headers of a request do not arrive in time;
                  this includes later requests on the same connection
    connections   granian accepts up to ``max_connections``; further connections wait
    bodies        the application rejects photos that do not arrive in time; `drained` reads the
                  rest of a rejected body, because its client may not see the response otherwise
    responses     Linux closes a connection if its client does not read its response in time

On SIGTERM or Ctrl-C, the server keeps listening while it completes accepted requests. New clients
then get an answer instead of a refused connection, and load balancers see that the server is not
ready. After SIGTERM, the server first serves as usual for ``drain_delay`` seconds, but reports that
it is not ready.

granian itself answers malformed requests (400, 414, 431), with an empty body. These requests are
neither counted nor logged. A client that closes its side of the connection early gets no response.
granian has no settings for these cases.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from fastapi import FastAPI
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server
from granian.utils.proxies import wrap_asgi_with_proxy_headers
from prometheus_client import start_http_server
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from captioner.errors import CaptionerError, ConfigError
from captioner.serving.observe import log_to_stderr, tell
from captioner.serving.request_errors import end, logger
from captioner.serving.security import ApiKeys
from captioner.serving.service import Service

# Limits on reading the rest of a rejected body.
DRAIN_SECONDS = 5.0
DRAIN_BYTES = 64 << 20

_CLOSE_SECONDS = 10.0  # time for sending the last responses, after the grace period
_STILL_SECONDS = 60.0  # after this time without progress of the event loop, the process is ended
_POLL_SECONDS = 0.05


def drained(app: ASGIApp) -> ASGIApp:
    """Return an application that reads the rest of a rejected body before it sends the response.

    If a connection is closed with unread data, the client's operating system may discard a response
    that has already arrived.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        # A client that waits for 100 Continue does not send the body after an error.
        ended = headers.get("expect", "").lower() == "100-continue" or (
            "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
        )

        async def watched() -> Message:
            nonlocal ended
            message = await receive()
            ended = ended or not message.get("more_body", False)
            return message

        async def discard() -> None:
            left = DRAIN_BYTES
            while not ended and left > 0:
                left -= len((await watched()).get("body", b""))

        async def send_after_body(message: Message) -> None:
            # Responses with other statuses are sent while their request is still read.
            if message.get("status", 200) >= 400 and message["status"] != 408 and not ended:
                with suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(discard(), DRAIN_SECONDS)
            await send(message)

        await app(scope, watched, send_after_body)

    return wrapped


def free_address(host: str, port: int) -> tuple[str, int]:
    """Return the IP address of a host, and a port on which a server can listen there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        with socket.create_server(address[:2], family=family) as probe:
            return str(address[0]), int(probe.getsockname()[1])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "use a different --port (0 selects any free port) or a different --host"
        raise CaptionerError(
            f"the server cannot listen on port {port} of {host}: {reason}; {hint}"
        ) from error


class Running:
    """A server that runs an application. ``await Running(...).serve()`` ends after `stop`."""

    def __init__(self, app: FastAPI, address: tuple[str, int]) -> None:
        """Prepare a server for an application from ``create_app``."""
        self.service: Service = app.state.service
        options = self.service.options
        self.address = address
        self.started = asyncio.Event()
        """Set when connections are accepted."""
        self._stopping, self._second = asyncio.Event(), asyncio.Event()
        self._delay = options.drain_delay
        target = drained(app)
        if options.trust_proxy:
            target = wrap_asgi_with_proxy_headers(target, trusted_hosts=options.trust_proxy)
        self._server = Server(
            target,
            *address,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backpressure=options.max_connections,
            http1_settings=HTTP1Settings(header_read_timeout=max(1, round(options.timeout * 1000))),
            log_level=LogLevels.error,
        )

    def stop(self, *, delay: bool = True) -> None:
        """Stop after the accepted requests are complete. A second call stops at once.

        With ``delay``, continue to serve new requests for ``drain_delay`` seconds first.
        """
        if self._stopping.is_set():
            self._second.set()
        elif not delay:
            self._delay = 0.0
        self._stopping.set()

    async def serve(self) -> None:
        """Serve requests until `stop` is called, then complete the accepted requests."""
        host, port = self.address
        serving = asyncio.create_task(self._server.serve())
        stopping = asyncio.create_task(self._stopping.wait())
        while not serving.done() and not self.started.is_set():
            await asyncio.sleep(_POLL_SECONDS)
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                self.started.set()
        if self.started.is_set():
            _close_unread_responses(port, self.service.options.timeout)
            shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
            shown = f"[{shown}]" if ":" in shown else shown
            self._tell(f"serving on http://{shown}:{port} (press Ctrl-C to stop)")
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            raise CaptionerError("the HTTP server ended unexpectedly; see the log for the reason")
        await self._drain()
        self._server.stop()  # type: ignore[no-untyped-call]
        with suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(serving, _CLOSE_SECONDS)

    def _tell(self, message: str) -> None:
        tell(message, self.service.options.log_format)

    async def _drain(self) -> None:
        """Reject new requests, and complete accepted requests within the grace period.

        First report that the server is not ready, and serve as usual during the drain delay.
        """
        service, grace = self.service, self.service.options.grace
        service.leaving = True
        if self._delay:
            self._tell(f"serving for {self._delay:g} s more (press Ctrl-C to stop now)")
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._second.wait(), self._delay)
        service.draining = True
        if count := service.in_flight:
            self._tell(f"completing {count} requests within {grace:g} s (press Ctrl-C to stop now)")
        latest = time.monotonic() + grace
        while service.in_flight and not self._second.is_set() and time.monotonic() < latest:
            await asyncio.sleep(_POLL_SECONDS)
        service.close()


def run(app: FastAPI, address: tuple[str, int]) -> bool:
    """Serve until SIGTERM or Ctrl-C, and return whether Ctrl-C ended the server.

    SIGHUP reloads the API keys. Without keys, it only ends a server in a terminal that is closed.
    """

    async def main() -> bool:
        running = Running(app, address)
        options = running.service.options
        log_to_stderr(options.log_format)  # granian has reconfigured logging
        loop = asyncio.get_running_loop()
        received: list[int] = []  # signals

        def stop(number: int) -> None:
            received.append(number)
            running.stop(delay=number == signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        if app.state.keys is not None or not sys.stderr.isatty():
            loop.add_signal_handler(signal.SIGHUP, _reload, app.state.keys)
        if options.metrics_port is not None:
            start_http_server(
                options.metrics_port, options.metrics_host, running.service.metrics.registry
            )
        watching = asyncio.create_task(_watch())
        await running.serve()
        watching.cancel()
        return signal.SIGINT in received

    return asyncio.run(main())


async def _watch() -> None:
    """End the process if this event loop hangs, and print the stack of each thread.

    If memory runs out in a thread of granian, the loop may wait for that thread forever and not see
    SIGTERM. The watchdog runs in a thread that needs neither the loop nor Python.
    """
    while True:
        try:
            faulthandler.dump_traceback_later(_STILL_SECONDS, file=2, exit=True)
        except RuntimeError:
            end("memory for a thread has run out")
        await asyncio.sleep(_STILL_SECONDS / 10)


def _reload(keys: ApiKeys | None) -> None:
    """Read the API keys again. If the file is invalid, keep the previous keys."""
    if keys is None:
        logger.warning("the server has no API keys to reload; to use keys, set --api-key-file")
        return
    try:
        keys.reload()
    except ConfigError as error:
        logger.error("%s; the previous %d API keys stay valid", error, len(keys))
    else:
        logger.info("reloaded %d API keys", len(keys))


def _close_unread_responses(port: int, seconds: float) -> None:
    """Let Linux close a connection if its client does not read the response for some seconds.

    Accepted connections inherit the option TCP_USER_TIMEOUT from the listening socket. granian does
    not expose this socket, so the function finds it among the file descriptors of the process.
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
