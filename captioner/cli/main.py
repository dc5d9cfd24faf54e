"""The ``captioner`` command: finds the subcommand, runs it, turns errors into one line.

A subcommand is a `Command` in the module of its name, or of its first word. The module is imported
only when the command is run, so that ``captioner --help`` is fast.

Exit codes: 0 success, 1 some inputs failed (each is reported, the others are processed), 2 usage
error, 130 interrupted.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import io
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMANDS = {
    "caption": "caption photos and folders of photos",
    "alt": "suggest alternative texts for the images of a site",
    "apply": "write corrected captions into their photos",
    "attend": "show where the model looked for each word: figure, animation or web page",
    "serve": "run a web page and an HTTP API for captioning",
    "evaluate": "score captions against references",
    "calibrate": "fit the confidence of a model's captions",
    "train": "train a model",
    "export": "write a model as ONNX graphs, which run without torch",
    "prepare dataset": "convert captions from other formats to COCO",
    "prepare frequencies": "count document frequencies of n-grams for CIDEr-D",
    "prepare features": "compute the features of a frozen encoder once for all epochs",
    "info": "show a model's architecture, training data and scores",
    "push": "upload a model with its card to the Hugging Face hub",
}

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

GRACE = 5.0
"""Time to end by itself after SIGTERM (seconds)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the command line; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    if argv is None:
        _warn_of_other_code()
    group = [arguments.pop(0)] if arguments[:1] == ["prepare"] else []
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = [line for line in COMMANDS.items() if line[0].startswith("".join(group))]
        lines = [f"  captioner {name:<19} {text}\n" for name, text in listed]
        print(OVERVIEW.format(commands="".join(lines)))
        return OK if arguments else USAGE
    if arguments[0] == "--version":
        from captioner.version import __version__

        print(f"captioner {__version__} from {Path(__file__).parents[1]}")
        return OK
    command, rest = " ".join([*group, arguments[0]]), arguments[1:]
    if command not in COMMANDS:
        hint = f"Give one of {', '.join(COMMANDS)}."
        if similar := difflib.get_close_matches(command, COMMANDS, 1):
            hint = f"Did you mean `captioner {similar[0]}`?"
        elif Path(command).suffix or Path(command).exists():
            hint = f"Did you mean `captioner caption {shlex.join(arguments)}`?"
        return _fail(f"Unknown command {command!r}. {hint}", USAGE)
    with suppress(ValueError):  # in a thread
        _end_at_sigterm()
    debug = "--debug" in rest
    try:
        return _run(command, [argument for argument in rest if argument != "--debug"], debug)
    except BrokenPipeError:  # e.g. `captioner ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            raise
        return _report(error)


def _open_missing_streams() -> None:
    """Open the null device for standard streams that are missing, as under pythonw or ``>&-``.

    In their order, so that the null device also takes their numbers: otherwise the next file that
    is opened has number 1 or 2, and libraries that print would write into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _warn_of_other_code() -> None:
    """Warn if the current folder is a checkout with other code than the package that runs."""
    with suppress(OSError):  # a file that may not be read
        if Path("captioner", "cli", "main.py").is_file():
            from captioner.cli.checkout import other_code

            if warning := other_code(Path()):
                _fail(warning, OK)


def function_of(command: str) -> Any:
    """The `captioner.cli.arguments.Command` of a command, such as ``prepare features``."""
    name, *kind = command.split()
    module = importlib.import_module(f"captioner.cli.{name}")
    return getattr(module, *kind or [name])


def parser_of(command: str) -> Any:
    """The parser of a command."""
    return function_of(command).parser()


def _run(command: str, arguments: list[str], debug: bool) -> int:
    from captioner.extras import require_extra
    from captioner.memory import keep_freed_memory, memory_errors

    keep_freed_memory()
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")  # meant for developers, not for users
        if not any(word in ("-h", "--help") for word in arguments):
            require_extra(command)
        with memory_errors("give a smaller --batch-size or beam, or another --device"):
            code: int = function_of(command)(arguments)
    sys.stdout.flush()
    return code


def _report(error: BaseException) -> int:
    """Print an error that is meant for users, or raise it again; return the exit code."""
    from captioner.errors import CaptionerError, ConfigError

    if isinstance(error, CaptionerError):
        return _fail(str(error), USAGE if isinstance(error, ConfigError) else FAILED)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", FAILED)
    # Ctrl-C inside `threading.Condition.wait` may end in a RuntimeError about its lock.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        raise error
    return _fail("interrupted", INTERRUPTED)


def _fail(message: str, code: int) -> int:
    from captioner.messages import printable

    print(f"captioner: {printable(message, lines=True)}", file=sys.stderr)
    return code


@functools.cache
def _end_at_sigterm() -> None:
    """SIGTERM (kill, a batch system) does as Ctrl-C, and ends what does not end by itself.

    Ctrl-C reaches the program between two operations of Python, and waits for threads that read
    photos. The thread here sees the signal at once, whatever the others are decoding. A command
    with a handler of its own (train, serve) ends by itself.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch() -> None:
        """After a signal that no command handles itself, end what goes on for GRACE seconds."""
        ours = signal.default_int_handler
        while signal.SIGTERM not in os.read(reader, 64) or signal.getsignal(signal.SIGTERM) != ours:
            pass
        time.sleep(GRACE)
        if signal.getsignal(signal.SIGTERM) is ours:
            with suppress(OSError):  # standard error may be closed
                os.write(2, b"captioner: interrupted\n")
            os._exit(INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()


OVERVIEW = """\
Caption photos and show where the model looked for each word.

{commands}
captioner COMMAND --help   show the options of a command
captioner COMMAND --debug  show the traceback of an error
captioner --version        show the version"""
