"""``captioner export``: write a model as ONNX graphs, or as a web site."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from captioner.cli.arguments import command
from captioner.cli.main import OK
from captioner.cli.output_files import require_parent
from captioner.data.folders import find_images
from captioner.errors import ConfigError
from captioner.schema import Shown


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Export a model as ONNX graphs, which run without PyTorch.

    captioner caption, attend, serve and evaluate run the exported folder with ONNX Runtime. Other
    programs can run it too (docs/export.md). With --web, the export is a static site that captions
    photos in the browser (docs/browser.md).
    """

    model: Annotated[str, Shown("MODEL", positional=True)] | None = None
    """Export this model folder or run folder (default: the shipped model). With --web, it may also
    be an exported folder."""
    output: Annotated[str, Shown("FOLDER", ("-o", "--output"))]
    """Write to this folder."""
    force: bool = False
    """Replace an existing folder."""
    int8: bool = False
    """Write 8-bit graphs, which are faster and a quarter of the size of float32 graphs. Captions
    differ slightly. Needs --calibration."""
    calibration: list[Annotated[str, Shown("PHOTOS")]] = field(default_factory=list)
    """Choose the value ranges of --int8 on these photos (files or folders): a few hundred photos
    that are similar to the photos you will caption, but not photos that you evaluate on. Repeat for
    several."""
    web: bool = False
    """Write a static site that captions photos in the browser. With --int8, the site is small
    enough for phones."""
    weights: bool = False
    """Keep the weights next to the graphs. On a CPU, the folder then runs the graphs by default.
    GPUs, other precisions and training use the weights."""
    onnxruntime_web: Annotated[str, Shown("SOURCE")] | None = None
    """With --web: take the npm package onnxruntime-web from this tarball or folder, without a
    network (default: download it once)."""


@command("export", "[MODEL] -o FOLDER [--int8 --calibration PHOTOS] [--web]", ExportOptions)
def export(options: ExportOptions, _: Any) -> int:
    """Export the model, compare the graphs with it, and print the files that were written."""
    output = Path(options.output)
    require_parent(output)
    if output.exists() and not options.force:
        raise ConfigError(f"{output} exists; add --force to replace it, or use another name")
    photos = find_images(options.calibration, recursive=True)
    if options.int8 != bool(photos):
        raise ConfigError(
            "--int8 and --calibration need each other; pass a few hundred photos of your own: "
            "--int8 --calibration FOLDER"
        )
    if options.onnxruntime_web is not None and not options.web:
        raise ConfigError("--onnxruntime-web is for --web; add --web, or leave it out")

    from captioner.inference.config_file import read_config
    from captioner.inference.find_model import find_model
    from captioner.inference.names import EXPORTED, SHIPPED_MODEL, WEIGHTS

    model = find_model(options.model or SHIPPED_MODEL)
    config = read_config(model)  # report a wrong folder before importing torch, which is slow
    if not options.web:
        for name, size in _export(model, output, photos, weights=options.weights).items():
            print(f"{output / name}  {size:.1f} MB")
        return OK
    if photos and not (model / WEIGHTS).is_file():
        raise ConfigError(
            f"{model} is already exported; with --int8, pass the model folder that it was exported "
            "from, or leave out --int8 and --calibration"
        )
    from captioner.inference.folder import load_model
    from captioner.serving.site.onnxruntime_web import runtime_files
    from captioner.serving.site.writer import check_search, write_site

    check_search(load_model(model))
    runtime = runtime_files(options.onnxruntime_web)  # before minutes of work
    with tempfile.TemporaryDirectory() as temporary:
        graphs = model
        if photos or EXPORTED not in config:
            graphs = Path(temporary) / "exported"
            _export(model, graphs, photos)
        site = write_site(graphs, output, runtime)
    print(f"{output}  {site.files} files; the first visit loads {site.first_load:.1f} MB")
    print(f"if the visitor chooses the GPU, {site.gpu:.1f} MB more")
    print(f"to try it, run: python -m http.server --directory {shlex.quote(str(output))}")
    return OK


def _export(
    model: Path, output: Path, photos: list[Path], *, weights: bool = False
) -> dict[str, float]:
    """Export the model, print how the graphs compare with it, and return the file sizes in MB."""
    from captioner.inference.export import export as write

    written = write(model, output, photos, weights=weights)
    print(f"float32: log-probabilities differ from torch's by at most {written.difference:.1g}")
    if written.equal is not None:
        equal, count = written.equal
        print(f"int8: the same caption as float32 for {equal} of {count} calibration photos")
    return dict(written.sizes)
