"""``captioner info``: show a model's architecture, training data and scores."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from captioner.cli.main import OK
from captioner.cli.options import Parser, new_parser


@functools.cache
def parser() -> Parser:
    """Options of ``info``."""
    new = new_parser(
        "info",
        "Show a model's architecture, preprocessing, search options, training data and scores.",
        "[--model FOLDER] [--format text|json]",
    )
    new.add_argument("--model", help="model folder (default: the shipped model)")
    new.add_argument("--format", choices=["text", "json"], default="text", help="output format")
    return new


def main(argv: Sequence[str]) -> int:
    """Print the facts, then the model card if there is one."""
    options = parser().parse(argv)

    from captioner.model_config import SHIPPED_MODEL, WEIGHTS
    from captioner.model_folder import CARD, load_model

    folder = options.model or SHIPPED_MODEL
    stored = load_model(folder)
    model = stored.model
    facts = {
        "folder": str(folder),
        "size_mb": round((Path(folder) / WEIGHTS).stat().st_size / 1e6, 1),
        "encoder": model.encoder.name,
        "grid": list(model.grid),
        "parameters": {
            "encoder": sum(p.numel() for p in model.encoder.parameters()),
            "decoder": sum(p.numel() for p in model.decoder.parameters()),
        },
        "preprocessing": dataclasses.asdict(model.preprocessing),
        "decoder": dataclasses.asdict(stored.decoder),
        "search": dataclasses.asdict(stored.search),
        "vocabulary": len(stored.vocabulary),
        "styles": list(stored.vocabulary.styles),
        **stored.info,
    }
    if options.format == "json":
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return OK
    for name, value in facts.items():
        for line in _lines(name, value):
            print(line)
    card = Path(folder) / CARD
    if card.is_file():
        print("\n" + card.read_text(encoding="utf-8").rstrip())
    return OK


def _lines(name: str, value: Any) -> Iterator[str]:
    """Format a fact as text, with nested dictionaries on lines of their own."""
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for part in value:
            yield from _lines(name, part)
        return
    parts = value if isinstance(value, dict) else {"": value}
    plain = [f"{key} {part}".strip() for key, part in parts.items() if not isinstance(part, dict)]
    if plain:
        yield f"{name:<22} " + ", ".join(plain)
    for key, part in parts.items():
        if isinstance(part, dict):
            yield from _lines(f"{name} {key}", part)
