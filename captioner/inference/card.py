"""The card of a model: ``README.md`` in its folder, with the header that the hub reads.

Written for every trained model, from its ``config.json`` and the ``config.yaml`` of its run. It
holds no paths, file names or photos of the training data: a card may be published.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from safetensors import safe_open

from captioner.errors import ConfigError, ModelError
from captioner.extras import require_extra
from captioner.files import atomic_write
from captioner.inference.folder import (
    CARD,
    EXPORTED,
    MODEL_FILES,
    RUN_CONFIG,
    WEIGHTS,
    read_config,
)
from captioner.options import TrainConfig

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from captioner.data.images import Photo
    from captioner.inference.captioner import Captioner

Report = Mapping[str, Any]
"""What ``captioner evaluate -o`` writes."""

METRICS = ("Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "METEOR", "ROUGE_L", "CIDEr", "CIDEr_D", "SPICE")
PICTURE = "attention.png"
_HUB_METRICS = {"Bleu": "bleu", "METEOR": "meteor", "ROUGE": "rouge", "CIDEr": "cider"}
"""Identifiers of metrics on the hub, by how our names begin."""

_PRIVATE = (
    ("run_folder",),
    *(("data", name) for name in ("train_annotations", "val_annotations", "images", "features",
                                  "shards", "workers")),
    ("training", "trackers"),
)  # fmt: skip
"""Settings that a card leaves out: paths, and what does not matter to others."""


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
    if own is None or is_generated(own):
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
    reports = [read_report(path) for path in options.reports]
    name = repo.partition("/")[2] if repo else _name(folder)
    parts = [
        header(config, name, options, reports),
        f"# {name}",
        _summary(folder, config),
        _picture(options),
        _usage(repo),
        _LIMITS.format(grid=_grid(config)),
        _scores(config, reports),
        _training(folder, config),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    return f"{text}\n{_mark(text)}\n"


def is_generated(card: str) -> bool:
    """Whether a card is as ``make_card`` wrote it."""
    text, _, mark = card.rstrip("\n").rpartition("\n\n")
    return mark == _mark(text + "\n")


def _mark(text: str) -> str:
    """A comment with a hash of the text."""
    return f"<!-- generated by captioner: {hashlib.sha256(text.encode()).hexdigest()[:16]} -->"


def readable(card: str) -> str:
    """A card for a terminal: without header, last line and control characters."""
    if card.startswith("---\n"):
        card = card.partition("\n---\n")[2]
    lines = [line for line in card.splitlines() if not line.startswith("<!-- generated by")]
    text = "\n".join(lines).strip()
    return "".join(sign for sign in text if sign.isprintable() or sign in "\n\t")


def read_report(path: str | Path) -> Report:
    """Read a report of ``captioner evaluate -o``.

    Raises:
        ConfigError: It cannot be read, or has no caption scores.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read {path} ({reason}); give a report of captioner evaluate -o"
        ) from error
    if not isinstance(report, dict) or not isinstance(report.get("metrics"), dict):
        raise ConfigError(
            f"{path} has no caption scores; give a report of captioner evaluate --annotations -o"
        )
    return report


# --- header --------------------------------------------------------------------------------------


def header(
    config: Mapping[str, Any], name: str, options: CardOptions, reports: Sequence[Report] = ()
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

    scores = [(_stem(one), one["metrics"], int(one.get("images", 0))) for one in reports]
    training = _training_row(config)
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
            dataset_name=f"{name}, {_photos(images)}" if images else name,
            metric_type=kind,
            metric_name=metric,
            metric_value=round(100 * scores[metric], 1),
        )
        for metric in METRICS
        for start, kind in _HUB_METRICS.items()
        if metric.startswith(start) and isinstance(scores.get(metric), float)
    ]


# --- body ----------------------------------------------------------------------------------------


def _name(folder: Path) -> str:
    """Of the run, or else of the model folder."""
    run = _run(folder)
    return (run or folder.resolve()).resolve().name or "model"


def _run(folder: Path) -> Path | None:
    """The run folder that a model folder is part of."""
    above = folder.resolve().parent
    return above if (above / RUN_CONFIG).is_file() else None


