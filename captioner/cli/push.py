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

    No training photos or paths are uploaded. The model contains words and n-gram counts from its
    training captions. Log in first (hf auth login), or set the environment variable HF_TOKEN.
    """

    model: Annotated[str, Shown(positional=True)]
    """Upload this model folder or run folder. shipped: the shipped model."""
    target: Annotated[str, Shown(positional=True)]
    """Upload to this repository, which is created if necessary: hf:user/name[@branch]."""
    dry_run: bool = False
    """Print the files and the card, without a connection to the hub."""
    private: bool = False
    """Make a new repository visible only to yourself (default: the setting of your account)."""
    message: str = "Upload a captioner model"
    """Use this commit message."""


@command("push", "MODEL|RUN hf:user/name [--private] [--dry-run] [options]", PushOptions)
def push(options: PushOptions, _: Any) -> int:
    """Upload the model, or list the files that would be uploaded."""
    from captioner.inference import hub
    from captioner.inference.captioner import caption_with
    from captioner.inference.card import files_to_push
    from captioner.inference.find_model import find_model
    from captioner.inference.names import CARD

    if hub.is_hub_name(options.model):
        raise ConfigError(
            f"{options.model} is already on the hub; pass a model folder or run folder"
        )
    if not hub.is_hub_name(options.target):
        raise ConfigError(
            f"the target {options.target!r} is not a repository on the hub; use hf:user/name"
        )
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
