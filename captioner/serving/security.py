"""Who may use the server: Host and Origin checks, and response headers.

Even a server on the loopback interface can be reached by every web page that its user opens. Two
checks prevent this: cross-origin requests are refused by their ``Origin``, unless it is an allowed
one, and DNS rebinding is prevented by accepting known ``Host`` names only. The latter does not
apply to health, readiness and metrics, which orchestrators request by any name or address.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from captioner.errors import ConfigError
from captioner.serving.observe import Metrics, route_path
from captioner.serving.responses import RequestError, error_response

PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths for orchestrators and monitoring: open to any Host, needing no key, answered while the
server drains. They reveal counts only."""

API = "/v1/"
"""Prefix of the paths that need an API key, if there are any keys."""

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

ANY_ORIGIN = "*"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)\.?(?::[0-9]+)?")

Check = Callable[[Scope], RequestError | None]
"""Returns why a request is refused; None: it is not."""


class Guard:
    """Middleware that refuses requests by a check, before their bodies are read."""

    def __init__(self, app: ASGIApp, check: Check, metrics: Metrics) -> None:
        self.app = app
        self.check = check
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        error = self.check(scope) if scope["type"] == "http" else None
        if error is None:
            await self.app(scope, receive, send)
            return
        self.metrics.refused.labels(error.reason).inc()
        await error_response(error)(scope, receive, send)


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
    names = [name.lower() for name in names]
    for name in names:
        match = _HOST.fullmatch(name)
        if match is None or match[1] != name:
            raise ConfigError(
                f"allow-host is {name!r}; give a host name without port, e.g. photos.example.org"
            )
    own = f"[{bound}]" if ":" in bound else bound
    known = LOOPBACK | {own.lower(), *names}
    address = _address(bound)
    if bound == "localhost" if address is None else address.is_loopback:
        return AllowedHosts(known)
    return AllowedHosts(known | {socket.gethostname().lower()}, addresses=True)


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


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


class OriginCheck:
    """Refuses unknown hosts and cross-origin requests.

    Cross-origin requests include form posts, which browsers send without a CORS preflight.
    """

    def __init__(self, hosts: AllowedHosts, origins: Collection[str]) -> None:
        self.hosts = hosts
        self.origins = origins

    def __call__(self, scope: Scope) -> RequestError | None:
        """Check a request's headers."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        reading = scope["method"] in ("GET", "HEAD")
        if not self.hosts.allows(host) and not (reading and route_path(scope) in PROBES):
            hint = "give its name to --allow-host, or use the address that the server printed"
            return RequestError(421, "host", f"unknown host {host[:100]!r}; {hint}")
        if reading:
            return None  # no side effects, and browsers hide the response from other sites
        if ANY_ORIGIN in self.origins or (origin or "").lower() in self.origins:
            return None
        foreign = origin is not None and _netloc(origin) != host.lower()
        if foreign or headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            message = f"cross-origin request refused (Origin: {(origin or 'none')[:100]})"
            hint = "use this server's own page, or start the server with --allow-origin"
            return RequestError(403, "origin", f"{message}; {hint}")
        return None


def _netloc(origin: str) -> str | None:
    """Host and port of an ``Origin``; None if it is invalid."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # an unmatched bracket
        return None


class RootPath:
    """Middleware for a server whose proxy publishes it under a prefix (``--root-path``).

    Both kinds of proxies work: those that remove the prefix, and those that keep it.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with ASGI's ``root_path``, which ``path`` includes."""
        if scope["type"] == "http":
            if scope["path"] == self.root_path:  # the page's links are relative to its folder
                response = RedirectResponse(f"{self.root_path}/", 308)
                await response(scope, receive, send)
                return
            kept = scope["path"].startswith(f"{self.root_path}/")
            path = scope["path"] if kept else self.root_path + scope["path"]
            scope = {**scope, "root_path": self.root_path, "path": path}
        await self.app(scope, receive, send)
