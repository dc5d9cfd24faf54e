"""``captioner evaluate``: score captions against references and attention against masks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from captioner.cli.main import FAILED, OK, flag
from captioner.cli.options import (
    Parser,
    add_model_options,
    add_search_options,
    add_yes_no,
    checked_search,
    new_parser,
    refuse_overwrite,
    search_changes,
    warn,
)
from captioner.errors import ConfigError, DataError, ProgramError

if TYPE_CHECKING:
    from captioner.caption import Caption
    from captioner.config import SearchOptions
    from captioner.evaluation.frequencies import DocumentFrequencies
    from captioner.evaluation.report import CaptionEvaluator, Report


Result = TypeVar("Result")


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
    target = _check(options)

    from captioner.evaluation.report import as_json, as_text, read_captions_of
    from captioner.files import atomic_write

    report: Report
    captions: dict[int, str] = {}
    failed = False
    if options.results is not None:
        captions = read_captions_of(options.results)
    else:
        checked_search(options)
    scoring = _read(options)  # before the photos are captioned, so that errors appear early
    if options.results is not None:
        report = {"results": options.results}
    else:
        report, captions, own, failed = _caption(options)
        if scoring is not None and scoring.judge.frequencies is None:
            scoring = scoring._replace(judge=dataclasses.replace(scoring.judge, frequencies=own))
    if scoring is not None:
        failed |= _score(report, captions, scoring, options)
    print(as_text(report))
    if target is not None:
        atomic_write(target, as_json(report))
    return FAILED if failed else OK


def _check(options: Any) -> Path | None:
    """Check options that contradict each other; return the report file."""
    if (options.images is None) == (options.results is None):
        raise ConfigError(
            "give either --images (a folder of photos) or --results (a file of captions)"
        )
    if options.results is not None:
        _check_results(options)
    if options.annotations is None and options.instances is None:
        raise ConfigError("give --annotations (to score captions) or --instances (attention)")
    for name in ("compare", "frequencies", "train_annotations", "meteor", "spice"):
        if options[name] and options.annotations is None:
            raise ConfigError(f"{flag(name)} needs references; give --annotations too")
    if (options.num_captions or 1) > 1:
        raise ConfigError(
            f"--num-captions is {options.num_captions}, but only one per photo is scored; omit it"
        )
    if options.output is None:
        return None
    target = Path(options.output)
    refuse_overwrite(target, options.force)
    return target


def _check_results(options: Any) -> None:
    """Reject options of a model when the captions come from a file."""
    if options.instances is not None:
        raise ConfigError(
            "--instances measures attention, which a results file does not contain; give --images "
            "instead of --results"
        )
    if options.annotations is None:
        raise ConfigError("--results needs references; give --annotations too")
    if options.model:
        raise ConfigError("give either --model (to caption photos) or --results, not both")
    defaults = parser().get_defaults()
    own = ("device", "precision", "batch_size")
    given = [*search_changes(options), *(name for name in own if options[name] != defaults[name])]
    if given:
        raise ConfigError(
            f"--results contains the captions, so no model runs; omit {flag(given[0])}"
        )


class _Scoring(NamedTuple):
    """What captions are scored against."""

    judge: CaptionEvaluator
    others: dict[int, str] | None
    """Captions of the system to compare with."""
    known: list[str] | None
    """Training captions."""


def _read(options: Any) -> _Scoring | None:
    """Read everything that captions are scored against; None without ``--annotations``."""
    if options.annotations is None:
        return None
    from captioner.data.coco import read_captions
    from captioner.evaluation.report import CaptionEvaluator, read_captions_of

    _, references = read_captions([options.annotations])
    others = known = None
    if options.compare is not None:
        others = _within(read_captions_of(options.compare), references, options.compare, options)
        if not others:
            raise DataError(
                f"{options.compare} has no captions for the photos in {options.annotations}; give "
                "captions of the same photos"
            )
    if options.train_annotations:
        _, training = read_captions(options.train_annotations)
        known = [text for texts in training.values() for text in texts]
    return _Scoring(CaptionEvaluator(references, _frequencies(options.frequencies)), others, known)


def _within(
    captions: dict[int, str], references: Mapping[int, Sequence[str]], source: str, options: Any
) -> dict[int, str]:
    """Return the captions of photos that have references.

    Raises:
        DataError: A photo is not in the annotations.
    """
    unknown = captions.keys() - references.keys()
    if unknown:
        raise DataError(
            f"{source}: image {min(unknown)} (and {len(unknown) - 1} more) is not in "
            f"{options.annotations}; give the annotations that the results belong to"
        )
    return {image_id: text for image_id, text in captions.items() if references[image_id]}


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


def _frequencies(given: str | None) -> DocumentFrequencies | None:
    """Read document frequencies from a file or model folder."""
    from captioner.data.coco import read_captions
    from captioner.evaluation.frequencies import GZIP, DocumentFrequencies
    from captioner.files import FREQUENCIES

    if given is None:
        return None
    path = Path(given)
    if path.is_dir():
        if not (path / FREQUENCIES).is_file():
            raise ConfigError(
                f"{path} has no {FREQUENCIES}; give a captions file, or create it with: captioner "
                f"prepare frequencies CAPTIONS.json -o {path}"
            )
        path /= FREQUENCIES
    if path.is_file() and path.read_bytes()[:2] != GZIP:
        _, references = read_captions([path])
        return DocumentFrequencies.from_references(references)
    return DocumentFrequencies.load(path)


# --- captions ------------------------------------------------------------------------------------


def _caption(options: Any) -> tuple[Report, dict[int, str], DocumentFrequencies | None, bool]:
    """Caption the photos of the annotations and of the instances with a model.

    Returns:
        Model facts for the report, the captions, the model's own document frequencies, and whether
        any photo could not be read.
    """
    from tqdm import tqdm

    from captioner.api import load
    from captioner.data.coco import locate_photos, read_dataset
    from captioner.evaluation.frequencies import DocumentFrequencies
    from captioner.files import FREQUENCIES
    from captioner.hardware import pick_precision

    paths: dict[int, Path] = {}
    instances = None
    if options.instances is not None:
        from captioner.evaluation.masks import read_instances

        instances = read_instances(options.instances)
        paths |= locate_photos(instances.names, [options.images], Path(options.instances).name)
    if options.annotations is not None:
        dataset = read_dataset([options.annotations], [options.images])
        for image in dataset:
            path = paths.setdefault(image.image_id, image.path)
            if path != image.path:
                raise DataError(
                    f"image {image.image_id} is {path.name} in {options.instances} but "
                    f"{image.path.name} in {options.annotations}; give files whose ids agree"
                )
    search = checked_search(options)
    model = load(*options.model, device=options.device, precision=options.precision)
    frequencies = None
    own = model.stored.frequencies
    if own is not None and options.annotations is not None and options.frequencies is None:
        frequencies = DocumentFrequencies.from_bytes(own, f"the model's {FREQUENCIES}")
    captions: dict[int, str] = {}
    grounded: dict[int, Caption] = {}  # of photos with instances
    results = model.stream(paths.values(), search, batch_size=options.batch_size)
    bar = tqdm(results, total=len(paths), unit="photo", disable=None, dynamic_ncols=True)
    for image_id, result in zip(paths, bar, strict=True):
        if result.error is not None:
            warn(str(result.error))
            continue
        captions[image_id] = result.captions[0].text
        if instances is not None and image_id in instances.sizes:
            grounded[image_id] = result.captions[0]
    report: Report = {
        "model": options.model or "the shipped model",
        "search": ", ".join(f"{k} {v}" for k, v in _summary(search).items()),
        "precision": pick_precision(model.precision, model.device),
    }
    if instances is not None:
        from captioner.evaluation.grounding import measure
        from captioner.evaluation.report import attention

        report |= {
            "instances": options.instances,
            "attention": attention(measure(grounded, instances)),
        }
    return report, captions, frequencies, len(captions) < len(paths)


def _summary(search: SearchOptions) -> dict[str, Any]:
    """The main search options, and all that differ from their defaults."""
    always = ("beam_size", "max_length", "length_penalty")
    return {
        field.name: getattr(search, field.name)
        for field in dataclasses.fields(search)
        if field.name in always or getattr(search, field.name) != field.default
    }


# --- scores --------------------------------------------------------------------------------------


def _score(report: Report, captions: dict[int, str], scoring: _Scoring, options: Any) -> bool:
    """Add scores, statistics and comparison to the report; return whether a metric failed."""
    from captioner.evaluation.report import build, difference, per_image

    references = scoring.judge.references
    if options.results is not None:
        captions = _within(captions, references, options.results, options)
    captions = {i: text for i, text in captions.items() if references.get(i)}
    java, failed = _java_metrics(options)
    judge = dataclasses.replace(scoring.judge, java=java, download=bool(options.spice))
    (found, scores), judge = _despite_failures(judge, lambda j: build(captions, j, scoring.known))
    report |= {"annotations": options.annotations, **found}
    missing = sum(1 for i, texts in references.items() if texts and i not in captions)
    if missing:
        report["images_without_caption"] = missing
    others = scoring.others
    if others is not None:
        compared, judge = _despite_failures(
            judge, lambda j: difference(captions, others, j, scores)
        )
        report["compare"] = {"with": options.compare, **compared}
    report["per_image"] = per_image(captions, scores)
    return failed or len(judge.java) < len(java)


def _despite_failures(
    judge: CaptionEvaluator, job: Callable[[CaptionEvaluator], Result]
) -> tuple[Result, CaptionEvaluator]:
    """Retry a job without the metrics whose programs fail; return the remaining judge too."""
    while True:
        try:
            return job(judge), judge
        except ProgramError as error:
            warn(f"{error}; continuing with the other metrics")
            java = [metric for metric in judge.java if metric != error.program]
            judge = dataclasses.replace(judge, java=java)
