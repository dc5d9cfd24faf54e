"""The model card: the file ``README.md`` of a model folder, with a header for the hub.

Every trained model gets a card, made from its ``config.json`` and the ``config.yaml`` of its run.
The card contains no paths, file names or photos of the training data, so it can be published.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from captioner.caption_types import Caption
from captioner.data.images import Photo, open_image
from captioner.errors import ConfigError
from captioner.extras import require_extra
from captioner.files import atomic_write
from captioner.inference.config_file import read_config
from captioner.inference.names import CARD, MODEL_FILES, RUN_CONFIG, WEIGHTS
from captioner.messages import counted
from captioner.options import PRIVATE, CardOptions, TrainConfig
from captioner.schema import option_fields

if TYPE_CHECKING:
    from PIL import Image

Report = Mapping[str, Any]
"""The report that ``captioner evaluate -o`` writes."""

TEMPLATE = Path(__file__).with_name("card.md")
PICTURE = "attention.png"
METRICS = ("Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "METEOR", "ROUGE_L", "CIDEr", "CIDEr_D", "SPICE")
_HUB_METRICS = {"Bleu": "bleu", "METEOR": "meteor", "ROUGE": "rouge", "CIDEr": "cider"}
"""Names of metrics on the hub, by the first letters of their names in captioner."""


def files_to_push(
    folder: Path,
    repo: str,
    options: CardOptions,
    caption_photo: Callable[[Image.Image], Caption],
) -> dict[str, bytes | Path]:
    """Return the files of a model folder by name, with a model card.

    A card that a person has edited is kept. If it has no header for the hub, a header is added.

    Args:
        folder: The model folder.
        repo: The repository on the hub, ``user/name``.
        options: Options of the card.
        caption_photo: Function that captions the photo ``options.picture`` with the model.

    Raises:
        ConfigError: The model has no weights, or a report cannot be read or added to an edited
            card.
        ImageError: The photo ``options.picture`` cannot be read.
        ModelError: The model folder cannot be read.
    """
    config = read_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"{folder} contains an exported model without weights; push the model folder that it "
            "was exported from"
        )
    files: dict[str, bytes | Path] = {
        name: folder / name for name in MODEL_FILES if (folder / name).is_file()
    }
    own = (folder / CARD).read_text(encoding="utf-8") if CARD in files else None
    if own is None or is_generated(own):
        caption = ""
        if options.picture is not None:
            caption, files[PICTURE] = _picture(options.picture, caption_photo)
        files[CARD] = make_card(folder, repo, options, caption).encode()
        return files
    headed, shown = own.startswith("---\n"), options.picture is not None
    if shown or options.reports or (headed and (options.license or options.datasets)):
        raise ConfigError(
            f"{folder / CARD} was edited by hand, so options of the card cannot be applied; edit "
            "the file yourself, or delete the file to generate a new card"
        )
    if not headed:
        files[CARD] = f"{_header(config, repo.partition('/')[2], options, {})}\n\n{own}".encode()
    return files


def _picture(photo: Photo, caption_photo: Callable[[Image.Image], Caption]) -> tuple[str, bytes]:
    """Return the model's caption of a photo, and a figure with the attention maps."""
    from captioner.drawing.figure import overlay

    image = open_image(photo)
    caption = caption_photo(image)
    return caption.text, overlay(image, caption, panel_size=240).encode(".png")


def write_card(folder: Path) -> None:
    """Write the card into a model folder."""
    atomic_write(folder / CARD, make_card(folder))


