"""Rows of the output: a photo with its captions as JSON data, in every output format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from captioner.caption_types import Caption
from captioner.text.sentence import as_sentence

Name = str | int
"""The name of a photo in the output: its path, or its image id in COCO results."""

Row = dict[str, Any]
"""``{"image": name, "captions": [...]}``, or ``{"image": name, "error": message}`` if the photo
failed. JSON adds an empty list of captions to the row of a failed photo. Rows of videos also have
``start`` and ``end`` in seconds, unless the video failed. Rows kept from an existing file have
``image`` (the photo's name or None), ``text`` (the caption) and ``kept`` (the original row)."""


class Wording(NamedTuple):
    """Options of ``captioner caption`` for the text of captions, and for unsure captions."""

    min_confidence: float | None = None
    """The confidence (0 to 1) below which a caption is unsure. If None, no caption is unsure."""
    if_unsure: Literal["mark", "skip", "hedge"] | None = None
    """Treatment of unsure captions. If None, they are marked."""
    sentence_case: bool = False
    """Begin captions with a capital letter and end them with a full stop."""

    @property
    def marks(self) -> bool:
        """True if each caption gets a field ``unsure``, true for a confidence that is too low."""
        return self.min_confidence is not None and self.if_unsure in (None, "mark")


def make_row(name: Name, captions: Sequence[Caption], wording: Wording) -> Row:
    """Return the row of a photo: its name and captions as JSON data.

    If the captions are skipped because their confidence is too low, the row contains no captions.
    ``wording`` sets the spelling of captions and the treatment of unsure captions.
    """
    least = wording.min_confidence
    entries = [
        caption.to_dict(min_confidence=least if wording.marks else None) for caption in captions
    ]
    if least is not None and wording.if_unsure == "hedge":
        entries[0]["text"] = captions[0].hedged(least)
    if least is not None and wording.if_unsure == "skip" and captions[0].unsure(least):
        entries = []
    if wording.sentence_case:
        for one in entries:
            one["text"] = as_sentence(one["text"])
    return {"image": name, "captions": entries}
