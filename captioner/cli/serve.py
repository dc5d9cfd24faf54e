"""``captioner serve``: a web page and an HTTP API for captioning."""

from __future__ import annotations

import errno
import ipaddress
import logging
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from captioner.cli.arguments import Parser
from captioner.cli.main import OK
from captioner.errors import CaptionerError, ConfigError
from captioner.hardware import keep_freed_memory
from captioner.inference.folder import SHIPPED, find_model, fingerprint
from captioner.option_fields import File, Shown, option_fields
from captioner.options import ModelOptions
from captioner.serving.limits import Limits

if TYPE_CHECKING:
    from fastapi import FastAPI
    from uvicorn import Server

    from captioner.serving.keys import ApiKeys

logger = logging.getLogger("captioner.serving")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Limits, ModelOptions):
    """Run a web page for captioning and an HTTP API.

    The API is POST /v1/captions, documented in /openapi.json. Photos and texts are never written to
    disk or logged.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 127.0.0.1 accepts connections from this machine only, 0.0.0.0 from
    anywhere."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000
    """Port to listen on; 0: any free port."""
    allow_host: list[Annotated[str, Shown("NAME")]] = field(default_factory=list)
    """Additional Host header to accept, such as a proxy's name or the service's in Docker Compose;
    others are refused, except for /healthz, /readyz and /metrics; repeat for several."""
    allow_origin: list[Annotated[str, Shown("ORIGIN")]] = field(default_factory=list)
    """Origin of a web page that may use this server (CORS), e.g. https://app.example.org; * for
    every page; repeat for several."""
    root_path: Annotated[str, Shown("PATH")] = ""
    """Prefix under which a proxy publishes this server, e.g. /captioner."""
    trust_proxy: list[Annotated[str, Shown("ADDRESS")]] = field(default_factory=list)
    """Address or network of a proxy whose X-Forwarded-For is logged as the client's address, e.g.
    127.0.0.1 or 172.16.0.0/12; repeat for several."""
    api_key_file: File | None = None
    """Require an API key for captions; the file has one per line, NAME KEY, and # starts a comment;
    SIGHUP reloads it."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log on stderr; json: one object per line."""


def serve_parser() -> Parser[ServeOptions]:
    """Options of ``serve``."""
    return Parser("serve", "[options]", ServeOptions)


def serve(argv: Sequence[str]) -> int:
    """Serve until interrupted."""
    options, _ = serve_parser().parse(argv)
    keep_freed_memory(threads=True)  # the model runs in a thread
    limits = Limits(**{name: getattr(options, name) for name in option_fields(Limits)})
    with closing(_listen(options.host, options.port)) as listener:  # before the model is loaded
        from PIL import Image

        from captioner.inference.captioner import load
        from captioner.serving.app import create_app

        access = _access(options, limits)
        model = load(*options.model, device=options.device, precision=options.precision)
        name = _model_name(options.model)
        app = create_app(model, limits, batch_size=options.batch_size, model_name=name, **access)
        blank = model.prepare(Image.new("RGB", (64, 64)))
        model.caption_batch([blank], model.options())  # warm-up: the first is the slowest
        _log_to_stderr(options.log_format)
        address = f"http://{_shown(options.host)}:{listener.getsockname()[1]}"
        server = _server(app, limits, address, _proxies(options.trust_proxy))
        with _reloading(access["keys"]):
            _serve(server, listener)
    return OK


def _access(options: ServeOptions, limits: Limits) -> dict[str, Any]:
    """Who may use the server, as arguments of ``create_app``.

    Raises:
        ConfigError: An option is invalid, or an API key file cannot be read.
    """
    from captioner.serving.keys import ApiKeys
    from captioner.serving.security import allowed_hosts, allowed_origins

    root_path = options.root_path.rstrip("/")
    if root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", root_path):
        raise ConfigError(f"--root-path is {options.root_path!r}; give a path such as /captioner")
    if limits.rate_limit and options.api_key_file is None:
        raise ConfigError("--rate-limit limits each API key; give --api-key-file too")
    return {
        "hosts": allowed_hosts(options.host, options.allow_host),
        "origins": allowed_origins(options.allow_origin),
        "root_path": root_path,
        "keys": None if options.api_key_file is None else ApiKeys(options.api_key_file),
    }