def make_card(
    folder: Path, repo: str | None = None, options: CardOptions | None = None, caption: str = ""
) -> str:
    """Return the card of a model for the repository ``user/name``.

    The last line of the card marks it as generated. If the model folder is inside its run folder,
    the card lists the settings of the run. If the folder was copied to a different place, the
    settings are taken from its earlier card.

    Raises:
        ConfigError: A report cannot be read, or two reports are about the same data set.
        ModelError: The model folder cannot be read.
    """
    options = options or CardOptions()
    config = read_config(folder)
    reports: dict[str, Report] = {}
    for path in options.reports:
        report = _read_report(path)
        name = Path(str(report.get("annotations", "captions"))).stem
        if reports.setdefault(name, report) is not report:
            raise ConfigError(f"two reports are about the data set {name!r}; pass only one of them")
    name = repo.partition("/")[2] if repo else (_run(folder) or folder.resolve()).name
    styles = ", ".join(f"`{style}`" for style in config.get("styles", ()))
    required = config.get("requires", ())  # scorers or encoders that are not built in
    packages = dict.fromkeys(one["package"] for one in required if "package" in one)
    own_code = (
        f"The {one['kind']} `{one['name']}` is the author's own code and is not included in this "
        f"folder. Register it with `captioner.register_{one['kind']}` before you load the model."
        for one in required
        if "package" not in one
    )
    shown = f"![Where the model looked for each word]({PICTURE})\n\n*{caption}*"
    with safe_open(folder / WEIGHTS, framework="np") as file:
        shapes = [file.get_slice(tensor).get_shape() for tensor in file.keys()]  # noqa: SIM118
    body = TEMPLATE.read_text(encoding="utf-8").format(
        **config["decoder"],
        title=name,
        encoder=config["encoder"]["name"],
        grid=" x ".join(map(str, config["encoder"]["grid"])),
        image_size=config["preprocessing"]["image_size"],
        words=len(config["vocabulary"]),
        kind="sub-word pieces" if config.get("tokenizer", "words") == "bpe" else "words",
        parameters=sum(map(math.prod, shapes)) / 1e6,
        megabytes=(folder / WEIGHTS).stat().st_size / 1e6,
        styles=f" Styles: {styles}." if styles else "",
        picture="" if options.picture is None else shown,
        own_code="\n".join(own_code),
        model=f"hf:{repo}" if repo else "FOLDER",
        package=" ".join(["'captioner[hub]'" if repo else "captioner", *packages]),
        scores=_scores(reports) if reports else _validation_scores(_training_row(config)),
        training=_training(folder, config),
    )
    header = _header(config, name, options, reports)
    return _marked(re.sub(r"\n{3,}", "\n\n", f"{header}\n\n{body.strip()}\n"))


def _marked(text: str) -> str:
    """Return a card with a last line that marks it as generated.

    The line is a comment with a hash of the text, so that edits can be detected.
    """
    mark = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text}\n<!-- generated by captioner: {mark} -->\n"


def is_generated(card: str) -> bool:
    """Return whether a card is still exactly as `make_card` wrote it."""
    return card == _marked(card.rstrip("\n").rpartition("\n\n")[0] + "\n")


def readable(card: str) -> str:
    """Return a card for a terminal, without its header, last line and control characters."""
    if card.startswith("---\n"):
        card = card.partition("\n---\n")[2]
    lines = [line for line in card.splitlines() if not line.startswith("<!-- generated by")]
    text = "\n".join(lines).strip()
    return "".join(sign for sign in text if sign.isprintable() or sign in "\n\t")


def _read_report(path: str | Path) -> Report:
    try:
        report: Report = json.loads(Path(path).read_text(encoding="utf-8"))
        report["metrics"].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a report with caption scores; create a report with: captioner evaluate "
            "--annotations FILE --images FOLDER -o REPORT.json"
        ) from error
    return report


def _run(folder: Path) -> Path | None:
    """Return the run folder that contains the model folder, or None."""
    above = folder.resolve().parent
    return above if (above / RUN_CONFIG).is_file() else None


