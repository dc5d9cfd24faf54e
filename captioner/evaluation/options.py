"""Options of ``captioner evaluate`` and ``captioner calibrate``, and checks for contradictions."""

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
"""Handler of the error of a photo or of a metric's program.

It may raise the error. Otherwise, the evaluation continues without the photo or metric.
"""

_Report = Annotated[str, Shown("FILE", ("-o", "--output"))]

_SCORING = "scoring"
"""Mark for options that only affect the scoring of captions against references."""


def raise_error(error: CaptionerError) -> None:
    """Raise the error, which ends the evaluation."""
    raise error


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelOptions):
    """Score captions against references (BLEU, ROUGE-L, CIDEr) with 95% confidence intervals.

    The captions come from a model (--images) or from a file (--results). The command can also
    measure how much of the attention is on the objects that captions name (--instances) or in the
    boxes of phrases (--phrases). With --faithfulness, it measures instead whether explanations find
    the regions that words depend on.
    """

    annotations: File | None = None
    """Score captions against the reference captions in this COCO captions file."""
    images: Folder | None = None
    """Let the model caption the photos in this folder."""
    results: File | None = None
    """Score the captions in this COCO results file, from any system: [{image_id, caption}]."""
    compare: Annotated[File | None, _SCORING] = None
    """Test whether the scores differ significantly from the scores of a second system. FILE is its
    results file, or its report."""
    instances: File | None = None
    """Use this COCO instances file. With --images: measure attention on its object masks. With
    --annotations: count hallucinated objects (CHAIR)."""
    objects: Annotated[File | None, _SCORING] = None
    """Count hallucinated objects (CHAIR). FILE lists the objects in each photo as JSON: {"classes":
    [names], "photos": {"image id": [indices of classes]}}. For photos that are not in the file,
    only the references decide."""
    chair: Annotated[bool, _SCORING] = False
    """Count hallucinated objects (CHAIR) without a list of objects: only the references decide."""
    phrases: File | None = None
    """Measure attention in the boxes of the phrases in this JSON file, made from Flickr30k
    Entities. Needs --images. The model explains the captions in the file, in the style of --style.
    With --annotations or --instances, only photos in these files are measured."""
    meteor: Annotated[bool, _SCORING] = False
    """Add the metric METEOR. Needs Java."""
    spice: Annotated[bool, _SCORING] = False
    """Add the metric SPICE. Needs Java 8 or 11, and downloads CoreNLP (several hundred MB) once."""
    frequencies: Annotated[str, Shown("FILE|FOLDER"), _SCORING] | None = None
    """Add the metric CIDEr-D with these document frequencies: a file from captioner prepare
    frequencies, a COCO captions file, or a model folder. Default: the frequencies stored
    with the model that captions the photos, if it has them."""
    train_annotations: Annotated[list[File], _SCORING] = field(default_factory=list)
    """Report how many captions do not occur in this COCO captions file, which the system was
    trained on. Repeat the option for several files."""
    output: _Report | None = None
    """Write a JSON report to FILE, with the caption and the scores of every image."""
    force: bool = False
    """Overwrite an existing report."""
    faithfulness: bool = False
    """Measure whether attention, gradient x input, Grad-CAM and occlusion find the regions that
    each content word depends on. Regions are deleted and inserted in the order of each method, and
    the change of the word's log-probability is measured. Needs --images. With --annotations, the
    words come from the first reference caption instead of the model's caption."""

    @property
    def java(self) -> list[str]:
        """The requested Java metrics: METEOR, SPICE or both."""
        return [name for name in PROGRAMS if getattr(self, name.lower())]

    def check(self, search: Mapping[str, Any]) -> None:
        """Check that the options and the changed search options fit together.

        Raises:
            ConfigError: Two options contradict each other, or an option or a program is missing.
        """
        if (self.images is None) == (self.results is None):
            problem = "missing" if self.images is None else "set"
            raise ConfigError(
                f"images and results are both {problem}; set either images (a folder of photos) or "
                "results (a file of captions)"
            )
        if not (self.faithfulness or self.annotations or self.instances or self.phrases):
            raise ConfigError(
                "nothing to measure is set; add annotations (to score captions), instances or "
                "phrases (to measure attention), or faithfulness"
            )
        if (wanted := search.get("num_captions", 1)) != 1:
            raise ConfigError(
                f"num_captions is {wanted}, but one caption per photo is scored; leave it out"
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
                "faithfulness is measured without scores",
                {"instances", "phrases", *scoring},
            ),
            (
                self.faithfulness and self.annotations,
                "the captions come from annotations",
                search.keys() - {"style"},
            ),
            (
                self.phrases and not (self.annotations or self.instances),
                "the captions come from phrases",
                search.keys() - {"style"},
            ),
        ):
            if applies and (unused := sorted(given & others)):
                raise ConfigError(f"{why}; leave out {unused[0]}")
        if self.annotations is None and (scored := sorted(given & {*scoring, "results"})):
            raise ConfigError(f"{scored[0]} needs references; add annotations")
        for metric in self.java:  # before photos are captioned
            if reason := unavailable(metric):
                raise ConfigError(f"{reason}, or leave out {metric.lower()}")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(DeviceOptions):
    """Calibrate a model on photos that people described.

    Calibration fits two probabilities: the truth of a word (the word is true of the photo) and the
    confidence of a caption (nothing in it is false). The model must not have been trained on the
    photos. Words are compared with reference captions. Captions are compared with reference
    captions too, or better, with people's judgements (--judged). The result is stored in the model
    folder. The report shows cross-validated calibration errors, and how well the probabilities
    separate right captions from wrong captions and true words from false words.
    """

    model: ModelName | None = None
    """Calibrate the model in this model folder or run folder."""
    annotations: list[File] = field(default_factory=list)
    """Fit to the photos in this COCO captions file. The model must not have been trained on them,
    and each needs several captions. Repeat the option for several files."""
    images: list[Folder] = field(default_factory=list)
    """Find the photos in this folder. Repeat the option for several folders, searched in order."""
    objects: File | None = None
    """Count the names of these annotated objects as true words too. FILE lists the objects in each
    photo as JSON: {"classes": [names], "photos": {"image id": [indices of classes]}}."""
    styles: list[Annotated[str, Shown("NAME")]] = field(default_factory=list)
    """Caption the photos of each --annotations file in this style: one style per file, in the same
    order (default: the model's default style)."""
    other_images: Folder | None = None
    """Learn from this folder which images are not photos. It contains a subfolder for each kind,
    such as pages, charts or icons. The confidence of such images falls to 0. They are compared with
    up to 4,000 photos in --images, with or without captions. The report shows how well each kind is
    told from photos after fitting to the other kinds only."""
    judged: list[File] = field(default_factory=list)
    """Fit the confidence to people's judgements instead of reference captions. FILE is a CSV file
    with the columns image, style, caption and grade (right, partly or wrong). A caption is right if
    all of its grades are right. The truth of words still comes from --annotations. Repeat the
    option for several files."""
    threshold: Annotated[float, Interval(gt=0, lt=10)] = 0.5
    """Count a caption as right from this CIDEr-D upwards (default: 0.5, which is 50 points)."""
    check: bool = False
    """Only measure the existing confidence of the model, without fitting. --model is then optional
    (default: the shipped model)."""
    diagram: File | None = None
    """Draw the calibration as a figure in FILE (.png, .svg or .pdf)."""
    output: _Report | None = None
    """Write a JSON report to FILE."""
    force: bool = False
    """Replace an existing calibration of the model, and existing files."""

    def check_files(self) -> None:
        """Check that the files are named, with one style for each captions file.

        Raises:
            ConfigError: A file is missing, or the number of styles and captions files differs.
        """
        if not (self.annotations or self.judged):
            raise ConfigError("annotations is missing; add a file with reference captions")
        if not self.images:
            raise ConfigError("images is missing; add the folder with the photos")
        if self.objects and not self.annotations:
            raise ConfigError("objects needs annotations; add annotations")
        styles, files = len(self.styles), len(self.annotations)
        if styles not in (0, files):
            raise ConfigError(
                f"styles has {styles} names for {files} files; set one style for each file in "
                "annotations"
            )
