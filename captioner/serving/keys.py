"""API keys and their rate limit.

The key file has one key per line, after its name; keys are compared by their SHA-256 digests in
constant time, and only names are ever logged.

    # name    key
    alice     3mJ0x8...
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import math
import time
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from captioner.errors import ConfigError
from captioner.serving.metrics import Metrics
from captioner.serving.paths import API, route_path
from captioner.serving.responses import RequestError, error_response

MIN_LENGTH = 16
"""Minimum number of characters of a key; shorter ones could be guessed."""

KEY_HEADER = "X-Api-Key"
"""Header with the key, for clients that cannot send ``Authorization: Bearer KEY``."""


class ApiKeys:
    """The keys of a file, by name."""

    def __init__(self, path: str | Path) -> None:
        """Read the file.

        Raises:
            ConfigError: The file cannot be read, or a line is invalid.
        """
        self.path = Path(path)
        self._names: dict[bytes, str] = {}
        self.reload()

    def __len__(self) -> int:
        return len(self._names)

    def reload(self) -> None:
        """Read the file again; after an error the previous keys stay valid.

        Raises:
            ConfigError: See ``__init__``.
        """
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise ConfigError(f"api-key-file {self.path}: {reason}; give a text file") from error
        names: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            if not (parts := line.partition("#")[0].split()):
                continue
            problem = _problem(parts, names)
            if problem:  # never quotes the line, which has a key
                raise ConfigError(f"api-key-file {self.path}, line {number}: {problem}")
            names[_digest(parts[1])] = parts[0]
        if not names:
            raise ConfigError(f"api-key-file {self.path} has no keys; give lines of: NAME KEY")
        self._names = names

    def name(self, key: str) -> str | None:
        """The name of a key; None if it is unknown. Takes the same time for every key."""
        given, found = _digest(key), None
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, given):
                found = name
        return found


def _problem(parts: list[str], names: dict[bytes, str]) -> str | None:
    """What is wrong with the words of a line; None if nothing is."""
    if len(parts) != 2:
        return f"{len(parts)} words; give a name and a key"
    name, key = parts
    digest = _digest(key)
    problems = {
        "the name is not printable ASCII text of 64 characters at most": (
            not (name.isascii() and name.isprintable() and len(name) <= 64)
        ),
        "the key is not printable ASCII text": not (key.isascii() and key.isprintable()),
        f"the key has {len(key)} characters; give {MIN_LENGTH} or more": len(key) < MIN_LENGTH,
        f"the name {name} is used twice; give each key its own": name in names.values(),
        f"the key is also that of {names.get(digest)}; give each name its own": digest in names,
    }
    return next((problem for problem, found in problems.items() if found), None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class RateLimit:
    """At most ``per_minute`` requests per minute and name, which may come all at once."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._full_at: dict[str, float] = {}
        """When a name's whole allowance is available again."""

    def take(self, name: str) -> int:
        """Use one request; 0, or the whole seconds after which to try again."""
        now, interval = self._clock(), 60 / self._per_minute
        full_at = max(self._full_at.get(name, now), now) + interval
        # An allowance of a minute is full after 60 seconds without requests.
        wait = full_at - now - 60
        if wait > 1e-6:
            return math.ceil(wait)
        self._full_at[name] = full_at
        return 0


class KeyCheck:
    """Middleware that requires an API key for paths under ``/v1/``.

    A request counts as one towards the rate limit. Of a batch, each photo does: for each further
    one the endpoint calls ``scope["state"]["count_photo"]``, which returns None or the refusal.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, per_minute: int, metrics: Metrics) -> None:
        """Check keys; ``per_minute`` is the rate limit of each, or 0 for none."""
        self.app = app
        self.keys = keys
        self.limit = RateLimit(per_minute) if per_minute else None
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        if scope["type"] == "http" and route_path(scope).startswith(API):
            error = self._check(scope)
            if error is not None:
                self.metrics.refused.labels(error.reason).inc()
                response = error_response(error)
                if error.status == 401:
                    response.headers["WWW-Authenticate"] = 'Bearer realm="captioner"'
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> RequestError | None:
        key = _given_key(Headers(scope=scope))
        if key is None:
            message = "an API key is required; send it as header: Authorization: Bearer KEY"
            return RequestError(401, "no_key", message)
        name = self.keys.name(key)
        if name is None:
            return RequestError(401, "key", "unknown API key; check it, or ask for a new one")
        state = scope.setdefault("state", {})
        state["api_key"] = name
        state["count_photo"] = functools.partial(self._count, name)
        return self._count(name)

    def _count(self, name: str) -> RequestError | None:
        if self.limit and (wait := self.limit.take(name)):
            message = f"too many requests with this API key; try again in {wait} s"
            return RequestError(429, "rate", message, retry_after=wait)
        return None


def _given_key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get(KEY_HEADER) or None
