"""Resource limits of the server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from captioner.data.images import MAX_PIXELS
from captioner.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Resource limits per request and for the whole server."""

    max_bytes: int = 20 * 2**20
    """Maximum file size of a photo, in bytes (413)."""
    max_pixels: int = 50_000_000
    """Maximum number of pixels of a photo, checked before it is decoded (413)."""
    max_queue: int = 64
    """Maximum number of requests in flight; further ones get 429. Uploads use at most max-queue *
    max-bytes of memory."""
    timeout: float = 30.0
    """Time limit in seconds for receiving a photo (408), and again for captioning it (503)."""
    max_connections: int = 500
    """Maximum number of open connections; further ones get 503. Each uses a file descriptor, of
    which a process usually has 1,024."""
    max_beam: int = 20
    """Maximum beam size and number of captions per request (422)."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels", "max_queue", "max_connections", "max_beam"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                option = name.replace("_", "-")
                raise ConfigError(f"{option} is {value!r}; give a whole number from 1")
        if self.max_pixels > MAX_PIXELS:
            raise ConfigError(f"max-pixels is {self.max_pixels:,}; give {MAX_PIXELS:,} at most")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout is {self.timeout}; give a positive number of seconds")


MAX_WORDS = 10
"""Maximum number of forced or banned words per request; each forced word widens the beam."""

MAX_LENGTH = 50
"""Maximum caption length in tokens."""

MAX_ALTERNATIVES = 20
"""Maximum number of alternatives per position."""

MAX_TEXT = 1000
"""Maximum number of characters of a text parameter."""
