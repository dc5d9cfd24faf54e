"""``captioner prepare``: prepare data for training and evaluation."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

from captioner.cli.main import OK
from captioner.cli.parser import Parser, similar_names
from captioner.errors import ConfigError, either

KINDS = {
    "dataset": "convert captions from other formats to COCO",
    "frequencies": "count document frequencies of n-grams for CIDEr-D",
    "features": "compute the features of a frozen encoder once for all epochs",
    "shards": "pack training photos into tar files for streaming",
}
"""Each is a module ``captioner.cli.prepare_KIND`` with ``parser()`` and ``run(options)``."""


def parser(what: str = "dataset") -> Parser:
    """Options of ``captioner prepare WHAT``."""
    made: Parser = _module(what).parser()
    return made


def main(argv: Sequence[str]) -> int:
    """Run the kind of preparation that the first argument names."""
    if argv and argv[0] in ("-h", "--help"):
        print("Prepare data for training and evaluation.\n")
        for name, text in KINDS.items():
            print(f"  captioner prepare {name:<12} {text}")
        print("\ncaptioner prepare COMMAND --help   show the options of a command")
        return OK
    if not argv or argv[0] not in KINDS:
        problem = f"Unknown command {argv[0]!r}" if argv else "Missing command"
        similar = similar_names(argv[0], KINDS)[:1] if argv else []
        hint = (
            f". Did you mean `captioner prepare {similar[0]}`?"
            if similar
            else f"; give captioner prepare {either(KINDS)}"
        )
        raise ConfigError(problem + hint)
    module = _module(argv[0])
    done: int = module.run(module.parser().parse(argv[1:]))
    return done


def _module(kind: str) -> ModuleType:
    return importlib.import_module(f"captioner.cli.prepare_{kind}")
