"""``captioner.evaluate``, and what ``captioner evaluate`` runs: score captions and attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from captioner.errors import CaptionerError, ConfigError, DataError, OptionError, ProgramError
from captioner.options import FaithfulnessOptions

if TYPE_CHECKING:  # torch is imported when they are needed
    from captioner.caption import Caption
    from captioner.evaluation.frequencies import DocumentFrequencies
    from captioner.evaluation.report import CaptionEvaluator, Report
    from captioner.inference.captioner import Captioner
    from captioner.options import SearchOptions

Result = TypeVar("Result")
OnError = Callable[[CaptionerError], None]
"""Called with the error of a photo or of a metric's program; the others go on. May raise it."""

MODEL_DEFAULTS = {"device": "auto", "precision": "auto", "batch_size": 32}


def evaluate(
    *,
    annotations: str | Path | None = None,
    images: str | Path | None = None,
    model: Captioner | str | Path | Sequence[str | Path] | None = None,
    results: str | Path | Mapping[int, str] | None = None,
    instances: str | Path | None = None,
    compare: str | Path | None = None,
    frequencies: str | Path | None = None,
    train_annotations: str | Path | Sequence[str | Path] = (),
    meteor: bool = False,
    spice: bool = False,
    faithfulness: bool | FaithfulnessOptions = False,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int = 32,
    progress: bool = True,
    **search: Any,
) -> Report:
    """Score captions against references, and attention against masks.

    Args:
        annotations: COCO captions file with the references.
        images: Folder of photos for the model to caption; or give ``results``.
        model: A loaded model, a model folder, or several folders; None: the shipped model.
        results: Captions of any system, instead of ``images``: a COCO results file, or captions by
            image id.
        instances: COCO instances file, to measure how much attention lies on the objects that
            words name; needs ``images``, but not ``annotations``.
        compare: Results file or report of another system; tests if the difference is significant.
        frequencies: Document frequencies for CIDEr_D: a file, a COCO captions file or a model
            folder; None: the model's own.
        train_annotations: COCO captions file(s) that the system was trained on, to count novel
            captions.
        meteor: Score METEOR too; needs Java.
        spice: Score SPICE too; needs Java and CoreNLP, which is downloaded.
        faithfulness: Measure instead whether explanations find the regions that words depend on;
            see ``evaluation.faithfulness``. Of the captions that the model generates for
            ``images`` or, given ``annotations``, of each photo's first reference caption.
        device: See ``load``; not with a loaded model.
        precision: See ``load``; not with a loaded model.
        batch_size: Photos that are captioned together.
        progress: Show a progress bar on standard error, if that is a terminal.
        **search: Fields of ``SearchOptions`` to change.

    Returns:
        What ``captioner evaluate -o`` writes as JSON; NaN where the file has null. The scores are
        under ``metrics``, with pycocoevalcap's names and scale: a CIDEr of 1.0 is 100 points.

    Raises:
        ConfigError: Arguments are missing or contradict each other, or a program that a metric
            needs is not installed.
        DataError: A file cannot be used; ImageError: a photo cannot be read.
    """
    inputs = Inputs(
        annotations=annotations,
        images=images,
        model=model,
        results=results,
        instances=instances,
        compare=compare,
        frequencies=frequencies,
        train_annotations=_listed(train_annotations),
        metrics=[name for name, given in (("METEOR", meteor), ("SPICE", spice)) if given],
        faithfulness=FaithfulnessOptions() if faithfulness is True else faithfulness or None,
        device=device,
        precision=precision,
        batch_size=batch_size,
        search=search,
    )

    from captioner.evaluation.java import unavailable

    for metric in inputs.metrics:
        reason = unavailable(metric, download=True)
        if reason is not None:
            raise ConfigError(f"{metric.lower()} is True, but {reason}")
    return run(inputs, progress=progress)


