"""``captioner serve``: a web page and an HTTP API for captioning."""

from __future__ import annotations

import errno
import functools
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from captioner.cli.main import OK, flag
from captioner.cli.options import add_model_options
from captioner.cli.parser import Parser, new_parser
from captioner.errors import CaptionerError, ConfigError
from captioner.hardware import keep_freed_memory
from captioner.option_fields import option_fields
from captioner.serving.limits import Limits

if TYPE_CHECKING:
    from uvicorn import Server

    from captioner.serving.service import Service


@functools.cache
def parser() -> Parser:
    """Options of ``serve``."""
    new = new_parser(
        "serve",
        "Run a web page for captioning and an HTTP API (POST /v1/captions, documented in "
        "/openapi.json). Photos and texts are never written to disk or logged.",
        "[options]",
    )
    new.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 127.0.0.1 accepts connections from this machine only, 0.0.0.0 "
        "from anywhere",
    )
    new.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free port")
    new.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="additional host name for this server, such as a proxy's; requests with other Host "
        "headers are refused; repeat for several",
    )
    limits = new.add_argument_group("limits")
    for name, field in option_fields(Limits).items():
        limits.add_argument(flag(name), type=field.type, default=field.default, help=field.help)
    add_model_options(new)
    return new


def main(argv: Sequence[str]) -> int:
    """Serve until interrupted."""
    options = parser().parse(argv)
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port is {options.port}; give 1 to 65535, or 0 for any free port")
    keep_freed_memory(threads=True)  # the model runs in a thread
    limits = Limits(**{name: options[name] for name in option_fields(Limits)})
    with closing(_listen(options.host, options.port)) as listener:  # before the model is loaded
        from PIL import Image

        from captioner.api import load
        from captioner.serving.app import create_app
        from captioner.serving.security import allowed_hosts

        model = load(*options.model, device=options.device, precision=options.precision)
        hosts = allowed_hosts(options.host, options.allow_host)
        app = create_app(model, limits, batch_size=options.batch_size, hosts=hosts)
        model.caption(Image.new("RGB", (64, 64)))  # warm-up: the first caption is the slowest
        _log_to_stderr()
        address = f"http://{_shown(options.host)}:{listener.getsockname()[1]}"
        _serve(_server(app.state.service, app, limits, address), listener)
    return OK


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


def _server(service: Service, app: Callable[..., object], limits: Limits, address: str) -> Server:
    """Create a server that announces its address and closes the service on shutdown."""
    import uvicorn

    from captioner.serving.connections import limited_protocol

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(
                f"captioner: serving on {address} (press Ctrl-C to stop)",
                file=sys.stderr,
                flush=True,
            )

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
        access_log=False,  # would contain the query string, with the user's texts
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(limits.timeout)),
    )
    return Announced(config)


def _serve(server: Server, listener: socket.socket) -> None:
    """Run until SIGTERM (returns) or Ctrl-C (raises KeyboardInterrupt)."""
    # uvicorn raises the signal again after its shutdown.
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
