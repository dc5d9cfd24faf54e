"""``captioner export``: write a model as ONNX graphs, which run without torch."""

from __future__ import annotations

import functools
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
        "Export a model to ONNX. captioner caption, attend, serve and evaluate run the "
        "folder with ONNX Runtime, without torch; other programs can run it too (docs/export.md). "
        "With --web: as a static site that captions photos in the browser (docs/browser.md).",
        "[MODEL] -o FOLDER [--int8 --calibration PHOTOS] [--web]",
    )
    new.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model or run folder (default: the shipped model); with --web also an exported folder",
    )
    new.add_argument("-o", "--output", required=True, metavar="FOLDER", help="folder to write")
    new.add_argument("--force", action="store_true", help="replace an existing folder")
    new.add_argument(
        "--int8",
        action="store_true",
        help="write 8-bit graphs: a quarter of the size of float32 ones and faster; captions "
        "differ slightly; needs --calibration",
    )
    new.add_argument(
        "--calibration",
        action="append",
        default=[],
        metavar="PHOTOS",
        help="a few hundred photos (files or folders) to choose the ranges of --int8 with, similar "
        "to those you will caption, but none that you evaluate on; repeat for several",
    )
    new.add_argument(
        "--web",
        action="store_true",
        help="write a static site that captions photos in the browser; combine with --int8 for a "
        "site small enough for phones",
    )
    new.add_argument(
        "--onnxruntime-web",
        metavar="SOURCE",
        help="tarball or folder of the npm package onnxruntime-web for --web, without a network "
        "(default: downloaded once)",
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
            "--int8 and --calibration go together; give a few hundred photos of your own: "
            "--int8 --calibration FOLDER"
        )
    if options.onnxruntime_web is not None and not options.web:
        raise ConfigError("--onnxruntime-web is for --web; give both, or neither")

    from captioner.inference.folder import SHIPPED_MODEL, read_config

    model = options.model or SHIPPED_MODEL
    config = read_config(model)  # a wrong folder fails before torch is imported
    if options.web:
        _write_site(model, config, output, photos, options.onnxruntime_web)
    else:
        _export(model, output, photos)
    return OK


def _export(
    model: str | Path, output: Path, photos: Sequence[Path], *, list_files: bool = True
) -> None:
    from captioner.inference.export.folder import export

    written = export(model, output, photos)
    for name, size in written.sizes.items() if list_files else ():
        print(f"{output / name}  {size:.1f} MB")
    print(f"float32: log-probabilities differ from torch's by at most {written.difference:.1g}")
    if written.equal is not None:
        equal, count = written.equal
        print(f"int8: the same caption as float32 for {equal} of {count} calibration photos")


def _write_site(
    model: str | Path,
    config: Mapping[str, Any],
    output: Path,
    photos: Sequence[Path],
    source: str | None,
) -> None:
    """Write the site of a model, which is exported first if necessary."""
    from captioner.inference.folder import EXPORTED
    from captioner.options import SearchOptions
    from captioner.serving.site.onnxruntime_web import runtime_files
    from captioner.serving.site.writer import check_search, write_site

    if EXPORTED in config and photos:
        raise ConfigError(
            f"{model} is exported already; give the model folder it was exported from with --int8, "
            "or leave out --int8 and --calibration"
        )
    check_search(SearchOptions(**config["search"]))
    runtime = runtime_files(source)  # before minutes of work
    with tempfile.TemporaryDirectory() as temporary:
        exported = Path(model)
        if EXPORTED not in config:
            exported = Path(temporary) / "exported"
            _export(model, exported, photos, list_files=False)
        site = write_site(exported, output, runtime)
    print(f"{output}  {site.files} files; the first visit loads {site.first_load:.1f} MB")
    print(f"the GPU, if the reader chooses it: {site.gpu:.1f} MB more")
    print(f"to try it: python -m http.server --directory {shlex.quote(str(output))}")
