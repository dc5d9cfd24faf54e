"""``captioner export``: write a model as ONNX graphs, or as a web site."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from captioner.cli.arguments import command
from captioner.cli.console import warn
from captioner.cli.main import OK
from captioner.cli.output_files import require_parent
from captioner.data.folders import find_images
from captioner.errors import ConfigError
from captioner.messages import counted
from captioner.schema import Shown

FEW_PHOTOS = 100
"""If fewer calibration photos are passed, a warning is printed."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Export a model as ONNX graphs, which run without PyTorch.

    captioner caption, attend, serve and evaluate run the exported folder with ONNX Runtime. Other
    programs can run the graphs too (docs/export.md). With --web, write a static site that captions
    photos in the browser (docs/browser.md).
    """

    model: Annotated[str, Shown("MODEL", positional=True)] | None = None
    """Export this model folder or run folder (default: the shipped model). With --web, you can also
    pass an exported folder."""
    output: Annotated[str, Shown("FOLDER", ("-o", "--output"))]
    """Write to this folder."""
    force: bool = False
    """Replace an existing folder."""
    int8: bool = False
    """Write 8-bit graphs, which have a quarter of the size of float32 graphs. They are faster on
    processors with 8-bit instructions, such as AVX-512 VNNI. Some captions differ. Needs
    --calibration."""
    calibration: list[Annotated[str, Shown("PHOTOS")]] = field(default_factory=list)
    """Measure the value ranges for --int8 on these photos (files or folders). Use a few hundred
    photos that resemble the photos you will caption, but none that you evaluate on. Repeat the
    option to add files or folders."""
    web: bool = False
    """Write a static site that captions photos in the browser. With --int8, the site is small
    enough for phones."""
    weights: bool = False
    """Store the model's weights in the folder too. On a CPU, captioner then runs the graphs by
    default. On GPUs, in other precisions and for training, it uses the weights."""
    onnxruntime_web: Annotated[str, Shown("SOURCE")] | None = None
    """With --web: read the npm package onnxruntime-web from this tarball or folder instead of the
    network (default: download the package once)."""


@command("export", "[MODEL] -o FOLDER [--int8 --calibration PHOTOS] [--web]", ExportOptions)
def export(options: ExportOptions, _: Any) -> int:
    """Export the model, compare its graphs with PyTorch, and print the written files."""
    output = Path(options.output)
    require_parent(output)
    if output.suffix == ".onnx":
        raise ConfigError(
            f"-o {output} names a file, but an export is a folder; use a name without .onnx"
        )
    if output.exists() and not options.force:
        raise ConfigError(f"{output} exists; add --force to replace it, or use a different name")
    photos = find_images(options.calibration, recursive=True)
    if options.int8 != bool(photos):
        raise ConfigError(
            "--int8 and --calibration must be used together; add both (--int8 --calibration "
            "FOLDER), or leave out both"
        )
    if options.onnxruntime_web is not None and not options.web:
        raise ConfigError(
            "--onnxruntime-web needs --web; add --web, or leave out --onnxruntime-web"
        )

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
            f"{model} is already exported; pass the original model folder, or leave out "
            "--int8 and --calibration"
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
    print(f"choosing the GPU loads another {site.gpu:.1f} MB")
    print(f"to try the site, run: python -m http.server --directory {shlex.quote(str(output))}")
    return OK


def _export(
    model: Path, output: Path, photos: list[Path], *, weights: bool = False
) -> dict[str, float]:
    """Export the model, print how the graphs compare with PyTorch, and return file sizes in MB."""
    from captioner.inference.export import export as write

    if photos and len(photos) < FEW_PHOTOS:
        warn(
            f"--calibration has only {counted(len(photos), 'photo')}; use a few hundred, so that "
            "more 8-bit captions are the same as in float32"
        )
    warn(f"exporting {model}; this can take a few minutes")
    written = write(model, output, photos, weights=weights)
    print(f"float32: log-probabilities differ from torch's by at most {written.difference:.1g}")
    if written.equal is not None:
        equal, count = written.equal
        print(f"int8: the same caption as float32 for {equal} of {count} calibration photos")
    return dict(written.sizes)
