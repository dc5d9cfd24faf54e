"""What ``captioner calibrate`` runs: caption photos with references or judgements, fit, report."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from captioner.caption import DOUBTFUL
from captioner.data.coco import CaptionedImage, locate_photos, read_dataset
from captioner.data.folders import find_images
from captioner.data.images import open_image
from captioner.data.importers import read_table
from captioner.data.reading import photo_bar, read_batches
from captioner.drawing.figure import Figure
from captioner.errors import ConfigError, DataError, ImageError, OptionError, counted
from captioner.evaluation.api import model_frequencies
from captioner.evaluation.calibration import (
    JUDGED_RIGHT,
    Backdrop,
    Example,
    Judged,
    Recipe,
    cross_validate,
    fit,
    measure_groups,
    measure_kinds,
)
from captioner.evaluation.options import CalibrateOptions, OnError
from captioner.evaluation.references import DocumentFrequencies, cider_d, ngrams, split
from captioner.evaluation.report import ends, table
from captioner.files import FREQUENCIES
from captioner.inference.captioner import Captioner
from captioner.inference.confidence import Calibrator, Observation, PhraseTable, search_key
from captioner.inference.engine import Prepared
from captioner.options import SearchOptions
from captioner.search.words import neutral_caption
from captioner.text.tokenizer import caption_tokens

T = TypeVar("T")

GRADES = {"right": 1.0, "partly": 0.5, "wrong": 0.0}
"""Of a judged caption: nothing in it is false; the main thing is right; nothing."""

MIN_PHOTOS = 100
"""Fewest photos to calibrate with: from fewer, probabilities cannot be estimated."""

TRAINING_PHOTOS = 8000
"""Training photos that are encoded, at random, to know which photos are familiar, and which words
are used for them."""

_KEPT = (
    "photos", "right", "score", "auroc", "auroc_wrong", "calibration_error", "half_gain",
    "calibration_error_interval", "half_gain_interval", "calibration_error_by_chance",
)  # fmt: skip
"""The figures that are stored with a model."""


def calibrate(
    model: Captioner, given: CalibrateOptions, changes: Mapping[str, Any], on_error: OnError
) -> tuple[Calibrator, dict[str, Any]]:
    """Fit a calibrator to a single model with document frequencies, and cross-validate it.

    ``changes`` are to its search options. ``on_error`` is called with the error of a photo that
    cannot be read; the others go on.

    Returns:
        The calibrator, fitted to all photos, and the report of the cross-validation.

    Raises:
        ConfigError: The model cannot be calibrated.
        DataError: The photos do not suffice, or a file cannot be used.
    """
    work = _Work(model, given, model.options(**changes), on_error)
    training, examples, kinds = work.training_photos(), work.examples, work.other_kinds()
    recipe = Recipe(
        PhraseTable.count(work.frequencies.documents, work.frequencies.counts),
        search_key(work.options),
        None if given.judged else given.threshold,
        kinds,
        None if training is None else Backdrop.fit(training[0], kinds, training[1]),
        work.usual_photos(),
    )
    report = work.report(cross_validate(examples, recipe))
    calibrator = fit(examples, recipe)
    if kinds:
        report["other_kinds"] = measure_kinds(examples, recipe)
    return replace(calibrator, report=stored_figures(report["groups"])), report


def stored_figures(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is stored of `measure_groups`: without what is undefined (a gain over scores of 0)."""
    return {
        group: {
            name: np.round(part[name], 4).tolist()
            for name in _KEPT
            if part[name] is not None and np.isfinite(part[name]).all()
        }
        for group, part in groups.items()
    }


def check(
    model: Captioner, given: CalibrateOptions, changes: Mapping[str, Any], on_error: OnError
) -> dict[str, Any]:
    """Measure the confidence that a calibrated model has on these photos; see `calibrate`."""
    options, calibrator = model.options(**changes), model.stored.calibrator
    reason = model.no_confidence(options)
    if calibrator is None or reason is not None:
        raise ConfigError(f"there is no confidence to check: {reason}")
    if calibrator.threshold is None and not given.judged:
        raise OptionError("the confidence was fitted to judgements; give captions with {judged}")
    work = _Work(model, given, options, on_error)
    if missing := {task.style for task in work.tasks} - calibrator.intercepts.keys():
        raise ConfigError(f"the model is not calibrated for style {missing.pop()}; calibrate it")
    confidences = [calibrator.confidence(one.seen, one.style) for one in work.examples]
    scores = [one.score for one in work.examples]
    right = JUDGED_RIGHT if given.judged else calibrator.threshold or given.threshold
    return work.report(Judged(np.array(confidences), np.array(scores), right))


