"""Who may ask, and what a browser may do with the answer.

A server on loopback is still within reach of every web page that its user opens. Two ways in are
closed: a page's own requests carry its ``Origin``, which is not ours; and a name that a stranger's
DNS suddenly points here (DNS rebinding) stands in ``Host``, where only our own names are answered.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from captioner.errors import ConfigError
from captioner.serving.answers import Refusal, refusal_response
from captioner.serving.metrics import Metrics

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-store",
}
"""On every answer, unless it brings its own (the page's policy allows its script and style)."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)\.?(?::[0-9]+)?")


@dataclass(frozen=True)
class Hosts:
    """The values of ``Host`` that are answered, whatever the port."""

    names: frozenset[str]
    """In lower case; IPv6 addresses in brackets."""
    addresses: bool = False
    """Any IP address too: DNS rebinding needs a name."""

    def answers_to(self, host: str) -> bool:
        """Whether a ``Host`` header is one of ours."""
        match = _HOST.fullmatch(host.strip().lower())
        if match is None:
            return False
        name = match[1].rstrip(".")
        return name in self.names or (self.addresses and _address(name) is not None)


LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to this address."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def answered_hosts(bound: str, names: Iterable[str] = ()) -> Hosts:
    """What a server answers to.

    On loopback: loopback's names. Elsewhere also any IP address and this machine's name; other
    names, e.g. a proxy's, must be given.

    Args:
        bound: The address that it is bound to.
        names: More names.

    Raises:
        ConfigError: One is no name: an address with a port, a URL.
    """
    names = list(names)
    for name in names:
        match = _HOST.fullmatch(name.lower())
        if match is None or match[1] != name.lower():
            raise ConfigError(f"allow-host is {name!r}; give a name alone, e.g. photos.example.org")
    own = f"[{bound}]" if ":" in bound else bound
    known = LOOPBACK | {own.lower()} | {name.lower() for name in names}
    if is_loopback(bound):
        return Hosts(known)
    return Hosts(known | {socket.gethostname().lower()}, addresses=True)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _netloc(origin: str) -> str | None:
    """Host and port of an ``Origin``; None of what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # a bracket without its other one
        return None


class SecurityHeaders:
    """Middleware: ``HEADERS`` on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the headers."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, with_headers)


class Guard:
    """Middleware: refuses names that are not ours, and other sites' pages."""

    def __init__(self, app: ASGIApp, hosts: Hosts, metrics: Metrics) -> None:
        self.app = app
        self.hosts = hosts
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through or refuse."""
        if scope["type"] == "http":
            refusal = self._refusal(scope["method"], Headers(scope=scope))
            if refusal is not None:
                self.metrics.refused.labels(refusal.reason).inc()
                await refusal_response(refusal)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> Refusal | None:
        host = headers.get("host", "")
        if not self.hosts.answers_to(host):
            return Refusal(
                421,
                "host",
                f"this server does not answer to the name {host[:100]!r}; use the address that it "
                "told when it started, or start it with --allow-host NAME",
            )
        if method in ("GET", "HEAD"):
            return None  # changes nothing, and the answer is not shown to other sites
        origin = headers.get("origin")
        foreign = origin is not None and _netloc(origin) != host.lower()
        if foreign or headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            problem = "a page of another site asks; open this server's own page, or use a program"
            return Refusal(403, "origin", problem)
        return None
