"""``captioner serve``: a web page and an HTTP API for captioning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from captioner.cli.arguments import Parser
from captioner.cli.main import OK
from captioner.hardware import keep_freed_memory
from captioner.inference.folder import SHIPPED, find_model, fingerprint
from captioner.serving.options import ServeOptions


def serve_parser() -> Parser[ServeOptions]:
    """Options of ``serve``."""
    return Parser("serve", "[options]", ServeOptions)


def serve(argv: Sequence[str]) -> int:
    """Serve until interrupted."""
    options, _ = serve_parser().parse(argv)
    keep_freed_memory(threads=True)  # the model runs in a thread

    from captioner.serving.keys import ApiKeys
    from captioner.serving.security import allowed_hosts, allowed_origins
    from captioner.serving.server import free_address, run

    hosts = allowed_hosts(options.host, options.allow_host)
    origins = allowed_origins(options.allow_origin)
    keys = None if options.api_key_file is None else ApiKeys(options.api_key_file)
    address = free_address(options.host, options.port)  # before the model is loaded

    from PIL import Image

    from captioner.inference.captioner import load
    from captioner.serving.app import create_app

    model = load(*options.model, device=options.device, precision=options.precision)
    app = create_app(
        model,
        options.limits(),
        batch_size=options.batch_size,
        hosts=hosts,
        origins=origins,
        root_path=options.root_path,
        keys=keys,
        model_name=_model_name(options.model),
    )
    blank = model.prepare(Image.new("RGB", (64, 64)))
    model.caption_batch([blank], model.options())  # warm-up: the first is the slowest
    run(app, options, address, keys)
    return OK


def _model_name(folders: Sequence[str]) -> str:
    """Names and fingerprints of the models, e.g. ``best@0123456789ab``."""
    models = [(folder, find_model(folder)) for folder in folders or (SHIPPED,)]
    return "+".join(f"{_ascii(folder)}@{fingerprint(path)}" for folder, path in models)


def _ascii(folder: str) -> str:
    """The name of a folder as it can appear in an HTTP header."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", Path(folder).resolve().name) or "model"
