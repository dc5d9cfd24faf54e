"""``captioner evaluate``: captions against references, attention against masks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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
        "Score captions against references (BLEU, ROUGE-L, CIDEr; METEOR and SPICE where Java is "
        "found), with 95% intervals, and attention against COCO's instance masks. Either a model "
        "captions the photos now, or a COCO results file of any system is read.",
        "--annotations CAPTIONS.json (--images FOLDER [--model DIR] [--instances INSTANCES.json] | "
        "--results RESULTS.json) [--compare OTHER.json] [-o REPORT.json]",
    )
    new.add_argument("--annotations", help="COCO captions file with the references")
    new.add_argument("--images", help="folder of the photos: the model captions them")
    new.add_argument("--results", help="COCO results file: [{image_id, caption}, ...]")
    new.add_argument(
        "--instances",
        help="COCO instances file: measure whether attention lies on the objects that words name; "
        "with --images, and without --annotations too",
    )
    new.add_argument(
        "--compare",
        help="results or report of another system: say whether the difference is significant",
    )
    new.add_argument(
        "--frequencies",
        help="frozen document frequencies for CIDEr_D: a file of captioner prepare frequencies, a "
        "COCO captions file, or a model folder (default with --images: the model's own)",
    )
    new.add_argument(
        "--train-annotations",
        action="append",
        default=[],
        help="COCO captions file that the system learned from: tells which captions are new",
    )
    for metric, need in (("METEOR", "Java"), ("SPICE", "Java and CoreNLP, which it downloads")):
        add_yes_no(
            new,
            metric.lower(),
            f"score {metric} too; needs {need} (default: where all of it is found)",
        )
    new.add_argument("-o", "--output", help="write the report as JSON, with every image's scores")
    new.add_argument("--force", action="store_true", help="replace the report")
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
    judged = _read(options)  # what cannot be read is told before the photos are captioned
    if options.results is not None:
        report = {"results": options.results}
    else:
        report, captions, own, failed = _caption(options)
        if judged is not None and judged.judge.frequencies is None:
            judged = judged._replace(judge=dataclasses.replace(judged.judge, frequencies=own))
    if judged is not None:
        failed |= _score(report, captions, judged, options)
    print(as_text(report))
    if target is not None:
        atomic_write(target, as_json(report))
    return FAILED if failed else OK


def _check(options: Any) -> Path | None:
    """Refuse what cannot work before anything is computed; where the report goes."""
    if (options.images is None) == (options.results is None):
        raise ConfigError("give either --images (a model captions them) or --results (a file)")
    if options.results is not None:
        _check_results(options)
    if options.annotations is None and options.instances is None:
        raise ConfigError("give --annotations (to score captions) or --instances (attention)")
    for name in ("compare", "frequencies", "train_annotations", "meteor", "spice"):
        if options[name] and options.annotations is None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is about captions; give --annotations with it"
            )
    if (options.num_captions or 1) > 1:
        raise ConfigError(
            f"--num-captions is {options.num_captions}, but one caption a photo is scored; omit it"
        )
    if options.output is None:
        return None
    target = Path(options.output)
    refuse_overwrite(target, options.force)
    return target


def _check_results(options: Any) -> None:
    """Refuse what asks for a model where a file holds the captions."""
    if options.instances is not None:
        raise ConfigError(
            "--instances measures the attention of a model, and a results file holds none; give "
            "--images in place of --results"
        )
    if options.annotations is None:
        raise ConfigError("--results is about captions; give --annotations, their references")
    if options.model:
        raise ConfigError("give either --model (it captions the photos) or --results, not both")
    defaults = parser().get_defaults()
    own = ("device", "precision", "batch_size")
    asked = [*search_changes(options), *(name for name in own if options[name] != defaults[name])]
    if asked:
        name = asked[0].replace("_", "-")
        raise ConfigError(f"--results holds the captions, so no model is searched; omit --{name}")


class _Judged(NamedTuple):
    """What captions are held against."""

    judge: CaptionEvaluator
    others: dict[int, str] | None
    """Captions of the system to compare with."""
    known: list[str] | None
    """Training captions."""


def _read(options: Any) -> _Judged | None:
    """Read all that the captions will be held against; None: they are not scored."""
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
                f"{options.compare} holds no caption of a photo that {options.annotations} has "
                "references for; compare captions of one set"
            )
    if options.train_annotations:
        _, training = read_captions(options.train_annotations)
        known = [text for texts in training.values() for text in texts]
    return _Judged(CaptionEvaluator(references, _frequencies(options.frequencies)), others, known)


def _within(
    captions: dict[int, str], references: Mapping[int, Sequence[str]], source: str, options: Any
) -> dict[int, str]:
    """The captions whose photos have references.

    Raises:
        DataError: A photo is not in the annotations at all.
    """
    unknown = captions.keys() - references.keys()
    if unknown:
        raise DataError(
            f"{source}: image {min(unknown)} (and {len(unknown) - 1} more) is not in "
            f"{options.annotations}; give the annotations that the results belong to"
        )
    return {image_id: text for image_id, text in captions.items() if references[image_id]}


def _java_metrics(options: Any) -> tuple[list[str], bool]:
    """Which of METEOR and SPICE to score, and whether one that was asked for cannot be."""
    from captioner.evaluation.java import JAVA_METRICS, unavailable

    wanted, failed = [], False
    for metric in JAVA_METRICS:
        asked = options[metric.lower()]
        if asked is False:
            continue
        reason = unavailable(metric, download=bool(asked))
        if reason is None:
            wanted.append(metric)
        else:
            failed |= bool(asked)
            silence = f"--no-{metric.lower()} silences this"
            can = metric == "SPICE" and unavailable(metric, download=True) is None
            fetch = "--spice lets it be downloaded, " if can else ""
            warn(f"{reason} ({fetch}{silence})")
    return wanted, failed


def _frequencies(given: str | None) -> DocumentFrequencies | None:
    """Frozen document frequencies from where the user says."""
    from captioner.data.coco import read_captions
    from captioner.evaluation.frequencies import GZIP, DocumentFrequencies
    from captioner.files import FREQUENCIES

    if given is None:
        return None
    path = Path(given)
    if path.is_dir():
        if not (path / FREQUENCIES).is_file():
            raise ConfigError(
                f"{path} has no {FREQUENCIES}; give a captions file, or make it by: captioner "
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
        What to report of it, the captions, the model's own document frequencies, and whether a
        photo could not be read.
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
    model = load(*options.model, device=options.device, precision=options.precision)
    search = model.options(**search_changes(options))
    frequencies = None
    own = model.stored.frequencies
    if own is not None and options.annotations is not None and options.frequencies is None:
        frequencies = DocumentFrequencies.from_bytes(own, f"the model's {FREQUENCIES}")
    captions: dict[int, str] = {}
    seen: dict[int, Caption] = {}  # with their attention
    results = model.stream(paths.values(), search, batch_size=options.batch_size)
    bar = tqdm(results, total=len(paths), unit="photo", disable=None, dynamic_ncols=True)
    for image_id, result in zip(paths, bar, strict=True):
        if result.error is not None:
            warn(str(result.error))
            continue
        captions[image_id] = result.captions[0].text
        if instances is not None and image_id in instances.sizes:
            seen[image_id] = result.captions[0]
    report: Report = {
        "model": options.model or "the model that ships",
        "search": ", ".join(f"{k} {v}" for k, v in _telling(search).items()),
        "precision": pick_precision(model.precision, model.device),
    }
    if instances is not None:
        from captioner.evaluation.grounding import measure
        from captioner.evaluation.report import attention

        report |= {
            "instances": options.instances,
            "attention": attention(measure(seen, instances)),
        }
    return report, captions, frequencies, len(captions) < len(paths)


def _telling(search: SearchOptions) -> dict[str, Any]:
    """Search options that say something: the sizes, and what is not as it is by default."""
    always = ("beam_size", "max_length", "length_penalty")
    return {
        field.name: getattr(search, field.name)
        for field in dataclasses.fields(search)
        if field.name in always or getattr(search, field.name) != field.default
    }


# --- scores --------------------------------------------------------------------------------------


def _score(report: Report, captions: dict[int, str], judged: _Judged, options: Any) -> bool:
    """Add scores, statistics and comparison to the report; whether a metric failed."""
    from captioner.evaluation.report import build, difference, per_image

    references = judged.judge.references
    if options.results is not None:
        captions = _within(captions, references, options.results, options)
    captions = {i: text for i, text in captions.items() if references.get(i)}
    java, failed = _java_metrics(options)
    judge = dataclasses.replace(judged.judge, java=java, download=bool(options.spice))
    (found, scores), judge = _despite_failures(judge, lambda j: build(captions, j, judged.known))
    report |= {"annotations": options.annotations, **found}
    missing = sum(1 for i, texts in references.items() if texts and i not in captions)
    if missing:
        report["images_without_caption"] = missing
    others = judged.others
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
    """Do a job without the metrics whose programs fail; with the judge that is left."""
    while True:
        try:
            return job(judge), judge
        except ProgramError as error:
            warn(f"{error}; the other metrics follow")
            java = [metric for metric in judge.java if metric != error.program]
            judge = dataclasses.replace(judge, java=java)
