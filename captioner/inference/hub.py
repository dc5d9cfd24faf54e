"""Models on the Hugging Face hub: ``hf:user/name`` or ``hf:user/name@revision``.

``fetch`` downloads the config and the named files of a repository into the hub's cache, and no
other files. ``push`` commits files to a repository. The token, cache folder, endpoint and offline
mode are set as in huggingface_hub: by HF_TOKEN (or ``hf auth login``), HF_HOME, HF_ENDPOINT and
HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from captioner.errors import ConfigError, ModelError
from captioner.extras import require_extra
from captioner.inference.names import CONFIG
from captioner.version import __version__

PREFIX = "hf:"

_REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_BAR_DELAY = 0.5
"""Seconds before a progress bar appears. A model in the cache is loaded in less time."""


class HubModel(NamedTuple):
    """A repository on the hub."""

    repo: str
    """Name of the repository: ``user/name``."""
    revision: str | None = None
    """Branch, tag or commit, or None for the main branch."""

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def is_hub_name(name: object) -> bool:
    """Return whether a model's name begins with ``hf:``, so that it refers to the hub."""
    return str(name).startswith(PREFIX)


def parse(name: str | Path, revision: str | None = None) -> HubModel:
    """Parse ``hf:user/name`` or ``hf:user/name@revision``. The prefix ``hf:`` may be missing.

    Raises:
        ConfigError: The name has a different form, or ``revision`` differs from the revision in the
            name.
    """
    repo, at, own = str(name).removeprefix(PREFIX).partition("@")
    if not _REPO.fullmatch(repo) or (at and not own):
        raise ConfigError(
            f"{str(name)!r} is not the name of a model on the hub; use hf:user/name or "
            "hf:user/name@revision"
        )
    if revision and own and revision != own:
        raise ConfigError(
            f"the name {name} and the revision {revision!r} contradict each other; set the "
            "revision only once"
        )
    return HubModel(repo, own or revision)


def fetch(model: HubModel, files: Sequence[str], **options: Any) -> Path:
    """Download files of a captioner model into the hub's cache.

    Files that the repository does not contain are skipped. The config is downloaded first, so that
    a model of another library is rejected before its weights are downloaded. ``options`` are passed
    to ``huggingface_hub.snapshot_download``.

    Returns:
        The folder with the files. Its name is the hash of the commit.

    Raises:
        ConfigError: huggingface_hub is not installed.
        ModelError: The repository or revision does not exist, is not accessible or does not contain
            a captioner model; or the hub cannot be reached and the files are not in the cache.
    """
    require_extra("hub", "the Hugging Face hub")
    import huggingface_hub

    def download(revision: str | None, names: Sequence[str]) -> Path:
        folder = huggingface_hub.snapshot_download(
            model.repo,
            revision=revision,
            allow_patterns=list(names),
            library_name="captioner",
            library_version=__version__,
            tqdm_class=_delayed_bar(),
            **options,
        )
        return Path(folder)

    with _errors(model):
        first = download(model.revision, [CONFIG])
        try:
            int(json.loads((first / CONFIG).read_text(encoding="utf-8"))["format_version"])
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise ModelError(
                f"{model} is not a captioner model, because it has no {CONFIG} with a "
                "format_version; use a model that was uploaded with captioner push"
            ) from error
        return download(first.name, files)  # the same commit, even if the branch moves


def push(
    files: Mapping[str, bytes | Path],
    target: HubModel,
    *,
    commit_message: str = "Upload a captioner model",
    private: bool | None = None,
    token: str | bool | None = None,
    create_pr: bool = False,
) -> str:
    """Commit files to a repository and branch, which are created if necessary.

    Args:
        files: The content or the path of each file, by the file's name (see
            ``card.files_to_push``).
        target: The repository. Its revision is the branch.
        commit_message: Message of the commit.
        private: Make a new repository private. None uses the account's default.
        token: Token of the hub. None uses the stored token.
        create_pr: Open a pull request instead of committing to the branch.

    Returns:
        The URL of the commit.

    Raises:
        ConfigError: The repository exists and is public, but ``private`` was set, or
            huggingface_hub is not installed.
        ModelError: The repository contains a model of another library, or the hub rejects the
            commit or cannot be reached.
    """
    require_extra("hub", "the Hugging Face hub")
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi(token=token, library_name="captioner", library_version=__version__)
    operations = [
        CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in files.items()
    ]
    with _errors(target):
        with suppress(RepositoryNotFoundError):
            held = api.model_info(target.repo)
            if private and not held.private:
                raise ConfigError(
                    f"hf:{target.repo} exists and is public, but private is set; make the "
                    "repository private on the hub, use another name, or leave out private"
                )
            if CONFIG in [sibling.rfilename for sibling in held.siblings or ()]:
                fetch(HubModel(target.repo), [CONFIG], token=token)
        api.create_repo(target.repo, private=private, exist_ok=True)
        if target.revision and not create_pr:
            api.create_branch(target.repo, branch=target.revision, exist_ok=True)
        commit = api.create_commit(
            target.repo,
            operations,
            commit_message=commit_message,
            revision=target.revision,
            create_pr=create_pr,
        )
    return str(commit.pr_url or commit.commit_url)


@contextmanager
def _errors(model: HubModel) -> Iterator[None]:
    """Report huggingface_hub's errors as one line, and silence the warnings about retries."""
    from huggingface_hub import errors

    transport_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]  # of its HTTP library
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{PREFIX}{model.repo} does not exist or is private; check the name, or log in with "
            "`hf auth login` or HF_TOKEN"
        ) from error
    except (transport_error, OSError, ValueError, RuntimeError) as error:
        reason: BaseException = error
        wrapped = (errors.LocalEntryNotFoundError, RuntimeError)
        if isinstance(error, wrapped) and isinstance(error.__cause__, transport_error):
            reason = error.__cause__  # the error itself only reports "not in the cache"
        own = getattr(reason, "server_message", None) or str(reason)
        text = " ".join(own.split()) or type(reason).__name__
        raise ModelError(
            f"{model} cannot be used ({text.rstrip('.')}); check the name, your access and the "
            "network"
        ) from error
    finally:
        logger.setLevel(level)


def _delayed_bar() -> Any:
    """Return huggingface_hub's progress bar class, changed to appear after ``_BAR_DELAY``."""
    from huggingface_hub import utils

    bar: Any = utils.tqdm  # type: ignore[attr-defined]

    class DelayedBar(bar):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"delay": _BAR_DELAY, "leave": False}))

    return DelayedBar
