"""Access control with Host and Origin checks, API keys, rate limits and response headers.

Every web page that the user opens can send requests to a server on the loopback interface. Two
checks prevent misuse. The first check rejects cross-origin requests, unless their ``Origin`` is
allowed. The second check prevents DNS rebinding: it accepts only known names in the ``Host``
header. It does not apply to health, readiness and metrics, because orchestrators request them under
any name or address.

The key file has one line per key: the name of the key, then the key. Keys are looked up by their
SHA-256 digests, so that the response time reveals nothing about them. The log contains only names.

    # name    key
    alice     3mJ0x8...
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import math
import re
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.types import Scope

from captioner.errors import ConfigError
from captioner.serving.options import HOST_NAME, ServeOptions
from captioner.serving.request_errors import RequestError, route_path

# Paths for orchestrators and monitoring. They need no key and accept any Host, because they reveal
# only counts.
PROBES = frozenset({"/healthz", "/readyz", "/metrics"})

# Default response headers; the web page overrides Content-Security-Policy.
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
KEY_HEADER = "X-Api-Key"  # for clients that cannot send ``Authorization: Bearer KEY``
MIN_LENGTH = 16  # characters of a key; shorter ones could be guessed
WRONG_KEYS = 60  # wrong keys per address and minute that get 401; further ones get 429
WRONG_KEY_SECONDS = 0.5  # until a wrong key is answered

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(rf"{HOST_NAME}\.?(?::[0-9]+)?")
_PORT = re.compile(r"^(\[.*\]|[^:]*):\d+$")


# --- hosts and origins ---------------------------------------------------------------------------


class AllowedHosts:
    """The ``Host`` headers that a server accepts, with any port.

    If the server listens on loopback, it accepts the loopback names. Otherwise, it accepts the name
    of this machine, and any IP address, because DNS rebinding needs a name. Further names, such as
    the name of a proxy, must be passed.
    """

    def __init__(self, bound: str, names: Iterable[str] = ()) -> None:
        own, address = f"[{bound}]" if ":" in bound else bound, _address(bound)
        self.names = LOOPBACK | {name.lower() for name in (own, *names)}
        self.addresses = not (bound == "localhost" if address is None else address.is_loopback)
        if self.addresses:
            self.names |= {socket.gethostname().lower()}

    def allows(self, host: str) -> bool:
        """Return whether a ``Host`` header is accepted."""
        match = _HOST.fullmatch(host.strip().lower())
        if match is None:
            return False
        name = match[1].rstrip(".")
        return name in self.names or (self.addresses and _address(name) is not None)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def origin_check(options: ServeOptions) -> Callable[[Scope], RequestError | None]:
    """Return a function that rejects unknown hosts and cross-origin requests by their headers.

    Cross-origin requests include form posts, which browsers send without a CORS preflight.
    """
    hosts = AllowedHosts(options.host, options.allow_host)
    origins = frozenset(options.allow_origin)

    def check(scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        given = len(headers.getlist("host"))
        if given > 1 or (given == 0 and scope.get("http_version") != "1.0"):  # RFC 9112, 3.2
            message = f"the request has {given} Host headers; send exactly one"
            return RequestError(400, "host", message)
        host, origin = headers.get("host", ""), headers.get("origin")
        reading = scope["method"] in ("GET", "HEAD")
        if not hosts.allows(host) and not (reading and route_path(scope) in PROBES):
            hint = (
                "start the server with --allow-host NAME, or use the address that the server "
                "printed"
            )
            return RequestError(421, "host", f"the host {host[:100]!r} is unknown; {hint}")
        if reading:
            return None  # no side effects, and browsers hide the response from other sites
        if origins & {"*", (origin or "").lower()}:
            return None
        foreign = origin is not None and origin.lower().partition("://")[2] != host.lower()
        if foreign or headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            message = f"cross-origin requests are not allowed (Origin: {(origin or 'none')[:100]})"
            hint = "use the page of this server, or start the server with --allow-origin ORIGIN"
            return RequestError(403, "origin", f"{message}; {hint}")
        return None

    return check


# --- API keys ------------------------------------------------------------------------------------


class ApiKeys:
    """API keys from a file or an environment variable, by name."""

    def __init__(self, path: str | Path | None, text: str = "") -> None:
        """Read the keys from the file, or from ``text`` if ``path`` is None.

        Raises:
            ConfigError: The file cannot be read, or a line is invalid.
        """
        self.path = None if path is None else Path(path)
        self._text = text
        self._names: dict[bytes, str] = {}
        self.reload()

    def __len__(self) -> int:
        return len(self._names)

    def reload(self) -> None:
        """Read the keys again. After an error, the previous keys stay valid."""
        source, text = f"the API key file {str(self.path)!r}", self._text
        try:
            if self.path is None:
                source = "CAPTIONER_API_KEYS"
            else:
                text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            hint = "use a text file that the server may read, with one line NAME KEY per key"
            raise ConfigError(f"{source} cannot be read ({reason}); {hint}") from error
        names: dict[bytes, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            parts = line.partition("#")[0].split()
            if not parts:
                continue
            if len(parts) != 2 or len(parts[1]) < MIN_LENGTH:  # never quote a line, which has a key
                hint = f"write a name, a space, and a key of at least {MIN_LENGTH} characters"
                raise ConfigError(f"{source}, line {number} is invalid; {hint}")
            names[_digest(parts[1])] = parts[0]
        if not names:
            raise ConfigError(f"{source} has no keys; write one line NAME KEY per key")
        self._names = names

    def name(self, key: str) -> str | None:
        """Return the name of a key, or None if the key is unknown."""
        return self._names.get(_digest(key))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class RateLimit:
    """A limit on requests per minute for each name. A minute's requests may all come at once."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 60 / per_minute if per_minute else 0.0
        self._clock = clock
        self._full_at: dict[str, float] = {}  # when a name's whole allowance is available again

    def take(self, name: str) -> int:
        """Count one request, and return the seconds to wait, or 0 if it is allowed."""
        now = self._clock()
        full_at = max(self._full_at.get(name, now), now) + self._interval
        # An allowance of a minute is full after 60 seconds without requests.
        wait = full_at - now - 60
        if wait > 1e-6:
            return math.ceil(wait)
        self._full_at.pop(name, None)
        self._full_at[name] = full_at
        while self._full_at[oldest := next(iter(self._full_at))] < now:  # it is available again
            del self._full_at[oldest]
        return 0


_Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))]
_Key = Annotated[str | None, Security(APIKeyHeader(name=KEY_HEADER, auto_error=False))]


def checks(keys: ApiKeys | None, per_minute: int) -> list[Any]:
    """Return the FastAPI dependencies of endpoints for photos: an API key and a rate limit.

    They store the client's name in ``request.state.client``. Each request counts once towards the
    rate limit, and each photo of a batch counts once. For every photo after the first, the endpoint
    calls ``request.state.count_photo``. This function raises an error at the limit.

    Requests with wrong keys are answered slowly, and their number per address and minute is
    limited. Clients with a valid key are not affected, even at the same address.

    Args:
        keys: The API keys, or None if no key is required.
        per_minute: Maximum number of requests per minute for each client, or 0 for no limit.
    """
    limit, wrong_keys = RateLimit(per_minute), RateLimit(WRONG_KEYS)

    async def check_key(request: Request, bearer: _Bearer, header: _Key) -> None:
        assert keys is not None
        key = bearer.credentials if bearer else header
        if not key:
            message = "the request has no API key; send the header Authorization: Bearer KEY"
            raise RequestError(401, "no_key", message)
        name = keys.name(key)
        if name is None:
            wait = wrong_keys.take(client_of(request))
            await asyncio.sleep(WRONG_KEY_SECONDS)
            if wait:
                message = f"too many wrong API keys from this address; try again in {wait} s"
                raise RequestError(429, "key", message, retry_after=wait)
            message = (
                "the API key is unknown; check the key, or ask the server's operator for a new key"
            )
            raise RequestError(401, "key", message)
        request.state.api_key = name

    async def check_rate(request: Request) -> None:
        request.state.client = client = client_of(request)

        # This function must not refer to the request, which refers to it: the reference cycle would
        # keep the connection open.
        def count() -> None:
            if wait := limit.take(client):
                source = "from this address" if keys is None else "with this API key"
                message = f"too many requests {source}; try again in {wait} s"
                raise RequestError(429, "rate", message, retry_after=wait)

        request.state.count_photo = count
        count()

    return [Depends(check_rate)] if keys is None else [Depends(check_key), Depends(check_rate)]


def client_of(request: Request) -> str:
    """Return the name of the request's API key, or the client's IP address without a valid key.

    An IPv6 address is replaced with its /64 network.
    """
    if key := getattr(request.state, "api_key", None):
        return str(key)
    given = request.client.host if request.client else ""
    address = _address(_PORT.sub(r"\1", given))
    address = getattr(address, "ipv4_mapped", None) or address  # if the server listens on ::
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(address), 64), strict=False))
    return str(address or given)
