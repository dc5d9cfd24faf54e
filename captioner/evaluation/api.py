"""The function ``captioner.evaluate``, which does the same as the command of the same name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from captioner.caption_types import Caption
from captioner.data.coco import locate_photos, read_captions, read_dataset
from captioner.data.example import Example
from captioner.data.folders import find_images
from captioner.data.reading import photo_bar
from captioner.errors import ConfigError, DataError
from captioner.evaluation.grounding import Instances, measure, read_instances
from captioner.evaluation.metrics import CaptionEvaluator
from captioner.evaluation.objects import by_confidence, photo_objects, read_objects
from captioner.evaluation.options import EvaluateOptions, OnError, raise_error
from captioner.evaluation.phrases import PhrasedPhoto, measure_phrases, read_phrases
from captioner.evaluation.references import GZIP, DocumentFrequencies, count_frequencies
from captioner.evaluation.report import Report, build, difference, read_captions_of
from captioner.hints import SEARCH_OPTIONS, hinted, unknown_option
from captioner.inference.captioner import Captioner, load
from captioner.inference.find_model import find_model
from captioner.inference.names import FREQUENCIES
from captioner.messages import first_of
from captioner.options import FaithfulnessOptions, Role, SearchOptions
from captioner.schema import build_options, changed, marked, option_fields
from captioner.search.words import neutral_caption


@hinted
def evaluate(
    *,
    model: Captioner | str | Path | Sequence[str | Path] | None = None,
    results: str | Path | Mapping[int, str] | Sequence[Mapping[str, Any]] | None = None,
    faithfulness: bool | FaithfulnessOptions = False,
    progress: bool = True,
    **options: Any,
) -> Report:
    """Score captions against reference captions, and attention against object masks or boxes.

    Args:
        model: A loaded model, a model folder, or a list of model folders. By default, the shipped
            model.
        results: Captions of any system, to score instead of the model's captions of ``images``: a
            COCO results file, its content, or captions by image id.
        faithfulness: Measure whether explanations find the regions that words depend on, instead of
            scoring captions. Pass True, or ``FaithfulnessOptions`` to change the settings.
        progress: Show a progress bar, if standard error is a terminal.
        **options: The options of ``captioner evaluate`` (``annotations``, ``images``,
            ``instances``, ``objects``, ``phrases``, ``compare``, ``frequencies``,
            ``train_annotations``, ``meteor``, ``spice``, ``chair``, ``device``, ``precision``,
            ``batch_size``), and the fields of ``SearchOptions`` that differ from the model's own.

    Returns:
        The report that ``captioner evaluate -o`` writes as JSON. Undefined values are NaN here and
        null in the file. ``metrics`` contains the scores. Their names and scale are the same as in
        pycocoevalcap: a CIDEr of 1.0 is 100 points.

    Raises:
        ConfigError: Arguments are missing or contradict each other, or a program that a metric
            needs is not installed.
        DataError: A file cannot be used.
        ImageError: A photo cannot be read.
    """
    fields = option_fields(EvaluateOptions).keys() - {"output", "force"}
    given = {name: options.pop(name) for name in fields & options.keys()}
    known = fields | option_fields(SearchOptions).keys()
    for name in options.keys() - known:
        raise unknown_option(name, known, SEARCH_OPTIONS)
    loaded = None if isinstance(model, str | Path | Sequence | None) else model
    captions = None if isinstance(results, str | Path | None) else results
    given.update(
        model=[repr(model)] if loaded else model or [],
        results=results if captions is None else "given captions",
        faithfulness=bool(faithfulness),
    )
    checked = build_options(EvaluateOptions, given)
    for name in {"device", "precision"} & {*changed(checked)} if loaded else ():
        raise ConfigError(
            f"{name} cannot change for a loaded model; pass {name} to captioner.load instead"
        )
    checked.check(options)
    how = faithfulness if isinstance(faithfulness, FaithfulnessOptions) else FaithfulnessOptions()
    return Evaluation(checked, options, how, loaded, captions, progress=progress).run()


@dataclass
class Evaluation:
    """One run of ``captioner evaluate``."""

    options: EvaluateOptions
    """Options of the command, already checked."""
    search: Mapping[str, Any]
    """Search options that differ from the model's own."""
    how: FaithfulnessOptions
    """Options for measuring the faithfulness of explanations."""
    model: Captioner | None = None
    """A loaded model. By default, the run loads the model that is named in the options."""
    captions: Any = None
    """The content of a results file, or captions by image id, to use instead of reading a file."""
    on_error: OnError = raise_error
    """Function that handles an error. By default, the first error is raised."""
    progress: bool = True
    """Show a progress bar, if standard error is a terminal."""

    def run(self) -> Report:
        """Evaluate everything that the options name, and return the report.

        The photos are captioned, the captions are scored, and the attention is measured. With the
        option ``faithfulness``, only the faithfulness of explanations is measured.
        """
        options = self.options
        if options.faithfulness:
            return self._faithfulness()
        # Read the files before captioning photos, so that errors appear early.
        judge, known, others = self._judge(), None, None
        if judge is not None and options.compare is not None:
            others = self._within(judge, options.compare)
        if options.train_annotations:
            training = read_captions(options.train_annotations, renumber=True)
            known = [text for texts in training.values() for text in texts]
        found: dict[int, Caption] = {}
        if judge is not None and options.results is not None:
            captions = self._within(judge, options.results, self.captions)
            report: Report = {"results": options.results}
            neutral = bool(self.search.get("neutral"))
        else:
            photos = self._photos()
            phrased = self._phrased(photos)
            model, report = self._load()
            neutral = model.options(**self.search).neutral
            found = self._caption(model, photos)
            failed = {photo.path for photo in photos if photo.image_id not in found}
            phrased = {path: one for path, one in phrased.items() if path not in failed}
            report |= self._attention(model, found, phrased)
            if judge is None:
                return report
            judge.frequencies = judge.frequencies or model_frequencies(model)
            captions = {i: one.text for i, one in found.items() if judge.references.get(i)}
        if neutral:
            report["references"] = "neutral: words for people are replaced, as in the captions"
            judge.references = {
                i: [*map(neutral_caption, texts)] for i, texts in judge.references.items()
            }
            known = known and [*map(neutral_caption, known)]
        scored, scores = build(captions, judge, known)
        report |= {"annotations": options.annotations, **scored}
        missing = sum(1 for i, texts in judge.references.items() if texts and i not in captions)
        if missing:
            report["images_without_caption"] = missing
        if judge.objects is not None:
            report["warnings"] += self._without_objects(captions)
            values = [found[i].confidence for i in scores.ids if i in found]
            if confidences := [value for value in values if value is not None]:
                report["chair_by_confidence"] = by_confidence(scores.counts["CHAIR_i"], confidences)
        if others is not None:
            compared = difference(captions, others, judge, scores)
            report["compare"] = {"with": options.compare, **compared}
        of_images = scores.images.items()
        report["per_image"] = [{"image_id": i, "caption": captions[i], **s} for i, s in of_images]
        return report

    @cached_property
    def instances(self) -> Instances | None:
        """The object masks of photos, or None without an instances file."""
        return None if self.options.instances is None else read_instances(self.options.instances)

    @cached_property
    def objects(self) -> dict[int, set[str]]:
        """The annotated categories in each photo that has object annotations, by image id."""
        found = {} if self.options.objects is None else read_objects(self.options.objects)
        if self.instances is not None:
            found = {i: found.get(i, set()) for i in {*found, *self.instances.images}}
            for image_id, category in self.instances.annotations:
                found[image_id].add(category)
        return found

    def _judge(self) -> CaptionEvaluator | None:
        """Build the evaluator that scores captions, or return None without reference captions."""
        if self.options.annotations is None:
            return None
        references = read_captions([self.options.annotations])
        frequencies = read_frequencies(self.options.frequencies)
        objects = None
        if self.objects or self.options.chair:
            objects = photo_objects(references, self.objects)
        return CaptionEvaluator(
            references, frequencies, self.options.java, objects, on_error=self.on_error
        )

    def _within(self, judge: CaptionEvaluator, source: str, content: Any = None) -> dict[int, str]:
        """Read a results file, and return the captions of all photos that have references.

        Args:
            judge: The evaluator with the reference captions.
            source: The results file, or its name for messages if ``content`` is passed.
            content: The content of a results file, to use instead of the file.

        Raises:
            DataError: A photo is not in the annotations.
        """
        captions = read_captions_of(source, content)
        if unknown := captions.keys() - judge.references.keys():
            raise DataError(
                f"{source}: image {first_of(sorted(unknown))} is not in "
                f"{self.options.annotations}; use the annotations file for these results"
            )
        return {i: text for i, text in captions.items() if judge.references[i]}

    def _without_objects(self, captions: Mapping[int, str]) -> list[str]:
        """Return a list with a warning if some photos have no annotated objects, otherwise [].

        ``captions`` has the captions of the photos by image id.
        """
        count = len(captions.keys() - self.objects)
        note = (
            f"CHAIR: {count} of {len(captions)} photos have no annotated objects; for them, "
            "every object that no reference names counts as hallucinated"
        )
        return [note] if count else []

    def _load(self) -> tuple[Captioner, Report]:
        """Load the model, and return it with the entries of the report that describe it.

        The entries are ``model``, ``search`` (the search options) and ``precision``.
        """
        options = self.options
        model = self.model or load(
            *options.model, device=options.device, precision=options.precision
        )
        if options.faithfulness:
            model = model.in_torch()
        search = model.options(**self.search)
        named = {*marked(SearchOptions, Role.REPORTED), *changed(search)}
        shown = [f"{name} {value}" for name, value in vars(search).items() if name in named]
        name = options.model[0] if self.model else options.model or "the shipped model"
        return model, {"model": name, "search": ", ".join(shown), "precision": model.precision}

    def _caption(self, model: Captioner, photos: list[Example]) -> dict[int, Caption]:
        """Caption all readable photos, and return the best caption of each photo by image id."""
        captions: dict[int, Caption] = {}
        paths = (photo.path for photo in photos)
        results = model.stream(paths, batch_size=self.options.batch_size, **self.search)
        bar = photo_bar(results, shown=self.progress, total=len(photos))
        for photo, result in zip(photos, bar, strict=True):
            if result.error is not None:
                self.on_error(result.error)
                continue
            best = result.captions[0]
            # Drop maps that nothing measures: the maps of all photos would fill the memory.
            if self.instances is None or photo.image_id not in self.instances.images:
                best = dataclasses.replace(best, alphas=best.alphas[:0].copy())
            captions[photo.image_id] = best
        return captions

    def _photos(self) -> list[Example]:
        """List the photos of the annotations and of the instances file.

        If both files are used, photos of the instances file that are not in the folder are skipped.
        """
        options, photos = self.options, dict[int, Example]()
        folder = Path(options.images or "")
        if self.instances is not None:
            listed = [
                Example(i, Path(image["file_name"]), ())
                for i, image in self.instances.images.items()
            ]
            if options.annotations is not None:
                listed = [one for one in listed if (folder / one.path).is_file()]
            located = locate_photos(listed, [folder], str(options.instances))
            photos = {photo.image_id: photo for photo in located}
        if options.annotations is not None:
            for image in read_dataset([options.annotations], [folder]):
                other = photos.setdefault(image.image_id, image)
                if other.path != image.path:
                    raise DataError(
                        f"image {image.image_id} is {other.path.name} in {options.instances}, but "
                        f"{image.path.name} in {options.annotations}; use files with matching ids"
                    )
        return [*photos.values()]

    def _phrased(self, photos: list[Example]) -> dict[Path, PhrasedPhoto]:
        """Return the photos for which the phrases file has an entry, by path.

        Only photos in ``photos`` are returned, or all photos in the folder if ``photos`` is empty.
        """
        options = self.options
        if options.phrases is None:
            return {}
        known = read_phrases(options.phrases)
        paths = [photo.path for photo in photos] or find_images([options.images or ""])
        found = {path: known[path.name] for path in paths if path.name in known}
        if not found:
            raise DataError(
                f"{options.phrases} has no phrases for the photos in {options.images}; use the "
                "phrases file for these photos"
            )
        return found

    def _attention(
        self,
        model: Captioner,
        captions: Mapping[int, Caption],
        phrased: Mapping[Path, PhrasedPhoto],
    ) -> Report:
        """Measure attention, and return the entries of the report that describe it.

        Args:
            model: The model.
            captions: Generated captions by image id. Their attention is measured on object masks.
            phrased: Photos with phrases by path. The attention on the phrases is measured in boxes.
        """
        options, report, style = self.options, Report(), model.options(**self.search).style
        if self.instances is not None:
            with_masks = {i: one for i, one in captions.items() if i in self.instances.images}
            report["instances"] = options.instances
            report["attention"] = measure(with_masks, self.instances)
        if phrased:
            report["phrases"] = options.phrases
            if not captions:
                report["search"] = f"none; the captions of {options.phrases}"
            report["phrase_attention"] = measure_phrases(
                model, phrased, style,
                batch_size=options.batch_size, on_error=self.on_error, progress=self.progress,
            )  # fmt: skip
        return report

    def _faithfulness(self) -> Report:
        """Measure the faithfulness of explanations, and return the report.

        With annotations, reference captions are explained. Otherwise, the model's own captions are.
        """
        annotations, folders = self.options.annotations, [self.options.images or ""]
        model, report = self._load()
        model.stored.require_weights("faithfulness")

        from captioner.evaluation import faithfulness  # imports torch

        if annotations is None:
            photos = [Example(0, path, ()) for path in find_images(folders)]
        else:
            photos = read_dataset([annotations], folders)
            report["search"] = f"none; the captions of {annotations}"
        found = faithfulness.measure(
            model, photos, self.how, model.options(**self.search),
            on_error=self.on_error, progress=self.progress,
        )  # fmt: skip
        return report | {"faithfulness": found}


