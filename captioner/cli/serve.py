"""``captioner serve``: a web page and an HTTP API for captioning."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from captioner.cli.arguments import command, unknown_variables
from captioner.cli.console import warn
from captioner.cli.main import INTERRUPTED, OK
from captioner.inference.folder import fingerprint
from captioner.inference.names import SHIPPED
from captioner.memory import keep_freed_memory
from captioner.serving.options import ServeOptions

KEYS = "CAPTIONER_API_KEYS"


@command("serve", "[options]", ServeOptions, environment=True)
def serve(options: ServeOptions, _: Any) -> NoReturn:
    """Run the server until it is interrupted."""
    options = dataclasses.replace(options, api_keys=os.environ.get(KEYS))
    keep_freed_memory(threads=True)  # the model runs in a thread

    from captioner.serving.observe import log_to_stderr, tell
    from captioner.serving.server import free_address, run

    log_to_stderr(options.log_format)
    for warning in unknown_variables(ServeOptions):
        tell(warning, options.log_format, logging.WARNING)
    address = free_address(options.host, options.port)  # before the model is loaded
    if warning := open_port(options, address):
        tell(warning, options.log_format, logging.WARNING)
    if options.metrics_port is not None:
        host, port = free_address(options.metrics_host, options.metrics_port)
        options = dataclasses.replace(options, metrics_host=host, metrics_port=port)

    from PIL import Image

    from captioner.inference.captioner import load
    from captioner.serving.app import create_app

    model = load(*options.model, device=options.device, precision=options.precision)
    app = create_app(model, options, model_name=_model_name(options.model))
    blank = model.prepare(Image.new("RGB", (64, 64)))
    model.caption_batch([blank], model.options())  # warm-up: the first caption is the slowest
    interrupted = run(app, address)
    if interrupted:
        warn("interrupted")
    # A normal exit would wait for photos that are still being decoded, and granian's threads may
    # crash Python meanwhile.
    logging.shutdown()
    os._exit(INTERRUPTED if interrupted else OK)


def open_port(options: ServeOptions, address: tuple[str, int]) -> str:
    """Return a warning if other machines can reach the server without an API key.

    Otherwise, return an empty string. ``address`` is the host and port of the server.
    """
    if options.has_keys or ipaddress.ip_address(address[0]).is_loopback:
        return ""
    return (
        f"everyone who can reach port {address[1]} can caption photos, because no API keys are "
        f"set; set --api-key-file or {KEYS}, or let only trusted services, such as a proxy that "
        "authenticates users, reach this port"
    )


def _model_name(folders: Sequence[str]) -> str:
    """Return the names and fingerprints of models for an HTTP header: ``best@0123456789ab``."""
    paths = [Path(folder) for folder in folders or (SHIPPED,)]
    names = [re.sub(r"[^A-Za-z0-9._-]", "_", path.resolve().name) or "model" for path in paths]
    return "+".join(f"{name}@{fingerprint(path)}" for name, path in zip(names, paths, strict=True))
