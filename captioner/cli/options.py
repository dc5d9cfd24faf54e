"""Shared by several commands: the parser, search and model options, photos, output files."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import jsonargparse

from captioner.cli.main import flag
from captioner.config import SearchOptions
from captioner.errors import ConfigError, DataError
from captioner.option_fields import check_option, option_fields


class Parser(jsonargparse.ArgumentParser):
    """A parser with one-line errors; options may have hyphens or underscores."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error instead of printing the usage."""
        cause: BaseException | None = ex
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__ or cause.__context__
        text = str(cause) if cause is not None else _one_line(message)
        raise ConfigError(f"{text} (see {self.prog} --help)") from ex

    def parse(self, argv: Sequence[str]) -> jsonargparse.Namespace:
        """Parse arguments with hyphens or underscores in their options."""
        return self.parse_args([self._respell(argument) for argument in argv])

    def _respell(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        known = self._option_string_actions
        for spelled in (name, name.replace("_", "-"), f"--{name[2:].replace('-', '_')}"):
            if name.startswith("--") and spelled in known:
                return f"{spelled}{equals}{value}"
        return argument


class ConfigFirst(Parser):
    """A parser that takes a leading argument without ``--`` as the ``--config`` file."""

    def parse(self, argv: Sequence[str]) -> jsonargparse.Namespace:
        """Parse arguments, with or without ``--config`` before the file."""
        named = bool(argv) and not argv[0].startswith("-")
        return super().parse(["--config", *argv] if named else argv)


def _one_line(message: str) -> str:
    """Rewrite jsonargparse's messages about values and put all others on one line."""
    message = " ".join(message.split())
    missing = re.search(r'Parser key "config": File does not exist: \'(.+)\'', message)
    if missing is not None:
        return f"{missing[1]} does not exist; give a YAML config file"
    expected = r"Expected a (?:<class '(int|float|list)'>|typing\.Literal\[(.+?)\])"
    wrong = re.search(rf'Parser key "([\w.]+)".*?{expected}', message)
    given = re.search(r"(?:Got|Given) value: (\S+)", message)
    if wrong is None or given is None:
        return message
    key, kind, choices = wrong.groups()
    kinds = {"int": "an integer", "float": "a number", "list": f"a list: [{given[1]}]"}
    name = key if "." in key else flag(key)  # a name with a dot may come from a config file
    return f"{name} is {given[1]}; give {kinds[kind] if kind else choices}"


class _HelpFormatter(jsonargparse.DefaultHelpFormatter):
    """Omits type and default of options that are off or empty by default."""

    def _expand_help(self, action: Any) -> str:
        text = str(super()._expand_help(action))
        return re.sub(
            r" \((?:type: [^()]*, )?default: null\)| \(default: (?:\[\]|False)\)", "", text
        )


def new_parser(command: str, description: str, usage: str, kind: type[Parser] = Parser) -> Parser:
    """Create the parser of a subcommand."""
    return kind(
        prog=f"captioner {command}",
        description=description,
        usage=f"captioner {command} {usage}",
        exit_on_error=True,
        allow_abbrev=False,  # a typo must not select another option
        formatter_class=_HelpFormatter,
    )


def add_model_options(parser: Parser) -> None:
    """``--model``, ``--device``, ``--precision``, ``--batch-size``."""
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        help="model folder (default: the shipped model); repeat to average the probabilities of "
        "several models",
    )
    parser.add_argument("--device", default="auto", help=DEVICE_HELP)
    parser.add_argument(
        "--precision",
        default="auto",
        choices=["auto", "fp32", "bf16"],
        help="auto: bf16 if the hardware supports it natively, else fp32",
    )
    parser.add_argument("--batch-size", type=int, default=32, help="number of photos per batch")


DEVICE_HELP = "auto, cpu, cuda, cuda:1, ..."


SEARCH_GROUPS = {
    "beam search": (
        "beam_size", "num_captions", "length_penalty", "beam_groups", "diversity", "forced_words",
    ),
    "sampling": ("temperature", "top_k", "top_p", "seed"),
    "constraints": (
        "min_length", "max_length", "block_ngrams", "banned_words", "guard_endings", "style",
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
        group = parser.add_argument_group(f"{title} (default: the model's own)")
        for name in names:
            field = known[name]
            if field.type is bool:
                add_yes_no(group, flag(name).removeprefix("--"), field.help)
            else:
                kind = field.type if field.type in (int, float) else str
                group.add_argument(flag(name), type=kind | None, default=None, help=field.help)


def search_changes(arguments: jsonargparse.Namespace) -> dict[str, Any]:
    """Return the search options that were given on the command line.

    Raises:
        ConfigError: One of them is out of range.
    """
    known = option_fields(SearchOptions)
    given = {name: arguments[name] for name in known if arguments[name] is not None}
    for name, value in given.items():
        check_option(known[name], value)
    return given


def checked_search(arguments: jsonargparse.Namespace) -> SearchOptions:
    """Return the model's search options with those of the command line.

    Reads the model's config only, so that an error does not have to wait for torch and the model.

    Raises:
        ConfigError: An option is out of range, two contradict each other, or the model does not
            know a style or a forced word.
        ModelError: The model folder cannot be read.
    """
    from captioner.decoding.words import encode_search_words
    from captioner.model_config import SHIPPED_MODEL, read_search

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
        new_folder: The file's folder is an output too, and is created.

    Raises:
        ConfigError: ``path`` exists and ``--force`` was not given, it is a folder, or its parent
            folder does not exist.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file name")
    require_parent(path.parent if new_folder else path)
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


def find_photos(given: Sequence[str], recursive: bool = False) -> tuple[list[Path], int]:
    """Return the photos in files and folders, and the number of arguments without any.

    Raises:
        ConfigError: Standard input was given twice.
    """
    from captioner.data.folders import find_images

    if given.count("-") > 1:
        raise ConfigError("standard input (-) is given more than once; give it once")
    photos: list[Path] = []
    failures = 0
    for argument in given:
        try:
            photos.extend(find_images([argument], recursive=recursive))
        except DataError as error:  # an empty folder: continue with the others
            failures += 1
            warn(str(error))
    return photos, failures


def missing(photo: Path) -> bool:
    """Whether a file does not exist; warns now instead of after a model was loaded."""
    if str(photo) == "-" or photo.exists():
        return False
    from captioner.data.images import open_image

    try:
        open_image(photo)
    except DataError as error:
        warn(str(error))
    return True


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
