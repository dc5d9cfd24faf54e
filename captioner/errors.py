"""Every error that captioner raises on purpose.

    CaptionerError
    ├── ConfigError        a setting is wrong, or two settings contradict each other
    │   └── OptionError    the same, with names that each interface spells its own way
    ├── DataError          annotations, captions or folders that cannot be used
    │   ├── ImageError     one photo that cannot be read
    │   │   ├── NotAnImageError    it is something else, or of a kind that is not read
    │   │   └── LargeImageError    it has more pixels or bytes than are allowed
    │   └── ProgramError   a program of another maker (METEOR, SPICE) that failed
    ├── ModelError         a model folder that cannot be loaded or saved
    └── CheckpointError    a training run that cannot be taken up again or saved

Each message is one line: what was given, what is allowed, what to do. The command line prints the
message alone and exits with 1 or 2; a traceback appears only with ``--debug``.
"""

from collections.abc import Callable


class CaptionerError(Exception):
    """Base class: catch this one to catch everything that captioner raises on purpose."""


class ConfigError(CaptionerError):
    """A setting is wrong, or two settings contradict each other."""


class OptionError(ConfigError):
    """An option is out of range, or options contradict each other.

    The message names options in braces (``"{beam_size} is {given}; give 1 or more"``). Python and
    HTTP use these names as they are; the command line changes them by `spelled`.
    """

    def __init__(self, message: str, **values: object) -> None:
        """Take the message and the values in it; every other name in braces is an option."""
        self._message, self._values = message, values
        super().__init__(self.spelled(str))

    def spelled(self, spell: Callable[[str], str]) -> str:
        """The message, with every option's name changed by ``spell``."""
        return self._message.format_map(_Names(self._values, spell))


class _Names(dict[str, object]):
    def __init__(self, values: dict[str, object], spell: Callable[[str], str]) -> None:
        super().__init__(values)
        self._spell = spell

    def __missing__(self, name: str) -> str:
        return self._spell(name)


class DataError(CaptionerError):
    """Annotations, captions or folders cannot be used."""


class ImageError(DataError):
    """One photo cannot be read; the others can go on."""


class NotAnImageError(ImageError):
    """What was given is no picture, or one of a kind that is not read."""


class LargeImageError(ImageError):
    """A picture has more pixels or bytes than are allowed."""


class ProgramError(DataError):
    """A program of another maker (METEOR, SPICE) failed; the other metrics can go on."""

    def __init__(self, program: str, message: str) -> None:
        """Name the program."""
        super().__init__(message)
        self.program = program


class ModelError(CaptionerError):
    """A model folder cannot be loaded or saved."""


class CheckpointError(CaptionerError):
    """A training run cannot be taken up again, or its state cannot be saved."""
