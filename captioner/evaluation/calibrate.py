"""What ``captioner calibrate`` runs: caption photos with references, fit, report."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioner.caption import DOUBTFUL
from captioner.data.coco import CaptionedImage, locate_photos, read_dataset
from captioner.data.folders import find_images
from captioner.data.images import open_image
from captioner.data.prefetch import read_batches
from captioner.data.progress import photo_bar
from captioner.errors import ConfigError, DataError, ImageError, OptionError, counted
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
from captioner.evaluation.frequencies import DocumentFrequencies
from captioner.evaluation.judgements import read_judgements
from captioner.evaluation.options import CalibrateOptions
from captioner.evaluation.references import References
from captioner.files import FREQUENCIES, atomic_write
from captioner.inference.captioner import Captioner
from captioner.inference.confidence import Calibrator, Observation, PhraseTable, search_key
from captioner.inference.engine import Prepared
from captioner.text.tokenizer import caption_tokens

OnError = Callable[[ImageError], None]
"""Called with the error of a photo; the others go on."""

MIN_PHOTOS = 100
"""Fewest photos to calibrate with: from fewer, probabilities cannot be estimated."""

TRAINING_PHOTOS = 8000
"""Training photos that are encoded, at random, to know which photos are familiar, and which words
are used for them."""


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
    work = _Work(model, given, changes, on_error, progress)
    training = work.training_photos()
    examples = work.examples
    kinds = work.other_kinds()
    recipe = Recipe(
        PhraseTable.count(work.frequencies.documents, work.frequencies.counts),
        search_key(model.options(**changes)),
        None if given.judged else given.threshold,
        kinds,
        None if training is None else Backdrop.fit(training[0], kinds, training[1]),
        work.usual_photos(),
    )
    report = work.report(cross_validate(examples, recipe))
    calibrator = fit(examples, recipe)
    if kinds:
        report["other_kinds"] = measure_kinds(calibrator, examples, recipe)
    kept = {
        group: {n: np.round(part[n], 4).tolist() for n in _KEPT if part[n] is not None}
        for group, part in report["groups"].items()
    }
    return replace(calibrator, report=kept), report


_KEPT = (
    "photos", "right", "score", "auroc", "auroc_wrong", "calibration_error", "half_gain",
    "calibration_error_interval", "half_gain_interval", "calibration_error_by_chance",
)  # fmt: skip
"""The figures that are stored with a model."""


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
    if calibrator.threshold is None and not given.judged:
        raise OptionError("the confidence was fitted to judgements; give captions with {judged}")
    work = _Work(model, given, changes, on_error, progress)
    if missing := sorted(set(work.styles) - calibrator.intercepts.keys()):
        raise ConfigError(f"the model is not calibrated for style {missing[0]}; calibrate it anew")
    if not work.examples:
        raise DataError("no photo could be captioned; give photos that can be read")
    confidences = [calibrator.confidence(one.seen, one.style) for one in work.examples]
    scores = [one.score for one in work.examples]
    right = JUDGED_RIGHT if given.judged else calibrator.threshold or given.threshold
    return work.report(Judged(np.array(confidences), np.array(scores), right))


@dataclass(frozen=True)
class _Work:
    """A model, and the photos to measure its confidence on."""

    model: Captioner
    given: CalibrateOptions
    changes: Mapping[str, Any]
    on_error: OnError
    progress: bool

    def __post_init__(self) -> None:
        """Check what can be checked before photos are captioned."""
        if self.model.stored.frequencies is None:
            raise ConfigError(
                f"the model has no {FREQUENCIES}, which decide whether a caption is right; add it "
                "with: captioner prepare frequencies CAPTIONS.json -o MODEL"
            )
        for style in self.styles:
            self.model.stored.vocabulary.start(style)  # raises if the model does not know it
        if temperature := self.model.options(**self.changes).temperature:
            raise OptionError(
                "{temperature} is {given}; confidence is for the best caption of a search, so omit "
                "it",
                given=temperature,
            )
        total = sum(map(len, self.photos.values()))
        if total < MIN_PHOTOS:
            raise DataError(
                f"{total} photos with captions are too few to calibrate; give {MIN_PHOTOS} or more"
            )

    @cached_property
    def frequencies(self) -> DocumentFrequencies:
        """Those of the model."""
        return DocumentFrequencies.from_bytes(
            self.model.stored.frequencies or b"", f"the model's {FREQUENCIES}"
        )

    @cached_property
    def judgements(self) -> dict[str, dict[str, dict[str, float]]]:
        """The mean judgement of each caption, by style and name of the photo."""
        return read_judgements(self.given.judged, self.default_style)

    @property
    def default_style(self) -> str:
        """The style of files for which none is given."""
        given = self.model.options(**self.changes).style
        return given or next(iter(self.model.stored.vocabulary.styles), "")

    @cached_property
    def styles(self) -> list[str]:
        """The style of each annotations file, or those of the judgements."""
        if self.given.judged:
            return [*self.judgements]
        return self.given.styles or [self.default_style] * len(self.given.annotations)

    @cached_property
    def photos(self) -> dict[str, list[CaptionedImage]]:
        """The photos of each annotations file, with their style, by the file's name.

        With judgements, the photos of each style.
        """
        if self.given.judged:
            source = self.given.judged[0]
            return {
                style: [
                    CaptionedImage(number, path, (), style)
                    for number, path in locate_photos(
                        dict(enumerate(captions)), self.given.images, source
                    ).items()
                ]
                for style, captions in self.judgements.items()
            }
        # By style, if each file has its own: annotation files often have the same name.
        names = self.styles
        if not self.given.styles or len(set(names)) < len(names):
            paths = [Path(path).absolute() for path in self.given.annotations]
            stems = Counter(path.stem for path in paths)
            names = [p.stem if stems[p.stem] == 1 else f"{p.parent.name}/{p.stem}" for p in paths]
        if len(set(names)) < len(names):
            names = [str(path) for path in self.given.annotations]
        return {
            name: [replace(photo, style=style) for photo in read_dataset([file], self.given.images)]
            for name, style, file in zip(names, self.styles, self.given.annotations, strict=True)
        }

    @cached_property
    def examples(self) -> list[Example]:
        """The captions of all photos that can be read."""
        examples: list[Example] = []
        for group, photos in self.photos.items():
            found: dict[int, Observation] = {}
            options = self.model.options(**{**self.changes, "style": photos[0].style})
            for batch, prepared in self._batches(photos, group):
                seen_of = self.model.observe_batch(prepared, options)
                found |= zip((photo.image_id for photo in batch), seen_of, strict=True)
            read = [photo for photo in photos if photo.image_id in found]
            if self.given.judged:
                examples += self._judged(read, found)
                continue
            references = {one.image_id: map(caption_tokens, one.captions) for one in read}
            captions = {i: [caption_tokens(seen.text)] for i, seen in found.items()}
            scores = References(references, self.frequencies).score(captions)
            for photo in read:
                seen, (score,) = found[photo.image_id], scores[photo.image_id]
                examples.append(Example(seen, photo.style, group, score, _words(photo)))
        return examples

    def _judged(
        self, photos: Sequence[CaptionedImage], found: Mapping[int, Observation]
    ) -> Iterator[Example]:
        """The captions of photos that have been judged; the model may have others by now."""
        for photo in photos:
            seen = found[photo.image_id]
            captions = [*self.judgements[photo.style].values()][photo.image_id]
            if seen.text in captions:
                score = captions[seen.text]
                yield Example(seen, photo.style, photo.style, score, photo=str(photo.path))

    def usual_photos(self) -> NDArray[np.float32] | None:
        """With judgements, the vectors of the photos of the annotations, if any."""
        if not (self.given.judged and self.given.annotations):
            return None
        photos = read_dataset(self.given.annotations, self.given.images, renumber=True)
        batches = self._batches(photos, "photos")
        return np.concatenate([self.model.photo_vectors(prepared) for _, prepared in batches])

    def training_photos(self) -> tuple[NDArray[np.float32], list[set[str]]] | None:
        """Vectors of a sample of the training photos, (N, D), and the words of their references."""
        if not self.given.train_annotations:
            return None
        photos = read_dataset(self.given.train_annotations, self.given.images, renumber=True)
        own = {photo.path for task in self.photos.values() for photo in task}
        photos = [photo for photo in photos if photo.path not in own]
        if len(photos) < MIN_PHOTOS:
            raise DataError(
                f"{len(photos)} training photos that are not calibrated with are too few; give "
                f"{MIN_PHOTOS} or more, or leave out the training annotations"
            )
        if len(photos) > TRAINING_PHOTOS:
            photos = random.Random(0).sample(photos, TRAINING_PHOTOS)
        vectors, words = [], []
        for batch, prepared in self._batches(photos, "training photos"):
            vectors.append(self.model.photo_vectors(prepared))
            words += [_words(photo) for photo in batch]
        return np.concatenate(vectors), words

    def other_kinds(self) -> dict[str, list[Observation]]:
        """The captions of images that are not photos, by kind."""
        if self.given.other_images is None:
            return {}
        found: dict[str, list[Observation]] = {}
        options = self.model.options(**{**self.changes, "style": self.styles[0]})
        for folder in sorted(p for p in Path(self.given.other_images).iterdir() if p.is_dir()):
            images = [CaptionedImage(0, path, ()) for path in find_images([folder])]
            for _, prepared in self._batches(images, folder.name):
                found.setdefault(folder.name, []).extend(
                    self.model.observe_batch(prepared, options)
                )
        if len(found) < 2:
            raise DataError(
                f"{self.given.other_images} has {counted(len(found), 'folder')} with images; give "
                "a folder with a folder for each of two kinds or more"
            )
        return found

    def _batches(
        self, photos: Sequence[CaptionedImage], name: str
    ) -> Iterator[tuple[list[CaptionedImage], list[Prepared]]]:
        """The photos that can be read."""

        def read(photo: CaptionedImage) -> Prepared:
            return self.model.prepare(open_image(photo.path))

        bar = photo_bar(shown=self.progress, total=len(photos), desc=name)
        with bar, closing(read_batches(read, photos, self.given.batch_size)) as batches:
            for batch in batches:
                good = {}
                for photo, prepared in batch:
                    if isinstance(prepared, ImageError):
                        self.on_error(prepared)
                    else:
                        good[photo] = prepared
                if good:
                    yield [*good], [*good.values()]
                bar.update(len(batch))

    def report(self, judged: Judged) -> dict[str, Any]:
        """What was measured on all photos and, with references, on their words."""
        report = {
            "right": "nothing in the caption is false, as people judge"
            if self.given.judged
            else f"CIDEr_D >= {judged.threshold:g} under the model's document frequencies",
            "search": search_key(self.model.options(**self.changes)),
            "groups": measure_groups(judged, [example.group for example in self.examples]),
        }
        if self.given.judged:
            total = sum(len(photos) for photos in self.photos.values())
            return report | {"photos": total, "judged_otherwise": total - len(self.examples)}
        words = [
            (float(np.exp(log_prob)) < DOUBTFUL, word in one.known)
            for one in self.examples
            if len(tokens := caption_tokens(one.seen.text)) == len(one.seen.log_probs)  # no pieces
            for word, log_prob in zip(tokens, one.seen.log_probs, strict=True)
        ]
        doubtful = [right for unsure, right in words if unsure]
        others = [right for unsure, right in words if not unsure]
        return report | {
            "words": {
                "doubtful_below": DOUBTFUL,
                "doubtful": len(doubtful),
                "doubtful_in_references": float(np.mean(doubtful)) if doubtful else None,
                "others": len(others),
                "others_in_references": float(np.mean(others)) if others else None,
            },
        }


def _words(photo: CaptionedImage) -> set[str]:
    """The words of a photo's references."""
    return {word for text in photo.captions for word in caption_tokens(text)}


