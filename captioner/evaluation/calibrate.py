"""What ``captioner calibrate`` runs: caption photos with references, fit, report."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.caption import DOUBTFUL
from captioner.data.coco import CaptionedImage, read_dataset
from captioner.data.folders import find_images
from captioner.data.images import open_image
from captioner.data.prefetch import read_ahead
from captioner.data.progress import photo_bar
from captioner.errors import ConfigError, DataError, ImageError, OptionError, counted
from captioner.evaluation.calibration import (
    MIN_PHOTOS,
    Example,
    Judged,
    Recipe,
    check_examples,
    cross_validate,
    fit,
    measure_groups,
    measure_kinds,
)
from captioner.evaluation.frequencies import DocumentFrequencies
from captioner.evaluation.options import CalibrateOptions
from captioner.evaluation.references import References
from captioner.files import FREQUENCIES
from captioner.inference.captioner import Captioner
from captioner.inference.confidence import Calibrator, Observation, PhraseTable, search_key
from captioner.inference.engine import Prepared
from captioner.options import SearchOptions
from captioner.text.tokenizer import caption_tokens

OnError = Callable[[ImageError], None]
"""Called with the error of a photo; the others go on."""

TRAINING_PHOTOS = 3000
"""Training photos that are encoded, at random, to know which photos are familiar."""


class _Task(NamedTuple):
    """The photos of one annotations file."""

    photos: list[CaptionedImage]
    style: str
    group: str


def calibrate(
    model: Captioner,
    given: CalibrateOptions,
    changes: Mapping[str, Any],
    on_error: OnError,
    *,
    progress: bool = True,
) -> tuple[Calibrator, dict[str, Any]]:
    """Fit a calibrator by cross-validation.

    Args:
        model: A single model with document frequencies.
        given: The photos and options.
        changes: Search options to change.
        on_error: Called for photos that cannot be read.
        progress: Show progress on standard error, if that is a terminal.

    Returns:
        The calibrator, fitted to all photos, and the report of the cross-validation.

    Raises:
        ConfigError: The model cannot be calibrated.
        DataError: The photos do not suffice, or a file cannot be used.
    """
    frequencies, tasks = _prepare(model, given, changes)
    reader = _Reader(model, given.batch_size, on_error, progress)
    training = _training_photos(given, tasks, reader)
    examples, words = _examples(changes, tasks, frequencies, reader)
    check_examples(examples, given.threshold)
    options = model.options(**changes)
    phrases = PhraseTable.count(frequencies.documents, frequencies.counts)
    kinds = _other_kinds(given, model.options(**{**changes, "style": tasks[0].style}), reader)
    recipe = Recipe(phrases, training, search_key(options), given.threshold, kinds)
    judged = cross_validate(examples, recipe)
    report = _report(model.options(**changes), judged, examples, words)
    calibrator = fit(examples, recipe)
    if kinds:
        report["other_kinds"] = measure_kinds(calibrator, examples, recipe)
    kept = {name: _brief(part) for name, part in report["groups"].items()}
    return Calibrator(**{**vars(calibrator), "report": kept}), report


def check(
    model: Captioner,
    given: CalibrateOptions,
    changes: Mapping[str, Any],
    on_error: OnError,
    *,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure the confidence that a calibrated model has on these photos; see `calibrate`."""
    calibrator = model.stored.calibrator
    reason = model.no_confidence(model.options(**changes))
    if calibrator is None or reason is not None:
        raise ConfigError(f"there is no confidence to check: {reason}")
    frequencies, tasks = _prepare(model, given, changes)
    missing = sorted({task.style for task in tasks} - calibrator.intercepts.keys())
    if missing:
        raise ConfigError(f"the model is not calibrated for style {missing[0]}; calibrate it anew")
    reader = _Reader(model, given.batch_size, on_error, progress)
    examples, words = _examples(changes, tasks, frequencies, reader)
    if not examples:
        raise DataError("no photo could be captioned; give photos that can be read")
    confidences = [calibrator.confidence(one.seen, one.style) for one in examples]
    scores = [one.score for one in examples]
    judged = Judged(np.array(confidences), np.array(scores), calibrator.threshold)
    return _report(model.options(**changes), judged, examples, words)