def model_frequencies(model: Captioner) -> DocumentFrequencies | None:
    """Return the document frequencies stored with a model, or None if the model has none.

    They count in how many training photos each phrase of 1 to 4 words occurs.
    """
    stored = model.stored.frequencies
    name = f"the model's {FREQUENCIES}"
    return None if stored is None else DocumentFrequencies.from_bytes(stored, name)


def read_frequencies(given: str | None) -> DocumentFrequencies | None:
    """Read document frequencies, or return None if ``given`` is None.

    They count in how many photos each phrase of 1 to 4 words occurs. CIDEr-D uses them.

    Args:
        given: Path of a document frequencies file, of a COCO captions file (its frequencies are
            counted), or of a model folder with a document frequencies file.

    Raises:
        ConfigError: The model folder has no such file.
        DataError: The file cannot be used.
    """
    if given is None:
        return None
    path = find_model(given)
    if path.is_dir():
        if not (path / FREQUENCIES).is_file():
            raise ConfigError(
                f"{path} has no {FREQUENCIES}; use a captions file, or create {FREQUENCIES} with: "
                f"captioner prepare frequencies CAPTIONS.json -o {path}"
            )
        path /= FREQUENCIES
    if path.is_file() and path.read_bytes()[:2] != GZIP:
        return count_frequencies(read_captions([path]))
    return DocumentFrequencies.load(path)
