"""Exceptions raised by captioner.

    CaptionerError
    ├── ConfigError        an invalid setting, or conflicting settings
    │   └── OptionError    the same, with option names that each interface spells its own way
    ├── DataError          unusable annotations, captions or folders
    │   ├── ImageError     an image that cannot be read
    │   │   ├── NotAnImageError    not an image, or an unsupported format
    │   │   └── LargeImageError    too many pixels or bytes
    │   └── ProgramError   an external program (METEOR, SPICE) that failed
    ├── ModelError         a model folder that cannot be loaded or saved
    ├── CheckpointError    a training run that cannot be resumed or saved
    └── ServerError        a request to captioner serve that failed

Each message is one line: what was given, what is allowed, what to do. The command line prints the
message alone and exits with 1 or 2; ``--debug`` adds a traceback.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, halves of surrogate pairs, and what changes the direction of text."""


class CaptionerError(Exception):
    """Base class of all exceptions that captioner raises on purpose."""


class ConfigError(CaptionerError):
    """A setting is invalid, or settings conflict."""


class OptionError(ConfigError):
    """An option is out of range, or options contradict each other.

    The message names options in braces (``"{beam_size} is {given}; give 1 or more"``). Python and
    HTTP use these names as they are; the command line changes them by `spelled`.
    """

    def __init__(self, message: str, **values: object) -> None:
        """Take the message and the values in it; every other name in braces is an option."""
        self._message, self._values = message, values
        super().__init__(self.spelled(str))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and its values: pools return errors of other processes."""
        values: Any = self._values
        return partial(type(self), **values), (self._message,)

    def spelled(self, spell: Callable[[str], str]) -> str:
        """The message, with every option's name changed by ``spell``."""
        options = {name: spell(name) for name in re.findall(r"\{(\w+)", self._message)}
        return self._message.format(**options | self._values)


class DataError(CaptionerError):
    """Annotations, captions or folders cannot be used."""


class ImageError(DataError):
    """An image cannot be read; the others are not affected."""


class NotAnImageError(ImageError):
    """The input is not an image, or its format is not supported."""


class LargeImageError(ImageError):
    """An image has too many pixels or bytes."""


class ProgramError(DataError):
    """An external program (METEOR, SPICE) failed; other metrics are not affected."""


class ModelError(CaptionerError):
    """A model folder cannot be loaded or saved."""


class CheckpointError(CaptionerError):
    """A training run cannot be resumed, or its state cannot be saved."""


class ServerError(CaptionerError):
    """A request to ``captioner serve`` failed: the server refused it, or could not be reached."""

    def __init__(self, message: str, status: int | None, retry_after: float | None = None) -> None:
        """Take the server's message, one line.

        ``status`` is that of HTTP, None if there was no response; ``retry_after`` the seconds after
        which the server asks to try again, if it does.
        """
        super().__init__(message)
        self.status, self.retry_after = status, retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all three arguments: pools return errors of other processes."""
        return type(self), (str(self), self.status, self.retry_after)


def counted(count: int, noun: str) -> str:
    """``1 part`` or ``2,000 parts``, for messages."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def clock(seconds: float) -> str:
    """A time as ``00:01:05.000``, as in WebVTT."""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds / 1000:06.3f}"


def either(names: Iterable[object]) -> str:
    """``a, b or c``, for messages."""
    *most, last = map(str, names)
    return f"{', '.join(most)} or {last}" if most else last


def first_of(names: Sequence[object]) -> str:
    """``a``, or of several ``a (and 2 more)``, for messages."""
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else str(names[0])


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its class if it has no text, for messages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip()


def printable(text: str, *, lines: bool = False) -> str:
    """A text whose control characters, such as file names may have, are escaped.

    With ``lines``, ends of lines are kept.
    """
    return _CONTROLS.sub(lambda c: c[0] if lines and c[0] == "\n" else ascii(c[0])[1:-1], text)