def _training_row(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the training record of the best epoch, or an empty mapping if there is no record."""
    return dict(config.get("info", {}).get("training", {}))


# --- parts ---------------------------------------------------------------------------------------


def _header(
    config: Mapping[str, Any], name: str, options: CardOptions, reports: Mapping[str, Report]
) -> str:
    """Return the YAML header from which the hub takes the facts about a model.

    The scores come from the reports. Without reports, they come from the validation during
    training.
    """
    require_extra("hub", "a model card")
    from huggingface_hub import EvalResult, ModelCardData

    scores = [(name, one["metrics"], one.get("images")) for name, one in reports.items()]
    row = _training_row(config)
    if not scores and row.get("CIDEr") is not None:
        scores = [("validation during training", row, row.get("val_photos"))]
    results = [
        EvalResult(
            task_type="image-to-text",
            task_name="Image captioning",
            dataset_type="captions",
            dataset_name=f"{data}, {counted(images, 'photo')}" if images else data,
            metric_type=kind,
            metric_name=metric,
            metric_value=round(100 * found[metric], 1),
        )
        for data, found, images in scores
        for metric in METRICS
        for start, kind in _HUB_METRICS.items()
        if metric.startswith(start) and isinstance(found.get(metric), float)
    ]
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


def _scores(reports: Mapping[str, Report]) -> str:
    found = [m for m in METRICS if any(m in report["metrics"] for report in reports.values())]
    notes = [
        f"- {name}: search: {report.get('search', 'given captions')}; {report['signature']}"
        for name, report in reports.items()
        if "signature" in report
    ]
    return (
        "## Scores\n\nIn percent, with 95% bootstrap intervals over photos (`captioner evaluate`)."
        f"\n\n{score_table(reports, found)}\n\n" + "\n".join(notes)
    )


def _validation_scores(row: Mapping[str, Any]) -> str:
    if row.get("CIDEr") is None or row.get("Bleu_4") is None:
        return ""
    photos = f" on {counted(row['val_photos'], 'photo')}" if "val_photos" in row else ""
    return (
        "## Scores\n\n"
        f"Validation during training{photos}: CIDEr {100 * row['CIDEr']:.1f}, BLEU-4 "
        f"{100 * row['Bleu_4']:.1f}. The model was selected on the same photos, so these scores "
        "are optimistic. Run `captioner evaluate` for scores on other photos, with intervals."
    )


def score_table(reports: Mapping[str, Report], metrics: Sequence[str]) -> str:
    """Return a Markdown table of scores in percent, with their confidence intervals.

    The table has one row per report and one column per metric.
    """
    rows = ["| photos | " + " | ".join(metrics) + " |", "|---" * (len(metrics) + 1) + "|"]
    for name, report in reports.items():
        cells = [f"{name}, {report['images']}"]
        for metric in metrics:
            value, ends = (part.get(metric) for part in (report["metrics"], report["intervals"]))
            points = None if value is None else 100 * value
            cells.append(with_interval(points, ends and [100 * end for end in ends], ".1f"))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def with_interval(value: float | None, ends: Sequence[float] | None, form: str) -> str:
    """Return a number with its confidence interval as text, such as ``0.5 (0.4 to 0.6)``.

    ``ends`` are the ends of the interval, or None without an interval. ``form`` is the format of a
    number, such as ``.1f``. If the number is None, the text is ``not measured``.
    """
    if value is None:
        return "not measured"
    return f"{value:{form}}" + (f" ({ends[0]:{form}} to {ends[1]:{form}})" if ends else "")


def _training(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the card's section on the training, or an empty text if nothing is known about it."""
    run, card = _run(folder), folder / CARD
    if run is None and card.is_file() and is_generated(card.read_text(encoding="utf-8")):
        text = card.read_text(encoding="utf-8").rpartition("\n\n<!--")[0]
        _, heading, section = text.rpartition("## Training\n")
        return heading and heading + section.rstrip()
    row = _training_row(config)
    data = config.get("info", {}).get("data")
    lines = [f"{data}."] if isinstance(data, str) else []
    if "train_photos" in row:
        lines.append(f"The model was trained on {counted(row['train_photos'], 'photo')}.")
    if "epoch" in row:
        lines.append(f"Its weights are from epoch {row['epoch']}, step {row['step']:,}.")
    if "average_of_epochs" in row:
        epochs = ", ".join(map(str, row["average_of_epochs"]))
        lines.append(f"Its weights are the mean of the weights after epochs {epochs}.")
    text = " ".join(lines)
    if settings := _settings(run):
        text += (
            "\n\nSettings that differ from the defaults of `captioner train`:\n\n"
            f"```yaml\n{settings}```"
        )
    return f"## Training\n\n{text.lstrip()}" if text else ""


def _settings(run: Path | None) -> str:
    """Return the settings of a run as YAML, without defaults and paths."""
    if run is None:
        return ""
    import yaml  # part of the extra train, which made the run

    given = yaml.safe_load((run / RUN_CONFIG).read_text(encoding="utf-8"))
    defaults = json.loads(json.dumps(dataclasses.asdict(TrainConfig())))  # with lists for tuples
    found = _public(TrainConfig, given, defaults)
    encoder = found.get("encoder", {})
    if str(encoder.get("weights", "")).endswith((".safetensors", ".pth")):
        encoder["weights"] = "(the author's own file)"
    if "init_from" in found:
        found["init_from"] = _public_name(found["init_from"])
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True) if found else ""


def _public(kind: Any, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that differ from the defaults and are not private.

    Settings of earlier versions that no longer exist are left out.
    """
    found: dict[str, Any] = {}
    for name, option in option_fields(kind).items():
        value, default = given.get(name, defaults[name]), defaults[name]
        if dataclasses.is_dataclass(option.type):
            value, default = _public(option.type, value, default), {}
        if value != default and PRIVATE not in option.marks:
            found[name] = value
    return found


def _public_name(model: str) -> str:
    """Return the name of a model, or a placeholder if the name is a path."""
    return model if model == "shipped" or model.startswith("hf:") else "(the author's own model)"