def read_judgements(
    files: Sequence[str], default_style: str, *, neutral: bool = False
) -> dict[str, dict[tuple[str, str], float]]:
    """Read tables of judged captions with the columns image, caption, grade and perhaps style.

    The grade is right, partly or wrong: 1, 0.5 or 0; of several judgements of a caption the mean
    counts. Rows with an empty grade are skipped. With ``neutral``, words for people are replaced as
    in `neutral_caption`, and captions with no ``errors`` but *person* become right.

    Returns:
        By style, the grade of each file name and caption.

    Raises:
        DataError: A file cannot be read, or lacks a column; or a grade is another.
    """
    grades: dict[str, dict[tuple[str, str], list[float]]] = {}
    for path in files:
        for where, row in read_table(path):
            try:
                if not row["grade"]:
                    continue
                grade, image, text = GRADES[row["grade"]], row["image"], row["caption"]
            except KeyError as error:
                raise DataError(
                    f"{where}: {error} is missing or no grade; give the columns image, "
                    f"caption and grade ({', '.join(GRADES)})"
                ) from error
            if neutral:
                text = neutral_caption(text)
                grade = 1.0 if row.get("errors") == "person" else grade
            of_style = grades.setdefault(row.get("style") or default_style, {})
            of_style.setdefault((image, text), []).append(grade)
    return {
        style: {caption: fmean(found) for caption, found in of_style.items()}
        for style, of_style in grades.items()
    }


def photo_batches(
    model: Captioner,
    photos: Sequence[CaptionedImage],
    on_error: OnError,
    name: str | None = None,
    batch_size: int = 32,
) -> Iterator[tuple[list[CaptionedImage], list[Prepared]]]:
    """The photos that can be read, in batches, with a progress bar of this name."""

    def read(photo: CaptionedImage) -> Prepared:
        return model.prepare(open_image(photo.path))

    progress = photo_bar(total=len(photos), desc=name)
    with progress, closing(read_batches(read, photos, batch_size)) as batches:
        for batch in batches:
            good = {}
            for photo, prepared in batch:
                if isinstance(prepared, ImageError):
                    on_error(prepared)
                else:
                    good[photo] = prepared
            if good:
                yield [*good], [*good.values()]
            progress.update(len(batch))


class _Task(NamedTuple):
    """Photos to measure the confidence on."""

    group: str
    """Their name in the report."""
    style: str
    photos: Sequence[CaptionedImage]
    score: Callable[[CaptionedImage, str], float | None]
    """The score of a caption of one of them, see ``Example``; None: it was not judged."""


