"""Attention on phrases: how much of the attention is in the boxes that people drew for a phrase.

    words      A black dog   runs in   the snow
    phrases    [0, 3, "1"]             [5, 7, "2"]
    boxes      for "1"                 for "2"          left, top, right, bottom in pixels
    measured   black dog               snow             mean attention map of the content words

The captions were written by people and come from a file. The model explains these captions instead
of its own. Two things are not measured: phrases without content words (`captioner.text.content`),
and captions with words outside the model's vocabulary. `captioner.evaluation.grounding` defines the
measures and the baselines. For a phrase, the union of its boxes replaces the object mask.

The file can be made from Flickr30k Entities (Plummer et al. 2015, arXiv:1505.04870). It is a JSON
object that maps each photo's file name to an entry like this:

    {"width": 500, "height": 399, "boxes": {"1": [[216, 193, 419, 334]]},
     "captions": [{"words": "A black dog runs in the snow", "phrases": [[0, 3, "1"]]}]}

Boxes are in pixels of the stated width and height: left, top, right and bottom. The photo itself
may have a different size or aspect ratio, because only fractions of width and height count. Words
are separated by spaces. A phrase consists of three values: the index of its first word, the index
after its last word, and the key of its boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from captioner.caption_types import Caption
from captioner.data.coco import read_json
from captioner.data.images import open_image
from captioner.data.reading import photo_bar, read_batches
from captioner.errors import DataError, ImageError
from captioner.evaluation.grounding import Array, Grounding, Marked, Target
from captioner.evaluation.options import OnError, raise_error
from captioner.inference.captioner import Captioner
from captioner.inference.engine import Prepared
from captioner.text.content import content_stems

Phrase = tuple[int, int, str]
"""A phrase: index of its first word, index after its last word, and key of its boxes."""


@dataclass(frozen=True)
class PhrasedPhoto:
    """A photo with its captions, their phrases, and the boxes of the phrases."""

    width: int
    """Width of the photo to which the boxes refer (pixels)."""
    height: int
    """Height of the photo to which the boxes refer (pixels)."""
    boxes: Mapping[str, Sequence[Sequence[int]]]
    """The boxes of each phrase by key: left, top, right and bottom in pixels."""
    captions: Sequence[tuple[Sequence[str], Sequence[Phrase]]]
    """The words of each caption, and its phrases."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PhrasedPhoto:
        """Check a photo's entry in a phrases file, and return the photo.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: The entry is invalid.
        """
        width, height, boxes = data["width"], data["height"], data["boxes"]
        for key, of_phrase in boxes.items():
            for left, top, right, bottom in of_phrase:
                whole = all(type(side) is int for side in (left, top, right, bottom))
                if not (whole and 0 <= left < right <= width and 0 <= top < bottom <= height):
                    raise ValueError(f"a box of phrase {key!r} is not inside the photo")
        captions = [(one["words"].split(), one["phrases"]) for one in data["captions"]]
        for words, phrases in captions:
            for start, stop, _ in phrases:
                if not 0 <= start < stop <= len(words):
                    raise ValueError(f"a phrase covers words {start} to {stop} of {len(words)}")
        return cls(width, height, boxes, captions)

    def labels(self, key: str) -> Array | None:
        """Label the pixels that are inside a phrase's boxes.

        ``key`` identifies the phrase's boxes in ``boxes``.

        Returns:
            Labels of the pixels, (H, W), 1 inside the boxes and 0 elsewhere, or None if the phrase
            has no boxes.
        """
        if not self.boxes.get(key):
            return None
        labels = np.zeros((self.height, self.width))
        for left, top, right, bottom in self.boxes[key]:
            labels[top:bottom, left:right] = 1
        return labels


def read_phrases(path: str | Path) -> dict[str, PhrasedPhoto]:
    """Read a phrases file, and return its photos by file name.

    Raises:
        DataError: The file is missing, or an entry is invalid.
    """
    found = {}
    for name, photo in read_json(Path(path)).items():
        try:
            found[name] = PhrasedPhoto.from_dict(photo)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise DataError(
                f"{path}: the entry of photo {name!r:.60} is invalid ({error!r:.100}); use a "
                "phrases file (see docs/evaluation.md)"
            ) from error
    return found


