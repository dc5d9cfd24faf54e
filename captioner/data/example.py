"""A photo with its captions, the unit of data sets, training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from captioner.text.vocabulary import START

UNSPLIT = "all"
"""Split name for photos without a split."""

NO_ID = -(2**63)
"""Image id of photos from a source without ids."""


@dataclass(frozen=True)
class Example:
    """One photo with all its captions, so that a training step encodes each photo once."""

    image_id: int
    """Id of the photo in the source, or ``NO_ID``."""
    path: Path
    """Path of the photo's file. Before the photo is located on disk, this is its name in the
    source."""
    captions: tuple[str, ...]
    """All captions of the photo, as text."""
    style: str = ""
    """Style of the captions (see ``Vocabulary.start``). Empty for the default style."""
    source: int = 0
    """Index of the captions file that lists the photo, from 0. If several files list the photo,
    this is the first file."""
    split: str = UNSPLIT
    """The split that contains the photo: ``train``, ``val``, ``test`` or ``UNSPLIT``."""
    tokens: tuple[list[int], ...] = field(default=(), hash=False)
    """Word ids of each caption, followed by the end token. Truncated captions have no end token, so
    that the model does not learn to end a caption there. Empty until the captions are encoded."""
    start: int = START
    """Id of the start token for the photo's style."""
    repeat: int = 0
    """Index of this repetition of the photo within an epoch, from 0 (see ``data.repeats``)."""

    @property
    def key(self) -> str:
        """A text that identifies the photo and seeds its random choices.

        If an epoch contains the photo several times, each repetition has a different key.
        """
        return f"{self.image_id} {self.repeat}" if self.repeat else str(self.image_id)
