"""Host and Origin checks, and response headers.

Even a server on the loopback interface can be reached by every web page that its user opens. Two
checks prevent this: cross-origin requests are refused by their ``Origin``, unless it is an allowed
one, and DNS rebinding is prevented by accepting known ``Host`` names only. The latter does not
apply to health, readiness and metrics, which orchestrators request by any name or address.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from captioner.errors import ConfigError
from captioner.serving.metrics import Metrics
from captioner.serving.paths import PROBES, route_path
from captioner.serving.responses import RequestError, error_response

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
"""Default response headers; the web page overrides Content-Security-Policy."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)\.?(?::[0-9]+)?")


@dataclass(frozen=True)
class AllowedHosts:
    """The ``Host`` values that the server accepts, with any port."""

    names: frozenset[str]
    """Lower case; IPv6 addresses in brackets."""
    addresses: bool = False
    """Accept any IP address too; DNS rebinding needs a name."""

    def allows(self, host: str) -> bool:
        """Whether a ``Host`` header is accepted."""
        match = _HOST.fullmatch(host.strip().lower())
        if match is None:
            return False
        name = match[1].rstrip(".")
        return name in self.names or (self.addresses and _address(name) is not None)


LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def is_loopback(host: str) -> bool:
    """Whether a server bound to this address is reachable from this machine only."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def allowed_hosts(bound: str, names: Iterable[str] = ()) -> AllowedHosts:
    """The hosts that a server accepts.

    On loopback, these are the loopback names; otherwise also any IP address and the name of this
    machine. Other names, such as a proxy's, must be given.

    Args:
        bound: Address that the server is bound to.
        names: Additional names.

    Raises:
        ConfigError: A name is not a plain host name, for example a URL.
    """
    names = list(names)
    for name in names:
        match = _HOST.fullmatch(name.lower())
        if match is None or match[1] != name.lower():
            raise ConfigError(
                f"allow-host is {name!r}; give a host name without port, e.g. photos.example.org"
            )
    own = f"[{bound}]" if ":" in bound else bound
    known = LOOPBACK | {own.lower()} | {name.lower() for name in names}
    if is_loopback(bound):
        return AllowedHosts(known)
    return AllowedHosts(known | {socket.gethostname().lower()}, addresses=True)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _netloc(origin: str) -> str | None:
    """Host and port of an ``Origin``; None if it is invalid."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # an unmatched bracket
        return None


ANY_ORIGIN = "*"


def allowed_origins(given: Iterable[str]) -> frozenset[str]:
    """Origins whose pages may use the server, as browsers spell them; may contain ``*``.

    Raises:
        ConfigError: One of them is not an origin, for example a host name alone.
    """
    origins = frozenset(origin.lower().removesuffix("/") for origin in given)
    for origin in origins - {ANY_ORIGIN}:
        if not re.fullmatch(r"https?://(\[[0-9a-f:.]+\]|[^:\[\]/@?#\s]+)(:[0-9]+)?", origin):
            raise ConfigError(
                f"allow-origin is {origin!r}; give scheme and host, e.g. https://app.example.org, "
                "or * for every web page"
            )
    return origins


class SecurityHeaders:
    """Middleware that adds ``HEADERS`` and those of this server to every response."""

    def __init__(self, app: ASGIApp, extra: Mapping[str, str]) -> None:
        self.app = app
        self.headers = HEADERS | dict(extra)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; add the headers to its response."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.headers.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, with_headers)


class OriginCheck:
    """Middleware that refuses unknown hosts and cross-origin requests.

    Cross-origin requests include form posts, which browsers send without a CORS preflight.
    """

    def __init__(
        self, app: ASGIApp, hosts: AllowedHosts, origins: Collection[str], metrics: Metrics
    ) -> None:
        self.app = app
        self.hosts = hosts
        self.origins = origins
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        if scope["type"] == "http":
            error = self._check(scope, Headers(scope=scope))
            if error is not None:
                self.metrics.refused.labels(error.reason).inc()
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> RequestError | None:
        host = headers.get("host", "")
        reading = scope["method"] in ("GET", "HEAD")
        if not self.hosts.allows(host) and not (reading and route_path(scope) in PROBES):
            return RequestError(421, "host", f"unknown host {host[:100]!r}; {_host_fix(host)}")
        if reading:
            return None  # no side effects, and browsers hide the response from other sites
        origin = headers.get("origin")
        if ANY_ORIGIN in self.origins or (origin or "").lower() in self.origins:
            return None
        foreign = origin is not None and _netloc(origin) != host.lower()
        if foreign or headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            message = f"cross-origin request refused (Origin: {(origin or 'none')[:100]})"
            return RequestError(403, "origin", f"{message}; {_origin_fix(origin)}")
        return None


def _host_fix(host: str) -> str:
    match = _HOST.fullmatch(host.strip().lower())
    name = match[1] if match and len(host) <= 100 else "NAME"
    return f"start the server with --allow-host {name}, or use the address that it printed"


def _origin_fix(origin: str | None) -> str:
    try:
        [known] = allowed_origins([origin or ""])
    except ConfigError:
        return "use this server's own page"
    return f"use this server's own page, or start the server with --allow-origin {known[:100]}"
