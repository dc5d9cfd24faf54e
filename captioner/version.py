"""The version of the package, for hatchling, ``captioner --version`` and signatures of scores."""

__version__ = "0.2.0"
