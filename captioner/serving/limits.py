"""How much the server takes on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from captioner.data.images import MAX_PIXELS
from captioner.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may cost."""

    max_bytes: int = 20 * 2**20
    """Bytes of a photo's file; a larger one is refused (413)."""
    max_pixels: int = 50_000_000
    """Pixels of a photo; a larger one is refused before it is decoded (413)."""
    max_queue: int = 64
    """Requests on their way at once, from the first byte to the answer; one more is told to come
    back (429). So many times max-bytes is the memory that files can fill."""
    timeout: float = 30.0
    """Seconds that a photo may take to arrive (408), and after that its captions to be ready
    (503)."""
    max_connections: int = 500
    """Connections open at once, used or not; one more is sent away (503). Each is an open file of
    the system's, which usually allows 1,024."""
    max_beam: int = 20
    """Greatest beam size and number of captions that may be asked for (422)."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels", "max_queue", "max_connections", "max_beam"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{_spelled(name)} is {value!r}; give a whole number from 1")
        if self.max_pixels > MAX_PIXELS:
            raise ConfigError(f"max-pixels is {self.max_pixels:,}; give {MAX_PIXELS:,} at most")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout is {self.timeout}; give seconds, more than 0")


def _spelled(name: str) -> str:
    return name.replace("_", "-")


MAX_WORDS = 10
"""Words that may be forced, or banned, in one request; each forced one widens the beam."""

MAX_LENGTH = 50
"""Most tokens of a sentence that may be asked for."""

MAX_ALTERNATIVES = 20
"""Most alternatives at a place."""

MAX_TEXT = 1000
"""Characters of own words."""
