"""Options of ``captioner serve``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from captioner.data.images import MAX_PIXELS
from captioner.errors import ConfigError
from captioner.options import ExplanationMethod, ModelOptions, Positive
from captioner.schema import File, Shown, option_fields

HOST_NAME = r"(\[[0-9a-f:.]+\]|[^:\[\]/@?#*\s]+)"  # in a regular expression


@dataclass(frozen=True)
class Form:
    """Mark of an option: the form that its text must have."""

    pattern: str
    """Regular expression of the whole text in lower case."""
    allowed: str
    """The form in words, for messages."""


_HOST = Form(HOST_NAME, "a host name, e.g. photos.example.org")
_PATH = Form(r"(/[a-z0-9._~-]+)*", "a path such as /captioner")
_ADDRESS = Form(r"[0-9a-f.:]+(/[0-9]+)?", "an IP address or network, e.g. ::1/128")
_ORIGIN = Form(rf"\*|https?://{HOST_NAME}(:[0-9]+)?", "scheme and host, e.g. https://x.org, or *")


@dataclass(frozen=True, kw_only=True)
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
    max_per_client: Positive | None = None
    """Maximum number of requests in flight of each API key, or without keys of each client address
    (429); default: half of max-queue with keys, otherwise unlimited."""
    max_cost: Positive = 60_000
    """Maximum cost of a request (422): beam_size times max_length steps of the decoder, and 250 for
    each word that occlusion or gradients explain. Those that cost more than a batch of others are
    worked on beside these."""
    rate_limit: Annotated[int, Ge(0)] = 0
    """Maximum number of requests per minute of each API key, or without keys of each client address
    (429); 0: unlimited."""
    timeout: Annotated[float, Interval(gt=0, lt=math.inf)] = 30.0
    """Time limit (seconds) for the headers of a request, for the upload of a photo (408), and then
    for its captions (503)."""
    grace: Annotated[float, Interval(ge=0, lt=math.inf)] = 60.0
    """Time limit (seconds) for completing accepted requests on SIGTERM or Ctrl-C, while new ones
    are refused (503); those still unfinished then fail (503)."""
    drain_delay: Annotated[float, Interval(ge=0, lt=math.inf)] = 0.0
    """Time (seconds) for which requests are still served after SIGTERM, while /readyz returns 503
    and load balancers turn to other servers; --grace starts after it."""
    max_connections: Positive = 500
    """Maximum number of open connections, idle ones included; further ones wait until one is
    closed. Each uses a file descriptor (usual limit of the system: 1,024)."""
    max_beam: Positive = 20
    """Maximum beam size, number of captions and of candidates of a request (422)."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions, Limits):
    """Run a web page for captioning and an HTTP API.

    The API (POST /v1/captions) is documented in /openapi.json. Photos and texts are never written
    to disk or logged. Variables of the environment set options that are not given: CAPTIONER_PORT
    sets --port.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 127.0.0.1 accepts connections from this machine only, 0.0.0.0 from
    anywhere."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000
    """Port to listen on; 0: any free port."""
    allow_host: list[Annotated[str, Shown("NAME"), _HOST]] = field(default_factory=list)
    """Additional Host header to accept, such as a proxy's name or the service's in Docker Compose;
    others are refused, except for /healthz, /readyz and /metrics; repeat for several."""
    allow_origin: list[Annotated[str, Shown("ORIGIN"), _ORIGIN]] = field(default_factory=list)
    """Origin of a web page that may use this server (CORS), e.g. https://app.example.org; * for
    every page; repeat for several."""
    root_path: Annotated[str, Shown("PATH"), _PATH] = ""
    """Prefix under which a proxy publishes this server, e.g. /captioner."""
    trust_proxy: list[Annotated[str, Shown("ADDRESS"), _ADDRESS]] = field(default_factory=list)
    """Address or network of a proxy whose X-Forwarded-For is the client's address, in the log and
    for limits, e.g. 127.0.0.1 or 172.16.0.0/12; repeat for several."""
    api_key_file: File | None = None
    """Require an API key for captions; the file has one per line, NAME KEY, and # starts a comment;
    SIGHUP reloads it. Or set the variable CAPTIONER_API_KEYS to such lines."""
    api_keys: Annotated[str | None, Shown(hidden=True)] = None
    """The text of a key file."""
    metrics_host: str = "127.0.0.1"
    """Address to listen on at --metrics-port; 0.0.0.0 accepts connections from anywhere."""
    metrics_port: Annotated[int, Interval(ge=0, le=65535)] | None = None
    """Serve /metrics on this port instead of --port; 0: any free port (default: on --port, for
    requests that do not come through a proxy)."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log on stderr; json: one object per line."""

    @property
    def has_keys(self) -> bool:
        """Whether clients need an API key."""
        return self.api_key_file is not None or self.api_keys is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_keys is not None and self.api_key_file is not None:
            raise ConfigError("api_key_file is given besides CAPTIONER_API_KEYS; give one")
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        origins = [origin.lower().removesuffix("/") for origin in self.allow_origin]
        object.__setattr__(self, "allow_origin", origins)
        if self.metrics_port and self.metrics_port == self.port:
            raise ConfigError(f"metrics_port is {self.port}, like port; give another port")
        for name, option in option_fields(ServeOptions).items():
            for form in [mark for mark in option.marks if isinstance(mark, Form)]:
                given = getattr(self, name)
                for one in [given] if isinstance(given, str) else given:
                    if not re.fullmatch(form.pattern, one.lower()):
                        raise ConfigError(f"{name} is {one!r}; give {form.allowed}")


# --- options of a request, besides those of the search --------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WordOptions:
    """Options of every endpoint, beside those of the search."""

    words: str | None = None
    """Explain this caption instead of searching for one."""
    alternatives: Annotated[int, Interval(ge=0, le=20)] = 0
    """Number of most probable words to return per position."""
    method: ExplanationMethod = "attention"
    """How the maps are computed: the attention, the attention times the gate, or the effect of each
    region on the word's log-probability."""


@dataclass(frozen=True, kw_only=True)
class ResponseOptions(WordOptions):
    """Options of the endpoints that return JSON."""

    attention: bool = False
    """Return attention: gates, alphas and the crop box that the model sees. The methods other than
    attention need it."""
    min_confidence: Annotated[float, Interval(ge=0, le=1)] | None = None
    """Return unsure: whether the confidence of each caption is lower than this."""
