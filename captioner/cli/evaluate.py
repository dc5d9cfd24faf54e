"""``captioner evaluate``: score captions against references and attention against masks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captioner.cli.main import FAILED, OK, flag
from captioner.cli.options import (
    add_model_options,
    add_search_options,
    check_batch_size,
    checked_search,
    refuse_overwrite,
    search_changes,
    warn,
)
from captioner.cli.parser import Parser, new_parser
from captioner.errors import CaptionerError, ConfigError, ProgramError
from captioner.option_fields import option_fields
from captioner.options import FaithfulnessOptions


@functools.cache
def parser() -> Parser:
    """Options of ``evaluate``."""
    new = new_parser(
        "evaluate",
        "Score captions against references (BLEU, ROUGE-L, CIDEr) with 95% confidence intervals; "
        "measure how much attention lies on the objects that the captions name (--instances) or "
        "whether explanations identify the regions that words depend on (--faithfulness). The "
        "captions come from a model (--images) or from a file (--results).",
        "[--annotations FILE] (--images FOLDER | --results FILE) [options]",
    )
    new.add_argument(
        "--annotations", metavar="FILE", help="COCO captions file with the reference captions"
    )
    new.add_argument("--images", metavar="FOLDER", help="folder of photos for the model to caption")
    new.add_argument(
        "--results", metavar="FILE", help="COCO results file of any system: [{image_id, caption}]"
    )
    new.add_argument(
        "--compare",
        metavar="FILE",
        help="results file or report of another system, to test whether the difference is "
        "significant",
    )
    new.add_argument(
        "--instances",
        metavar="FILE",
        help="COCO instances file, to measure attention against its object masks; needs --images, "
        "but not --annotations",
    )
    new.add_argument("--meteor", action="store_true", help="score METEOR too; needs Java")
    new.add_argument(
        "--spice",
        action="store_true",
        help="score SPICE too; needs Java 8 or 11, and downloads CoreNLP (several hundred MB) once",
    )
    new.add_argument(
        "--frequencies",
        metavar="FILE|FOLDER",
        help="score CIDEr-D too, with document frequencies from a file of captioner prepare "
        "frequencies, a COCO captions file or a model folder (default with --images: that of the "
        "model)",
    )
    new.add_argument(
        "--train-annotations",
        action="append",
        default=[],
        metavar="FILE",
        help="COCO captions file that the system was trained on, to report how many captions "
        "are not in it; repeat for several",
    )
    new.add_argument(
        "-o", "--output", metavar="FILE", help="JSON report with the scores of every image"
    )
    new.add_argument("--force", action="store_true", help="overwrite the report")
    _add_faithfulness_options(new)
    add_search_options(new)
    add_model_options(new)
    return new


def _add_faithfulness_options(new: Parser) -> None:
    group = new.add_argument_group("faithfulness")
    group.add_argument(
        "--faithfulness",
        action="store_true",
        help="delete and insert the regions that attention, gradient x input, Grad-CAM and "
        "occlusion rank first, and measure the log-probability of each content word; needs "
        "--images. With --annotations, the first reference caption is used, not the model's",
    )
    for field in option_fields(FaithfulnessOptions).values():
        group.add_argument(
            flag(field.name),
            type=(str if field.choices else field.type) | None,
            default=None,
            help=f"{field.help} (default: {field.default})",
        )


def _faithfulness_options(options: Any) -> FaithfulnessOptions | None:
    """The options of --faithfulness; None if it is not given."""
    fields = option_fields(FaithfulnessOptions)
    given = {name: options[name] for name in fields if options[name] is not None}
    if given and not options.faithfulness:
        raise ConfigError(f"{flag(next(iter(given)))} needs --faithfulness; give both")
    return FaithfulnessOptions(**given) if options.faithfulness else None


def main(argv: Sequence[str]) -> int:
    """Score and report."""
    options = parser().parse(argv)

    from captioner.evaluation.api import Inputs, run

    failed = False

    def on_error(error: CaptionerError) -> None:
        nonlocal failed
        failed = True
        program = isinstance(error, ProgramError)
        warn(f"{error}; continuing with the other metrics" if program else str(error))

    inputs = Inputs(
        annotations=options.annotations,
        images=options.images,
        model=options.model,
        results=options.results,
        instances=options.instances,
        compare=options.compare,
        frequencies=options.frequencies,
        train_annotations=options.train_annotations,
        metrics=[name for name in ("METEOR", "SPICE") if options[name.lower()]],
        faithfulness=_faithfulness_options(options),
        device=options.device,
        precision=options.precision,
        batch_size=options.batch_size,
        search=search_changes(options),
    )
    _check_java(inputs.metrics)
    check_batch_size(options.batch_size)
    if inputs.results is None:
        checked_search(options)
    target = None if options.output is None else Path(options.output)
    if target is not None:
        refuse_overwrite(target, options.force)

    from captioner.evaluation.report import as_json, as_text
    from captioner.files import atomic_write

    report = run(inputs, on_error=on_error)
    print(as_text(report))
    if target is not None:
        atomic_write(target, as_json(report))
    return FAILED if failed else OK


def _check_java(metrics: Sequence[str]) -> None:
    """Check that the requested metrics can be computed, before photos are captioned."""
    from captioner.evaluation.java import unavailable

    for metric in metrics:
        if reason := unavailable(metric, download=True):
            raise ConfigError(f"{reason}, or omit --{metric.lower()}")