def _summary(folder: Path, config: Mapping[str, Any]) -> str:
    encoder, decoder = config["encoder"]["name"], config["decoder"]
    styles = ", ".join(f"`{style}`" for style in config.get("styles", ()))
    kind = "sub-word pieces" if config.get("tokenizer", "words") == "bpe" else "words"
    with safe_open(folder / WEIGHTS, framework="np") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    millions = sum(map(math.prod, shapes)) / 1e6
    size = (folder / WEIGHTS).stat().st_size / 1e6
    return (
        "Describes a photo in a sentence and shows where it looked for each word: an encoder "
        f"(`{encoder}`) of {_grid(config)} regions at {config['preprocessing']['image_size']} "
        f"pixels, and an LSTM with {decoder['hidden_dim']} units, {decoder['attention']} attention "
        f"({decoder['selection']}) and a vocabulary of {len(config['vocabulary']):,} {kind}; "
        f"{millions:.1f} million parameters, {size:.1f} MB."
        + (f" Styles: {styles}." if styles else "")
    )


def _grid(config: Mapping[str, Any]) -> str:
    return " x ".join(map(str, config["encoder"]["grid"]))


def _picture(options: CardOptions) -> str:
    if options.picture is None:
        return ""
    return f"![Where the model looked for each word]({PICTURE})\n\n*{options.picture.caption}*"


def _usage(repo: str | None) -> str:
    model = f"hf:{repo}" if repo else "FOLDER"
    package = "'captioner[hub]'" if repo else "captioner"
    return f"""## Use

```bash
pip install {package}
captioner caption photo.jpg --model {model}
captioner attend photo.jpg --model {model}
```

```python
import captioner

model = captioner.load("{model}")
caption = model.caption("photo.jpg")
captioner.overlay("photo.jpg", caption).save("photo_attention.png")
```"""


_LIMITS = """## Limits

The model describes photos like those that it was trained on; of other images it writes a sentence
all the same. It repeats the biases of its training captions. Do not use it to describe, identify
or judge people where it matters who they are, where a wrong caption does harm, or for alternative
texts without review.

Attention shows where the decoder looked, on a coarse grid of {grid} regions; it does not explain
why a word was chosen. If the gate of a word is near 0, its map was hardly used."""


def _scores(config: Mapping[str, Any], reports: Sequence[Report]) -> str:
    if not reports:
        return _validation_scores(_training_row(config))
    named: dict[str, Report] = {}
    for report in reports:
        name = _stem(report)
        if name in named:
            raise ConfigError(f"two reports are about {name}; give one report per data set")
        named[name] = report
    found = [m for m in METRICS if any(m in report["metrics"] for report in reports)]
    notes = [
        f"- {name}: search: {report.get('search', 'given captions')}; {report['signature']}"
        for name, report in named.items()
        if "signature" in report
    ]
    return "\n\n".join(
        [
            "## Scores",
            "In percent, with 95% bootstrap intervals over photos (`captioner evaluate`).",
            score_table(named, found),
            "\n".join(notes),
        ]
    )


def _validation_scores(row: Mapping[str, Any]) -> str:
    if "CIDEr" not in row:
        return ""
    photos = f" on {_photos(row['val_photos'])}" if "val_photos" in row else ""
    return (
        "## Scores\n\n"
        f"Validation during training{photos}: CIDEr {100 * row['CIDEr']:.1f}, BLEU-4 "
        f"{100 * row['Bleu_4']:.1f}. These photos selected the model, so the scores are "
        "optimistic; other photos, and intervals, were not evaluated (`captioner evaluate`)."
    )


