"""Exceptions raised by captioner.

    CaptionerError
    ├── ConfigError        an invalid setting, or two settings that conflict
    ├── DataError          unusable annotations, captions or folders
    │   ├── ImageError     an image that cannot be read
    │   │   ├── NotAnImageError    not an image, or an unsupported format
    │   │   └── LargeImageError    too many pixels or bytes
    │   └── ProgramError   an external program (METEOR, SPICE) that failed
    ├── ModelError         a model folder that cannot be loaded or saved
    └── CheckpointError    a training run that cannot be resumed or saved

Each message is one line with the problem and a remedy. If an error ends a command, the command line
prints only the message and exits with code 2. The option ``--debug`` adds a traceback.
"""


class CaptionerError(Exception):
    """The base class of all exceptions that captioner raises on purpose."""


class ConfigError(CaptionerError):
    """A setting is invalid, or two settings conflict."""


class DataError(CaptionerError):
    """Annotations, captions or folders cannot be used."""


class ImageError(DataError):
    """An image cannot be read. Other images are not affected."""


class NotAnImageError(ImageError):
    """The input is not an image, or its format is not supported."""


class LargeImageError(ImageError):
    """An image has too many pixels or bytes."""


class ProgramError(DataError):
    """An external program (METEOR, SPICE) failed. Other metrics are not affected."""


class ModelError(CaptionerError):
    """A model folder cannot be loaded or saved."""


class CheckpointError(CaptionerError):
    """A training run cannot be resumed, or its state cannot be saved."""
