"""``captioner evaluate``: score captions against references and attention against masks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captioner.cli.main import FAILED, OK
from captioner.cli.options import (
    Parser,
    add_model_options,
    add_search_options,
    add_yes_no,
    new_parser,
    refuse_overwrite,
    search_changes,
    warn,
)
from captioner.errors import CaptionerError, ProgramError


@functools.cache
def parser() -> Parser:
    """Options of ``evaluate``."""
    new = new_parser(
        "evaluate",
        "Score captions against references (BLEU, ROUGE-L, CIDEr; METEOR and SPICE if Java is "
        "installed) with 95% confidence intervals, and attention against COCO instance masks. The "
        "captions come from a model (--images) or from a COCO results file of any system "
        "(--results).",
        "--annotations CAPTIONS.json (--images FOLDER [--model DIR] [--instances INSTANCES.json] | "
        "--results RESULTS.json) [--compare OTHER.json] [-o REPORT.json]",
    )
    new.add_argument("--annotations", help="COCO captions file with the references")
    new.add_argument("--images", help="folder of photos for the model to caption")
    new.add_argument("--results", help="COCO results file: [{image_id, caption}, ...]")
    new.add_argument(
        "--instances",
        help="COCO instances file: measure how much attention lies on the objects that words name; "
        "needs --images, but not --annotations",
    )
    new.add_argument(
        "--compare",
        help="results file or report of another system; tests if the difference is significant",
    )
    new.add_argument(
        "--frequencies",
        help="document frequencies for CIDEr_D: a file from captioner prepare frequencies, a COCO "
        "captions file, or a model folder (default with --images: the model's own)",
    )
    new.add_argument(
        "--train-annotations",
        action="append",
        default=[],
        help="COCO captions file that the system was trained on, to count novel captions",
    )
    for metric, need in (
        ("METEOR", "Java"),
        ("SPICE", "Java and CoreNLP, which --spice downloads"),
    ):
        add_yes_no(
            new,
            metric.lower(),
            f"score {metric}; needs {need} (default: if installed)",
        )
    new.add_argument(
        "-o", "--output", help="JSON file for the report with the scores of every image"
    )
    new.add_argument("--force", action="store_true", help="overwrite the report")
    add_search_options(new)
    add_model_options(new)
    return new


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

    def java() -> list[str]:
        nonlocal failed
        metrics, unavailable = _java_metrics(options)
        failed |= unavailable
        return metrics

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
        device=options.device,
        precision=options.precision,
        batch_size=options.batch_size,
        search=search_changes(options),
    )
    target = None if options.output is None else Path(options.output)
    if target is not None:
        refuse_overwrite(target, options.force)

    from captioner.evaluation.report import as_json, as_text
    from captioner.files import atomic_write

    report = run(inputs, on_error=on_error, java=java)
    print(as_text(report))
    if target is not None:
        atomic_write(target, as_json(report))
    return FAILED if failed else OK


def _java_metrics(options: Any) -> tuple[list[str], bool]:
    """Return which of METEOR and SPICE to score, and whether a requested one is unavailable."""
    from captioner.evaluation.java import JAVA_METRICS, unavailable

    metrics, failed = [], False
    for metric in JAVA_METRICS:
        requested = options[metric.lower()]
        if requested is False:
            continue
        reason = unavailable(metric, download=bool(requested))
        if reason is None:
            metrics.append(metric)
        else:
            failed |= bool(requested)
            hint = f"--no-{metric.lower()} hides this message"
            if metric == "SPICE" and unavailable(metric, download=True) is None:
                hint = f"--spice downloads it, {hint}"
            warn(f"{reason} ({hint})")
    return metrics, failed
