"""``captioner info``: show a model's architecture, training data and scores."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioner.cli.main import OK
from captioner.cli.parser import Parser, new_parser

if TYPE_CHECKING:
    from captioner.inference.confidence import Calibrator


@functools.cache
def parser() -> Parser:
    """Options of ``info``."""
    new = new_parser(
        "info",
        "Show a model's architecture, preprocessing, search options, training data and scores.",
        "[--model MODEL] [--format text|json]",
    )
    new.add_argument(
        "--model",
        metavar="MODEL",
        help="model or run folder, or hf:user/name[@revision] of the Hugging Face hub (default: "
        "the shipped model)",
    )
    new.add_argument("--format", choices=["text", "json"], default="text", help="output format")
    return new


def main(argv: Sequence[str]) -> int:
    """Print the facts, then the model card if there is one."""
    options = parser().parse(argv)

    from captioner.inference.card import readable
    from captioner.inference.folder import (
        CARD,
        SHIPPED_MODEL,
        find_model,
        read_config,
        weight_files,
    )

    folder = find_model(options.model or SHIPPED_MODEL)
    config = read_config(folder)
    size = sum((folder / name).stat().st_size for name in weight_files(config))
    facts = {"folder": str(folder), "size_mb": round(size / 1e6, 1)}
    facts |= _facts(folder, config)
    if options.format == "json":
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return OK
    for name, value in facts.items():
        for line in _lines(name, value):
            print(line)
    card = folder / CARD
    if card.is_file():
        print("\n" + readable(card.read_text(encoding="utf-8", errors="replace")))
    return OK


def _facts(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What is known of a model, whether it is exported or not."""
    from captioner.inference.folder import EXPORTED, Graphs, load_model

    stored = load_model(folder)
    network = stored.network
    facts: dict[str, Any] = {}
    if isinstance(network, Graphs):
        facts["exported"] = {name: config[EXPORTED][name] for name in ("opset", "precision")}
    facts |= {"encoder": config["encoder"]["name"], "grid": list(network.grid)}
    if not isinstance(network, Graphs):
        parts = {"encoder": network.encoder, "decoder": network.decoder}
        facts["parameters"] = {
            name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()
        }
    return {
        **facts,
        "preprocessing": dataclasses.asdict(network.preprocessing),
        "decoder": dataclasses.asdict(stored.decoder),
        "search": dataclasses.asdict(stored.search),
        "vocabulary": len(stored.vocabulary),
        "tokenizer": stored.vocabulary.tokenizer,
        "styles": list(stored.vocabulary.styles),
        **stored.info,
        "confidence": _confidence(stored.calibrator),
    }


def _confidence(calibrator: Calibrator | None) -> Any:
    return "not calibrated" if calibrator is None else dict(calibrator.report)


def _lines(name: str, value: Any) -> Iterator[str]:
    """Format a fact as text, with nested dictionaries on lines of their own."""
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for part in value:
            yield from _lines(name, part)
        return
    parts = value if isinstance(value, dict) else {"": value}
    plain = {key: part for key, part in parts.items() if not isinstance(part, dict)}
    texts = [f"{key} {_text(part)}".strip() for key, part in plain.items() if not _empty(part)]
    if texts:
        label = _LABELS.get(name, name.replace("_", " "))
        yield f"{label:<22} " + ", ".join(texts)
    for key, part in parts.items():
        if isinstance(part, dict):
            yield from _lines(f"{name} {key}", part)


_LABELS = {"size_mb": "size (MB)", "vocabulary": "vocabulary (words)"}


def _empty(value: Any) -> bool:
    """Whether a value means that nothing was set, such as no style."""
    return value is None or value in ("", (), [])


def _text(value: Any) -> str:
    """A value as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < _SMALL else f"{round(value, 4):g}"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, list | tuple):
        return str(value)
    if all(isinstance(part, float) for part in value) and len(value) == 2:
        return f"({_text(value[0])} to {_text(value[1])})"  # an interval
    kinds = {type(part) for part in value}
    separator = {int: " x ", str: ", "}.get(kinds.pop(), " ") if len(kinds) == 1 else " "
    return separator.join(map(_text, value))


_SMALL = 0.001
"""Numbers below this keep four digits; others are rounded to four decimals."""
