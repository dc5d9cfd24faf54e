"""``captioner evaluate`` and ``calibrate``: score captions and attention; fit the confidence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from captioner.cli.arguments import Parser, checked_search, flag
from captioner.cli.main import FAILED, OK
from captioner.cli.outputs import refuse_overwrite, warn
from captioner.errors import CaptionerError, ConfigError, ProgramError, either
from captioner.option_fields import File, Folder, ModelName, Shown, option_fields
from captioner.options import DeviceOptions, FaithfulnessOptions, ModelOptions, SearchOptions

Report = Annotated[str, Shown("FILE", ("-o", "--output"))]


class _Errors:
    """Prints the errors of single photos and metrics, while the others go on."""

    def __init__(self) -> None:
        self.code = OK

    def __call__(self, error: CaptionerError) -> None:
        self.code = FAILED
        program = isinstance(error, ProgramError)
        warn(f"{error}; continuing with the other metrics" if program else str(error))


# --- evaluate ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelOptions):
    """Score captions against references (BLEU, ROUGE-L, CIDEr) with 95% confidence intervals.

    Or measure how much attention lies on the objects that the captions name (--instances), or
    whether explanations identify the regions that words depend on (--faithfulness). The captions
    come from a model (--images) or from a file (--results).
    """

    annotations: File | None = None
    """COCO captions file with the reference captions."""
    images: Folder | None = None
    """Folder of photos for the model to caption."""
    results: File | None = None
    """COCO results file of any system: [{image_id, caption}]."""
    compare: File | None = None
    """Results file or report of another system, to test whether the difference is significant."""
    instances: File | None = None
    """COCO instances file, to measure attention against its object masks; needs --images, but not
    --annotations."""
    meteor: bool = False
    """Score METEOR too; needs Java."""
    spice: bool = False
    """Score SPICE too; needs Java 8 or 11, and downloads CoreNLP (several hundred MB) once."""
    frequencies: Annotated[str, Shown("FILE|FOLDER")] | None = None
    """Score CIDEr-D too, with document frequencies from a file of captioner prepare frequencies, a
    COCO captions file or a model folder (default with --images: that of the model)."""
    train_annotations: list[File] = field(default_factory=list)
    """COCO captions file that the system was trained on, to report how many captions are not in it;
    repeat for several."""
    output: Report | None = None
    """JSON report with the scores of every image."""
    force: bool = False
    """Overwrite the report."""
    faithfulness: bool = False
    """Delete and insert the regions that attention, gradient x input, Grad-CAM and occlusion rank
    first, and measure the log-probability of each content word; needs --images. With --annotations,
    the first reference caption is used, not the model's."""


def evaluate_parser() -> Parser[EvaluateOptions]:
    """Options of ``evaluate``."""
    usage = "[--annotations FILE] (--images FOLDER | --results FILE) [options]"
    return Parser("evaluate", usage, EvaluateOptions, FaithfulnessOptions, SearchOptions)


def evaluate(argv: Sequence[str]) -> int:
    """Score and report."""
    options, search = evaluate_parser().parse(argv)
    how = {name: search.pop(name) for name in option_fields(FaithfulnessOptions) if name in search}
    if how and not options.faithfulness:
        raise ConfigError(f"{flag(next(iter(how)))} needs --faithfulness; give both")

    from captioner.evaluation.api import Inputs, run

    inputs = Inputs(
        annotations=options.annotations,
        images=options.images,
        model=options.model,
        results=options.results,
        instances=options.instances,
        compare=options.compare,
        frequencies=options.frequencies,
        train_annotations=options.train_annotations,
        metrics=[name for name in ("METEOR", "SPICE") if getattr(options, name.lower())],
        faithfulness=FaithfulnessOptions(**how) if options.faithfulness else None,
        device=options.device,
        precision=options.precision,
        batch_size=options.batch_size,
        search=search,
    )
    _check_java(inputs.metrics)
    if inputs.results is None:
        checked_search(options.model, search)
    target = _output(options.output, force=options.force)

    from captioner.evaluation.report import as_json, as_text
    from captioner.files import atomic_write

    errors = _Errors()
    report = run(inputs, on_error=errors)
    print(as_text(report))
    if target is not None:
        atomic_write(target, as_json(report))
    return errors.code