def _listed(given: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [given] if isinstance(given, str | Path) else list(given)


@dataclass
class Inputs:
    """What is scored and against what; for the fields see ``evaluate``."""

    annotations: str | Path | None = None
    images: str | Path | None = None
    model: Captioner | str | Path | Sequence[str | Path] | None = None
    results: str | Path | Mapping[int, str] | None = None
    instances: str | Path | None = None
    compare: str | Path | None = None
    frequencies: str | Path | None = None
    train_annotations: Sequence[str | Path] = ()
    metrics: Sequence[str] = ()
    """METEOR, SPICE or both."""
    faithfulness: FaithfulnessOptions | None = None
    device: str = "auto"
    precision: str = "auto"
    batch_size: int = 32
    search: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check for contradictions.

        Raises:
            OptionError: There is one.
        """
        if (self.images is None) == (self.results is None):
            raise OptionError(
                "give either {images} (a folder of photos) or {results} (a file of captions)"
            )
        if self.faithfulness is not None:
            self._check_faithfulness()
        if self.results is not None:
            self._check_results()
        if self.faithfulness is None and self.annotations is None and self.instances is None:
            raise OptionError(
                "give {annotations} (to score captions), {instances} (attention) or {faithfulness}"
            )
        for name in ("compare", "frequencies", "train_annotations"):
            if getattr(self, name) and self.annotations is None:
                raise OptionError(f"{{{name}}} needs references; give {{annotations}} too")
        if self.metrics and self.annotations is None:
            name = self.metrics[0].lower()
            raise OptionError(f"{{{name}}} needs references; give {{annotations}} too")
        if hasattr(self.model, "caption_batch"):
            for name in ("device", "precision"):
                if getattr(self, name) != MODEL_DEFAULTS[name]:
                    raise OptionError(
                        f"{{model}} is loaded already; omit {{{name}}}, or load it with that"
                    )
        if self.search.get("num_captions", 1) != 1:
            raise OptionError(
                "{num_captions} is {given}, but only one per photo is scored; omit it",
                given=self.search["num_captions"],
            )

    def _check_faithfulness(self) -> None:
        """Reject what is not measured along with faithfulness."""
        if self.images is None:
            raise OptionError("{faithfulness} is measured on photos; give {images}, not {results}")
        others = ("instances", "compare", "frequencies", "train_annotations")
        unused = [name for name in others if getattr(self, name)]
        for name in [*unused, *(metric.lower() for metric in self.metrics)]:
            raise OptionError(f"{{faithfulness}} is measured alone; omit {{{name}}}")
        for name in self.search if self.annotations is not None else ():
            if name != "style":
                raise OptionError(f"{{annotations}} gives the captions; omit {{{name}}}")

    def _check_results(self) -> None:
        """Reject options of a model when the captions are given."""
        if self.instances is not None:
            raise OptionError(
                "{instances} measures attention, which a results file does not contain; give "
                "{images} instead of {results}"
            )
        if self.annotations is None:
            raise OptionError("{results} needs references; give {annotations} too")
        if self.model:
            raise OptionError("give either {model} (to caption photos) or {results}, not both")
        changed = [name for name, value in MODEL_DEFAULTS.items() if getattr(self, name) != value]
        for name in [*self.search, *changed]:
            raise OptionError(
                f"{{results}} contains the captions, so no model runs; omit {{{name}}}"
            )


def _raise(error: CaptionerError) -> None:
    raise error


def run(
    inputs: Inputs,
    *,
    on_error: OnError = _raise,
    progress: bool = True,
) -> Report:
    """Caption, score and measure.

    Args:
        inputs: What to score.
        on_error: By default the first error is raised.
        progress: See ``evaluate``.
    """
    from captioner.evaluation.report import read_captions_of

    if inputs.faithfulness is not None:
        return _faithfulness(inputs, inputs.faithfulness, on_error, progress)
    report: Report
    captions: dict[int, str] = {}
    if isinstance(inputs.results, Mapping):
        captions = dict(inputs.results)
    elif inputs.results is not None:
        captions = read_captions_of(inputs.results)
    scoring = _read(inputs)  # before the photos are captioned, so that errors appear early
    if inputs.results is not None:
        report = {"results": _results_name(inputs)}
    else:
        report, captions, own = _caption(inputs, on_error, progress)
        if scoring is not None and scoring.judge.frequencies is None:
            scoring = scoring._replace(judge=dataclasses.replace(scoring.judge, frequencies=own))
    if scoring is not None:
        _score(report, captions, scoring, inputs, on_error)
    return report


def _results_name(inputs: Inputs) -> str:
    return "given captions" if isinstance(inputs.results, Mapping) else str(inputs.results)


class _Scoring(NamedTuple):
    """What captions are scored against."""

    judge: CaptionEvaluator
    others: dict[int, str] | None
    """Captions of the system to compare with."""
    known: list[str] | None
    """Training captions."""


def _read(inputs: Inputs) -> _Scoring | None:
    """Read everything that captions are scored against; None without annotations."""
    if inputs.annotations is None:
        return None
    from captioner.data.coco import read_captions
    from captioner.evaluation.report import CaptionEvaluator, read_captions_of

    _, references = read_captions([inputs.annotations])
    others = known = None
    if inputs.compare is not None:
        others = _within(
            read_captions_of(inputs.compare), references, inputs.compare, inputs.annotations
        )
        if not others:
            raise DataError(
                f"{inputs.compare} has no captions for the photos in {inputs.annotations}; give "
                "captions of the same photos"
            )
    if inputs.train_annotations:
        _, training = read_captions(inputs.train_annotations, renumber=True)
        known = [text for texts in training.values() for text in texts]
    return _Scoring(CaptionEvaluator(references, _frequencies(inputs.frequencies)), others, known)


def _within(
    captions: dict[int, str],
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
        return DocumentFrequencies.from_references(references)
    return DocumentFrequencies.load(path)


# --- captions ------------------------------------------------------------------------------------


def _load(inputs: Inputs) -> tuple[Captioner, Any]:
    """The model, and its name in the report."""
    from captioner.inference import captioner as api

    given = inputs.model
    if isinstance(given, api.Captioner):
        return given, repr(given)
    folders = _listed(given or ())
    model = api.load(*folders, device=inputs.device, precision=inputs.precision)  # type: ignore[arg-type]
    return model, [str(folder) for folder in folders] or "the shipped model"


def _caption(
    inputs: Inputs, on_error: OnError, progress: bool
) -> tuple[Report, dict[int, str], DocumentFrequencies | None]:
    """Caption the photos of the annotations and of the instances with a model.

    Returns:
        Model facts for the report, the captions, and the model's own document frequencies.
    """
    from captioner.data.coco import locate_photos, read_dataset
    from captioner.data.progress import photo_bar
    from captioner.evaluation.frequencies import DocumentFrequencies
    from captioner.files import FREQUENCIES

    assert inputs.images is not None
    paths: dict[int, Path] = {}
    instances = None
    if inputs.instances is not None:
        from captioner.evaluation.masks import read_instances

        instances = read_instances(inputs.instances)
        paths |= locate_photos(instances.names, [inputs.images], Path(inputs.instances).name)
    if inputs.annotations is not None:
        dataset = read_dataset([inputs.annotations], [inputs.images])
        for image in dataset:
            path = paths.setdefault(image.image_id, image.path)
            if path != image.path:
                raise DataError(
                    f"image {image.image_id} is {path.name} in {inputs.instances} but "
                    f"{image.path.name} in {inputs.annotations}; give files whose ids agree"
                )
    model, name = _load(inputs)
    search = model.options(**inputs.search)
    frequencies = None
    own = model.stored.frequencies
    if own is not None and inputs.annotations is not None and inputs.frequencies is None:
        frequencies = DocumentFrequencies.from_bytes(own, f"the model's {FREQUENCIES}")
    captions: dict[int, str] = {}
    grounded: dict[int, Caption] = {}  # of photos with instances
    results = model.stream(paths.values(), batch_size=inputs.batch_size, **inputs.search)
    bar = photo_bar(results, shown=progress, total=len(paths))
    for image_id, result in zip(paths, bar, strict=True):
        if result.error is not None:
            on_error(result.error)
            continue
        captions[image_id] = result.captions[0].text
        if instances is not None and image_id in instances.sizes:
            grounded[image_id] = result.captions[0]
    report = _about_model(model, name, search)
    if instances is not None:
        from captioner.evaluation.grounding import measure
        from captioner.evaluation.report import attention

        report |= {
            "instances": str(inputs.instances),
            "attention": attention(measure(grounded, instances)),
        }
    return report, captions, frequencies


def _faithfulness(
    inputs: Inputs, options: FaithfulnessOptions, on_error: OnError, progress: bool
) -> Report:
    """Measure the explanations of generated or reference captions."""
    from captioner.data.coco import read_dataset
    from captioner.data.folders import find_images
    from captioner.data.progress import photo_bar

    assert inputs.images is not None
    photos: dict[Path, str | None]
    if inputs.annotations is None:
        photos = dict.fromkeys(find_images([inputs.images]))
    else:
        dataset = read_dataset([inputs.annotations], [inputs.images])
        photos = {image.path: image.captions[0] for image in dataset if image.captions}
    model, name = _load(inputs)
    if not model.engine.computes_relevance:
        raise OptionError(
            "{faithfulness} needs the weights, and the model is exported; give the model folder it "
            "was exported from"
        )
    from captioner.evaluation.faithfulness import measure  # imports torch

    search = model.options(**inputs.search)
    found = measure(
        model,
        photos,
        options,
        search,
        on_error=on_error,
        progress=lambda paths: photo_bar(paths, shown=progress),
    )
    report = _about_model(model, name, search)
    if inputs.annotations is not None:
        report["search"] = f"none; the captions of {inputs.annotations}"
    return report | {"faithfulness": found.summary()}


def _about_model(model: Captioner, name: Any, search: SearchOptions) -> Report:
    return {
        "model": name,
        "search": ", ".join(f"{k} {v}" for k, v in _summary(search).items()),
        "precision": model.precision,
    }


def _summary(search: SearchOptions) -> dict[str, Any]:
    """The main search options, and all that differ from their defaults."""
    always = ("beam_size", "max_length", "length_penalty")
    return {
        field.name: getattr(search, field.name)
        for field in dataclasses.fields(search)
        if field.name in always or getattr(search, field.name) != field.default
    }


# --- scores --------------------------------------------------------------------------------------


def _score(
    report: Report,
    captions: dict[int, str],
    scoring: _Scoring,
    inputs: Inputs,
    on_error: OnError,
) -> None:
    """Add scores, statistics and comparison to the report."""
    from captioner.evaluation.report import build, difference, per_image

    references = scoring.judge.references
    if inputs.results is not None:
        captions = _within(captions, references, _results_name(inputs), inputs.annotations)
    captions = {i: text for i, text in captions.items() if references.get(i)}
    judge = dataclasses.replace(scoring.judge, java=inputs.metrics, download=True)
    (found, scores), judge = _despite_failures(
        judge, lambda j: build(captions, j, scoring.known), on_error
    )
    report |= {"annotations": str(inputs.annotations), **found}
    missing = sum(1 for i, texts in references.items() if texts and i not in captions)
    if missing:
        report["images_without_caption"] = missing
    others = scoring.others
    if others is not None:
        compared, judge = _despite_failures(
            judge, lambda j: difference(captions, others, j, scores), on_error
        )
        report["compare"] = {"with": str(inputs.compare), **compared}
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
