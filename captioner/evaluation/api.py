"""``captioner.evaluate``, and what ``captioner evaluate`` runs: score captions and attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from captioner.caption import Caption
from captioner.data.coco import locate_photos, read_captions, read_dataset
from captioner.data.folders import find_images
from captioner.data.progress import photo_bar
from captioner.errors import ConfigError, DataError, OptionError
from captioner.evaluation.frequencies import GZIP, DocumentFrequencies
from captioner.evaluation.grounding import measure as measure_attention
from captioner.evaluation.masks import read_instances
from captioner.evaluation.metrics import CaptionEvaluator
from captioner.evaluation.options import EvaluateOptions, OnError, changed_device, raise_error
from captioner.evaluation.references import count_frequencies
from captioner.evaluation.report import Report, build, difference, per_image, read_captions_of
from captioner.files import FREQUENCIES
from captioner.inference.captioner import Captioner, load
from captioner.inference.folder import find_model
from captioner.option_fields import build_options, option_fields
from captioner.options import FaithfulnessOptions


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
    how = faithfulness if isinstance(faithfulness, FaithfulnessOptions) else FaithfulnessOptions()
    return run(checked, options, how, model=loaded, captions=captions, progress=progress)


def run(
    options: EvaluateOptions,
    search: Mapping[str, Any],
    how: FaithfulnessOptions,
    *,
    model: Captioner | None = None,
    captions: Mapping[int, str] | None = None,
    on_error: OnError = raise_error,
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
    judge = others = known = None
    if options.annotations is not None and not options.faithfulness:
        # Files are read before photos are captioned, so that errors appear early.
        references = read_captions([options.annotations])[1]
        frequencies = _frequencies(options.frequencies)
        judge = CaptionEvaluator(references, frequencies, options.java, on_error)
        if options.compare is not None:
            others = _within(read_captions_of(options.compare), options.compare, options, judge)
            if not others:
                raise DataError(
                    f"{options.compare} has no captions for the photos in {options.annotations}; "
                    "give captions of the same photos"
                )
        if options.train_annotations:
            _, training = read_captions(options.train_annotations, renumber=True)
            known = [text for texts in training.values() for text in texts]
    if options.results is not None and judge is not None:
        captions = read_captions_of(options.results) if captions is None else captions
        captions = _within(captions, options.results, options, judge)
        report: Report = {"results": options.results}
    else:
        name = options.model[0] if model is not None else options.model or "the shipped model"
        if model is None:
            model = load(*options.model, device=options.device, precision=options.precision)
        if options.faithfulness:
            return _faithfulness(
                options, how, model.in_torch(), name, search, on_error=on_error, progress=progress
            )
        own = model.stored.frequencies
        if judge is not None and judge.frequencies is None and own is not None:
            judge.frequencies = DocumentFrequencies.from_bytes(own, f"the model's {FREQUENCIES}")
        report = _about(model, name, search)
        captions, attention = _caption(options, model, search, on_error, progress)
        report |= attention
    if judge is None:
        return report
    captions = {i: text for i, text in captions.items() if judge.references.get(i)}
    found, scores = build(captions, judge, known)
    report |= {"annotations": str(options.annotations), **found}
    missing = sum(1 for i, texts in judge.references.items() if texts and i not in captions)
    if missing:
        report["images_without_caption"] = missing
    if others is not None:
        compared = difference(captions, others, judge, scores)
        report["compare"] = {"with": str(options.compare), **compared}
    report["per_image"] = per_image(captions, scores)
    return report


def _within(
    captions: Mapping[int, str], source: str, options: EvaluateOptions, judge: CaptionEvaluator
) -> dict[int, str]:
    """Return the captions of photos that have references.

    Raises:
        DataError: A photo is not in the annotations.
    """
    unknown = captions.keys() - judge.references.keys()
    if unknown:
        raise DataError(
            f"{source}: image {min(unknown)} (and {len(unknown) - 1} more) is not in "
            f"{options.annotations}; give the annotations that the results belong to"
        )
    return {image_id: text for image_id, text in captions.items() if judge.references[image_id]}


def _frequencies(given: str | None) -> DocumentFrequencies | None:
    """Read document frequencies from a file or model folder."""
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
        return count_frequencies(read_captions([path])[1])
    return DocumentFrequencies.load(path)


def _about(model: Captioner, name: Any, search: Mapping[str, Any]) -> Report:
    """What the report says of a model: its main search options, and those that are not default."""
    options = model.options(**search)
    always = ("beam_size", "max_length", "length_penalty")
    shown = [
        f"{field.name} {getattr(options, field.name)}"
        for field in dataclasses.fields(options)
        if field.name in always or getattr(options, field.name) != field.default
    ]
    return {"model": name, "search": ", ".join(shown), "precision": model.precision}


def _caption(
    options: EvaluateOptions,
    model: Captioner,
    search: Mapping[str, Any],
    on_error: OnError,
    progress: bool,
) -> tuple[dict[int, str], Report]:
    """Caption the photos of the annotations and of the instances.

    Returns:
        The captions, and what the report says of their attention.
    """
    assert options.images is not None
    paths: dict[int, Path] = {}
    instances = None
    if options.instances is not None:
        instances = read_instances(options.instances)
        paths |= locate_photos(instances.names, [options.images], Path(options.instances).name)
    if options.annotations is not None:
        for image in read_dataset([options.annotations], [options.images]):
            path = paths.setdefault(image.image_id, image.path)
            if path != image.path:
                raise DataError(
                    f"image {image.image_id} is {path.name} in {options.instances} but "
                    f"{image.path.name} in {options.annotations}; give files whose ids agree"
                )
    captions: dict[int, str] = {}
    grounded: dict[int, Caption] = {}  # of photos with instances
    results = model.stream(paths.values(), batch_size=options.batch_size, **search)
    bar = photo_bar(results, shown=progress, total=len(paths))
    for image_id, result in zip(paths, bar, strict=True):
        if result.error is not None:
            on_error(result.error)
            continue
        captions[image_id] = result.captions[0].text
        if instances is not None and image_id in instances.sizes:
            grounded[image_id] = result.captions[0]
    if instances is None:
        return captions, {}
    found = measure_attention(grounded, instances).summary()
    return captions, {"instances": str(options.instances), "attention": found}


def _faithfulness(
    options: EvaluateOptions,
    how: FaithfulnessOptions,
    model: Captioner,
    name: object,
    search: Mapping[str, Any],
    *,
    on_error: OnError,
    progress: bool,
) -> Report:
    """Measure the explanations of generated or reference captions."""
    from captioner.evaluation.faithfulness import measure  # imports torch

    assert options.images is not None
    report = _about(model, name, search)
    photos: dict[Path, str | None]
    if options.annotations is None:
        photos = dict.fromkeys(find_images([options.images]))
    else:
        dataset = read_dataset([options.annotations], [options.images])
        photos = {image.path: image.captions[0] for image in dataset if image.captions}
        report["search"] = f"none; the captions of {options.annotations}"
    found = measure(
        model, photos, how, model.options(**search), on_error=on_error, progress=progress
    )
    return report | {"faithfulness": found.summary()}
