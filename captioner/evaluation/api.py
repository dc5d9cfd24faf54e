"""``captioner.evaluate``, and what ``captioner evaluate`` runs: score captions and attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from captioner.errors import CaptionerError, ConfigError, DataError, OptionError, ProgramError
from captioner.evaluation.options import EvaluateOptions, changed_device
from captioner.option_fields import build_options, option_fields
from captioner.options import FaithfulnessOptions

if TYPE_CHECKING:  # torch is imported when they are needed
    from captioner.caption import Caption
    from captioner.evaluation.frequencies import DocumentFrequencies
    from captioner.evaluation.metrics import CaptionEvaluator
    from captioner.evaluation.report import Report
    from captioner.inference.captioner import Captioner
    from captioner.options import SearchOptions

Result = TypeVar("Result")
OnError = Callable[[CaptionerError], None]
"""Called with the error of a photo or of a metric's program; the others go on. May raise it."""


def evaluate(
    *,
    model: Captioner | str | Path | Sequence[str | Path] | None = None,
    results: str | Path | Mapping[int, str] | None = None,
    faithfulness: bool | FaithfulnessOptions = False,
    progress: bool = True,
    **options: Any,
) -> Report:
    """Score captions against references, and attention against masks.

    Args:
        model: A loaded model, a model folder, or several folders; None: the shipped model.
        results: Captions of any system, instead of ``images``: a COCO results file, or captions by
            image id.
        faithfulness: Measure instead whether explanations find the regions that words depend on,
            and how; see ``evaluation.faithfulness``.
        progress: Show a progress bar on standard error, if that is a terminal.
        **options: The other fields of ``EvaluateOptions`` (``annotations``, ``images``,
            ``instances``, ``compare``, ``frequencies``, ``train_annotations``, ``meteor``,
            ``spice``, ``device``, ``precision``, ``batch_size``), which are those of ``captioner
            evaluate``, and fields of ``SearchOptions`` to change.

    Returns:
        What ``captioner evaluate -o`` writes as JSON; NaN where the file has null. The scores are
        under ``metrics``, with pycocoevalcap's names and scale: a CIDEr of 1.0 is 100 points.

    Raises:
        ConfigError: Arguments are missing or contradict each other, or a program that a metric
            needs is not installed.
        DataError: A file cannot be used; ImageError: a photo cannot be read.
    """
    from captioner.evaluation.java import unavailable

    names = option_fields(EvaluateOptions).keys() - {"output", "force"}
    given = {name: options.pop(name) for name in names & options.keys()}
    loaded = None if isinstance(model, str | Path | Sequence | None) else model
    captions = results if isinstance(results, Mapping) else None
    given |= {
        "model": [repr(model)] if loaded else model or [],
        "results": results if captions is None else "given captions",
        "faithfulness": bool(faithfulness),
    }
    checked = build_options(EvaluateOptions, given)
    for name in changed_device(checked) if loaded else ():
        if name != "batch_size":
            raise OptionError(f"{{model}} is loaded already; omit {{{name}}}, or load it with that")
    checked.check(options)
    for metric in checked.java:
        if reason := unavailable(metric):
            raise ConfigError(f"{metric.lower()} is True, but {reason}")
    how = faithfulness if isinstance(faithfulness, FaithfulnessOptions) else FaithfulnessOptions()
    return run(checked, options, how, model=loaded, captions=captions, progress=progress)


def _raise(error: CaptionerError) -> None:
    raise error


def run(
    options: EvaluateOptions,
    search: Mapping[str, Any],
    how: FaithfulnessOptions,
    *,
    model: Captioner | None = None,
    captions: Mapping[int, str] | None = None,
    on_error: OnError = _raise,
    progress: bool = True,
) -> Report:
    """Caption, score and measure.

    Args:
        options: What to score, checked.
        search: Search options to change.
        how: How to measure faithfulness.
        model: A loaded model, instead of that of the options.
        captions: Captions by image id, instead of a results file.
        on_error: By default the first error is raised.
        progress: See ``evaluate``.
    """
    from captioner.evaluation.report import read_captions_of

    if options.results is not None and captions is None:
        captions = read_captions_of(options.results)
    # References are read before photos are captioned, so that errors appear early.
    scoring = None if options.faithfulness else _read(options)
    if captions is not None:
        report: Report = {"results": options.results}
    else:
        used = _Model(*_load(options, model), search)
        if options.faithfulness:
            return _faithfulness(options, how, used, on_error, progress)
        report, captions, own = _caption(options, used, on_error, progress)
        if scoring is not None and scoring.judge.frequencies is None:
            scoring = scoring._replace(judge=dataclasses.replace(scoring.judge, frequencies=own))
    if scoring is not None:
        _score(report, captions, scoring, options, on_error)
    return report


