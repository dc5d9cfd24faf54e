"""Limits of the server and of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Interval

from captioner.data.images import MAX_PIXELS
from captioner.option_fields import check_options

Positive = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class Limits:
    """Limits of the server."""

    max_bytes: Positive = 30 * 2**20
    """Maximum size of an uploaded photo (bytes); larger ones are refused (HTTP status 413)."""
    max_pixels: Annotated[int, Interval(ge=1, le=MAX_PIXELS)] = 120_000_000
    """Maximum number of pixels of a photo; larger ones are refused before decoding (413)."""
    max_batch: Positive = 100
    """Maximum number of photos of a batch with a JSON response (413); NDJSON has no limit."""
    max_queue: Positive = 64
    """Maximum number of requests in flight; further ones are refused (429). Uploads use at most
    max-queue times max-bytes of memory."""
    rate_limit: Annotated[int, Ge(0)] = 0
    """Maximum number of requests per minute of each API key (429); 0: unlimited."""
    timeout: Annotated[float, Interval(gt=0, lt=math.inf)] = 30.0
    """Time limit (seconds) for the upload of a photo (408), and then for its captions (503)."""
    grace: Annotated[float, Interval(ge=0, lt=math.inf)] = 60.0
    """Time limit (seconds) for completing accepted requests on SIGTERM or Ctrl-C, while new ones
    are refused (503); those still unfinished then fail (503)."""
    max_connections: Positive = 500
    """Maximum number of open connections, idle ones included; further ones are refused (503). Each
    uses a file descriptor (usual limit of the system: 1,024)."""
    max_beam: Positive = 20
    """Maximum beam size, number of captions and of candidates of a request (422)."""

    def __post_init__(self) -> None:
        check_options(self)


MAX_WORDS = 10
"""Maximum number of forced words, and of banned words, in a request."""

MAX_LENGTH = 50
"""Maximum length of a caption in tokens that a request may set."""

MAX_ALTERNATIVES = 20
"""Maximum number of alternatives per position."""

MAX_TEXT = 1000
"""Maximum length of a text in a request (characters)."""
