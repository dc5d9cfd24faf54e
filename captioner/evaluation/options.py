"""Options of ``captioner evaluate`` and ``calibrate``, and which of them contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval

from captioner.errors import CaptionerError, ConfigError
from captioner.evaluation.java import PROGRAMS, unavailable
from captioner.options import DeviceOptions, ModelOptions
from captioner.schema import (
    File,
    Folder,
    ModelName,
    Shown,
    changed,
    marked,
    option_fields,
)

OnError = Callable[[CaptionerError], None]
"""Called with the error of a photo or of a metric's program; the others go on. May raise it."""

_Report = Annotated[str, Shown("FILE", ("-o", "--output"))]

_SCORING = "scoring"
"""Mark of an option for captions that are scored against references."""


def raise_error(error: CaptionerError) -> None:
    """The first error ends the evaluation."""
    raise error


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelOptions):
    """Score captions against references (BLEU, ROUGE-L, CIDEr) with 95% confidence intervals.

    Or measure how much attention lies on the objects that the captions name (--instances) or on the
    boxes of phrases (--phrases), or whether explanations identify the regions that words depend on
    (--faithfulness). The captions come from a model (--images) or from a file (--results).
    """

    annotations: File | None = None
    """COCO captions file with the reference captions."""
    images: Folder | None = None
    """Folder of photos for the model to caption."""
    results: File | None = None
    """COCO results file of any system: [{image_id, caption}]."""
    compare: Annotated[File | None, _SCORING] = None
    """Results file or report of another system, to test whether the difference is significant."""
    instances: File | None = None
    """COCO instances file: with --images, to measure attention against its object masks; with
    --annotations, to count hallucinated objects (CHAIR)."""
    objects: Annotated[File | None, _SCORING] = None
    """Count hallucinated objects (CHAIR), with the objects of each photo from a JSON file:
    {"classes": [name], "photos": {id: [index of a class]}}. A photo that is not in the file is
    judged by its references alone."""
    chair: Annotated[bool, _SCORING] = False
    """Count hallucinated objects without --instances or --objects, by the references alone."""
    phrases: File | None = None
    """Measure attention against the boxes of phrases in the captions of a JSON file made from
    Flickr30k Entities; needs --images. The model explains these captions in the given --style.
    With --annotations or --instances, only photos of these files are measured."""
    meteor: Annotated[bool, _SCORING] = False
    """Score METEOR too; needs Java."""
    spice: Annotated[bool, _SCORING] = False
    """Score SPICE too; needs Java 8 or 11, and downloads CoreNLP (several hundred MB) once."""
    frequencies: Annotated[str, Shown("FILE|FOLDER"), _SCORING] | None = None
    """Score CIDEr-D too, with document frequencies from a file of captioner prepare frequencies, a
    COCO captions file or a model folder (default with --images: that of the model)."""
    train_annotations: Annotated[list[File], _SCORING] = field(default_factory=list)
    """COCO captions file that the system was trained on, to report how many captions are not in it;
    repeat for several."""
    output: _Report | None = None
    """JSON report with the scores of every image."""
    force: bool = False
    """Overwrite the report."""
    faithfulness: bool = False
    """Delete and insert the regions that attention, gradient x input, Grad-CAM and occlusion rank
    first, and measure the log-probability of each content word; needs --images. With --annotations,
    the first reference caption is used, not the model's."""

    @property
    def java(self) -> list[str]:
        """METEOR, SPICE or both, if they are requested."""
        return [name for name in PROGRAMS if getattr(self, name.lower())]

    def check(self, search: Mapping[str, Any]) -> None:
        """Check that the options, and the changes to search options, go together.

        Raises:
            ConfigError: Two contradict each other, or one or a program is missing.
        """
        if (self.images is None) == (self.results is None):
            raise ConfigError(
                "give either images (a folder of photos) or results (a file of captions)"
            )
        if not (self.faithfulness or self.annotations or self.instances or self.phrases):
            raise ConfigError(
                "give annotations (to score captions), instances or phrases (to measure "
                "attention), or faithfulness"
            )
        if (wanted := search.get("num_captions", 1)) != 1:
            raise ConfigError(
                f"num_captions is {wanted}, but only one per photo is scored; omit it"
            )
        given = {*changed(self), *search}
        scoring = marked(EvaluateOptions, _SCORING)
        of_model = {
            "faithfulness",
            "phrases",
            *option_fields(ModelOptions),
            *search.keys() - {"neutral"},
        }
        for applies, why, others in (
            (self.results, "results contains the captions, so no model runs", of_model),
            (
                self.faithfulness,
                "faithfulness is measured alone",
                {"instances", "phrases", *scoring},
            ),
            (
                self.faithfulness and self.annotations,
                "annotations gives the captions",
                search.keys() - {"style"},
            ),
            (
                self.phrases and not (self.annotations or self.instances),
                "phrases gives the captions",
                search.keys() - {"style"},
            ),
        ):
            if applies and (unused := sorted(given & others)):
                raise ConfigError(f"{why}; omit {unused[0]}")
        if self.annotations is None and (scored := sorted(given & {*scoring, "results"})):
            raise ConfigError(f"{scored[0]} needs references; give annotations too")
        for metric in self.java:  # before photos are captioned
            if reason := unavailable(metric):
                raise ConfigError(f"{reason}, or omit {metric.lower()}")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(DeviceOptions):
    """Fit how true words are, and the confidence of captions, to photos that people described.

    The model must not have been trained on them. Words are compared with reference captions;
    captions too, or better with people's judgements of them. Both are stored in the model's folder.
    Reports cross-validated calibration errors, and how well right captions and true words are told
    apart.
    """

    model: ModelName | None = None
    """Model or run folder to calibrate."""
    annotations: list[File] = field(default_factory=list)
    """COCO captions file of photos that the model was not trained on, with several captions each;
    repeat for several."""
    images: list[Folder] = field(default_factory=list)
    """Folder with their photos; repeat for several, which are searched in order."""
    objects: File | None = None
    """Objects that are annotated in the photos, whose names are true too: {"classes": [names],
    "photos": {"image id": [numbers of classes]}}."""
    styles: list[Annotated[str, Shown("NAME")]] = field(default_factory=list)
    """Caption style for each --annotations, in their order (default: the model's default)."""
    other_images: Folder | None = None
    """Folder of images that are not photos, with a folder for each kind (pages, charts, icons): the
    confidence of images like them falls to 0. They are told from up to 4,000 photos, also from the
    photos in --images without captions. Reports how well each kind is told from photos by a fit to
    the other kinds."""
    judged: list[File] = field(default_factory=list)
    """CSV of judged captions (image, style, caption, grade: right, partly or wrong) to fit the
    confidence to, instead of reference captions: a caption is right if every judgement is *right*.
    The truth of words still comes from --annotations. Repeat for several."""
    threshold: Annotated[float, Interval(gt=0, lt=10)] = 0.5
    """CIDEr-D from which a caption counts as right (default: 0.5, which is 50 points)."""
    check: bool = False
    """Fit nothing: measure the confidence that the model already has (default: --model the shipped
    model)."""
    diagram: File | None = None
    """Figure of the calibration: .png, .svg or .pdf."""
    output: _Report | None = None
    """JSON report."""
    force: bool = False
    """Replace the model's confidence and existing files."""

    def check_files(self) -> None:
        """Check that there are files, and a style for each.

        Raises:
            ConfigError: One is missing, or the number of styles differs from the number of files.
        """
        if not (self.annotations or self.judged):
            raise ConfigError("annotations is missing; give photos with reference captions")
        if not self.images:
            raise ConfigError("images is missing; give photos with reference captions")
        if self.objects and not self.annotations:
            raise ConfigError("objects needs annotations; give annotations too")
        styles, files = len(self.styles), len(self.annotations)
        if styles not in (0, files):
            raise ConfigError(
                f"styles has {styles} names for {files} files; give one style for each file in "
                "annotations"
            )