class _Scoring(NamedTuple):
    """What captions are scored against."""

    judge: CaptionEvaluator
    others: dict[int, str] | None
    """Captions of the system to compare with."""
    known: list[str] | None
    """Training captions."""


def _read(options: EvaluateOptions) -> _Scoring | None:
    """Read everything that captions are scored against; None without annotations."""
    if options.annotations is None:
        return None
    from captioner.data.coco import read_captions
    from captioner.evaluation.metrics import CaptionEvaluator
    from captioner.evaluation.report import read_captions_of

    _, references = read_captions([options.annotations])
    others = known = None
    if options.compare is not None:
        others = _within(
            read_captions_of(options.compare), references, options.compare, options.annotations
        )
        if not others:
            raise DataError(
                f"{options.compare} has no captions for the photos in {options.annotations}; give "
                "captions of the same photos"
            )
    if options.train_annotations:
        _, training = read_captions(options.train_annotations, renumber=True)
        known = [text for texts in training.values() for text in texts]
    return _Scoring(CaptionEvaluator(references, _frequencies(options.frequencies)), others, known)


def _within(
    captions: Mapping[int, str],
    references: Mapping[int, Sequence[str]],
    source: str | Path,
    annotations: str | Path | None,
) -> dict[int, str]:
    """Return the captions of photos that have references.

    Raises:
        DataError: A photo is not in the annotations.
    """
    unknown = captions.keys() - references.keys()
    if unknown:
        raise DataError(
            f"{source}: image {min(unknown)} (and {len(unknown) - 1} more) is not in "
            f"{annotations}; give the annotations that the results belong to"
        )
    return {image_id: text for image_id, text in captions.items() if references[image_id]}


def _frequencies(given: str | Path | None) -> DocumentFrequencies | None:
    """Read document frequencies from a file or model folder."""
    from captioner.data.coco import read_captions
    from captioner.evaluation.frequencies import GZIP, DocumentFrequencies
    from captioner.evaluation.references import count_frequencies
    from captioner.files import FREQUENCIES
    from captioner.inference.folder import find_model

    if given is None:
        return None
    path = find_model(given)
    if path.is_dir():
        if not (path / FREQUENCIES).is_file():
            raise ConfigError(
                f"{path} has no {FREQUENCIES}; give a captions file, or create it with: captioner "
                f"prepare frequencies CAPTIONS.json -o {path}"
            )
        path /= FREQUENCIES
    if path.is_file() and path.read_bytes()[:2] != GZIP:
        _, references = read_captions([path])
        return count_frequencies(references)
    return DocumentFrequencies.load(path)


# --- captions ------------------------------------------------------------------------------------


class _Model(NamedTuple):
    """The model that captions."""

    model: Captioner
    name: Any
    """Its name in the report."""
    changes: Mapping[str, Any]
    """Search options that differ from its own."""

    @property
    def search(self) -> SearchOptions:
        return self.model.options(**self.changes)

    def about(self) -> Report:
        """What the report says of it: the main search options, and those that are not default."""
        always = ("beam_size", "max_length", "length_penalty")
        search = {
            field.name: getattr(self.search, field.name)
            for field in dataclasses.fields(self.search)
            if field.name in always or getattr(self.search, field.name) != field.default
        }
        return {
            "model": self.name,
            "search": ", ".join(f"{k} {v}" for k, v in search.items()),
            "precision": self.model.precision,
        }


def _load(options: EvaluateOptions, model: Captioner | None) -> tuple[Captioner, Any]:
    """The model, and its name in the report."""
    from captioner.inference import captioner as api

    if model is not None:
        return model, options.model[0]
    found = api.load(*options.model, device=options.device, precision=options.precision)
    return found, options.model or "the shipped model"


