"""``captioner serve``: a web page and an HTTP interface for programs."""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from docstring_parser import parse_from_object

from captioner.cli.main import OK
from captioner.cli.options import Parser, add_model_options, new_parser
from captioner.errors import CaptionerError, ConfigError
from captioner.hardware import keep_freed_memory
from captioner.serving.limits import Limits

if TYPE_CHECKING:
    from uvicorn import Server

    from captioner.serving.service import Service


@functools.cache
def parser() -> Parser:
    """Options of ``serve``."""
    new = new_parser(
        "serve",
        "Serve a page that captions photos, and POST /v1/captions for programs (described in "
        "/openapi.json). Nothing that is sent is written to disk or logged.",
        "[options]",
    )
    new.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; by default only this machine gets through, 0.0.0.0 lets "
        "everyone in who can reach it",
    )
    new.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one")
    new.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name, e.g. a proxy's, under which browsers may call this server besides its own "
        "address; may be given more than once",
    )
    limits = new.add_argument_group("limits")
    texts = {entry.arg_name: entry.description for entry in parse_from_object(Limits).params}
    for field in dataclasses.fields(Limits):
        spelled, text = field.name.replace("_", "-"), " ".join((texts[field.name] or "").split())
        kind = {"int": int, "float": float}[str(field.type)]
        limits.add_argument(f"--{spelled}", type=kind, default=field.default, help=text)
    add_model_options(new)
    return new


def main(argv: Sequence[str]) -> int:
    """Serve until someone says stop."""
    options = parser().parse(argv)
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"port is {options.port}; give 1 to 65535, or 0 for a free one")
    keep_freed_memory(threads=True)  # the model works in one
    limits = Limits(**{field.name: options[field.name] for field in dataclasses.fields(Limits)})
    with closing(_listen(options.host, options.port)) as listener:  # before the model is loaded
        from PIL import Image

        from captioner.api import load
        from captioner.serving.app import create_app
        from captioner.serving.security import allowed_hosts

        model = load(*options.model, device=options.device, precision=options.precision)
        hosts = allowed_hosts(options.host, options.allow_host)
        app = create_app(model, limits, batch_size=options.batch_size, hosts=hosts)
        model.caption(Image.new("RGB", (64, 64)))  # the first one takes longest
        _log_to_stderr()
        address = f"http://{_shown(options.host)}:{listener.getsockname()[1]}"
        _serve(_server(app.state.service, app, limits, address), listener)
    return OK


def _listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, not listening yet.

    Raises:
        ConfigError: There is no such address.
        CaptionerError: It cannot be listened on.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"host {host!r} is no address; give 127.0.0.1, 0.0.0.0, ...") from None
    family, kind, protocol, _, address = found[0]
    new = socket.socket(family, kind, protocol)
    if sys.platform != "win32":  # where it would let two servers share a port
        new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        new.bind(address)
    except OSError as error:
        new.close()
        where = f"port {port} of {host}"
        if error.errno == errno.EADDRINUSE:
            line = f"{where} is in use; give another --port, or --port 0 for a free one"
        else:
            line = (
                f"{where} cannot be listened on ({error.strerror}); give another --port or --host"
            )
        raise CaptionerError(line) from error
    return new


def _shown(host: str) -> str:
    """The host as a browser on this machine takes it."""
    if host in ("", "0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _server(service: Service, app: Callable[..., object], limits: Limits, address: str) -> Server:
    """A server that says when it is ready and tells the service when it is to stop."""
    import uvicorn

    from captioner.serving.connections import limited_protocol

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(f"captioner serves on {address} (Ctrl-C stops it)", file=sys.stderr, flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            service.close()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        http=limited_protocol(limits),
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # its lines hold the query, with own words in it
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(limits.timeout)),
    )
    return Announced(config)


def _serve(server: Server, listener: socket.socket) -> None:
    """Run until SIGTERM (returns) or Ctrl-C (raises KeyboardInterrupt)."""
    # uvicorn finishes and then sends itself the signal again, as if it had not been handled.
    old = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, old)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    for name, level in (("captioner.serving", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers = [handler]
        logger.propagate = False
