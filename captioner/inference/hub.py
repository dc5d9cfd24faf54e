"""Models of the Hugging Face hub: ``hf:user/name`` or ``hf:user/name@revision``.

``fetch`` downloads the files it is given by name into the hub's cache, and nothing else; ``upload``
commits files to a repository. Token, cache folder, endpoint and offline mode are those of
huggingface_hub: HF_TOKEN (or ``hf auth login``), HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from captioner.errors import ConfigError, ModelError, first_line
from captioner.extras import require_extra
from captioner.version import __version__

PREFIX = "hf:"

_REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_BAR_DELAY = 0.5
"""Seconds before a progress bar is shown: a model from the cache needs none."""


class HubModel(NamedTuple):
    """A repository of the hub."""

    repo: str
    """``user/name``"""
    revision: str | None = None
    """Branch, tag or commit; None: the main branch."""

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}" + (f"@{self.revision}" if self.revision else "")


class RepoState(NamedTuple):
    """What a repository holds before something is pushed to it."""

    private: bool
    files: tuple[str, ...]


def is_hub_name(name: object) -> bool:
    """Whether a model's name refers to the hub: it begins with ``hf:``."""
    return str(name).startswith(PREFIX)


def parse(name: str | Path, revision: str | None = None) -> HubModel:
    """Read ``hf:user/name`` or ``hf:user/name@revision``.

    Args:
        name: The name, with its prefix.
        revision: The revision, if it is not part of the name.

    Raises:
        ConfigError: It is not such a name, or two revisions are given.
    """
    repo, at, own = str(name).removeprefix(PREFIX).partition("@")
    if not _REPO.fullmatch(repo) or (at and not own):
        raise ConfigError(
            f"{str(name)!r} is not a model of the hub; give hf:user/name or hf:user/name@revision"
        )
    if revision and own and revision != own:
        raise ConfigError(f"{name} and revision {revision!r} contradict each other; give one")
    return HubModel(repo, own or revision)


def fetch(
    model: HubModel, files: Sequence[str], *, commit: str | None = None, **options: Any
) -> Path:
    """Download files of a repository, as far as they are not in the cache.

    Args:
        model: The repository.
        files: Names of files; those that it does not have are ignored.
        commit: What the revision is known to be.
        **options: ``token``, ``cache_dir``, ``force_download`` and ``local_files_only``, as in
            ``huggingface_hub.snapshot_download``.

    Returns:
        The folder with the files; its name is the commit.

    Raises:
        ConfigError: huggingface_hub is not installed.
        ModelError: The repository or revision does not exist, access is denied, the hub cannot be
            reached and the files are not in the cache, or the download is interrupted.
    """
    require_extra("hub", "the Hugging Face hub")
    import huggingface_hub

    given = {name: value for name, value in options.items() if value is not None}
    with _errors(model, offline=bool(given.get("local_files_only"))):
        folder = huggingface_hub.snapshot_download(
            model.repo,
            revision=commit or model.revision,
            allow_patterns=list(files),
            library_name="captioner",
            library_version=__version__,
            tqdm_class=_delayed_bar(),
            **given,
        )
    return Path(folder)


def inspect(model: HubModel, token: str | bool | None = None) -> RepoState | None:
    """Visibility and files of a repository; None if it, or the revision, does not exist.

    Raises:
        ConfigError: huggingface_hub is not installed.
        ModelError: The hub cannot be reached or denies access.
    """
    api = _api(token)
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    with _errors(model), suppress(RepositoryNotFoundError):
        try:
            found = api.model_info(model.repo, revision=model.revision)
        except RevisionNotFoundError:  # a new branch
            found = api.model_info(model.repo)
        names = (sibling.rfilename for sibling in found.siblings or ())
        return RepoState(bool(found.private), tuple(names))
    return None


