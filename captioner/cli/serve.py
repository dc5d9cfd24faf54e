"""``captioner serve``: a web page and an HTTP API for captioning."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from captioner.cli.arguments import command
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

    from captioner.serving.server import free_address, run

    address = free_address(options.host, options.port)  # before the model is loaded
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


def _model_name(folders: Sequence[str]) -> str:
    """Return the names and fingerprints of models for an HTTP header: ``best@0123456789ab``."""
    paths = [Path(folder) for folder in folders or (SHIPPED,)]
    names = [re.sub(r"[^A-Za-z0-9._-]", "_", path.resolve().name) or "model" for path in paths]
    return "+".join(f"{name}@{fingerprint(path)}" for name, path in zip(names, paths, strict=True))