def _brief(part: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that are stored with a model, rounded."""
    names = ("photos", "right", "cider_d", "calibration_error", "half_gain")
    intervals = ("calibration_error_interval", "half_gain_interval", "calibration_error_by_chance")
    return {name: _rounded(part[name]) for name in (*names, *intervals)}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def _prepare(
    model: Captioner, given: CalibrateOptions, changes: Mapping[str, Any]
) -> tuple[DocumentFrequencies, list[_Task]]:
    """Document frequencies, and the photos of each file."""
    stored = model.stored
    if len(model.ensemble.engines) > 1:
        raise ConfigError("an ensemble cannot be calibrated; give a single model")
    if stored.frequencies is None:
        raise ConfigError(
            f"the model has no {FREQUENCIES}, which decide whether a caption is right; add it "
            "with: captioner prepare frequencies CAPTIONS.json -o MODEL"
        )
    frequencies = DocumentFrequencies.from_bytes(stored.frequencies, f"the model's {FREQUENCIES}")
    default = model.options(**changes).style or next(iter(stored.vocabulary.styles), "")
    styles = given.styles or [default] * len(given.annotations)
    for style in styles:
        stored.vocabulary.start(style)  # raises if the model does not know it
    options = model.options(**changes)
    if options.temperature:
        raise OptionError(
            "{temperature} is {given}; confidence is for the best caption of a search, so omit it",
            given=options.temperature,
        )
    # By style, if each file has its own: annotation files often have the same name.
    named_by_style = given.styles and len(set(styles)) == len(styles)
    names = styles if named_by_style else _names(given.annotations)
    tasks = []
    for file, style, name in zip(given.annotations, styles, names, strict=True):
        photos = read_dataset([file], given.images)
        tasks.append(_Task(photos, style, name))
    total = sum(len(task.photos) for task in tasks)
    if total < MIN_PHOTOS:
        raise DataError(
            f"{total} photos with captions are too few to calibrate; give {MIN_PHOTOS} or more"
        )
    return frequencies, tasks


def _names(annotations: Sequence[str | Path]) -> list[str]:
    """A name for each file: its own, with its folder if two are the same."""
    paths = [Path(path).absolute() for path in annotations]
    counts = Counter(path.stem for path in paths)
    return [p.stem if counts[p.stem] == 1 else f"{p.parent.name}/{p.stem}" for p in paths]


def _training_photos(
    given: CalibrateOptions, tasks: Sequence[_Task], reader: _Reader
) -> NDArray[np.float32] | None:
    """Vectors of a sample of the training photos, (N, D)."""
    if not given.train_annotations:
        return None
    photos = read_dataset(given.train_annotations, given.images, renumber=True)
    own = {photo.path for task in tasks for photo in task.photos}
    paths = [photo.path for photo in photos if photo.path not in own]
    if len(paths) < MIN_PHOTOS:
        raise DataError(
            f"{len(paths)} training photos that are not calibrated with are too few; give "
            f"{MIN_PHOTOS} or more, or leave out the training annotations"
        )
    if len(paths) > TRAINING_PHOTOS:
        paths = random.Random(0).sample(paths, TRAINING_PHOTOS)
    batches = reader.batches(paths, "training photos")
    return np.concatenate([reader.model.photo_vectors(photos) for _, photos in batches])


def _examples(
    changes: Mapping[str, Any],
    tasks: Sequence[_Task],
    frequencies: DocumentFrequencies,
    reader: _Reader,
) -> tuple[list[Example], list[tuple[bool, bool]]]:
    """The captions of all photos; and, of each of their words, if it is doubtful and if right."""
    examples: list[Example] = []
    words: list[tuple[bool, bool]] = []
    for task in tasks:
        options = reader.model.options(**{**changes, "style": task.style})
        found: dict[int, Observation] = {}
        paths = [photo.path for photo in task.photos]
        for indices, photos in reader.batches(paths, task.group):
            seen_of = reader.model.observe_batch(photos, options)
            found.update(zip(indices, seen_of, strict=True))
        references = {
            index: [caption_tokens(text) for text in task.photos[index].captions] for index in found
        }
        captions = {index: [caption_tokens(seen.text)] for index, seen in found.items()}
        scores = References(references, frequencies).score(captions) if found else {}
        for index, seen in found.items():
            examples.append(Example(seen, task.style, task.group, scores[index][0]))
            known = {word for tokens in references[index] for word in tokens}
            if len(captions[index][0]) == len(seen.log_probs):  # not pieces of words
                for word, log_prob in zip(captions[index][0], seen.log_probs, strict=True):
                    words.append((float(np.exp(log_prob)) < DOUBTFUL, word in known))
    return examples, words


def _other_kinds(
    given: CalibrateOptions, options: SearchOptions, reader: _Reader
) -> dict[str, list[Observation]]:
    """The captions of images that are not photos, by kind."""
    if given.other_images is None:
        return {}
    found = {}
    for folder in sorted(path for path in Path(given.other_images).iterdir() if path.is_dir()):
        batches = reader.batches(find_images([folder]), folder.name)
        observed = (reader.model.observe_batch(images, options) for _, images in batches)
        if seen := [one for batch in observed for one in batch]:
            found[folder.name] = seen
    if len(found) < 2:
        raise DataError(
            f"{given.other_images} has {counted(len(found), 'folder')} with images; give a folder "
            "with a folder for each of two kinds or more"
        )
    return found


@dataclass(frozen=True)
class _Reader:
    """Reads photos in batches."""

    model: Captioner
    size: int
    on_error: OnError
    progress: bool

    def batches(
        self, paths: Sequence[Path], name: str
    ) -> Iterator[tuple[list[int], list[Prepared]]]:
        """Positions and pixels of the photos that can be read."""
        bar = photo_bar(shown=self.progress, total=len(paths), desc=name)
        with bar, closing(read_ahead(self._read, paths, ahead=self.size + 1, threads=2)) as photos:
            numbered = enumerate(photos)
            while batch := list(islice(numbered, self.size)):
                good = [(i, photo) for i, photo in batch if not isinstance(photo, ImageError)]
                for _, photo in batch:
                    if isinstance(photo, ImageError):
                        self.on_error(photo)
                if good:
                    yield [i for i, _ in good], [photo for _, photo in good]
                bar.update(len(batch))

    def _read(self, path: Path) -> Prepared | ImageError:
        try:
            return self.model.prepare(open_image(path))
        except ImageError as error:
            return error


def _report(
    options: SearchOptions,
    judged: Judged,
    examples: Sequence[Example],
    words: Sequence[tuple[bool, bool]],
) -> dict[str, Any]:
    doubtful = [right for unsure, right in words if unsure]
    others = [right for unsure, right in words if not unsure]
    return {
        "right": f"CIDEr_D >= {judged.threshold:g} under the model's document frequencies",
        "search": search_key(options),
        "groups": measure_groups(judged, [example.group for example in examples]),
        "words": {
            "doubtful_below": DOUBTFUL,
            "doubtful": len(doubtful),
            "doubtful_in_references": float(np.mean(doubtful)) if doubtful else None,
            "others": len(others),
            "others_in_references": float(np.mean(others)) if others else None,
        },
    }


def as_text(report: Mapping[str, Any]) -> str:
    """The report for people."""
    groups = report["groups"]
    width = max(len(name) for name in groups)
    head = (
        f"{'':<{width}}  photos  right  CIDEr-D  calibration error (95%)  by chance"
        "  confident half (95%)"
    )
    lines = [f"right: {report['right']}", "", head]
    for name, part in groups.items():
        error, half = part["calibration_error_interval"], part["half_gain_interval"]
        lines.append(
            f"{name:<{width}}  {part['photos']:>6,}  {part['right']:>5.0%}  {part['cider_d']:>7.3f}"
            f"  {part['calibration_error']:.3f} ({error[0]:.3f} to {error[1]:.3f})".ljust(
                width + 50
            )
            + f"  {part['calibration_error_by_chance']:>9.3f}"
            f"  {part['half_gain']:.2f} x ({half[0]:.2f} to {half[1]:.2f})"
        )
    found = report["words"]
    if found["doubtful"]:
        lines += [
            "",
            f"{found['doubtful']:,} words with a probability below {found['doubtful_below']}: "
            f"{found['doubtful_in_references']:.0%} are in a reference caption; of the other "
            f"{found['others']:,}, {found['others_in_references']:.0%}",
        ]
    if kinds := report.get("other_kinds"):
        width = max(map(len, [*kinds, "kind, unseen"]))
        lines += ["", f"{'kind, unseen':<{width}}  images  AUROC  confidence  below 0.2"]
        lines += [
            f"{name:<{width}}  {part['images']:>6,}  {part['auroc']:.3f}  "
            f"{part['confidence']:>10.2f}  {part['below_0.2']:>9.0%}"
            for name, part in kinds.items()
        ]
    return "\n".join(lines)
