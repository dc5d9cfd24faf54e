"""The card of a model: ``README.md`` in its folder, with the header that the hub reads.

Written for every trained model, from its ``config.json`` and the ``config.yaml`` of its run. It
holds no paths, file names or photos of the training data: a card may be published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from captioner.errors import ConfigError
from captioner.files import atomic_write
from captioner.hardware import require_extra
from captioner.inference import card_sections as sections
from captioner.inference.card_sections import Report
from captioner.inference.folder import (
    CARD,
    EXPORTED,
    MODEL_FILES,
    read_config,
)

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from captioner.data.images import Photo
    from captioner.inference.captioner import Captioner

PICTURE = "attention.png"
_HUB_METRICS = {"Bleu": "bleu", "METEOR": "meteor", "ROUGE": "rouge", "CIDEr": "cider"}
"""Identifiers of metrics on the hub, by how our names begin."""


class Picture(NamedTuple):
    """A photo with its attention."""

    png: bytes
    caption: str


def picture_of(model: Captioner, photo: Photo) -> Picture:
    """A photo with its attention, captioned by the model."""
    from captioner.data.images import open_image
    from captioner.drawing.figure import overlay

    image = open_image(photo)
    caption = model.caption(image)
    return Picture(overlay(image, caption, panel_size=240).encode(".png"), caption.text)


@dataclass(frozen=True)
class CardOptions:
    """Contents of a card that the model folder does not hold."""

    license: str | None = None
    """Identifier of the license, as the hub spells it: ``apache-2.0``."""
    datasets: Sequence[str] = ()
    """Names of the training data on the hub."""
    reports: Sequence[str | Path] = ()
    """Reports of ``captioner evaluate -o``, one per data set."""
    picture: Picture | None = None


def files_to_push(
    folder: Path, repo: str, options: CardOptions | None = None
) -> dict[str, bytes | Path]:
    """The files of a model folder for the hub, with its card.

    A card that was edited is kept; if it has no header for the hub, it gets one.

    Args:
        folder: Model folder.
        repo: ``user/name`` on the hub.
        options: For a card that was not edited.

    Returns:
        Content, or its path, by file name.

    Raises:
        ConfigError: The model is exported, or a report cannot be read or added to a card that was
            edited.
        ModelError: The model folder cannot be read.
    """
    options = options or CardOptions()
    config = read_config(folder)
    if EXPORTED in config:
        raise ConfigError(f"{folder} is exported; push the model folder that it was exported from")
    files: dict[str, bytes | Path] = {
        name: folder / name for name in MODEL_FILES if (folder / name).is_file()
    }
    own = (folder / CARD).read_text(encoding="utf-8") if CARD in files else None
    if own is None or sections.is_generated(own):
        files[CARD] = make_card(folder, repo, options).encode()
        if options.picture is not None:
            files[PICTURE] = options.picture.png
    elif options.reports or options.picture:
        raise ConfigError(
            f"{folder / CARD} was edited, so reports and a picture cannot be added to it; add them "
            "yourself, or remove the file for a new card"
        )
    elif not own.startswith("---\n"):
        name = repo.partition("/")[2]
        files[CARD] = f"{header(config, name, options)}\n\n{own}".encode()
    elif options.license or options.datasets:
        raise ConfigError(
            f"{folder / CARD} was edited and has its own header; give license and datasets there"
        )
    return files


def write_card(folder: Path) -> None:
    """Write the card into a model folder."""
    atomic_write(folder / CARD, make_card(folder))


def make_card(folder: Path, repo: str | None = None, options: CardOptions | None = None) -> str:
    """The card of a model; its last line marks it as generated and not edited since.

    Args:
        folder: Model folder; if it is in its run folder, the settings of the run are listed. A copy
            keeps those that its generated card lists.
        repo: ``user/name`` of the model on the hub.
        options: What the model folder does not hold.

    Raises:
        ConfigError: A report cannot be read.
        ModelError: The model folder cannot be read.
    """
    options = options or CardOptions()
    config = read_config(folder)
    reports = [sections.read_report(path) for path in options.reports]
    name = repo.partition("/")[2] if repo else sections.model_name(folder)
    parts = [
        header(config, name, options, reports),
        f"# {name}",
        sections.summary(folder, config),
        _picture(options),
        sections.usage(repo),
        sections.LIMITS.format(grid=sections.grid_of(config)),
        sections.scores(config, reports),
        sections.training(folder, config),
    ]
    return sections.marked("\n\n".join(part for part in parts if part) + "\n")


def readable(card: str) -> str:
    """A card for a terminal: without header, last line and control characters."""
    if card.startswith("---\n"):
        card = card.partition("\n---\n")[2]
    lines = [line for line in card.splitlines() if not line.startswith("<!-- generated by")]
    text = "\n".join(lines).strip()
    return "".join(sign for sign in text if sign.isprintable() or sign in "\n\t")


# --- header --------------------------------------------------------------------------------------


def header(
    config: Mapping[str, Any],
    name: str,
    options: CardOptions,
    reports: Sequence[Report] = (),
) -> str:
    """The YAML between ``---`` lines: what the hub shows, filters and compares.

    Args:
        config: Contents of ``config.json``.
        name: Of the model.
        options: License and data sets.
        reports: Scores; none: those of the validation during training.

    Raises:
        ConfigError: huggingface_hub is not installed.
    """
    require_extra("hub", "a model card")
    from huggingface_hub import ModelCardData

    scores = [
        (sections.dataset_name(one), one["metrics"], int(one.get("images", 0))) for one in reports
    ]
    training = sections.training_row(config)
    if not scores and "CIDEr" in training:
        scores = [("validation during training", training, int(training.get("val_photos", 0)))]
    results = [result for one in scores for result in _results(*one)]
    data = ModelCardData(
        license=options.license,
        library_name="captioner",
        pipeline_tag="image-to-text",
        tags=["image-captioning", "attention"],
        datasets=list(options.datasets) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=name,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _results(name: str, scores: Mapping[str, Any], images: int) -> list[EvalResult]:
    """Scores of one data set, in points."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="image-to-text",
            task_name="Image captioning",
            dataset_type="captions",
            dataset_name=f"{name}, {sections.photo_count(images)}" if images else name,
            metric_type=kind,
            metric_name=metric,
            metric_value=round(100 * scores[metric], 1),
        )
        for metric in sections.METRICS
        for start, kind in _HUB_METRICS.items()
        if metric.startswith(start) and isinstance(scores.get(metric), float)
    ]


def _picture(options: CardOptions) -> str:
    if options.picture is None:
        return ""
    return f"![Where the model looked for each word]({PICTURE})\n\n*{options.picture.caption}*"
