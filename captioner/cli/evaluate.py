"""``captioner evaluate`` and ``calibrate``: score captions and attention; fit the confidence."""

from __future__ import annotations

from functools import partial
from typing import Any

from captioner.cli.arguments import checked_search, command, flag
from captioner.cli.main import FAILED, OK
from captioner.cli.outputs import new_file, warn
from captioner.errors import CaptionerError, ConfigError, ProgramError
from captioner.evaluation.options import CalibrateOptions, EvaluateOptions
from captioner.option_fields import taken
from captioner.options import FaithfulnessOptions, SearchOptions


def _warn(errors: list[CaptionerError], error: CaptionerError) -> None:
    """Print and count the error of a single photo or metric, while the others go on."""
    errors.append(error)
    program = isinstance(error, ProgramError)
    warn(f"{error}; continuing with the other metrics" if program else str(error))


@command(
    "evaluate",
    "[--annotations FILE] (--images FOLDER | --results FILE) [options]",
    EvaluateOptions, FaithfulnessOptions, SearchOptions,
)  # fmt: skip
def evaluate(options: EvaluateOptions, search: dict[str, Any]) -> int:
    """Score and report."""
    measured = taken(search, FaithfulnessOptions)
    if measured and not options.faithfulness:
        raise ConfigError(f"{flag(next(iter(measured)))} needs --faithfulness; give both")
    options.check(search)
    if options.results is None:
        checked_search(options.model, search)
    target = new_file(options.output, options.force)

    from captioner.evaluation.api import Evaluation
    from captioner.evaluation.report import as_json, as_text
    from captioner.files import atomic_write

    errors: list[CaptionerError] = []
    how = FaithfulnessOptions(**measured)
    report = Evaluation(options, search, how, on_error=partial(_warn, errors)).run()
    print(as_text(report))
    if target is not None:
        atomic_write(target, as_json(report))
    return FAILED if errors else OK


@command(
    "calibrate",
    "--model FOLDER --annotations FILE... --images FOLDER... [options]",
    CalibrateOptions, SearchOptions,
)  # fmt: skip
def calibrate(options: CalibrateOptions, search: dict[str, Any]) -> int:
    """Calibrate, report and store."""
    if "style" in search:
        raise ConfigError("--style is not used here; give --styles, one for each --annotations")
    if options.model is None and not options.check:
        raise ConfigError("--model is missing; give the model folder to calibrate")
    options.check_files()

    from captioner.inference.folder import CONFIDENCE, SHIPPED_MODEL, find_model

    folder = find_model(options.model or SHIPPED_MODEL)
    target = folder / CONFIDENCE
    checked_search([str(folder)], search)
    if not options.check and target.exists() and not options.force:
        raise ConfigError(
            f"{folder} is calibrated already; give --force to calibrate it again, or --check to "
            "measure it"
        )
    report_file = new_file(options.output, options.force)
    diagram = new_file(options.diagram, options.force)

    from captioner.drawing.figure import Figure
    from captioner.evaluation import calibrate as calibration
    from captioner.evaluation.report import as_json
    from captioner.files import atomic_write
    from captioner.inference.captioner import load

    if diagram is not None:
        Figure.check_suffix(diagram)
    errors: list[CaptionerError] = []
    model = load(folder, device=options.device, precision=options.precision)
    report: Any
    if options.check:
        report = calibration.check(model, options, search, partial(_warn, errors))
    else:
        calibrator, report = calibration.calibrate(model, options, search, partial(_warn, errors))
        atomic_write(target, calibrator.to_bytes())
    print(calibration.as_text(report))
    if report_file is not None:
        atomic_write(report_file, as_json(report, indent=2))
    if diagram is not None:
        calibration.diagram(report).save(diagram)
    if not options.check:
        print(f"\nsaved as {target}")
    return FAILED if errors else OK
