"""The steps of ``captioner calibrate``: caption photos, score the captions, fit and report.

A calibration fits the truth of words and the confidence of captions. Both are probabilities. The
photos need captions by people, or people's judgements of the model's captions. The statistics are
in `fit_confidence`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from captioner.data.coco import locate_photos, read_dataset
from captioner.data.example import Example
from captioner.data.folders import find_images
from captioner.data.formats import format_by_name
from captioner.data.images import open_image
from captioner.data.importers import read_table
from captioner.data.reading import photo_bar, read_batches
from captioner.drawing.figure import Figure
from captioner.errors import ConfigError, DataError, ImageError
from captioner.evaluation.api import model_frequencies
from captioner.evaluation.fit_confidence import (
    JUDGED_RIGHT,
    Judged,
    Kinds,
    Recipe,
    ScoredCaption,
    cross_truth,
    cross_validate,
    fit,
    fit_kinds,
    fit_truth,
    measure_groups,
    measure_kinds,
    measure_truth,
    true_words,
)
from captioner.evaluation.objects import read_objects
from captioner.evaluation.options import CalibrateOptions, OnError
from captioner.evaluation.references import cider_d, ngrams, split
from captioner.evaluation.report import ends, table
from captioner.inference.captioner import Captioner
from captioner.inference.confidence import Calibrator, Observation, search_key
from captioner.inference.engine import Prepared
from captioner.inference.names import FREQUENCIES
from captioner.inference.truth import WordTruth
from captioner.messages import counted, either
from captioner.options import SearchOptions
from captioner.search.words import neutral_caption
from captioner.text.tokenizer import caption_tokens

T = TypeVar("T")

GRADES = {"right": 1.0, "partly": 0.5, "wrong": 0.0}
"""The score for each grade of a judged caption. right: nothing in the caption is false. partly: the
main thing is right. wrong: all other captions."""

MIN_PHOTOS = 100
"""Minimum number of photos for a calibration. Fewer photos cannot yield reliable estimates."""

PHOTOS, GREY_PHOTOS = 4000, 1000
"""Number of photos to compare with images that are not photos, and number of these photos that are
also used in black and white. So black-and-white photos also count as photos."""

_KEPT = (
    "photos", "right", "score", "auroc", "auroc_wrong", "calibration_error",
    "calibration_error_interval", "calibration_error_by_chance",
)  # fmt: skip
"""Names of the report's figures that are stored with a model (see `measure_groups`)."""


def calibrate(
    model: Captioner, given: CalibrateOptions, changes: Mapping[str, Any], on_error: OnError
) -> tuple[Calibrator, dict[str, Any]]:
    """Fit the truth of words and the confidence of captions for one model, and cross-validate both.

    The truth of a word is the probability that the word is true of the photo. The confidence of a
    caption is the probability that the caption is right. The model is not changed. The caller
    stores the calibrator, which computes both.

    Args:
        model: The model to calibrate.
        given: The options of ``captioner calibrate``.
        changes: Search options that differ from the model's own.
        on_error: Called with the error of each photo that cannot be read and is left out.

    Returns:
        The calibrator, fitted to all photos, and the report of the cross-validation.

    Raises:
        ConfigError: The model cannot be calibrated.
        DataError: There are too few photos, or a file cannot be used.
    """
    work = _Work(model, given, model.options(**changes), on_error)
    examples, annotated, images = work.examples, work.annotated, work.other_kinds()
    truth = fit_truth(annotated)
    if truth is None and given.judged and not given.annotations and model.stored.calibrator:
        truth = model.stored.calibrator.truth  # judgements of captions do not change it
    recipe = Recipe(
        search_key(work.options),
        None if given.judged else given.threshold,
        truth,
        work.kinds(images) if images else None,
    )
    report = work.report(cross_validate(examples, recipe), cross_truth(annotated))
    calibrator = fit(examples, recipe)
    if recipe.kinds is not None:
        style = examples[0].style
        report["other_kinds"] = measure_kinds(calibrator, recipe.kinds, images, style)
    return replace(calibrator, report=stored_figures(report["groups"])), report