def _training(folder: Path, config: Mapping[str, Any]) -> str:
    if kept := _kept_training(folder):
        return kept
    info, row = config.get("info", {}), _training_row(config)
    lines = [f"{info['data']}."] if isinstance(info.get("data"), str) else []
    if "train_photos" in row:
        lines.append(f"Trained on {_photos(row['train_photos'])}.")
    if "epoch" in row:
        lines.append(f"Weights of epoch {row['epoch']}, step {row['step']:,}.")
    if "average_of_epochs" in row:
        epochs = ", ".join(map(str, row["average_of_epochs"]))
        lines.append(f"The mean of the weights of epochs {epochs}.")
    text = " ".join(lines)
    if settings := _settings(folder):
        text += (
            "\n\nSettings that differ from the defaults of `captioner train`:\n\n"
            f"```yaml\n{settings}```"
        )
    return f"## Training\n\n{text.lstrip()}" if text else ""


def _kept_training(folder: Path) -> str:
    """The section about the training of a generated card outside of its run folder."""
    path = folder / CARD
    if _run(folder) is not None or not path.is_file():
        return ""
    card = path.read_text(encoding="utf-8")
    if not is_generated(card):
        return ""
    _, heading, section = card.rpartition("\n\n<!--")[0].rpartition("\n## Training\n")
    return (heading + section).strip() if heading else ""


def _training_row(config: Mapping[str, Any]) -> Mapping[str, Any]:
    row = config.get("info", {}).get("training", {})
    return row if isinstance(row, dict) else {}


def _settings(folder: Path) -> str:
    """The settings of the run as YAML, without defaults and without paths."""
    run = _run(folder)
    if run is None:
        return ""
    try:
        given = yaml.safe_load((run / RUN_CONFIG).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ModelError(f"cannot read {run / RUN_CONFIG} ({error})") from error
    defaults = dataclasses.asdict(TrainConfig())
    found = _different(given, defaults) if isinstance(given, dict) else {}
    encoder = found.get("encoder", {})
    if str(encoder.get("weights", "")).endswith((".safetensors", ".pth")):
        encoder["weights"] = "(a file of the author)"
    if start := found.get("init_from"):
        found["init_from"] = _public_name(start)
    distillation = found.get("distillation", {})
    if teachers := distillation.get("models"):
        distillation["models"] = [_public_name(teacher) for teacher in teachers]
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True) if found else ""


def _public_name(model: object) -> str:
    """The name of a model without the path of a folder."""
    name = str(model)
    return name if name == "shipped" or name.startswith("hf:") else "(a model of the author)"


def _different(
    given: Mapping[str, Any], defaults: Mapping[str, Any], section: tuple[str, ...] = ()
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        key, default = (*section, name), defaults.get(name)
        if isinstance(value, dict):
            value = _different(value, default if isinstance(default, dict) else {}, key)  # noqa: PLW2901
            default = {}
        if isinstance(default, tuple):
            default = list(default)
        if key not in _PRIVATE and value != default:
            found[name] = value
    return found


def _photos(count: int) -> str:
    return f"{count:,} {'photo' if count == 1 else 'photos'}"


def _stem(report: Report) -> str:
    """The name of a report's data set: that of its annotations file."""
    return Path(str(report.get("annotations", "captions"))).stem


# --- tables --------------------------------------------------------------------------------------


def score_table(reports: Mapping[str, Report], metrics: Sequence[str]) -> str:
    """Scores in percent with their intervals as Markdown, one row per report.

    Args:
        reports: Reports of ``captioner evaluate`` by the names of their data sets.
        metrics: The columns.
    """
    rows = [
        "| photos | " + " | ".join(metrics) + " |",
        "|---" * (len(metrics) + 1) + "|",
        *(_row(name, report, metrics) for name, report in reports.items()),
    ]
    return "\n".join(rows)


def _row(name: str, report: Report, metrics: Sequence[str]) -> str:
    intervals = report.get("intervals", {})
    cells = []
    for metric in metrics:
        value, ends = report["metrics"].get(metric), intervals.get(metric)
        points = None if value is None else 100 * value
        cells.append(with_interval(points, ends and [100 * end for end in ends], ".1f"))
    return f"| {name}, {report['images']} | " + " | ".join(cells) + " |"


def with_interval(value: float | None, ends: Sequence[float] | None, form: str) -> str:
    """A number with its interval, as far as they were measured."""
    if value is None:
        return "not measured"
    return f"{value:{form}}" + (f" ({ends[0]:{form}} to {ends[1]:{form}})" if ends else "")
