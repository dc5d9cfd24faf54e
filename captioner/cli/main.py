"""The ``captioner`` command, which runs a subcommand and reports errors in one line.

Each subcommand is a `Command` in the module of the same name. ``prepare features`` is in the module
``prepare``. A module is imported only when its command runs, so that ``captioner --help`` is fast.

Scripts rely on the exit codes, which docs/captioning.md describes for users.
"""

from __future__ import annotations

import difflib
import errno
import functools
import importlib
import io
import os
import shlex
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMANDS = {
    "caption": "caption photos and folders of photos",
    "alt": "suggest alternative texts for the images of a web site",
    "apply": "write corrected captions into their photos",
    "attend": "show where the model looked for each word: figure, animation or web page",
    "serve": "run a web page and an HTTP API for captioning",
    "evaluate": "score captions against reference captions",
    "calibrate": "fit the confidence of a model's captions to data",
    "train": "train a model",
    "export": "write a model as ONNX graphs, which run without PyTorch",
    "prepare dataset": "convert captions from other formats to COCO's format",
    "prepare frequencies": "count in how many photos each phrase occurs, for CIDEr-D",
    "prepare features": "compute the features of a frozen encoder once for all epochs",
    "info": "show a model's architecture, training data and scores",
    "push": "upload a model with its card to the Hugging Face hub",
}

OK, SOME_FAILED, NOT_DONE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes. 0: everything is done. 1: the command finished, but some inputs failed, and each of
them was reported. 2: the command did not do its work. 130: the command was interrupted."""

GRACE = 5.0
"""Seconds that a command may take to end after SIGTERM."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    Args:
        argv: The arguments (default: the arguments on the command line).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    if argv is None:
        _warn_of_other_code()
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    group = [arguments.pop(0)] if arguments[:1] == ["prepare"] else []
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = [line for line in COMMANDS.items() if line[0].startswith("".join(group))]
        lines = [f"  captioner {name:<19} {text}\n" for name, text in listed]
        print(OVERVIEW.format(commands="".join(lines)))
        return OK if arguments else NOT_DONE
    if arguments[0] == "--version":
        from captioner.version import __version__

        print(f"captioner {__version__} from {Path(__file__).parents[1]}")
        return OK
    command, rest = " ".join([*group, arguments[0]]), arguments[1:]
    if command not in COMMANDS:
        hint = f"use {', '.join(COMMANDS)}"
        elsewhere = ["apply --remove"] if command == "remove" else []
        if similar := elsewhere or difflib.get_close_matches(command, COMMANDS, 1):
            hint = f"did you mean captioner {similar[0]}?"
        elif Path(command).suffix or Path(command).exists():
            hint = f"did you mean captioner caption {shlex.join(arguments)}?"
        return _fail(f"{command!r} is not a command; {hint}", NOT_DONE)
    with suppress(ValueError):  # in a thread
        _end_at_sigterm()
    debug = "--debug" in rest
    try:
        return _run(command, [argument for argument in rest if argument != "--debug"], debug)
    except BrokenPipeError:  # e.g. `captioner ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (Exception, KeyboardInterrupt) as error:
        return _report(error, debug)


def _open_missing_streams() -> None:
    """Open the null device for each standard stream that is closed, as under pythonw or ``>&-``.

    The streams are opened in order, so that they get file descriptors 0 to 2. Otherwise, the next
    opened file would get descriptor 1 or 2, and libraries that print would write into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            null: Any = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115
            null.buffer.raw.name = f"<{name}>"  # for messages about the stream
            setattr(sys, name, null)


def _warn_of_other_code() -> None:
    """Warn if the current folder is a checkout with different code than the running package."""
    with suppress(OSError):  # a file that may not be read
        if Path("captioner", "cli", "main.py").is_file():
            from captioner.cli.checkout import other_code

            if warning := other_code(Path()):
                _fail(warning, OK)


def function_of(command: str) -> Any:
    """Return the `captioner.cli.arguments.Command` of a command, such as ``prepare features``."""
    name, *kind = command.split()
    module = importlib.import_module(f"captioner.cli.{name}")
    return getattr(module, *kind or [name])


def parser_of(command: str) -> Any:
    """Return the parser of a command."""
    return function_of(command).parser()


def _run(command: str, arguments: list[str], debug: bool) -> int:
    """Run a command and return its exit code."""
    from captioner.extras import require_extra
    from captioner.memory import keep_freed_memory, memory_errors

    keep_freed_memory()
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")  # meant for developers, not for users
        if not any(word in ("-h", "--help") for word in arguments):
            require_extra(command)
        with memory_errors("use a smaller --batch-size or --beam-size, or another --device"):
            code: int = function_of(command)(arguments)
    sys.stdout.flush()
    return code


def _report(error: BaseException, debug: bool) -> int:
    """Print an error, and return the exit code.

    The error is printed in one line if it is meant for users. Any other error is a mistake in the
    program and is printed with its traceback, as every error is with ``debug``.
    """
    from captioner.errors import CaptionerError

    code = NOT_DONE
    if isinstance(error, CaptionerError):
        message = str(error)
    elif isinstance(error, OSError):
        message = error.strerror or str(error)
        if error.filename:
            advice = {
                errno.ENOSPC: "free some disk space",
                errno.ENAMETOOLONG: "use a shorter name",
            }
            remedy = advice.get(error.errno or 0, "check the name and your permissions")
            message = f"{error.filename} cannot be read or written ({message}); {remedy}"
    elif _is_interrupt(error):
        message, code = "interrupted", INTERRUPTED
    else:
        debug = True
    if debug:
        traceback.print_exception(error)
        return code
    return _fail(message, code)


def _is_interrupt(error: BaseException) -> bool:
    """Return whether Ctrl-C or SIGTERM caused an error, directly or through other errors.

    For example, Ctrl-C inside `threading.Condition.wait` may end in a RuntimeError about its lock.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _fail(message: str, code: int) -> int:
    """Print an error message and return the exit code."""
    from captioner.messages import printable

    print(f"captioner: {printable(message, lines=True)}", file=sys.stderr)
    return code


@functools.cache
def _end_at_sigterm() -> None:
    """Handle SIGTERM (from kill or a batch system) like Ctrl-C, but exit after a few seconds.

    If the program is still running GRACE seconds after the signal, it is ended.

    Python handles Ctrl-C only between two of its operations, and waits for threads that read
    photos. The thread started here sees the signal at once, even while other threads decode photos.
    Commands with their own handler (train, serve) end on their own.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch() -> None:
        """Wait for SIGTERM, and exit the process if it is still running GRACE seconds later.

        Commands that handle SIGTERM themselves are not affected.
        """
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
captioner COMMAND --debug  show the traceback if an error occurs
captioner --version        show the version

Exit codes: 0 if everything is done, 1 if the command finished but some inputs failed, 2 if the
command did not do its work, 130 if it was interrupted."""