def _caption(
    options: EvaluateOptions, used: _Model, on_error: OnError, progress: bool
) -> tuple[Report, dict[int, str], DocumentFrequencies | None]:
    """Caption the photos of the annotations and of the instances with a model.

    Returns:
        Model facts for the report, the captions, and the model's own document frequencies.
    """
    from captioner.data.coco import locate_photos, read_dataset
    from captioner.data.progress import photo_bar
    from captioner.evaluation.frequencies import DocumentFrequencies
    from captioner.files import FREQUENCIES

    assert options.images is not None
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
    frequencies = None
    own = used.model.stored.frequencies
    if own is not None and options.annotations is not None and options.frequencies is None:
        frequencies = DocumentFrequencies.from_bytes(own, f"the model's {FREQUENCIES}")
    captions: dict[int, str] = {}
    grounded: dict[int, Caption] = {}  # of photos with instances
    results = used.model.stream(paths.values(), batch_size=options.batch_size, **used.changes)
    bar = photo_bar(results, shown=progress, total=len(paths))
    for image_id, result in zip(paths, bar, strict=True):
        if result.error is not None:
            on_error(result.error)
            continue
        captions[image_id] = result.captions[0].text
        if instances is not None and image_id in instances.sizes:
            grounded[image_id] = result.captions[0]
    report = used.about()
    if instances is not None:
        from captioner.evaluation.grounding import measure

        found = measure(grounded, instances).summary()
        report |= {"instances": str(options.instances), "attention": found}
    return report, captions, frequencies


def _faithfulness(
    options: EvaluateOptions,
    how: FaithfulnessOptions,
    used: _Model,
    on_error: OnError,
    progress: bool,
) -> Report:
    """Measure the explanations of generated or reference captions."""
    from captioner.data.coco import read_dataset
    from captioner.data.folders import find_images
    from captioner.data.progress import photo_bar

    assert options.images is not None
    photos: dict[Path, str | None]
    if options.annotations is None:
        photos = dict.fromkeys(find_images([options.images]))
    else:
        dataset = read_dataset([options.annotations], [options.images])
        photos = {image.path: image.captions[0] for image in dataset if image.captions}
    used = used._replace(model=used.model.in_torch())
    from captioner.evaluation.faithfulness import measure  # imports torch

    found = measure(
        used.model,
        photos,
        how,
        used.search,
        on_error=on_error,
        progress=lambda paths: photo_bar(paths, shown=progress),
    )
    report = used.about()
    if options.annotations is not None:
        report["search"] = f"none; the captions of {options.annotations}"
    return report | {"faithfulness": found.summary()}


# --- scores --------------------------------------------------------------------------------------


def _score(
    report: Report,
    captions: Mapping[int, str],
    scoring: _Scoring,
    options: EvaluateOptions,
    on_error: OnError,
) -> None:
    """Add scores, statistics and comparison to the report."""
    from captioner.evaluation.report import build, difference, per_image

    references = scoring.judge.references
    if options.results is not None:
        captions = _within(captions, references, options.results, options.annotations)
    captions = {i: text for i, text in captions.items() if references.get(i)}
    judge = dataclasses.replace(scoring.judge, java=options.java)
    (found, scores), judge = _despite_failures(
        judge, lambda j: build(captions, j, scoring.known), on_error
    )
    report |= {"annotations": str(options.annotations), **found}
    missing = sum(1 for i, texts in references.items() if texts and i not in captions)
    if missing:
        report["images_without_caption"] = missing
    others = scoring.others
    if others is not None:
        compared, judge = _despite_failures(
            judge, lambda j: difference(captions, others, j, scores), on_error
        )
        report["compare"] = {"with": str(options.compare), **compared}
    report["per_image"] = per_image(captions, scores)


def _despite_failures(
    judge: CaptionEvaluator, job: Callable[[CaptionEvaluator], Result], on_error: OnError
) -> tuple[Result, CaptionEvaluator]:
    """Retry a job without the metrics whose programs fail; return the remaining judge too."""
    while True:
        try:
            return job(judge), judge
        except ProgramError as error:
            on_error(error)
            java = [metric for metric in judge.java if metric != error.program]
            judge = dataclasses.replace(judge, java=java)