def _check_java(metrics: Sequence[str]) -> None:
    """Check that the requested metrics can be computed, before photos are captioned."""
    from captioner.evaluation.java import unavailable

    for metric in metrics:
        if reason := unavailable(metric, download=True):
            raise ConfigError(f"{reason}, or omit --{metric.lower()}")


def _output(name: str | None, *, force: bool) -> Path | None:
    if name is None:
        return None
    refuse_overwrite(Path(name), force)
    return Path(name)


# --- calibrate -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(DeviceOptions):
    """Fit the confidence of a model's captions to photos with reference captions.

    The model must not have been trained on them. The confidence is stored in its folder. Reports
    the cross-validated calibration error, and the score of the more confident captions.
    """

    model: ModelName | None = None
    """Model or run folder to calibrate."""
    annotations: list[File] = field(default_factory=list)
    """COCO captions file of photos that the model was not trained on; repeat for several."""
    images: list[Folder] = field(default_factory=list)
    """Folder with their photos; repeat for several, which are searched in order."""
    styles: list[Annotated[str, Shown("NAME")]] = field(default_factory=list)
    """Caption style for each --annotations, in their order (default: the model's default)."""
    train_annotations: list[File] = field(default_factory=list)
    """COCO captions file of the training photos, of which 3,000 are encoded to know which photos
    are unfamiliar (default: the photos of --annotations); repeat for several."""
    threshold: float = 0.5
    """CIDEr-D from which a caption counts as right (default: 0.5, which is 50 points)."""
    check: bool = False
    """Fit nothing: measure the confidence that the model already has (default: --model the shipped
    model)."""
    diagram: File | None = None
    """Figure of calibration and coverage: .png, .svg or .pdf."""
    output: Report | None = None
    """JSON report."""
    force: bool = False
    """Replace the model's confidence and existing files."""


def calibrate_parser() -> Parser[CalibrateOptions]:
    """Options of ``calibrate``."""
    usage = "--model FOLDER --annotations FILE... --images FOLDER... [options]"
    return Parser("calibrate", usage, CalibrateOptions, SearchOptions)


def calibrate(argv: Sequence[str]) -> int:
    """Calibrate, report and store."""
    options, search = calibrate_parser().parse(argv)
    if "style" in search:
        raise ConfigError("--style is not used here; give --styles, one for each --annotations")
    if options.model is None and not options.check:
        raise ConfigError("--model is missing; give the model folder to calibrate")

    from captioner.inference.folder import CONFIDENCE, SHIPPED_MODEL, find_model

    folder = find_model(options.model or SHIPPED_MODEL)
    target = folder / CONFIDENCE
    checked_search([str(folder)], search)
    if not options.check and target.exists() and not options.force:
        raise ConfigError(
            f"{folder} is calibrated already; give --force to calibrate it again, or --check to "
            "measure it"
        )
    report_file = _output(options.output, force=options.force)
    diagram = _output(options.diagram, force=options.force)

    from captioner.evaluation.calibrate import Inputs, as_text, check
    from captioner.evaluation.calibrate import calibrate as fit
    from captioner.evaluation.calibration_figure import FORMATS, save_figure
    from captioner.files import atomic_write
    from captioner.inference.captioner import load

    if diagram is not None and diagram.suffix.lower() not in FORMATS:
        raise ConfigError(f"--diagram is {diagram}; use a name that ends with {either(FORMATS)}")
    inputs = Inputs(
        annotations=options.annotations,
        images=options.images,
        styles=options.styles,
        train_annotations=options.train_annotations,
        threshold=options.threshold,
        batch_size=options.batch_size,
        search=search,
    )
    errors = _Errors()
    model = load(folder, device=options.device, precision=options.precision)
    report: Any
    if options.check:
        report = check(model, inputs, errors)
    else:
        calibrator, report = fit(model, inputs, errors)
        atomic_write(target, calibrator.to_bytes())
    print(as_text(report))
    if report_file is not None:
        atomic_write(report_file, json.dumps(report, indent=2) + "\n")
    if diagram is not None:
        save_figure(report, diagram)
    if not options.check:
        print(f"\nsaved as {target}")
    return errors.code