def stored_figures(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures that are stored with a model, rounded to 4 decimals.

    Args:
        groups: The result of `measure_groups`. Figures that are None are left out.
    """
    return {
        group: {name: np.round(part[name], 4).tolist() for name in _KEPT if part[name] is not None}
        for group, part in groups.items()
    }


def check(
    model: Captioner, given: CalibrateOptions, changes: Mapping[str, Any], on_error: OnError
) -> dict[str, Any]:
    """Measure the confidence of a calibrated model on photos, without changing the model.

    The arguments and errors are the same as for `calibrate`. The result is a report in the same
    form.
    """
    options, calibrator = model.options(**changes), model.stored.calibrator
    reason = model.no_confidence(options)
    if calibrator is None or reason is not None:
        raise ConfigError(f"the confidence of this model cannot be checked: {reason}")
    if calibrator.threshold is None and not given.judged:
        raise ConfigError(
            "the confidence of this model was fitted to captions that people judged; to check it, "
            "set judged to a CSV file with such judgements"
        )
    work = _Work(model, given, options, on_error)
    if missing := {task.style for task in work.tasks} - calibrator.intercepts.keys():
        raise ConfigError(
            f"the model is not calibrated for the style {missing.pop()!r}; calibrate the model for "
            "this style first"
        )
    confidences = [calibrator.confidence(one.seen, one.style) for one in work.examples]
    scores = [one.score for one in work.examples]
    right = JUDGED_RIGHT if given.judged else calibrator.threshold or given.threshold
    judged = Judged(np.array(confidences), np.array(scores), right)
    return work.report(judged, [calibrator.truth] * len(work.annotated))


def read_judgements(
    files: Sequence[str], default_style: str, *, neutral: bool = False
) -> dict[str, dict[tuple[str, str], float]]:
    """Read tables of captions that people have judged, and return the score of each caption.

    A table has the columns ``image``, ``caption`` and ``grade``. The columns ``style`` and
    ``errors`` are optional. The grades right, partly and wrong become the scores 1, 0.5 and 0. If
    several people judged a caption, its score is the mean. Rows with an empty grade are skipped.

    Args:
        files: The tables.
        default_style: Style of rows without a style.
        neutral: Replace words for people by neutral words ("man" by "person"), as in
            `neutral_caption`. A caption with the single entry "person" in the column ``errors``
            then counts as right.

    Returns:
        The scores by style, then by file name and caption.

    Raises:
        DataError: A file cannot be read, a column is missing, or a grade is unknown.
    """
    grades: dict[str, dict[tuple[str, str], list[float]]] = {}
    for path in files:
        for where, row in read_table(path):
            if missing := [name for name in ("image", "caption", "grade") if name not in row]:
                raise DataError(
                    f"{where}: the table has no column {missing[0]!r}; use the columns 'image', "
                    "'caption' and 'grade'"
                )
            if not row["grade"]:
                continue
            if row["grade"] not in GRADES:
                raise DataError(
                    f"{where}: the grade {row['grade']!r:.60} is unknown; use {either(GRADES)}"
                )
            grade, image, text = GRADES[row["grade"]], row["image"], row["caption"]
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
    photos: Sequence[Example],
    on_error: OnError,
    name: str | None = None,
    *,
    batch_size: int = 32,
    change: Callable[[Image.Image], Image.Image] = lambda image: image,
) -> Iterator[tuple[list[Example], list[Prepared]]]:
    """Yield batches of photos and their prepared pixels, with a progress bar.

    Args:
        model: The model that prepares the pixels.
        photos: The photos to read.
        on_error: Called with the error of each photo that cannot be read and is left out.
        name: Label of the progress bar.
        batch_size: Number of photos in a batch.
        change: Function that changes each photo before the model prepares it.

    Yields:
        The readable photos of a batch, and their pixels in the same order.
    """

    def read(photo: Example) -> Prepared:
        """Read, change and prepare one photo."""
        return model.prepare(change(open_image(photo.path)))

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


def grey(image: Image.Image) -> Image.Image:
    """Return a black-and-white copy of an image, in RGB."""
    return image.convert("L").convert("RGB")


class _Task(NamedTuple):
    """A group of photos to caption in one style, with a function that scores the captions.

    The captions are used to fit and measure the confidence of captions (the probability that a
    caption is right) and the truth of words (the probability that a word is true of the photo).
    """

    group: str
    """Name of the group in the report."""
    style: str
    """Style in which the photos are captioned."""
    photos: Sequence[Example]
    score: Callable[[Example, str], float | None]
    """Function that returns the score of a photo's caption (see ``ScoredCaption.score``), or None
    if nobody has judged this caption."""
    objects: Mapping[int, Collection[str]] = {}
    """Categories of the annotated objects, by image id."""


@dataclass(frozen=True)
class _Work:
    """One calibration run: the model, the options, and all groups of photos."""

    model: Captioner
    given: CalibrateOptions
    options: SearchOptions
    """Search options with which the photos are captioned."""
    on_error: OnError

    def __post_init__(self) -> None:
        """Check the styles, options and number of photos before any photo is captioned."""
        for task in (*self.tasks, *self.captioned):
            self.model.stored.vocabulary.start(task.style)  # raises if the model lacks the style
        if temperature := self.options.temperature:
            raise ConfigError(
                f"temperature is {temperature}, but sampled captions have no confidence; set "
                "temperature to 0"
            )
        for tasks in filter(None, (self.tasks, self.captioned)):
            total = sum(len(task.photos) for task in tasks)
            if total < MIN_PHOTOS:
                raise DataError(
                    f"{total} photos with captions are too few for a calibration; use "
                    f"{MIN_PHOTOS} or more"
                )

    @cached_property
    def tasks(self) -> list[_Task]:
        """The groups for measuring confidence.

        With judgements by people, there is one group of judged photos for each style. Otherwise,
        there is one group for each annotations file, and captions are scored by CIDEr-D.
        """
        given, default = self.given, self.default_style

        def judged(style: str, grades: Mapping[tuple[str, str], float]) -> _Task:
            """Return the group of judged photos for a style.

            ``grades`` has the mean grade, 0 to 1, by file name and caption. The grade is the
            caption's score. A caption without a grade has the score None.
            """
            names = [*dict.fromkeys(image for image, _ in grades)]
            listed = [Example(n, Path(name), ()) for n, name in enumerate(names)]
            photos = locate_photos(listed, given.images, given.judged[0])
            return _Task(
                style, style, photos, lambda one, text: grades.get((names[one.image_id], text))
            )

        if given.judged:
            found = read_judgements(given.judged, default, neutral=self.options.neutral)
            return [judged(style, grades) for style, grades in found.items()]
        if (frequencies := model_frequencies(self.model)) is None:
            raise ConfigError(
                f"the model has no {FREQUENCIES}, so captions cannot be scored; create the file "
                "with: captioner prepare frequencies CAPTIONS.json -o MODEL"
            )

        def score(photo: Example, text: str) -> float:
            """Return the CIDEr-D of a caption against the photo's references."""
            caption, *references = (
                ngrams(split(caption_tokens(one))) for one in (text, *photo.captions)
            )
            return cider_d([caption], references, frequencies)[0]

        return [task._replace(score=score) for task in self.captioned]

    @cached_property
    def captioned(self) -> list[_Task]:
        """One group of photos for each annotations file.

        Its score is a placeholder, because fitting the truth of words needs no scores.
        """
        given = self.given
        styles = given.styles or [self.default_style] * len(given.annotations)
        stems = [Path(path).stem for path in given.annotations]
        # Annotations files often share a file name, so groups are named by style if styles differ.
        groups = next(
            (names for names in (given.styles, stems) if names and len({*names}) == len(names)),
            given.annotations,
        )
        objects = read_objects(given.objects) if given.objects else {}
        return [
            _Task(group, style, read_dataset([file], given.images), lambda *_: 0.0, objects)
            for group, style, file in zip(groups, styles, given.annotations, strict=True)
        ]

    @property
    def default_style(self) -> str:
        """The style of photos for which no style is set."""
        return self.options.style or next(iter(self.model.stored.vocabulary.styles), "")

    @cached_property
    def examples(self) -> list[ScoredCaption]:
        """The scored captions for fitting confidence.

        With --judged, these are only the captions that people have judged.
        """
        return self._examples(self.tasks)

    @cached_property
    def annotated(self) -> list[ScoredCaption]:
        """The captions of all readable photos with reference captions.

        They are used to fit the truth of words (the probability that a word is true of the photo).
        """
        if not self.given.judged:
            return self.examples
        return self._examples(self.captioned) if self.captioned else []

    def _examples(self, tasks: Sequence[_Task]) -> list[ScoredCaption]:
        """Caption the photos of several groups, and score the captions and label their words."""
        examples = [
            ScoredCaption(
                seen, task.style, task.group, score, str(photo.path),
                true_words(seen.words, photo.captions, task.objects.get(photo.image_id, ()))
                if photo.captions else np.full(len(seen.words), np.nan),
            )
            for task in tasks
            for photo, seen in self._observed(task.photos, task.group, task.style)
            if (score := task.score(photo, seen.text)) is not None
        ]  # fmt: skip
        if not examples:
            raise DataError(
                "no caption can be used, because no photo could be read or no caption has a "
                "judgement; set images to the photos, and judged to judgements of the captions"
            )
        return examples

    def other_kinds(self) -> dict[str, list[Observation]]:
        """Caption the images that are not photos, and return the observations by kind of image.

        Each subfolder of --other-images contains one kind of image. An observation contains the
        caption and the inputs for its confidence. Without --other-images, the result is empty.
        """
        if self.given.other_images is None:
            return {}
        found: dict[str, list[Observation]] = {}
        for folder in sorted(p for p in Path(self.given.other_images).iterdir() if p.is_dir()):
            images = _uncaptioned(find_images([folder]))
            if seen := [one for _, one in self._observed(images, folder.name, self.tasks[0].style)]:
                found[folder.name] = seen
        if len(found) < 2:
            raise DataError(
                f"{self.given.other_images} has {counted(len(found), 'subfolder')} with images; "
                "use two or more subfolders, one for each kind of image"
            )
        return found

    def kinds(self, images: Mapping[str, Sequence[Observation]]) -> Kinds:
        """Fit a classifier that tells photos from other kinds of images.

        The photos for the fit are all captioned photos. If there are fewer than `PHOTOS`, further
        photos from the same folders are added.

        Args:
            images: Observations (captions with the inputs for their confidence) of images that are
                not photos, by kind.
        """
        own = {one.photo: [one.seen.photo] for one in (*self.examples, *self.annotated)}
        listed = (path for folder in self.given.images for path in sorted(Path(folder).iterdir()))
        more = [one for one in listed if format_by_name(one.name) and str(one) not in own]
        more = random.Random(0).sample(more, min(len(more), max(PHOTOS - len(own), 0)))
        for photo, vector in self._each(_uncaptioned(more), "photos", self.model.photo_vectors):
            own[str(photo.path)] = [vector]
        some = random.Random(0).sample(sorted(own), min(len(own), GREY_PHOTOS))
        photos = _uncaptioned(map(Path, some))
        for photo, vector in self._each(photos, "grey photos", self.model.photo_vectors, grey):
            own[str(photo.path)].append(vector)
        return fit_kinds(
            [np.stack(vectors) for vectors in own.values()],
            {name: np.stack([one.photo for one in seen]) for name, seen in images.items()},
        )

    def _observed(
        self, photos: Sequence[Example], name: str, style: str
    ) -> Iterator[tuple[Example, Observation]]:
        """Caption photos in a style, and yield each readable photo with its observation.

        An observation contains the caption and the inputs for its confidence. ``name`` is the label
        of the progress bar.
        """
        options = replace(self.options, style=style)
        return self._each(photos, name, lambda some: self.model.observe_batch(some, options))

    def _each(
        self,
        photos: Sequence[Example],
        name: str,
        call: Callable[[list[Prepared]], Iterable[T]],
        change: Callable[[Image.Image], Image.Image] = lambda image: image,
    ) -> Iterator[tuple[Example, T]]:
        """Call a function on batches of photos, and yield each readable photo with its result.

        Args:
            photos: The photos to read.
            name: Label of the progress bar.
            call: Function that returns one result for each photo of a batch.
            change: Function that changes each photo before the model prepares it.
        """
        how: Any = {"batch_size": self.given.batch_size, "change": change}
        for batch, prepared in photo_batches(self.model, photos, self.on_error, name, **how):
            yield from zip(batch, call(prepared), strict=True)

    def report(self, judged: Judged, truths: Sequence[WordTruth | None]) -> dict[str, Any]:
        """Build the report on the confidence of captions and, if fitted, the truth of words.

        The truth of a word is the probability that the word is true of the photo.

        Args:
            judged: Confidence and score of each caption in `examples`.
            truths: For each caption in `annotated`, the fitted `WordTruth` to measure, or None if
                the truth was not fitted.

        Returns:
            JSON data: the meaning of a right caption, the search options, and the measures of each
            group of photos. With truths, ``truth`` has the measures of words and phrases.
        """
        report: dict[str, Any] = {
            "right": "nothing in the caption is false, according to the judgements"
            if self.given.judged
            else f"CIDEr_D >= {judged.threshold:g} under the model's document frequencies",
            "search": search_key(self.options),
            "groups": measure_groups(judged, [example.group for example in self.examples]),
        }
        if self.given.judged:
            total = sum(len(task.photos) for task in self.tasks)
            report |= {"photos": total, "judged_otherwise": total - len(self.examples)}
        measured = measure_truth(self.annotated, truths)
        return report | ({"truth": measured} if measured else {})


def _uncaptioned(paths: Iterable[Path]) -> list[Example]:
    """Return the images as examples without captions."""
    return [Example(0, path, ()) for path in paths]


# --- the report for people -----------------------------------------------------------------------


def as_text(report: Mapping[str, Any]) -> str:
    """Format the report of `calibrate` or `check` as tables for the terminal."""
    heads = (
        "", "captions", "right", "score", "AUROC right", "wrong", "calibration error (95%)",
        "by chance",
    )  # fmt: skip
    rows = [
        (
            name, part["photos"], f"{part['right']:.0%}", f"{part['score']:.2f}", part["auroc"],
            part["auroc_wrong"],
            f"{part['calibration_error']:.3f} ({ends(part['calibration_error_interval'], '.3f')})",
            part["calibration_error_by_chance"],
        )
        for name, part in report["groups"].items()
    ]  # fmt: skip
    lines = [f"right: {report['right']}", "", *table([heads, *rows], 3, first=0)]
    if report.get("judged_otherwise"):
        lines += ["", f"{report['judged_otherwise']} of {report['photos']} captions are not judged"]
    if truth := report.get("truth"):
        titles = ("", "count", "true", "AUROC true", "calibration error")
        names = ("count", "true", "auroc", "calibration_error")
        rows_of_truth = [(name, *(part[key] for key in names)) for name, part in truth.items()]
        lines += ["", *table([titles, *rows_of_truth], 3, first=0)]
        bins = [
            (name, one["count"], one["truth"], one["true"])
            for name, part in truth.items()
            for one in part["bins"]
        ]
        lines += ["", *table([("", "count", "mean truth", "true"), *bins], 3, first=0)]
    if kinds := report.get("other_kinds"):
        titles = ("kind, unseen", "images", "AUROC", "confidence", "below 0.2")
        rows_of_kinds = [(name, *part.values()) for name, part in kinds.items()]
        lines += ["", *table([titles, *rows_of_kinds], 3, first=0)]
    return "\n".join(lines)


def diagram(report: Mapping[str, Any]) -> Figure:
    """Draw the report of `calibrate` or `check` as reliability diagrams.

    A panel for each group of photos shows the share of right captions by confidence. If the truth
    of words (the probability that a word is true of the photo) was measured, two further panels
    show the share of true words and of true phrases by their truth. If the probabilities are well
    calibrated, the points are close to the diagonal.
    """
    import captioner.drawing.backend  # noqa: F401 (before matplotlib)

    # isort: split
    from matplotlib import figure

    panels = [
        (name, part, ("photos", "confidence", "right"), part["photos"], "captions")
        for name, part in report["groups"].items()
    ] + [
        (name, part, ("count", "truth", "true"), part["count"], name)
        for name, part in report.get("truth", {}).items()
    ]
    drawn = figure.Figure(figsize=(4 * len(panels), 4), dpi=100, layout="constrained")
    all_axes = drawn.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, part, keys, total, noun) in zip(all_axes, panels, strict=True):
        count, x, y = (np.array([one[key] for one in part["bins"]]) for key in keys)
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
        axes.bar(x, 0.25 * count / count.max(), width=0.06, color="0.85", zorder=0)
        errors = 1.96 * (y * (1 - y) / count) ** 0.5
        axes.errorbar(x, y, yerr=errors, marker="o", capsize=2, linewidth=1)
        axes.set(
            title=f"{name}: {total:,} {noun}, error {part['calibration_error']:.3f}",
            xlabel=f"{keys[1]} (bars: number of {noun})",
            ylabel=f"share of {keys[2]} {noun} (95% interval)",
            xlim=(0, 1),
            ylim=(0, 1),
            aspect="equal",
        )
    return Figure(drawn, "calibration")
