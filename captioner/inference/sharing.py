"""Push a model folder to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from captioner.errors import ConfigError
from captioner.inference import hub
from captioner.inference.card import (
    PICTURE,
    CardOptions,
    has_header,
    header,
    is_generated,
    make_card,
)
from captioner.inference.folder import (
    CARD,
    CONFIG,
    EXPORTED,
    MODEL_FILES,
    read_config,
    require_captioner_model,
)


class Picture(NamedTuple):
    """A photo with its attention, for the card."""

    png: bytes
    caption: str


def files_to_push(
    folder: Path,
    repo: str,
    options: CardOptions | None = None,
    picture: Picture | None = None,
) -> dict[str, bytes | Path]:
    """The files of a model folder for the hub, with its card.

    A card that was edited is kept; if it has no header for the hub, it gets one.

    Args:
        folder: Model folder.
        repo: ``user/name`` on the hub.
        options: For a card that was not edited.
        picture: See ``options``.

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
    own = _edited_card(folder)
    if own is None:
        if picture is not None:
            options = replace(options, picture=picture.caption)
            files[PICTURE] = picture.png
        files[CARD] = make_card(folder, repo, options).encode()
    elif options.reports or picture:
        raise ConfigError(
            f"{folder / CARD} was edited, so reports and a picture cannot be added to it; add them "
            "yourself, or remove the file for a new card"
        )
    elif not has_header(own):
        name = repo.partition("/")[2]
        files[CARD] = f"{header(config, name, options)}\n\n{own}".encode()
    elif options.license or options.datasets:
        raise ConfigError(
            f"{folder / CARD} was edited and has its own header; give license and datasets there"
        )
    return files


def _edited_card(folder: Path) -> str | None:
    """The folder's card, unless there is none or it is the generated one."""
    path = folder / CARD
    if not path.is_file():
        return None
    card = path.read_text(encoding="utf-8")
    return None if is_generated(card) else card


def push(
    files: Mapping[str, bytes | Path],
    target: hub.HubModel,
    *,
    message: str = "Upload a captioner model",
    private: bool | None = None,
    token: str | bool | None = None,
    create_pr: bool = False,
) -> str:
    """Commit the files of a model to a repository of the hub, which is created if necessary.

    Args:
        files: From ``files_to_push``.
        target: The repository; its revision is a branch.
        message: Of the commit.
        private: Whether only its owner sees a new repository; None: the account's default.
        token: Default: the one that is stored.
        create_pr: Open a pull request instead.

    Returns:
        The address of the commit.

    Raises:
        ConfigError: The repository exists and is public although ``private`` is given, or
            huggingface_hub is not installed.
        ModelError: The repository holds another kind of model, or the hub refuses or cannot be
            reached.
    """
    state = hub.inspect(target, token)
    if state is not None:
        if private and not state.private:
            raise ConfigError(
                f"hf:{target.repo} exists and is public; change its visibility on the hub, give "
                "another name, or leave private out"
            )
        if CONFIG in state.files:
            held = hub.HubModel(target.repo)
            require_captioner_model(target, hub.fetch(held, [CONFIG], token=token))
    return hub.upload(
        target, files, message=message, private=private, token=token, create_pr=create_pr
    )
