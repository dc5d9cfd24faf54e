"""``captioner prepare``: what training and evaluation read, made once; one module a kind."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

from captioner.cli.main import OK
from captioner.cli.options import Parser
from captioner.errors import ConfigError

KINDS = {
    "dataset": "turn captions in another layout into COCO's",
    "frequencies": "count phrases once, for CIDEr-D",
    "features": "encode photos once, for a frozen encoder",
    "shards": "put training photos into tar files, to be streamed",
}
"""Each has a module ``captioner.cli.prepare_KIND`` with ``parser()`` and ``run(options)``."""


def parser(what: str = "dataset") -> Parser:
    """Options of ``captioner prepare WHAT``."""
    made: Parser = _module(what).parser()
    return made


def main(argv: Sequence[str]) -> int:
    """Prepare what the first argument names."""
    if argv and argv[0] in ("-h", "--help"):
        for name, text in KINDS.items():
            print(f"captioner prepare {name:<12} {text}; see --help")
        return OK
    if not argv or argv[0] not in KINDS:
        given = repr(argv[0]) if argv else "nothing"
        raise ConfigError(
            f"captioner prepare was given {given}; give: captioner prepare {' or '.join(KINDS)}"
        )
    module = _module(argv[0])
    done: int = module.run(module.parser().parse(argv[1:]))
    return done


def _module(kind: str) -> ModuleType:
    return importlib.import_module(f"captioner.cli.prepare_{kind}")
