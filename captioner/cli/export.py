"""``captioner export``: write a model as ONNX graphs, which run without torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from captioner.cli.main import OK
from captioner.cli.options import require_parent
from captioner.cli.parser import Parser, new_parser
from captioner.data.folders import find_images
from captioner.errors import ConfigError


@functools.cache
def parser() -> Parser:
    """Options of ``export``."""
    new = new_parser(
        "export",
        "Write a model as ONNX graphs. captioner caption, attend, serve and evaluate run the "
        "folder with ONNX Runtime, without torch; other programs can run it too (docs/export.md).",
        "[MODEL] -o FOLDER [--int8 --calibration PHOTOS]",
    )
    new.add_argument(
        "model", nargs="?", metavar="MODEL", help="model or run folder (default: the shipped model)"
    )
    new.add_argument("-o", "--output", required=True, metavar="FOLDER", help="folder to write")
    new.add_argument("--force", action="store_true", help="replace an existing folder")
    new.add_argument(
        "--int8",
        action="store_true",
        help="write 8-bit graphs: a quarter of the size and faster, with slightly other captions; "
        "needs --calibration",
    )
    new.add_argument(
        "--calibration",
        action="append",
        default=[],
        metavar="PHOTOS",
        help="photo or folder of photos to choose the ranges of --int8 with, some hundred like "
        "those to be captioned; not those that captions are scored on; repeat for several",
    )
    return new


def main(argv: Sequence[str]) -> int:
    """Export, check against the model, and print what was written."""
    options = parser().parse(argv)
    output = Path(options.output)
    require_parent(output)
    if output.exists() and not options.force:
        raise ConfigError(f"{output} exists; give --force to replace it, or another name")

    photos = find_images(options.calibration, recursive=True)
    if options.int8 != bool(photos):
        raise ConfigError(
            "--int8 and --calibration go together; give some hundred photos of your own: "
            "--int8 --calibration FOLDER"
        )

    from captioner.model_config import SHIPPED_MODEL, read_config

    model = options.model or SHIPPED_MODEL
    read_config(model)  # a wrong folder fails before torch is imported
    from captioner.export.folder import export

    written = export(model, output, photos)
    for name, size in written.sizes.items():
        print(f"{output / name}  {size:.1f} MB")
    print(f"float32: log-probabilities differ from torch's by at most {written.difference:.1g}")
    if written.equal is not None:
        equal, count = written.equal
        print(f"int8: the same caption as float32 for {equal} of {count} calibration photos")
    return OK