@dataclass(frozen=True)
class _Work:
    """A model, and the photos to measure its confidence on."""

    model: Captioner
    given: CalibrateOptions
    options: SearchOptions
    on_error: OnError

    def __post_init__(self) -> None:
        """Check what can be checked before photos are captioned."""
        for task in self.tasks:
            self.model.stored.vocabulary.start(task.style)  # raises if the model does not know it
        if temperature := self.options.temperature:
            raise OptionError(
                "{temperature} is {given}; confidence is for the best caption of a search, so omit "
                "it",
                given=temperature,
            )
        total = sum(len(task.photos) for task in self.tasks)
        if total < MIN_PHOTOS:
            raise DataError(
                f"{total} photos with captions are too few to calibrate; give {MIN_PHOTOS} or more"
            )

    @cached_property
    def frequencies(self) -> DocumentFrequencies:
        """Those of the model."""
        if (found := model_frequencies(self.model)) is None:
            raise ConfigError(
                f"the model has no {FREQUENCIES}, which decide whether a caption is right; add it "
                "with: captioner prepare frequencies CAPTIONS.json -o MODEL"
            )
        return found

    @cached_property
    def tasks(self) -> list[_Task]:
        """The photos of each annotations file; or the judged ones, by style."""
        given, frequencies = self.given, self.frequencies  # raises if the model has none
        default = self.options.style or next(iter(self.model.stored.vocabulary.styles), "")

        def judged(style: str, grades: Mapping[tuple[str, str], float]) -> _Task:
            names = [*dict.fromkeys(image for image, _ in grades)]
            listed = [CaptionedImage(n, Path(name), ()) for n, name in enumerate(names)]
            photos = locate_photos(listed, given.images, given.judged[0])
            return _Task(
                style, style, photos, lambda one, text: grades.get((names[one.image_id], text))
            )

        if given.judged:
            found = read_judgements(given.judged, default, neutral=self.options.neutral)
            return [judged(style, grades) for style, grades in found.items()]

        def score(photo: CaptionedImage, text: str) -> float:
            caption, *references = (
                ngrams(split(caption_tokens(one))) for one in (text, *photo.captions)
            )
            return cider_d([caption], references, frequencies)[0]

        styles = given.styles or [default] * len(given.annotations)
        stems = [Path(path).stem for path in given.annotations]
        # By style, if each file has its own: annotation files often have the same name.
        groups = next(
            (names for names in (given.styles, stems) if names and len({*names}) == len(names)),
            given.annotations,
        )
        return [
            _Task(group, style, read_dataset([file], given.images), score)
            for group, style, file in zip(groups, styles, given.annotations, strict=True)
        ]

    @cached_property
    def examples(self) -> list[Example]:
        """The captions of all photos that can be read; the judged ones that have a judgement."""
        examples = [
            Example(seen, task.style, task.group, score, str(photo.path), _words(photo))
            for task in self.tasks
            for photo, seen in self._observed(task.photos, task.group, task.style)
            if (score := task.score(photo, seen.text)) is not None
        ]
        if not examples:
            raise DataError("no photo could be captioned; give photos that can be read")
        return examples

    def usual_photos(self) -> NDArray[np.float32] | None:
        """With judgements, the vectors of the photos of the annotations, if any."""
        if not (self.given.judged and self.given.annotations):
            return None
        photos = read_dataset(self.given.annotations, self.given.images, renumber=True)
        return self._vectors(photos, "photos")[0]

    def training_photos(self) -> tuple[NDArray[np.float32], list[set[str]]] | None:
        """Vectors of a sample of the training photos, (N, D), and the words of their references."""
        if not self.given.train_annotations:
            return None
        photos = read_dataset(self.given.train_annotations, self.given.images, renumber=True)
        own = {photo.path for task in self.tasks for photo in task.photos}
        photos = [photo for photo in photos if photo.path not in own]
        if len(photos) < MIN_PHOTOS:
            raise DataError(
                f"{len(photos)} training photos that are not calibrated with are too few; give "
                f"{MIN_PHOTOS} or more, or leave out the training annotations"
            )
        if len(photos) > TRAINING_PHOTOS:
            photos = random.Random(0).sample(photos, TRAINING_PHOTOS)
        return self._vectors(photos, "training photos")

    def _vectors(
        self, photos: Sequence[CaptionedImage], name: str
    ) -> tuple[NDArray[np.float32], list[set[str]]]:
        """Vectors of the photos that can be read, (N, D), and the words of their references."""
        read = [*self._each(photos, name, self.model.photo_vectors)]
        if not read:
            raise DataError(f"none of the {name} can be read; give photos that can")
        return np.stack([vector for _, vector in read]), [_words(photo) for photo, _ in read]

    def other_kinds(self) -> dict[str, list[Observation]]:
        """The captions of images that are not photos, by kind."""
        if self.given.other_images is None:
            return {}
        found: dict[str, list[Observation]] = {}
        for folder in sorted(p for p in Path(self.given.other_images).iterdir() if p.is_dir()):
            images = [CaptionedImage(0, path, ()) for path in find_images([folder])]
            if seen := [one for _, one in self._observed(images, folder.name, self.tasks[0].style)]:
                found[folder.name] = seen
        if len(found) < 2:
            raise DataError(
                f"{self.given.other_images} has {counted(len(found), 'folder')} with images; give "
                "a folder with a folder for each of two kinds or more"
            )
        return found

    def _observed(
        self, photos: Sequence[CaptionedImage], name: str, style: str
    ) -> Iterator[tuple[CaptionedImage, Observation]]:
        """The photos that can be read, with their captions."""
        options = replace(self.options, style=style)
        return self._each(photos, name, lambda some: self.model.observe_batch(some, options))

    def _each(
        self,
        photos: Sequence[CaptionedImage],
        name: str,
        call: Callable[[list[Prepared]], Iterable[T]],
    ) -> Iterator[tuple[CaptionedImage, T]]:
        """The photos that can be read, with what a function of batches of them returns."""
        size = self.given.batch_size
        for batch, prepared in photo_batches(self.model, photos, self.on_error, name, size):
            yield from zip(batch, call(prepared), strict=True)

    def report(self, judged: Judged) -> dict[str, Any]:
        """What was measured on all photos and, with references, on their words."""
        report = {
            "right": "nothing in the caption is false, as people judge"
            if self.given.judged
            else f"CIDEr_D >= {judged.threshold:g} under the model's document frequencies",
            "search": search_key(self.options),
            "groups": measure_groups(judged, [example.group for example in self.examples]),
        }
        if self.given.judged:
            total = sum(len(task.photos) for task in self.tasks)
            return report | {"photos": total, "judged_otherwise": total - len(self.examples)}
        words: dict[str, Any] = {"doubtful_below": DOUBTFUL}
        known: dict[bool, list[bool]] = {True: [], False: []}  # by whether the word is doubtful
        for one in self.examples:
            tokens, log_probs = caption_tokens(one.seen.text), one.seen.found.token_log_probs
            if len(tokens) == len(log_probs):  # else they are pieces
                for word, p in zip(tokens, np.exp(log_probs), strict=True):
                    known[bool(p < DOUBTFUL)].append(word in one.known)
        for name, found in zip(("doubtful", "others"), known.values(), strict=True):
            share = float(np.mean(found)) if found else None
            words |= {name: len(found), f"{name}_in_references": share}
        return report | {"words": words}


