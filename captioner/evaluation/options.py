"""Options of ``captioner evaluate`` and ``captioner calibrate``, with checks for contradictions."""

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
"""Function that handles an error of a photo or of a metric's program.

If the function does not raise the error, the evaluation continues without this photo or metric.
"""

_Report = Annotated[str, Shown("FILE", ("-o", "--output"))]

_SCORING = "scoring"
"""Mark of the options that only affect the scoring of captions against references."""


def raise_error(error: CaptionerError) -> None:
    """Raise the error, which ends the evaluation. This is the default handler of errors."""
    raise error


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelOptions):
    """Score captions against references (BLEU, ROUGE-L, CIDEr) with 95% confidence intervals.

    The captions come from a model (--images) or from a file (--results). The command can also
    measure how much of the attention is on the objects that captions name (--instances) or in the
    boxes of phrases (--phrases). With --faithfulness, the command does not score captions: it
    measures whether explanations find the regions that words depend on.
    """

    annotations: File | None = None
    """Score captions against the reference captions in this COCO captions file."""
    images: Folder | None = None
    """Caption the photos in this folder with the model, and evaluate the captions."""
    results: File | None = None
    """Score the captions in this COCO results file. They may come from any system. Format:
    [{"image_id": number, "caption": text}, ...]."""
    compare: Annotated[File | None, _SCORING] = None
    """Test whether a second system has significantly different scores. FILE contains the second
    system's captions: a COCO results file, or a report that was written with -o."""
    instances: File | None = None
    """Use the object masks in this COCO instances file. With --images, measure how much of the
    attention is on the masks. With --annotations, count objects that a caption names but the photo
    does not contain (hallucinated objects, CHAIR)."""
    objects: Annotated[File | None, _SCORING] = None
    """Count hallucinated objects, which a caption names but the photo does not contain (CHAIR).
    FILE lists the objects in each photo as JSON: {"classes": [names], "photos": {"image id":
    [indices of classes]}}. For a photo that is not in FILE, only the objects that its references
    name count as present."""
    chair: Annotated[bool, _SCORING] = False
    """Count hallucinated objects, which a caption names but the photo does not contain (CHAIR).
    Without a list of objects, only the objects that a photo's references name count as present."""
    phrases: File | None = None
    """Measure how much of a phrase's attention is in the boxes that people drew for the phrase.
    FILE is a JSON file made from Flickr30k Entities (see docs/evaluation.md). The model explains
    the captions in FILE, in the style of --style. Needs --images. With --annotations or
    --instances, only photos in these files are measured."""
    meteor: Annotated[bool, _SCORING] = False
    """Add the metric METEOR. Needs Java."""
    spice: Annotated[bool, _SCORING] = False
    """Add the metric SPICE. Needs Java 8 or 11. The first run downloads CoreNLP (several hundred
    MB)."""
    frequencies: Annotated[str, Shown("FILE|FOLDER"), _SCORING] | None = None
    """Add the metric CIDEr-D, which weights phrases by the number of photos that they occur in. The
    numbers come from a file written by captioner prepare frequencies, a COCO captions file or a
    model folder (default: the numbers stored with the model that captions the photos, if any)."""
    train_annotations: Annotated[list[File], _SCORING] = field(default_factory=list)
    """Report how many captions are new, because they do not occur in this COCO captions file. Pass
    the file that the system was trained on. Repeat the option for several files."""
    output: _Report | None = None
    """Write a JSON report to FILE, with the caption and the scores of every image."""
    force: bool = False
    """Overwrite an existing report."""
    faithfulness: bool = False
    """Measure whether attention, gradient x input, Grad-CAM and occlusion find the regions that
    each content word depends on. Regions are deleted or inserted in the order of each method, and
    the change in the word's log-probability is measured. Needs --images. With --annotations, each
    photo's first reference caption is explained instead of the model's caption."""

    @property
    def java(self) -> list[str]:
        """The requested Java metrics: METEOR, SPICE or both."""
        return [name for name in PROGRAMS if getattr(self, name.lower())]

    def check(self, search: Mapping[str, Any]) -> None:
        """Check that the options and the changed search options fit together.

        Args:
            search: Search options that differ from the model's own.

        Raises:
            ConfigError: Two options contradict each other, or an option or a program is missing.
        """
        if (self.images is None) == (self.results is None):
            problem = "missing" if self.images is None else "set"
            raise ConfigError(
                f"images and results are both {problem}; set either images to a folder of photos, "
                "or results to a file of captions"
            )
        if not (self.faithfulness or self.annotations or self.instances or self.phrases):
            raise ConfigError(
                "no reference data is set; add annotations to score captions, instances or "
                "phrases to measure attention, or faithfulness"
            )
        if (wanted := search.get("num_captions", 1)) != 1:
            raise ConfigError(
                f"num_captions is {wanted}, but the evaluation scores one caption per photo; leave "
                "out num_captions"
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
                "faithfulness is measured instead of scores and attention",
                {"instances", "phrases", *scoring},
            ),
            (
                self.faithfulness and self.annotations,
                "the captions to explain come from annotations",
                search.keys() - {"style"},
            ),
            (
                self.phrases and not (self.annotations or self.instances),
                "the captions to explain come from phrases",
                search.keys() - {"style"},
            ),
        ):
            if applies and (unused := sorted(given & others)):
                raise ConfigError(f"{why}; leave out {unused[0]}")
        if self.annotations is None and (scored := sorted(given & {*scoring, "results"})):
            raise ConfigError(
                f"{scored[0]} needs reference captions; set annotations to a COCO captions file"
            )
        for metric in self.java:  # before photos are captioned
            if reason := unavailable(metric):
                raise ConfigError(f"{reason}, or leave out {metric.lower()}")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(DeviceOptions):
    """Calibrate a model on photos that people described.

    Calibration fits two probabilities. The truth of a word is the probability that the word is true
    of the photo. The confidence of a caption is the probability that nothing in the caption is
    false. The model must not have been trained on the photos. Words and captions are compared with
    reference captions. For captions, people's judgements (--judged) are better. The calibration is
    stored in the model folder. The report shows cross-validated calibration errors, and how well
    the probabilities separate right from wrong captions and true from false words.
    """

    model: ModelName | None = None
    """Calibrate the model in this model folder or run folder."""
    annotations: list[File] = field(default_factory=list)
    """Fit to the photos in this COCO captions file. Each photo needs several captions. The model
    must not have been trained on the photos. Repeat the option for several files."""
    images: list[Folder] = field(default_factory=list)
    """Look for the photos in this folder. Repeat the option for several folders, which are searched
    in this order."""
    objects: File | None = None
    """Count words that name an annotated object as true, even if no reference contains them. FILE
    lists the objects in each photo as JSON: {"classes": [names], "photos": {"image id": [indices of
    classes]}}."""
    styles: list[Annotated[str, Shown("NAME")]] = field(default_factory=list)
    """Caption the photos of one --annotations file in this style (default: the model's default
    style). Repeat the option, once per file in the order of the files."""
    other_images: Folder | None = None
    """Learn from this folder which images are not photos, so that captions of such images get a
    confidence near 0. The folder contains a subfolder for each kind of image, such as pages, charts
    or icons. The images are compared with up to 4,000 photos in --images, with or without captions.
    The report shows how well each kind is recognized when it is left out of the fit."""
    judged: list[File] = field(default_factory=list)
    """Fit the confidence to people's judgements instead of reference captions. FILE is a CSV file
    with the columns image, caption, grade (right, partly or wrong) and, if needed, style. A caption
    counts as right if all of its grades are right. The truth of words is still fitted to
    --annotations. Repeat the option for several files."""
    threshold: Annotated[float, Interval(gt=0, lt=10)] = 0.5
    """Count a caption as right if its CIDEr-D (0 to 10) is at least this value (default: 0.5, which
    is 50 points)."""
    check: bool = False
    """Measure the calibration that the model already has, and do not fit a new one. --model is then
    optional (default: the shipped model)."""
    diagram: File | None = None
    """Draw reliability diagrams, which compare the probabilities with how often they are right.
    Save them in FILE (.png, .svg or .pdf)."""
    output: _Report | None = None
    """Write a JSON report to FILE."""
    force: bool = False
    """Replace the model's existing calibration, and overwrite existing output files."""

    def check_files(self) -> None:
        """Check that all needed files are set, and that each captions file has a style.

        Raises:
            ConfigError: A file is missing, or the numbers of styles and captions files differ.
        """
        if not (self.annotations or self.judged):
            raise ConfigError("annotations is missing; set annotations to a COCO captions file")
        if not self.images:
            raise ConfigError("images is missing; set images to the folder with the photos")
        if self.objects and not self.annotations:
            raise ConfigError(
                "objects needs reference captions; set annotations to a COCO captions file"
            )
        styles, files = len(self.styles), len(self.annotations)
        if styles not in (0, files):
            raise ConfigError(
                f"styles lists {styles} names, but annotations lists {files} files; set one style "
                "for each file"
            )
