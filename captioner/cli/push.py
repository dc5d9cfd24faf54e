"""``captioner push``: upload a model with its card to the Hugging Face hub."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captioner.cli.main import OK
from captioner.cli.parser import Parser, new_parser
from captioner.errors import ConfigError


@functools.cache
def parser() -> Parser:
    """Options of ``push``."""
    new = new_parser(
        "push",
        "Upload a model with its card to the Hugging Face hub. No photos or paths are uploaded; "
        "the model holds words and n-gram counts of the training captions. Log in first (hf auth "
        "login), or set HF_TOKEN.",
        "MODEL|RUN hf:user/name [--private] [--dry-run] [options]",
    )
    new.add_argument("model", help="model or run folder, or: shipped")
    new.add_argument("target", help="repository, created if necessary: hf:user/name[@branch]")
    new.add_argument(
        "--dry-run",
        action="store_true",
        help="print the files and the card, and connect to nothing",
    )
    new.add_argument(
        "--private",
        action="store_true",
        help="let only yourself see a new repository (default: your account's setting)",
    )
    new.add_argument("--message", default="Upload a captioner model", help="message of the commit")
    card = new.add_argument_group("card (unless README.md in the model folder was edited)")
    card.add_argument("--license", help="license of the model as the hub spells it: apache-2.0")
    card.add_argument(
        "--dataset",
        action="append",
        help="name of the training data on the hub; repeat for several",
    )
    card.add_argument(
        "--report",
        action="append",
        help="report of captioner evaluate -o: scores with intervals; repeat for several data sets",
    )
    card.add_argument("--picture", help="photo to publish in the card with its attention")
    return new


def main(argv: Sequence[str]) -> int:
    """Upload, or list what would be uploaded."""
    options = parser().parse(argv)

    from captioner.inference import hub
    from captioner.inference.card import CardOptions
    from captioner.inference.folder import find_model, read_config
    from captioner.inference.sharing import files_to_push, push

    if hub.is_hub_name(options.model):
        raise ConfigError(f"{options.model} is on the hub already; give a model or run folder")
    if not hub.is_hub_name(options.target):
        raise ConfigError(f"the target is {options.target!r}; give hf:user/name")
    target = hub.parse(options.target)
    folder = find_model(options.model)
    read_config(folder)  # before the model is loaded for a picture
    picture = _picture(folder, options.picture)
    card = CardOptions(options.license, options.dataset or (), options.report or ())
    files = files_to_push(folder, target.repo, card, picture)
    if options.dry_run:
        _print_plan(target, files, options)
        return OK
    address = push(files, target, message=options.message, private=options.private or None)
    print(address)
    return OK


def _picture(folder: Path, photo: str | None) -> Any:
    if photo is None:
        return None
    from captioner.inference.captioner import card_picture, load

    return card_picture(load(folder, precision="fp32"), photo)


def _print_plan(target: Any, files: dict[str, bytes | Path], options: Any) -> None:
    """Print every file with its size, then the card."""
    from captioner.inference.folder import CARD

    contents = {
        name: content if isinstance(content, bytes) else content.read_bytes()
        for name, content in files.items()
    }
    kind = "private " if options.private else ""
    print(f"would upload to the {kind}repository {target} ({options.message}):")
    for name, content in contents.items():
        print(f"  {len(content):>11,} bytes  {name}")
    print(f"\n{CARD}:\n\n{contents[CARD].decode()}", end="")
