"""The ``captioner`` command: finds the subcommand, runs it, turns errors into one line.

A subcommand is a module of this folder with ``main(argv) -> exit code``; it is imported only when
it is asked for, so that ``captioner --help`` answers at once.

Exit codes: 0 fine, 1 some inputs failed (the rest is done, the failures are named), 2 wrong usage,
130 interrupted.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence

COMMANDS = {
    "caption": "caption photos and folders of photos",
    "attend": "draw where the model looked for every word",
    "serve": "serve a page that captions photos, and an HTTP interface for programs",
    "evaluate": "score captions against references",
    "train": "train a model",
    "prepare": "make what training and evaluation read: data sets, features, shards, frequencies",
    "info": "tell what a model is, where it was trained and how it scores",
}

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None: the command line's.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show is no failure
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return OK if arguments else USAGE
    if arguments[0] == "--version":
        from captioner import __version__

        print(f"captioner {__version__}")
        return OK
    command = arguments[0]
    if command not in COMMANDS:
        return _fail(f"{command!r} is no command; give one of {', '.join(COMMANDS)}", USAGE)
    return _run(command, arguments[1:])


def _run(command: str, arguments: list[str]) -> int:
    from captioner.errors import CaptionerError, ConfigError
    from captioner.hardware import keep_freed_memory

    keep_freed_memory()
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")  # libraries' notes to programmers, not to users
            module = importlib.import_module(f"captioner.cli.{command}")
            code: int = module.main(arguments)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # the reader of our output left, e.g. `| head`
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
        return _fail(str(error), USAGE if isinstance(error, ConfigError) else FAILED)


def _fail(message: str, code: int) -> int:
    print(f"captioner: {message}", file=sys.stderr)
    return code


def _overview() -> str:
    lines = [f"  captioner {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "Captions photos and shows where it looked.",
            "",
            *lines,
            "",
            "captioner COMMAND --help tells a command's options; --debug shows a traceback when "
            "one fails;",
            "captioner --version tells the version.",
        ]
    )