def _model_name(folders: Sequence[str]) -> str:
    """Names and fingerprints of the models, e.g. ``best@0123456789ab``."""
    models = [(folder, find_model(folder)) for folder in folders or (SHIPPED,)]
    named = (f"{_ascii(folder)}@{fingerprint(path)}" for folder, path in models)
    return "+".join(named)


def _ascii(folder: str) -> str:
    """The name of a folder as it can appear in an HTTP header."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", Path(folder).resolve().name) or "model"


def _proxies(addresses: Sequence[str]) -> list[str]:
    """Check the addresses and networks of proxies.

    Raises:
        ConfigError: One of them is neither.
    """
    for address in addresses:
        try:
            ipaddress.ip_network(address)
        except ValueError:
            raise ConfigError(
                f"--trust-proxy is {address!r}; give an IP address or network, e.g. 172.16.0.0/12"
            ) from None
    return list(addresses)


def _listen(host: str, port: int) -> socket.socket:
    """Bind a socket, without listening yet.

    Raises:
        ConfigError: The host is unknown.
        CaptionerError: The port is in use or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(
            f"--host {host!r} is not a known address; give 127.0.0.1, 0.0.0.0, ..."
        ) from None
    family, kind, protocol, _, address = found[0]
    new = socket.socket(family, kind, protocol)
    if sys.platform != "win32":  # there, it would let two servers share a port
        new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        new.bind(address)
    except OSError as error:
        new.close()
        where = f"port {port} of {host}"
        if error.errno == errno.EADDRINUSE:
            line = f"{where} is in use; give another --port, or --port 0 for any free port"
        else:
            line = f"cannot listen on {where} ({error.strerror}); give another --port or --host"
        raise CaptionerError(line) from error
    return new


def _shown(host: str) -> str:
    """The host as it appears in a URL."""
    if host in ("", "0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _server(app: FastAPI, limits: Limits, address: str, proxies: list[str]) -> Server:
    """Create a server that announces its address and drains on shutdown."""
    import uvicorn

    from captioner.serving.connections import DRAIN_SECONDS, limited_protocol

    class Draining(uvicorn.Server):
        """Completes the accepted requests before it stops listening."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Listen, and print the address."""
            await super().startup(sockets)
            _announce(f"serving on {address} (press Ctrl-C to stop)")

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Refuse new requests, wait for the accepted ones, then close the sockets."""
            lifecycle = app.state.lifecycle
            lifecycle.drain()
            if lifecycle.accepted:
                _announce(
                    f"completing {lifecycle.accepted} requests within {limits.grace:g} s (press "
                    "Ctrl-C to stop now)"
                )
                await lifecycle.drained(limits.grace, lambda: self.force_exit)
            app.state.service.close()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        http=limited_protocol(limits),
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # would contain the query string, with the user's texts
        proxy_headers=bool(proxies),
        forwarded_allow_ips=proxies,
        server_header=False,
        # After the grace period: to read the rest of refused bodies and send the last responses.
        timeout_graceful_shutdown=round(2 * DRAIN_SECONDS),
    )
    return Draining(config)


def _announce(message: str) -> None:
    print(f"captioner: {message}", file=sys.stderr, flush=True)


@contextmanager
def _reloading(keys: ApiKeys | None) -> Iterator[None]:
    """Read the API keys again on SIGHUP, where there is that signal."""
    if keys is None or not hasattr(signal, "SIGHUP"):
        yield
        return

    def reload(*_: object) -> None:
        """Read the file; keep the keys if it is invalid."""
        try:
            keys.reload()
        except ConfigError as error:
            logger.error("%s; the previous %d API keys stay valid", error, len(keys))
        else:
            logger.info("reloaded %d API keys", len(keys))

    old = signal.signal(signal.SIGHUP, reload)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, old)


def _serve(server: Server, listener: socket.socket) -> None:
    """Run until SIGTERM (returns) or Ctrl-C (raises KeyboardInterrupt)."""
    # uvicorn raises the signal again after its shutdown.
    old = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, old)


def _log_to_stderr(kind: Literal["text", "json"]) -> None:
    from captioner.serving.access_log import JsonFormatter

    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(JsonFormatter() if kind == "json" else text)
    for name, level in (("captioner.serving", logging.INFO), ("uvicorn.error", logging.WARNING)):
        log = logging.getLogger(name)
        log.setLevel(level)
        log.handlers = [handler]
        log.propagate = False