# --- the report for people -----------------------------------------------------------------------


def as_text(report: Mapping[str, Any]) -> str:
    """The report as text."""
    groups = report["groups"]
    width = max(map(len, groups))
    lines = [
        f"right: {report['right']}",
        "",
        f"{'':<{width}}  captions  right  score  AUROC right  wrong  calibration error (95%)"
        "  by chance  confident half (95%)",
    ]
    for name, part in groups.items():
        error, half = part["calibration_error_interval"], part["half_gain_interval"]
        errors = f"{part['calibration_error']:.3f} ({error[0]:.3f} to {error[1]:.3f})"
        lines.append(
            f"{name:<{width}}  {part['photos']:>8,}  {part['right']:>5.0%}  {part['score']:>5.2f}"
            f"  {_share(part['auroc']):>11}  {_share(part['auroc_wrong']):>5}  {errors:<23}"
            f"  {part['calibration_error_by_chance']:>9.3f}"
            f"  {part['half_gain']:.2f} x ({half[0]:.2f} to {half[1]:.2f})"
        )
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
        width = max(map(len, [*kinds, "kind, unseen"]))
        lines += ["", f"{'kind, unseen':<{width}}  images  AUROC  confidence  below 0.2"]
        lines += [
            f"{name:<{width}}  {part['images']:>6,}  {part['auroc']:.3f}  "
            f"{part['confidence']:>10.2f}  {part['below_0.2']:>9.0%}"
            for name, part in kinds.items()
        ]
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


FIGURES = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""File extensions of the figure, and what keeps the date out of the file."""


def save_figure(report: Mapping[str, Any], path: Path) -> None:
    """Draw a report.

    Left, for each group of photos: the share of right captions by confidence; on the diagonal,
    confidence is calibrated. Right: the mean score of the most confident captions.

    Args:
        report: Of `calibrate` or `check`.
        path: The file; its extension, one of ``FIGURES``, selects the format.
    """
    from matplotlib.figure import Figure

    groups = report["groups"]
    figure = Figure(figsize=(4 * (len(groups) + 1), 4), dpi=100, layout="constrained")
    *panels, last = figure.subplots(1, len(groups) + 1)
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
    buffer = io.BytesIO()
    kind = path.suffix.lower()
    figure.savefig(buffer, format=kind[1:], metadata=FIGURES[kind])
    atomic_write(path, buffer.getvalue())