def upload(
    model: HubModel,
    files: Mapping[str, bytes | Path],
    *,
    message: str,
    private: bool | None = None,
    token: str | bool | None = None,
    create_pr: bool = False,
) -> str:
    """Create the repository, and the branch, if necessary, and commit files to it.

    Args:
        model: The repository; its revision is the branch.
        files: Content, or path of the content, by name in the repository.
        message: Of the commit.
        private: Of a new repository; None: the account's default.
        token: Default: the one that is stored.
        create_pr: Open a pull request instead.

    Returns:
        The address of the commit.

    Raises:
        ConfigError: huggingface_hub is not installed.
        ModelError: The hub cannot be reached or refuses.
    """
    api = _api(token)
    from huggingface_hub import CommitOperationAdd

    operations = [
        CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in files.items()
    ]
    with _errors(model):
        api.create_repo(model.repo, private=private, exist_ok=True)
        if model.revision and not create_pr:
            api.create_branch(model.repo, branch=model.revision, exist_ok=True)
        commit = api.create_commit(
            model.repo,
            operations,
            commit_message=message,
            revision=model.revision,
            create_pr=create_pr,
        )
    return str(commit.pr_url or commit.commit_url)


def _api(token: str | bool | None) -> Any:
    require_extra("hub", "the Hugging Face hub")
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="captioner", library_version=__version__)


# --- errors --------------------------------------------------------------------------------------


@contextmanager
def _errors(model: HubModel, *, offline: bool = False) -> Iterator[None]:
    """Turn huggingface_hub's errors into one line each, without its warnings of each retry.

    Args:
        model: What is read or written.
        offline: Only the cache is used.
    """
    from huggingface_hub import constants, errors

    transport_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]  # of its HTTP library
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except errors.RevisionNotFoundError as error:
        if model.revision is None:
            raise ModelError(f"{model} is not a captioner model: it is empty") from error
        raise ModelError(
            f"{PREFIX}{model.repo} has no revision {model.revision!r}; give one of its branches, "
            "tags or commits"
        ) from error
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{model.repo}"
        raise ModelError(
            f"{model} needs permission; request it at {page}, then {_LOGIN}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{PREFIX}{model.repo} does not exist, or is private; check the name, or {_LOGIN}"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        cause = error.__cause__
        if isinstance(cause, errors.HfHubHTTPError):  # it was reached, and is not in the cache
            raise ModelError(_refused(model, cause)) from error
        raise ModelError(_unreachable(model, error, offline=offline)) from error
    except errors.HfHubHTTPError as error:
        raise ModelError(_refused(model, error)) from error
    except ValueError as error:  # the card's header, for example
        raise ModelError(f"{model}: {' '.join(str(error).split())}") from error
    except (transport_error, OSError, RuntimeError) as error:
        raise ModelError(
            f"{model}: the transfer failed ({_reason(error)}); run the same again: what has "
            "arrived is kept"
        ) from error
    finally:
        logger.setLevel(level)


_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def _refused(model: HubModel, error: Any) -> str:
    """The message for an HTTP status."""
    status = error.response.status_code
    reason = error.server_message or getattr(error.response, "reason_phrase", "no reason given")
    advice = "try again later"
    if status in (401, 403):
        advice = f"check the token and what it may do ({_LOGIN})"
    return f"{model}: the hub returned {status} ({reason}); {advice}"


def _unreachable(model: HubModel, error: Exception, *, offline: bool) -> str:
    """The message for a model that is not in the cache, or only in parts, without connection."""
    from huggingface_hub import constants

    cache = f"is not, or not completely, in the cache ({constants.HF_HUB_CACHE})"
    if constants.HF_HUB_OFFLINE:
        return f"{model} {cache}, and HF_HUB_OFFLINE is set; load it once without HF_HUB_OFFLINE"
    if offline:
        return f"{model} {cache}; load it once without local_files_only"
    cause = error.__cause__ or error
    return (
        f"{model} {cache}, and {constants.ENDPOINT} cannot be reached ({_reason(cause)}); check "
        "the connection"
    )


def _reason(error: BaseException) -> str:
    """The first line of an error's own cause."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:  # "while uploading ..."
        error = error.__cause__
    return first_line(error)


# --- progress ------------------------------------------------------------------------------------


def _delayed_bar() -> Any:
    """huggingface_hub's progress bar, not shown for what takes less than ``_BAR_DELAY``."""
    from huggingface_hub import utils

    bar: Any = utils.tqdm  # type: ignore[attr-defined]

    class DelayedBar(bar):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._created = time.monotonic()
            super().__init__(*args, **(kwargs | {"delay": _BAR_DELAY, "leave": False}))

        def display(self, *args: Any, **kwargs: Any) -> Any:
            if time.monotonic() - self._created > _BAR_DELAY:
                return super().display(*args, **kwargs)
            return True

    return DelayedBar
