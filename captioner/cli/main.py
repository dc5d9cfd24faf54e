"""The ``captioner`` command: finds the subcommand, runs it, turns errors into one line.

A subcommand NAME is a function ``NAME(argv) -> exit code`` of a module of this folder; beside it,
``NAME_parser()`` returns its parser. The module is imported only when needed, so that ``captioner
--help`` is fast.

Exit codes: 0 success, 1 some inputs failed (each is reported, the others are processed), 2 usage
error, 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

COMMANDS = {
    "caption": "caption photos and folders of photos",
    "attend": "show where the model looked for each word: figure, animation or web page",
    "serve": "run a web page and an HTTP API for captioning",
    "evaluate": "score captions against references",
    "calibrate": "fit the confidence of a model's captions",
    "train": "train a model",
    "export": "write a model as ONNX graphs, which run without torch",
    "prepare": "prepare data for training and evaluation",
    "info": "show a model's architecture, training data and scores",
    "push": "upload a model with its card to the Hugging Face hub",
}

MODULES = {"calibrate": "evaluate", "export": "models", "info": "models", "push": "models"}
"""The modules that are not named for their command."""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None: the command line's.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return OK if arguments else USAGE
    if arguments[0] == "--version":
        from captioner.version import __version__

        print(f"captioner {__version__}")
        return OK
    command = arguments[0]
    if command not in COMMANDS:
        return _fail(f"Unknown command {command!r}. {_suggestion(arguments)}", USAGE)
    return _run(command, arguments[1:])


def module_of(command: str) -> ModuleType:
    """The module of a subcommand."""
    return importlib.import_module(f"captioner.cli.{MODULES.get(command, command)}")


def parser_of(command: str) -> Any:
    """The parser of a subcommand, such as ``caption`` or ``prepare shards``."""
    name, _, kind = command.partition(" ")
    return getattr(module_of(name), f"{kind or name}_parser")()


def _suggestion(arguments: list[str]) -> str:
    """What the user probably meant by an unknown command."""
    similar = difflib.get_close_matches(arguments[0], COMMANDS, 1)
    if similar:
        return f"Did you mean `captioner {similar[0]}`?"
    if Path(arguments[0]).suffix or Path(arguments[0]).exists():
        return f"Did you mean `captioner caption {shlex.join(arguments)}`?"
    return f"Give one of {', '.join(COMMANDS)}."


def _run(command: str, arguments: list[str]) -> int:
    from captioner.errors import CaptionerError, ConfigError, OptionError
    from captioner.hardware import keep_freed_memory, require_extra

    keep_freed_memory()
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")  # meant for developers, not for users
            if not any(word.partition("=")[0] in ("-h", "--help") for word in arguments):
                require_extra(command)
            code: int = getattr(module_of(command), command)(arguments)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # e.g. `captioner ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (KeyboardInterrupt, CaptionerError, OSError) as error:
        if debug:
            raise
        if isinstance(error, KeyboardInterrupt):
            return _fail("interrupted", INTERRUPTED)
        if isinstance(error, OSError):
            where = f"{error.filename}: " if error.filename else ""
            return _fail(f"{where}{error.strerror or error}", FAILED)
        message = str(error)
        if isinstance(error, OptionError):
            message = error.spelled(lambda name: f"--{name.replace('_', '-')}")
        return _fail(message, USAGE if isinstance(error, ConfigError) else FAILED)
    except Exception as error:
        # Ctrl-C inside `threading.Condition.wait` may end in a RuntimeError about its lock.
        if debug or not _was_interrupted(error):
            raise
        return _fail("interrupted", INTERRUPTED)


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether an exception was raised while a KeyboardInterrupt was handled."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _fail(message: str, code: int) -> int:
    print(f"captioner: {message}", file=sys.stderr)
    return code


def _overview() -> str:
    lines = [f"  captioner {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "Caption photos and show where the model looked for each word.",
            "",
            *lines,
            "",
            "captioner COMMAND --help   show the options of a command",
            "captioner COMMAND --debug  show the traceback of an error",
            "captioner --version        show the version",
        ]
    )
