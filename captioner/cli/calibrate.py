"""The command ``captioner calibrate``: fit the confidence of a model's captions and words."""

from __future__ import annotations

from functools import partial
from typing import Any

from captioner.cli.arguments import command
from captioner.cli.console import warn_and_count
from captioner.cli.main import OK, SOME_FAILED
from captioner.cli.output_files import new_file
from captioner.cli.search_options import checked_search
from captioner.errors import CaptionerError, ConfigError
from captioner.evaluation.options import CalibrateOptions
from captioner.options import SearchOptions


@command(
    "calibrate",
    "--model FOLDER --annotations FILE... --images FOLDER... [options]",
    CalibrateOptions, SearchOptions,
)  # fmt: skip
def calibrate(options: CalibrateOptions, search: dict[str, Any]) -> int:
    """Calibrate the model, print the report, and store the calibration in the model folder."""
    if "style" in search:
        raise ConfigError(
            "--style is not an option here; use --styles, once for each --annotations file"
        )
    if options.model is None and not options.check:
        raise ConfigError("--model is missing; add --model FOLDER to choose the model to calibrate")
    options.check_files()

    from captioner.inference.find_model import find_model
    from captioner.inference.names import CONFIDENCE, SHIPPED_MODEL

    folder = find_model(options.model or SHIPPED_MODEL)
    target = folder / CONFIDENCE
    checked_search([str(folder)], search)
    if not options.check and target.exists() and not options.force:
        raise ConfigError(
            f"{folder} is already calibrated; add --force to replace the calibration, or --check "
            "to measure it"
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
        report = calibration.check(model, options, search, partial(warn_and_count, errors))
    else:
        calibrator, report = calibration.calibrate(
            model, options, search, partial(warn_and_count, errors)
        )
        atomic_write(target, calibrator.to_bytes())
    print(calibration.as_text(report))
    if report_file is not None:
        atomic_write(report_file, as_json(report, indent=2))
    if diagram is not None:
        calibration.diagram(report).save(diagram)
    if not options.check:
        print(f"\nsaved as {target}")
    return SOME_FAILED if errors else OK
