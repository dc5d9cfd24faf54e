"""Options of ``captioner serve`` and of requests to the server."""

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
    """A mark for options that accept only text of a certain form."""

    pattern: str
    """A regular expression that must match the whole text in lower case."""
    allowed: str
    """A description of the form, for messages."""


_HOST = Form(HOST_NAME, "a host name such as photos.example.org")
_PATH = Form(r"(/[a-z0-9._~-]+)*", "a path such as /captioner")
_ADDRESS = Form(r"[0-9a-f.:]+(/[0-9]+)?", "an IP address or network such as ::1/128")
_ORIGIN = Form(rf"\*|https?://{HOST_NAME}(:[0-9]+)?", "an origin such as https://x.org, or *")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the server."""

    max_bytes: Positive = 30 * 2**20
    """Reject photos with more bytes than this, with the HTTP status 413."""
    max_pixels: Annotated[int, Interval(ge=1, le=MAX_PIXELS)] = 120_000_000
    """Reject photos with more pixels than this before they are decoded, with the status 413."""
    max_batch: Positive = 100
    """Reject batches with more photos than this, with the status 413. The limit applies only to
    JSON responses. NDJSON responses have no limit."""
    max_queue: Positive = 64
    """Accept at most this many requests at the same time, and reject further requests with the
    status 429. Uploads use at most max-queue times max-bytes of memory."""
    max_per_client: Positive | None = None
    """Accept at most this many requests at the same time from each client, and reject further
    requests with the status 429. A client is an API key or, without keys, an address. Default: half
    of max-queue with keys, otherwise unlimited."""
    max_cost: Positive = 60_000
    """Reject requests that cost more than this, with the status 422. The cost counts the steps of
    the decoder: beam_size times max_length, and more with forced_words. Every word that occlusion
    or gradients explain adds 250. The option limits how long a single request can take."""
    rate_limit: Annotated[int, Ge(0)] = 0
    """Accept at most this many requests per minute from each client, and reject further requests
    with the status 429. Each photo of a batch counts as a request. A client is an API key or,
    without keys, an address. 0: unlimited."""
    timeout: Annotated[float, Interval(gt=0, lt=math.inf)] = 30.0
    """Wait at most this many seconds for each part of a request: its headers, the upload of its
    photo, and its captions. A late upload gets the status 408, and late captions get the status
    503."""
    grace: Annotated[float, Interval(ge=0, lt=math.inf)] = 60.0
    """After SIGTERM or Ctrl-C, complete accepted requests for at most this many seconds. New
    requests, and requests that are still unfinished then, get the status 503."""
    drain_delay: Annotated[float, Interval(ge=0, lt=math.inf)] = 0.0
    """After SIGTERM, keep serving requests for this many seconds before --grace starts. Meanwhile,
    /readyz returns 503, so that load balancers switch to other servers."""
    max_connections: Positive = 500
    """Open at most this many connections, including idle ones. Further connections wait. Each
    connection uses a file descriptor, and many systems allow only 1,024 per process."""
    max_beam: Positive = 20
    """Reject requests for a larger beam_size, num_captions or candidates than this, with the status
    422."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions, Limits):
    """Run a server with a web page and an HTTP API for captioning.

    The server documents the API at /docs and /openapi.json. Photos and texts are never written to
    disk or logged. Environment variables such as CAPTIONER_PORT set the options that the command
    line does not set.
    """

    host: str = "127.0.0.1"
    """Listen on this address. 127.0.0.1: accept connections from this machine only. 0.0.0.0: accept
    connections from other machines too."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000
    """Listen on this port. 0: any free port."""
    allow_host: list[Annotated[str, Shown("NAME"), _HOST]] = field(default_factory=list)
    """Also accept requests to this host name (in the Host header), such as the name of a proxy or a
    Docker Compose service. Requests to unknown names are rejected, except for /healthz, /readyz and
    /metrics. Repeat the option to accept several names."""
    allow_origin: list[Annotated[str, Shown("ORIGIN"), _ORIGIN]] = field(default_factory=list)
    """Let web pages from this origin, such as https://app.example.org, send requests to the server
    (CORS). *: all web pages. Repeat the option to allow several origins."""
    root_path: Annotated[str, Shown("PATH"), _PATH] = ""
    """Set the path under which a proxy publishes this server, such as /captioner (default: the
    proxy publishes it at the root)."""
    trust_proxy: list[Annotated[str, Shown("ADDRESS"), _ADDRESS]] = field(default_factory=list)
    """Trust the X-Forwarded-For header of this proxy. The log and the limits then use the client
    address in the header. Pass the proxy's address or network (127.0.0.1, 172.16.0.0/12). Repeat
    the option to trust several proxies."""
    api_key_file: File | None = None
    """Require an API key for captions. The file has one line NAME KEY per key, and # starts a
    comment. The signal SIGHUP makes the server read the file again. Instead of a file, you can put
    such lines into the environment variable CAPTIONER_API_KEYS."""
    api_keys: Annotated[str | None, Shown(hidden=True)] = None
    """API keys as text, in the format of a key file."""
    metrics_host: Annotated[str, Shown("HOST")] = "127.0.0.1"
    """Serve /metrics on this address if --metrics-port is set. 127.0.0.1: this machine only.
    0.0.0.0: other machines too."""
    metrics_port: Annotated[int, Interval(ge=0, le=65535)] | None = None
    """Serve /metrics on this port instead of --port. 0: any free port. Default: on --port, but only
    for requests that do not come through a proxy."""
    log_format: Literal["text", "json"] = "text"
    """Choose the format of the log on standard error. text: one line per request. json: one JSON
    object per line."""

    @property
    def has_keys(self) -> bool:
        """True if clients need an API key."""
        return self.api_key_file is not None or self.api_keys is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_keys is not None and self.api_key_file is not None:
            raise ConfigError(
                "api_key_file and the variable CAPTIONER_API_KEYS are both set; use only "
                "one of them"
            )
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        origins = [origin.lower().removesuffix("/") for origin in self.allow_origin]
        object.__setattr__(self, "allow_origin", origins)
        if self.metrics_port and self.metrics_port == self.port:
            raise ConfigError(f"metrics_port and port are both {self.port}; use different ports")
        for name, option in option_fields(ServeOptions).items():
            for form in [mark for mark in option.marks if isinstance(mark, Form)]:
                given = getattr(self, name)
                for one in [given] if isinstance(given, str) else given:
                    if not re.fullmatch(form.pattern, one.lower()):
                        raise ConfigError(f"{name} is {one!r}; use {form.allowed}")


# --- options of a request, in addition to the search options -------------------------------------


@dataclass(frozen=True, kw_only=True)
class WordOptions:
    """Options of all endpoints, in addition to the search options."""

    words: str | None = None
    """Explain this caption instead of searching for one."""
    alternatives: Annotated[int, Interval(ge=0, le=20)] = 0
    """Return this many of the most probable words at each position. 0: return none."""
    method: ExplanationMethod = "attention"
    """Choose how the maps are computed. attention: the attention weights. attention_gate: attention
    times the gate, the weight of the photo for the word (0 to 1). gradient_input, grad_cam and
    occlusion: the effect of each region on the word's log-probability."""


@dataclass(frozen=True, kw_only=True)
class ResponseOptions(WordOptions):
    """Options of the endpoints that return JSON."""

    attention: bool = False
    """Return the maps: alphas, gates, and the part of the photo that the model sees. Must be true
    with every method except attention."""
    min_confidence: Annotated[float, Interval(ge=0, le=1)] | None = None
    """Add the field unsure to each caption. It is true if the confidence is lower than this."""
