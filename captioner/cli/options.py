"""What several commands share: the parser, options of the search, photos, output files."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import jsonargparse
from docstring_parser import parse_from_object

from captioner.config import SearchOptions
from captioner.errors import ConfigError, DataError


class Parser(jsonargparse.ArgumentParser):
    """A parser whose errors are one line; hyphens and underscores in options are the same."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise instead of printing the usage."""
        cause: BaseException | None = ex
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__ or cause.__context__
        text = str(cause) if cause is not None else _one_line(message)
        raise ConfigError(f"{text} (see {self.prog} --help)") from ex

    def parse(self, argv: Sequence[str]) -> jsonargparse.Namespace:
        """Parse arguments, whichever way the options are spelled."""
        return self.parse_args([self._respell(argument) for argument in argv])

    def _respell(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        known = self._option_string_actions
        for spelled in (name, name.replace("_", "-"), f"--{name[2:].replace('-', '_')}"):
            if name.startswith("--") and spelled in known:
                return f"{spelled}{equals}{value}"
        return argument


class ConfigFirst(Parser):
    """A parser whose leading argument, where it is no option, is the ``--config`` file."""

    def parse(self, argv: Sequence[str]) -> jsonargparse.Namespace:
        """Parse arguments, the file named or not."""
        named = bool(argv) and not argv[0].startswith("-")
        return super().parse(["--config", *argv] if named else argv)


def _one_line(message: str) -> str:
    """Jsonargparse's complaint about a value, in our words; other messages on one line."""
    message = " ".join(message.split())
    missing = re.search(r'Parser key "config": File does not exist: \'(.+)\'', message)
    if missing is not None:
        return f"{missing[1]} does not exist; give a YAML file with settings"
    named = re.search(r'Parser key "([\w.]+)".*?Expected a <class \'(int|float)\'>', message)
    given = re.search(r"(?:Got|Given) value: (\S+)", message)
    if named is None or given is None:
        listed = re.search(r'Parser key "([\w.]+)".*?Expected a <class \'list\'>', message)
        if listed is None or given is None:
            return message
        return f"--{listed[1].replace('_', '-')} is {given[1]}; give a list: [{given[1]}]"
    wanted = {"int": "a whole number", "float": "a number"}[named[2]]
    return f"--{named[1].replace('_', '-')} is {given[1]}; give {wanted}"


class _HelpFormatter(jsonargparse.DefaultHelpFormatter):
    """Help without the type and default of an option that has no default."""

    def _expand_help(self, action: Any) -> str:
        text = str(super()._expand_help(action))
        return re.sub(r" \((?:type: [^()]*, )?default: null\)| \(default: \[\]\)", "", text)


def new_parser(command: str, description: str, usage: str, kind: type[Parser] = Parser) -> Parser:
    """A parser for one subcommand; it is kept, for building one takes longer than parsing."""
    return kind(
        prog=f"captioner {command}",
        description=description,
        usage=f"captioner {command} {usage}",
        exit_on_error=True,
        allow_abbrev=False,  # a misspelled setting must not pass for another
        formatter_class=_HelpFormatter,
    )


def add_model_options(parser: Parser) -> None:
    """``--model``, ``--device``, ``--precision``, ``--batch-size``."""
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        help="model folder (default: the model that ships); given more than once, the models "
        "caption together: their probabilities are averaged",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--precision",
        default="auto",
        choices=["auto", "fp32", "bf16"],
        help="auto: bf16 where the hardware multiplies it natively",
    )
    parser.add_argument("--batch-size", type=int, default=32, help="photos captioned together")


SEARCH_GROUPS = {
    "search": (
        "beam_size", "num_captions", "length_penalty", "beam_groups", "diversity", "forced_words",
    ),
    "drawing": ("temperature", "top_k", "top_p", "seed"),
    "rules": ("min_length", "max_length", "block_ngrams", "banned_words", "guard_endings"),
}  # fmt: skip
"""The fields of ``SearchOptions`` as the help groups them."""


def add_yes_no(parser: Any, name: str, help: str) -> None:  # noqa: A002 - argparse's word
    """``--name`` and ``--no-name``; None where neither is given."""
    action = jsonargparse.ActionYesNo(yes_prefix="", no_prefix="no-")
    parser.add_argument(f"--{name}", action=action, default=None, help=help)


def add_search_options(parser: Parser) -> None:
    """Every field of ``SearchOptions``; unset ones stay as the model has them."""
    texts = {entry.arg_name: entry.description for entry in parse_from_object(SearchOptions).params}
    types = {field.name: str(field.type) for field in dataclasses.fields(SearchOptions)}
    for title, names in SEARCH_GROUPS.items():
        group = parser.add_argument_group(f"{title} (default: the model's own)")
        for name in names:
            text, spelled = " ".join((texts[name] or "").split()), name.replace("_", "-")
            if types[name] == "bool":
                add_yes_no(group, spelled, text)
            else:
                kind = {"int": int, "float": float}.get(types[name], str)
                group.add_argument(f"--{spelled}", type=kind | None, default=None, help=text)


def search_changes(arguments: jsonargparse.Namespace) -> dict[str, Any]:
    """The search options that were given on the command line."""
    names = [field.name for field in dataclasses.fields(SearchOptions)]
    return {name: arguments[name] for name in names if arguments[name] is not None}


def refuse_overwrite(path: Path, force: bool) -> None:
    """Stop before anything is computed when the output is already there.

    Raises:
        ConfigError: ``path`` exists and ``--force`` was not given, or it is a folder, or
            would lie in a file.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ConfigError(f"{path} would lie in {above}, which is a file; give another name")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; give --force to replace it, or another name")


def find_photos(given: Sequence[str], recursive: bool = False) -> tuple[list[Path], int]:
    """The photos that the arguments stand for, and how many arguments stand for none.

    Raises:
        ConfigError: Standard input was given twice.
    """
    from captioner.data.folders import find_images

    if given.count("-") > 1:
        raise ConfigError("standard input (-) was given more than once; give it once")
    photos: list[Path] = []
    failures = 0
    for argument in given:
        try:
            photos.extend(find_images([argument], recursive=recursive))
        except DataError as error:  # an empty folder: the others go on
            failures += 1
            warn(str(error))
    return photos, failures


def missing(photo: Path) -> bool:
    """Whether there is no such file; said at once, not when a model has been loaded."""
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
    """Standard output, or a file that appears under its name when it is complete."""
    if path is None:
        yield sys.stdout
        return
    from captioner.files import atomic_open

    with atomic_open(path) as file:
        yield file


def warn(message: str) -> None:
    """One line on standard error."""
    from tqdm import tqdm

    tqdm.write(f"captioner: {message}", file=sys.stderr)
