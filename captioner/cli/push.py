"""``captioner push``: upload a model with its card to the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from captioner.cli.arguments import command
from captioner.cli.main import OK
from captioner.errors import ConfigError
from captioner.options import CardOptions
from captioner.schema import Shown


@dataclass(frozen=True, kw_only=True)
class PushOptions(CardOptions):
    """Upload a model with its card to the Hugging Face hub.

    No photos or paths are uploaded; the model holds words and n-gram counts of the training
    captions. Log in first (hf auth login), or set HF_TOKEN.
    """

    model: Annotated[str, Shown(positional=True)]
    """Model or run folder, or: shipped."""
    target: Annotated[str, Shown(positional=True)]
    """Repository, created if necessary: hf:user/name[@branch]."""
    dry_run: bool = False
    """Print the files and the card, and connect to nothing."""
    private: bool = False
    """Let only yourself see a new repository (default: your account's setting)."""
    message: str = "Upload a captioner model"
    """Message of the commit."""


@command("push", "MODEL|RUN hf:user/name [--private] [--dry-run] [options]", PushOptions)
def push(options: PushOptions, _: Any) -> int:
    """Upload, or list what would be uploaded."""
    from captioner.inference import hub
    from captioner.inference.captioner import caption_with
    from captioner.inference.card import files_to_push
    from captioner.inference.find_model import find_model
    from captioner.inference.names import CARD

    if hub.is_hub_name(options.model):
        raise ConfigError(f"{options.model} is on the hub already; give a model or run folder")
    if not hub.is_hub_name(options.target):
        raise ConfigError(f"the target is {options.target!r}; give hf:user/name")
    target, folder = hub.parse(options.target), find_model(options.model)
    files = files_to_push(folder, target.repo, options, partial(caption_with, folder))
    if not options.dry_run:
        private = options.private or None
        print(hub.push(files, target, commit_message=options.message, private=private))
        return OK
    contents = {n: c if isinstance(c, bytes) else c.read_bytes() for n, c in files.items()}
    kind = "private " if options.private else ""
    print(f"would upload to the {kind}repository {target} ({options.message}):")
    for name, content in contents.items():
        print(f"  {len(content):>11,} bytes  {name}")
    print(f"\n{CARD}:\n\n{contents[CARD].decode()}", end="")
    return OK
