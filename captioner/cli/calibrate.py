"""``captioner calibrate``: fit the confidence of a model's captions, and measure it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captioner.cli.main import FAILED, OK
from captioner.cli.options import (
    add_device_options,
    add_search_options,
    checked_search,
    refuse_overwrite,
    search_changes,
    warn,
)
from captioner.cli.parser import Parser, new_parser
from captioner.errors import ConfigError, ImageError, either


@functools.cache
def parser() -> Parser:
    """Options of ``calibrate``."""
    new = new_parser(
        "calibrate",
        "Fit the confidence of a model's captions to photos with reference captions that it was "
        "not trained on, and store it in the model folder. Reports the cross-validated "
        "calibration error, and the score of the more confident captions.",
        "--model FOLDER --annotations FILE... --images FOLDER... [options]",
    )
    new.add_argument("--model", metavar="FOLDER", help="model or run folder to calibrate")
    new.add_argument(
        "--annotations",
        action="append",
        default=[],
        metavar="FILE",
        help="COCO captions file of photos that the model was not trained on; repeat for several",
    )
    new.add_argument(
        "--images",
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder with their photos; repeat for several, which are searched in order",
    )
    new.add_argument(
        "--styles",
        action="append",
        default=[],
        metavar="NAME",
        help="caption style for each --annotations, in their order (default: the model's default)",
    )
    new.add_argument(
        "--train-annotations",
        action="append",
        default=[],
        metavar="FILE",
        help="COCO captions file of the training photos, of which 3,000 are encoded to know which "
        "photos are unfamiliar (default: the photos of --annotations); repeat for several",
    )
    new.add_argument(
        "--threshold",
        type=float,
        default=0.5,
        help="CIDEr-D from which a caption counts as right (default: 0.5, which is 50 points)",
    )
    new.add_argument(
        "--check",
        action="store_true",
        help="fit nothing: measure the confidence that the model already has (default: --model "
        "the shipped model)",
    )
    new.add_argument(
        "--diagram",
        metavar="FILE",
        help="figure of calibration and coverage: .png, .svg or .pdf",
    )
    new.add_argument("-o", "--output", metavar="FILE", help="JSON report")
    new.add_argument(
        "--force", action="store_true", help="replace the model's confidence and existing files"
    )
    add_device_options(new)
    add_search_options(new)
    return new


def main(argv: Sequence[str]) -> int:
    """Calibrate, report and store."""
    options = parser().parse(argv)
    if options.style is not None:
        raise ConfigError("--style is not used here; give --styles, one for each --annotations")
    if options.model is None and not options.check:
        raise ConfigError("--model is missing; give the model folder to calibrate")

    from captioner.inference.folder import CONFIDENCE, SHIPPED_MODEL, find_model

    folder = find_model(options.model or SHIPPED_MODEL)
    target = folder / CONFIDENCE
    checked_search(_with_models(options, folder))
    if not options.check and target.exists() and not options.force:
        raise ConfigError(
            f"{folder} is calibrated already; give --force to calibrate it again, or --check to "
            "measure it"
        )
    outputs = [_output(options.output, options), _output(options.diagram, options)]

    from captioner.evaluation.calibrate import Inputs, as_text, calibrate, check
    from captioner.evaluation.calibration_figure import FORMATS, save_figure
    from captioner.files import atomic_write
    from captioner.inference.captioner import load

    report_file, diagram = outputs
    if diagram is not None and diagram.suffix.lower() not in FORMATS:
        raise ConfigError(f"--diagram is {diagram}; use a name that ends with {either(FORMATS)}")
    inputs = Inputs(
        annotations=options.annotations,
        images=options.images,
        styles=options.styles,
        train_annotations=options.train_annotations,
        threshold=options.threshold,
        batch_size=options.batch_size,
        search=search_changes(options),
    )
    failed = False

    def on_error(error: ImageError) -> None:
        nonlocal failed
        failed = True
        warn(f"{error}; continuing without it")

    model = load(folder, device=options.device, precision=options.precision)
    if options.check:
        report = check(model, inputs, on_error)
    else:
        calibrator, report = calibrate(model, inputs, on_error)
        atomic_write(target, calibrator.to_bytes())
    print(as_text(report))
    if report_file is not None:
        atomic_write(report_file, json.dumps(report, indent=2) + "\n")
    if diagram is not None:
        save_figure(report, diagram)
    if not options.check:
        print(f"\nsaved as {target}")
    return FAILED if failed else OK


def _with_models(options: Any, folder: Path) -> Any:
    """The options as `checked_search` reads them, with a list of models."""
    copied = options.clone()
    copied.model = [str(folder)]
    return copied


def _output(name: str | None, options: Any) -> Path | None:
    if name is None:
        return None
    refuse_overwrite(Path(name), options.force)
    return Path(name)
