"""The card of a model: ``README.md`` in its folder, with the header that the hub reads.

Written for every trained model, from its ``config.json`` and the ``config.yaml`` of its run. It
holds no paths, file names or photos of the training data: a card may be published.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open

from captioner.config import TrainConfig
from captioner.errors import ConfigError, ModelError
from captioner.model_config import CARD, RUN_CONFIG, WEIGHTS, read_config

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


@dataclass(frozen=True)
class CardOptions:
    """What a card says that the model folder does not hold."""

    license: str | None = None
    """Identifier of the license, as the hub spells it: ``apache-2.0``."""
    datasets: Sequence[str] = ()
    """Names of the training data on the hub."""
    reports: Sequence[str | Path] = ()
    """Reports of ``captioner evaluate -o``, one per data set."""
    picture: str | None = None
    """The caption of the picture ``attention.png``; None: there is no picture."""


def write_card(folder: Path) -> None:
    """Write the card into a model folder."""
    from captioner.files import atomic_write

    atomic_write(folder / CARD, make_card(folder))


def make_card(folder: Path, repo: str | None = None, options: CardOptions | None = None) -> str:
    """The card of a model.

    Args:
        folder: Model folder; if it is part of a run folder, the settings of the run are listed.
        repo: ``user/name`` of the model on the hub.
        options: What else to say.

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
    return "\n\n".join(part for part in parts if part) + "\n"


def has_header(card: str) -> bool:
    """Whether a card begins with a header for the hub."""
    return card.startswith("---\n")


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
        reports: Scores.
    """
    results = [
        _result(_stem(report), report["metrics"], int(report.get("images", 0)))
        for report in reports
    ]
    training = _training_row(config)
    if not results and "CIDEr" in training:
        results = [_result("validation photos of the training", training, 0)]
    fields: dict[str, Any] = {
        "license": options.license,
        "library_name": "captioner",
        "pipeline_tag": "image-to-text",
        "tags": ["image-captioning", "attention"],
        "datasets": list(options.datasets),
        "metrics": list(dict.fromkeys(m["type"] for one in results for m in one["metrics"])),
        "model-index": [{"name": name, "results": results}] if results else None,
    }
    text = yaml.safe_dump(
        {key: value for key, value in fields.items() if value}, sort_keys=False, allow_unicode=True
    )
    return f"---\n{text}---"


def _result(name: str, scores: Mapping[str, Any], images: int) -> dict[str, Any]:
    """An entry of the header's model-index; scores in points."""
    return {
        "task": {"type": "image-to-text", "name": "Image captioning"},
        "dataset": {"type": "captions", "name": f"{name}, {images} photos" if images else name},
        "metrics": [
            {"type": kind, "name": metric, "value": round(100 * scores[metric], 1)}
            for metric in METRICS
            for start, kind in _HUB_METRICS.items()
            if metric.startswith(start) and isinstance(scores.get(metric), float)
        ],
    }


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
    return f"![Where the model looked for each word]({PICTURE})\n\n*{options.picture}*"


def _usage(repo: str | None) -> str:
    model = f"hf:{repo}" if repo else "FOLDER"
    extra = "[hub]" if repo else ""
    return f"""## Use

```bash
pip install 'captioner{extra}'
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
all the same. It does not indicate that it is guessing, and it repeats the biases of its training
captions. Do not use it to describe, identify or judge people where it matters who they are, where
a wrong caption does harm, or for alternative texts that nobody reviews.

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
    photos = f" on {row['val_photos']:,} photos" if "val_photos" in row else ""
    return (
        "## Scores\n\n"
        f"Validation during training{photos}: CIDEr {100 * row['CIDEr']:.1f}, BLEU-4 "
        f"{100 * row['Bleu_4']:.1f}. These photos selected the model, so the scores are "
        "optimistic; other photos, and intervals, were not evaluated (`captioner evaluate`)."
    )


def _training(folder: Path, config: Mapping[str, Any]) -> str:
    info, row = config.get("info", {}), _training_row(config)
    lines = [f"{info['data']}."] if isinstance(info.get("data"), str) else []
    if "train_photos" in row:
        lines.append(f"Trained on {row['train_photos']:,} photos.")
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
    except (OSError, yaml.YAMLError) as error:
        raise ModelError(f"cannot read {run / RUN_CONFIG} ({error})") from error
    defaults = dataclasses.asdict(TrainConfig())
    found = _different(given, defaults) if isinstance(given, dict) else {}
    encoder = found.get("encoder", {})
    if str(encoder.get("weights", "")).endswith((".safetensors", ".pth")):
        encoder["weights"] = "(a file of the author)"
    start = found.get("init_from")
    if start and start != "shipped" and not str(start).startswith("hf:"):
        found["init_from"] = "(a model of the author)"
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True) if found else ""


def _different(
    given: Mapping[str, Any], defaults: Mapping[str, Any], section: tuple[str, ...] = ()
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        key, default = (*section, name), defaults.get(name)
        if isinstance(value, dict):
            value = _different(value, default if isinstance(default, dict) else {}, key)  # noqa: PLW2901
            default = {}
        if key not in _PRIVATE and value != default:
            found[name] = value
    return found


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
