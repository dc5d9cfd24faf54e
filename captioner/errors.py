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
from collections.abc import Callable
from functools import partial
from typing import Any


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