def measure_phrases(
    model: Captioner,
    photos: Mapping[Path, PhrasedPhoto],
    style: str = "",
    *,
    batch_size: int = 32,
    on_error: OnError = raise_error,
    progress: bool = False,
) -> dict[str, Any]:
    """Measure how much attention is in the boxes of phrases, for a model that reads given captions.

    The model explains each caption: it computes the attention map of every word as if it had
    written the caption itself.

    Args:
        model: The model that explains the captions.
        photos: Photos with captions, phrases and boxes, by path.
        style: Style in which the model explains the captions.
        batch_size: Number of photos in a batch.
        on_error: Called with the error of each photo that cannot be read and is left out.
        progress: Show a progress bar.

    Returns:
        The result of `Grounding.summary` for ``phrases``, with two more counts. ``captions`` counts
        the explained captions, and ``captions_with_unknown_words`` the captions that were left out.

        A phrase is not measured for one of these reasons:

        * ``absent``: the phrase has no boxes.
        * ``empty``: the phrase contains no content words.
        * ``unseen``: the boxes are outside the part of the photo that the model sees.
    """
    found, counts = Grounding(), {"captions": 0, "captions_with_unknown_words": 0}

    def read(path: Path) -> Prepared:
        """Read a photo and prepare its pixels for the model."""
        return model.prepare(open_image(path))

    bar = photo_bar(total=len(photos), shown=progress)
    with bar, closing(read_batches(read, photos, batch_size)) as batches:
        for path, prepared in chain.from_iterable(batches):
            bar.update()
            if isinstance(prepared, ImageError):
                on_error(prepared)
                continue
            explained = _explain(model, prepared, photos[path], style)
            counts["captions"] += len(explained)
            counts["captions_with_unknown_words"] += len(photos[path].captions) - len(explained)
            for caption, marked in _mark(path.name, photos[path], explained):
                found.add(path.name, caption, marked)
    return counts | found.summary("phrases", ("absent", "empty", "unseen"))


def _explain(
    model: Captioner, prepared: Prepared, photo: PhrasedPhoto, style: str
) -> list[tuple[Caption, list[tuple[str, list[int]]]]]:
    """Explain a photo's captions, except for captions with words outside the vocabulary.

    Returns:
        Each explained caption with its phrases. A phrase consists of the key of its boxes and the
        positions of its content words.
    """
    vocabulary = model.stored.vocabulary
    texts, phrases = [], []
    for words, of_caption in photo.captions:
        tokens = [vocabulary.tokenize(word) for word in words]
        text = [*chain.from_iterable(tokens)]
        if text and all(token in vocabulary for token in text):
            texts.append(text)
            phrases.append([*_positions(words, tokens, of_caption)])
    captions = model.explain_batch([prepared] * len(texts), texts, style=style)
    return [*zip(captions, phrases, strict=True)]


def _positions(
    words: Sequence[str], tokens: Sequence[Sequence[str]], phrases: Sequence[Phrase]
) -> Iterator[tuple[str, list[int]]]:
    """Yield the key of each phrase's boxes and the positions of its content words.

    The positions count the tokens of the whole caption, from 0.

    Args:
        words: Words of the caption.
        tokens: Tokens of each word. Punctuation has no tokens, and "dog's" has two.
        phrases: Phrases in the caption.
    """
    ends = [0, *accumulate(map(len, tokens))]
    content = [bool(content_stems(word)) for word in words]
    for start, stop, key in phrases:
        inside = [range(ends[n], ends[n + 1]) for n in range(start, stop) if content[n]]
        yield key, [*chain.from_iterable(inside)]


def _mark(
    name: str,
    photo: PhrasedPhoto,
    explained: Sequence[tuple[Caption, Sequence[tuple[str, Sequence[int]]]]],
) -> Iterator[tuple[Caption, list[Marked]]]:
    """Yield each explained caption of a photo with its phrases and their targets.

    A target is the part of the photo that is inside the phrase's boxes, or the reason (text) why
    the attention on the phrase cannot be measured.

    Args:
        name: File name of the photo.
        photo: The photo's entry in the phrases file.
        explained: Each caption, with the key of each phrase's boxes and the positions of the
            phrase's content words.
    """

    @cache
    def target(key: str) -> Target | str:
        """Return the part of the photo inside the boxes with this key, or why it is not measurable.

        The reason is text, such as ``absent`` if the phrase has no boxes (see `Target.seen`). The
        result is kept, because several captions of a photo may use the same boxes.
        """
        return Target.seen(photo.labels(key), explained[0][0])

    for caption, phrases in explained:
        yield (
            caption,
            [
                Marked(
                    {"photo": name, "phrase": key}, positions, target(key) if positions else "empty"
                )
                for key, positions in phrases
            ],
        )
