"""The command ``captioner evaluate``: score captions, or measure attention and explanations."""

from __future__ import annotations

from functools import partial
from typing import Any

from captioner.cli.arguments import command
from captioner.cli.console import warn_and_count
from captioner.cli.main import OK, SOME_FAILED
from captioner.cli.output_files import new_file
from captioner.cli.search_options import checked_search
from captioner.errors import CaptionerError, ConfigError
from captioner.evaluation.options import EvaluateOptions
from captioner.options import FaithfulnessOptions, SearchOptions
from captioner.schema import flag, taken


@command(
    "evaluate",
    "[--annotations FILE] (--images FOLDER | --results FILE) [options]",
    EvaluateOptions, FaithfulnessOptions, SearchOptions,
)  # fmt: skip
def evaluate(options: EvaluateOptions, search: dict[str, Any]) -> int:
    """Run the evaluation, print the report and, with --output, write it to a file."""
    measured = taken(search, FaithfulnessOptions)
    if measured and not options.faithfulness:
        raise ConfigError(f"{flag(next(iter(measured)))} needs --faithfulness; add --faithfulness")
    options.check(search)
    if options.results is None:
        checked_search(options.model, search)
    target = new_file(options.output, options.force)

    from captioner.evaluation.api import Evaluation
    from captioner.evaluation.report import as_json, as_text
    from captioner.files import atomic_write

    errors: list[CaptionerError] = []
    how = FaithfulnessOptions(**measured)
    report = Evaluation(options, search, how, on_error=partial(warn_and_count, errors)).run()
    print(as_text(report))
    if target is not None:
        atomic_write(target, as_json(report))
    return SOME_FAILED if errors else OK