def _words(photo: CaptionedImage) -> set[str]:
    """The words of a photo's references."""
    return {word for text in photo.captions for word in caption_tokens(text)}


# --- the report for people -----------------------------------------------------------------------


def as_text(report: Mapping[str, Any]) -> str:
    """The report as text."""
    heads = (
        "", "captions", "right", "score", "AUROC right", "wrong", "calibration error (95%)",
        "by chance", "confident half (95%)",
    )  # fmt: skip
    rows = [
        (
            name, part["photos"], f"{part['right']:.0%}", f"{part['score']:.2f}", part["auroc"],
            part["auroc_wrong"],
            f"{part['calibration_error']:.3f} ({ends(part['calibration_error_interval'], '.3f')})",
            part["calibration_error_by_chance"],
            f"{part['half_gain']:.2f} x ({ends(part['half_gain_interval'], '.2f')})",
        )
        for name, part in report["groups"].items()
    ]  # fmt: skip
    lines = [f"right: {report['right']}", "", *table([heads, *rows], 3, first=0)]
    if report.get("judged_otherwise"):
        lines += ["", f"{report['judged_otherwise']} of {report['photos']} captions are not judged"]
    found = report.get("words")
    if found and found["doubtful"]:
        lines += [
            "",
            f"{found['doubtful']:,} words with a probability below {found['doubtful_below']}: "
            f"{found['doubtful_in_references']:.0%} are in a reference caption; of the other "
            f"{found['others']:,}, {found['others_in_references']:.0%}",
        ]
    if kinds := report.get("other_kinds"):
        titles = ("kind, unseen", "images", "AUROC", "confidence", "below 0.2")
        rows_of_kinds = [(name, *part.values()) for name, part in kinds.items()]
        lines += ["", *table([titles, *rows_of_kinds], 3, first=0)]
    return "\n".join(lines)


def diagram(report: Mapping[str, Any]) -> Figure:
    """The figure of a report of `calibrate`.

    Left, for each group of photos: the share of right captions by confidence; on the diagonal,
    confidence is calibrated. Right: the mean score of the most confident captions.
    """
    from matplotlib import figure

    groups = report["groups"]
    drawn = figure.Figure(figsize=(4 * (len(groups) + 1), 4), dpi=100, layout="constrained")
    *panels, last = drawn.subplots(1, len(groups) + 1)
    for axes, (name, part) in zip(panels, groups.items(), strict=True):
        photos, x, y = (
            np.array([one[key] for one in part["bins"]])
            for key in ("photos", "confidence", "right")
        )
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
        axes.bar(x, 0.25 * photos / photos.max(), width=0.06, color="0.85", zorder=0)
        errors = 1.96 * (y * (1 - y) / photos) ** 0.5
        axes.errorbar(x, y, yerr=errors, marker="o", capsize=2, linewidth=1)
        axes.set(
            title=f"{name}: {part['photos']:,} photos, error {part['calibration_error']:.3f}",
            xlabel="confidence (bars: number of captions)",
            ylabel="share of right captions (95% interval)",
            xlim=(0, 1),
            ylim=(0, 1),
            aspect="equal",
        )
        shares = [100 * float(share) for share in part["coverage"]]
        last.plot(shares, [*part["coverage"].values()], marker="o", markersize=3, label=name)
    last.axhline(1, color="0.7", linewidth=1, zorder=0)
    last.set(
        title="score of the most confident captions",
        xlabel="captions kept, most confident first (%)",
        ylabel="score, relative to all captions",
        xlim=(0, 102),
    )
    last.legend(frameon=False)
    return Figure(drawn, "calibration and coverage")
