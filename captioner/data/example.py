"""A photo with its captions, as data sets hold it and as training and evaluation read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from captioner.text.vocabulary import START

UNSPLIT = "all"
"""Split name for photos without a split."""

NO_ID = -(2**63)
"""Image id of a photo whose source does not number its photos."""


@dataclass(frozen=True)
class Example:
    """One photo with all its captions, so that a training step encodes each photo once."""

    image_id: int
    """Id in the source, or ``NO_ID``."""
    path: Path
    """The photo's file; until the photo has been located on disk, its name in the source."""
    captions: tuple[str, ...]
    style: str = ""
    """See ``Vocabulary.start``."""
    source: int = 0
    """Index of the captions file, in the order given; of several that list the photo, the first."""
    split: str = UNSPLIT
    """``train``, ``val``, ``test`` or ``UNSPLIT``."""
    tokens: tuple[list[int], ...] = field(default=(), hash=False)
    """Word ids of each caption, then the end token; truncated captions have no end token, so that
    truncation is not learned as an ending. Empty until the captions are encoded."""
    start: int = START
    """Start token of the photo's style."""
    repeat: int = 0
    """Which of the photo's uses in an epoch this is, from 0 (see ``data.repeats``)."""

    @property
    def key(self) -> str:
        """Text that the photo's random choices depend on; it differs between uses in an epoch."""
        return f"{self.image_id} {self.repeat}" if self.repeat else str(self.image_id)
