"""Shared by several commands: search and model options, output files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, get_args

import jsonargparse

from captioner.cli.main import flag
from captioner.cli.parser import Parser
from captioner.errors import ConfigError
from captioner.hardware import PRECISION_HELP, Precision
from captioner.option_fields import check_option, option_fields
from captioner.options import SearchOptions


def add_model_options(parser: Parser) -> None:
    """``--model``, ``--device``, ``--precision``, ``--batch-size``."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="MODEL",
        help="model or run folder, or hf:user/name[@revision] of the Hugging Face hub (default: "
        "the shipped model); repeat to average the probabilities of several models",
    )
    add_device_options(group)


def add_device_options(parser: Any) -> None:
    """``--device``, ``--precision``, ``--batch-size``."""
    parser.add_argument("--device", default="auto", help=DEVICE_HELP)
    parser.add_argument(
        "--precision", default="auto", choices=get_args(Precision), help=PRECISION_HELP
    )
    parser.add_argument("--batch-size", type=int, default=32, help="number of photos per batch")


def check_batch_size(size: int) -> None:
    """Raise ConfigError if ``--batch-size`` is not positive."""
    if size < 1:
        raise ConfigError(f"--batch-size is {size}; give 1 or more")


DEVICE_HELP = "auto, cpu, cuda, cuda:1, mps, ..."


SEARCH_GROUPS = {
    "beam search": (
        "beam_size", "num_captions", "candidates", "length_penalty", "beam_groups", "diversity",
        "forced_words",
    ),
    "sampling": ("temperature", "top_k", "top_p", "seed"),
    "constraints": (
        "min_length", "max_length", "guidance", "rare_words", "block_ngrams", "block_repeats",
        "banned_words", "guard_endings", "style",
    ),
}  # fmt: skip
"""Groups of ``SearchOptions`` fields in the help."""


def add_yes_no(parser: Any, name: str, help: str) -> None:  # noqa: A002
    """Add ``--name`` and ``--no-name``, which default to None."""
    action = jsonargparse.ActionYesNo(yes_prefix="", no_prefix="no-")
    parser.add_argument(f"--{name}", action=action, default=None, help=help)


def add_search_options(parser: Parser) -> None:
    """Add every field of ``SearchOptions``; None means the model's own value."""
    known = option_fields(SearchOptions)
    for title, names in SEARCH_GROUPS.items():
        group = parser.add_argument_group(f"{title} (defaults: see captioner info)")
        for name in names:
            field = known[name]
            if field.type is bool:
                add_yes_no(group, flag(name).removeprefix("--"), field.help)
            elif field.type in (int, float, str):
                group.add_argument(
                    flag(name), type=field.type | None, default=None, help=field.help
                )
            else:
                group.add_argument(flag(name), action="append", metavar="WORDS", help=field.help)


def search_changes(arguments: jsonargparse.Namespace) -> dict[str, Any]:
    """Return the search options that were given on the command line.

    Raises:
        ConfigError: One of them is out of range.
    """
    known = option_fields(SearchOptions)
    given = {name: arguments[name] for name in known if arguments[name] is not None}
    for name, value in given.items():
        if isinstance(value, list):  # of an option that may be repeated
            given[name] = ", ".join(value)
        check_option(known[name], given[name])
    return given


def checked_search(arguments: jsonargparse.Namespace) -> SearchOptions:
    """Return the model's search options with those of the command line.

    Reads the model's config only, so that an error does not have to wait for torch and the model.

    Raises:
        ConfigError: An option is out of range, two contradict each other, or the model does not
            know a style or a forced word.
        ModelError: The model folder cannot be read.
    """
    from captioner.inference.folder import SHIPPED_MODEL, read_search
    from captioner.search.words import encode_search_words

    own, vocabulary = read_search((arguments.model or [SHIPPED_MODEL])[0])
    search = own.changed(**search_changes(arguments))
    encode_search_words(search, vocabulary)
    vocabulary.start(search.style)
    return search


def refuse_overwrite(path: Path, force: bool, *, new_folder: bool = False) -> None:
    """Check that an output file can be written.

    Args:
        path: The output file.
        force: Overwrite an existing file.
        new_folder: The file's folder will be created if it does not exist.

    Raises:
        ConfigError: ``path`` exists and ``--force`` was not given, it is a folder, or its parent
            folder does not exist.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file name")
    if not new_folder:
        require_parent(path)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; give --force to overwrite it, or another name")


def require_parent(path: Path) -> None:
    """Check that the folder exists in which a file or folder is to be created.

    Raises:
        ConfigError: It does not exist, or one of its parents is a file.
    """
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ConfigError(f"cannot write {path}: {above} is a file, not a folder")
    if above != path.absolute().parent:
        raise ConfigError(
            f"cannot write {path}: the folder {path.parent} does not exist; create it first "
            f"(mkdir -p {shlex.quote(str(path.parent))}), or give another name"
        )


@contextmanager
def output(path: Path | None) -> Iterator[IO[str]]:
    """Open standard output, or a file that is renamed to ``path`` once it is complete."""
    if path is None:
        yield sys.stdout
        return
    from captioner.files import atomic_open

    with atomic_open(path) as file:
        yield file


def warn(message: str) -> None:
    """Print one line to standard error."""
    from tqdm import tqdm

    tqdm.write(f"captioner: {message}", file=sys.stderr)
