"""``captioner info``: show a model's architecture, training data and scores."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from captioner.cli.arguments import command
from captioner.cli.main import OK
from captioner.files import json_values
from captioner.messages import printable
from captioner.options import SearchOptions
from captioner.schema import ModelName, changed

if TYPE_CHECKING:  # importing torch takes a second
    from captioner.model.caption_model import CaptionModel


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Show a model's architecture, preprocessing, search options, training data and scores."""

    model: ModelName | None = None
    """Show this model: a model folder, a run folder, or hf:user/name[@revision] on the Hugging Face
    hub (default: the shipped model)."""
    card: bool = False
    """Also print the model card."""
    format: Literal["text", "json"] = "text"
    """Choose the output. text: the main facts. json: all facts."""


@command("info", "[--model MODEL] [--card] [--format text|json]", InfoOptions)
def info(options: InfoOptions, _: Any) -> int:
    """Print the facts about a model and, with ``--card``, its model card."""
    from captioner.inference.card import readable
    from captioner.inference.config_file import config_errors
    from captioner.inference.find_model import find_model
    from captioner.inference.names import CARD, SHIPPED_MODEL

    folder = find_model(options.model or SHIPPED_MODEL)
    facts = _facts(folder)
    if options.format == "json":
        print(json.dumps(json_values(facts), indent=2, ensure_ascii=False))
        return OK
    with config_errors(folder):
        summary = _summary(facts)
    for name, value in summary.items():
        if value:
            print(f"{name:<12}{printable(value)}")
    card = folder / CARD
    if options.card and card.is_file():
        print("\n" + readable(card.read_text(encoding="utf-8", errors="replace")))
    return OK


def _facts(folder: Path) -> dict[str, Any]:
    """Return all facts about a model, whether it is exported or not."""
    from captioner.extras import is_installed
    from captioner.inference.folder import load_model
    from captioner.inference.names import EXPORTED, GRAPHS, WEIGHTS

    stored = load_model(folder)
    config, vocabulary = stored.config, stored.vocabulary
    sizes = [(folder / n).stat().st_size for n in (*GRAPHS, WEIGHTS) if (folder / n).is_file()]
    facts: dict[str, Any] = {"folder": str(folder), "size_mb": round(sum(sizes) / 1e6, 1)}
    if stored.has_graphs:
        facts["exported"] = {name: config[EXPORTED][name] for name in ("opset", "precision")}
    facts |= {"encoder": config["encoder"]["name"], "grid": config["encoder"]["grid"]}
    if stored.has_weights and is_installed("torch"):
        parts = {"encoder": stored.model.encoder, "decoder": stored.model.decoder}
        facts["parameters"] = {
            name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()
        }
        facts["classes"] = _classes(stored.model)
    calibrator = stored.calibrator
    return {
        **facts,
        "preprocessing": config["preprocessing"],
        "decoder": dataclasses.asdict(stored.decoder),
        "search": dataclasses.asdict(stored.search),
        "vocabulary": len(vocabulary.words),
        "tokenizer": vocabulary.tokenizer,
        "styles": list(vocabulary.styles),
        **stored.info,
        "confidence": "not calibrated" if calibrator is None else dict(calibrator.report),
    }


def _classes(model: CaptionModel) -> dict[str, str]:
    """Return the module and class of each part of a network, for readers of the code."""
    attention = model.decoder.attention
    parts = {
        "encoder": model.encoder,
        "backbone": model.encoder.backbone,
        "decoder": model.decoder,
        "attention": attention,
        "scorer": getattr(attention, "scorer", None),
    }
    kinds = {name: type(part) for name, part in parts.items() if part is not None}
    return {name: f"{kind.__module__}.{kind.__qualname__}" for name, kind in kinds.items()}


def _summary(facts: dict[str, Any]) -> dict[str, str]:
    """Return the main facts as text by name. Unknown facts are empty."""
    decoder, grid, graphs = facts["decoder"], facts["grid"], facts.get("exported")
    search, data = SearchOptions(**facts["search"]), facts.get("data")
    own = [f"{name} {getattr(search, name)}" for name in changed(search)]
    sizes = [f"{part} {count:,}" for part, count in facts.get("parameters", {}).items()]
    measured = facts.get("scores", {}) | {"validation": facts.get("training", {})}
    scores = [
        f"{photos} CIDEr {100 * found['CIDEr']:.1f}, BLEU-4 {100 * found['Bleu_4']:.1f}"
        for photos, found in measured.items()
        if found.get("CIDEr") is not None and found.get("Bleu_4") is not None
    ]
    confidence = facts["confidence"]
    return {
        "folder": f"{facts['folder']}, {facts['size_mb']} MB",
        "graphs": f"{graphs['precision']}, opset {graphs['opset']}" if graphs else "",
        "encoder": f"{facts['encoder']}, {grid[0]} x {grid[1]} regions at "
        f"{facts['preprocessing']['image_size']} pixels",
        "decoder": f"{decoder['attention']} attention ({decoder['selection']}), "
        f"{decoder['hidden_dim']} hidden units, {decoder['order']} order",
        "parameters": ", ".join(sizes),
        "classes": ", ".join(map(" ".join, facts.get("classes", {}).items())),
        "vocabulary": f"{facts['vocabulary']:,} {facts['tokenizer']}",
        "styles": ", ".join(facts["styles"]),
        "search": ", ".join(own),
        "data": data if isinstance(data, str) else "",
        "scores": "; ".join(scores),
        "confidence": confidence if isinstance(confidence, str) else "calibrated",
    }
