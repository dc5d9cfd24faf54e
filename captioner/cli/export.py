"""``captioner export``: write a model as ONNX graphs, which run without torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from captioner.cli.main import OK
from captioner.cli.options import require_parent
from captioner.cli.parser import Parser, new_parser
from captioner.errors import ConfigError


@functools.cache
def parser() -> Parser:
    """Options of ``export``."""
    new = new_parser(
        "export",
        "Write a model as ONNX graphs. captioner caption, attend, serve and evaluate run the "
        "folder with ONNX Runtime, without torch; other programs can run it too (docs/export.md).",
        "[MODEL] -o FOLDER",
    )
    new.add_argument(
        "model", nargs="?", metavar="MODEL", help="model or run folder (default: the shipped model)"
    )
    new.add_argument("-o", "--output", required=True, metavar="FOLDER", help="folder to write")
    new.add_argument("--force", action="store_true", help="replace an existing folder")
    return new


def main(argv: Sequence[str]) -> int:
    """Export, check against the model, and print what was written."""
    options = parser().parse(argv)
    output = Path(options.output)
    require_parent(output)
    if output.exists() and not options.force:
        raise ConfigError(f"{output} exists; give --force to replace it, or another name")

    from captioner.model_config import SHIPPED_MODEL, read_config

    model = options.model or SHIPPED_MODEL
    read_config(model)  # a wrong folder fails before torch is imported
    from captioner.export.folder import export

    facts = export(model, output)
    difference = facts.pop("difference")
    for name, size in facts.items():
        print(f"{output / name}  {size:.1f} MB")
    print(f"log-probabilities differ from torch's by at most {difference:.1g}")
    return OK
