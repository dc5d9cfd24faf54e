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
from starlette.types import Scope

from captioner.errors import ConfigError
from captioner.serving.observe import route_path
from captioner.serving.responses import RequestError
from captioner.serving.security import API

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
    if not (f"{name}{key}".isascii() and f"{name}{key}".isprintable() and len(name) <= 64):
        return "name and key are not printable ASCII text, the name of 64 characters at most"
    if len(key) < MIN_LENGTH:
        return f"the key has {len(key)} characters; give {MIN_LENGTH} or more"
    if name in names.values():
        return f"the name {name} is used twice; give each key its own"
    if other := names.get(_digest(key)):
        return f"the key is also that of {other}; give each name its own"
    return None


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
    """Requires an API key for paths under ``/v1/``.

    A request counts as one towards the rate limit. Of a batch, each photo does: for each further
    one the endpoint calls ``scope["state"]["count_photo"]``, which returns None or the refusal.
    """

    def __init__(self, keys: ApiKeys, per_minute: int) -> None:
        """Check keys; ``per_minute`` is the rate limit of each, or 0 for none."""
        self.keys = keys
        self.limit = RateLimit(per_minute) if per_minute else None

    def __call__(self, scope: Scope) -> RequestError | None:
        """Check a request's key, and count the request."""
        if not route_path(scope).startswith(API):
            return None
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        key = key or headers.get(KEY_HEADER, "")
        if not key:
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
