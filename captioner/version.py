"""The package version, for the build, ``captioner --version`` and the signatures of scores."""

__version__ = "0.2.0"
