"""Stems and training targets of the reading network.

The network (``model.reading``) predicts the content words that a photo shows, as stems. A stem
stands for all forms of a word: the stem "dog" stands for dog and dogs. The targets of a photo are
the shares of its captions that contain each stem.

Notation: B photos, S stems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from captioner.data.example import Example
from captioner.errors import DataError
from captioner.inference.reading import ReadingWords
from captioner.inference.stored_model import StoredModel
from captioner.model.reading import PhotoReading
from captioner.text.content import content_stems, stem

MIN_PHOTOS = 40
"""Minimum number of photos with a stem in their captions. Rarer stems are not learned."""


def add_reading(stored: StoredModel, photos: Sequence[Example]) -> None:
    """Add an untrained reading network to a model, for the frequent stems in the training captions.

    The network predicts the content words that a photo shows, as stems. A stem stands for all forms
    of a word: "dog" for dog and dogs. A stem is frequent if the captions of at least ``MIN_PHOTOS``
    photos contain it. A stem is left out if the vocabulary contains no word with this stem. With
    sub-word pieces, all frequent stems are kept. The most frequent stem comes first.

    Args:
        stored: The model. The network, its stems and its initial frequencies are set.
        photos: The training photos.

    Raises:
        DataError: No stem is frequent enough.
    """
    of_photos: Counter[str] = Counter()
    of_captions: Counter[str] = Counter()
    captions, vocabulary = 0, stored.vocabulary
    for photo in photos:
        each = [content_stems(text) for text in photo.captions]
        captions += len(each)
        of_captions.update(one for stems in each for one in stems)
        of_photos.update([*dict.fromkeys(one for stems in each for one in stems)])
    known = {stem(word) for word in vocabulary.words} if vocabulary.subwords is None else of_photos
    stems = [one for one, n in of_photos.most_common() if n >= MIN_PHOTOS and one in known]
    if not stems:
        raise DataError(
            f"no content word occurs in the captions of {MIN_PHOTOS} training photos, so the "
            "reading network cannot learn any word; train on more photos, or set "
            "training.reading to 0"
        )
    model = stored.model
    model.reading = PhotoReading(model.feature_dim, len(stems))
    counts = torch.tensor([of_captions[one] for one in stems])
    model.reading.start_at((counts + 0.5) / (captions + 1))
    stored.reading = ReadingWords.of(stems, vocabulary)


class StemsOfPhotos:
    """The targets of the reading network: how many captions of each photo contain each stem.

    A stem stands for all forms of a word: the stem "dog" stands for dog and dogs.
    """

    def __init__(self, photos: Sequence[Example], stems: Sequence[str]) -> None:
        """Count the S stems in the captions of the training photos."""
        columns = {stem: column for column, stem in enumerate(stems)}
        self._stems = len(stems)
        self._counts: dict[int | None, tuple[int, Counter[int]]] = {None: (0, Counter())}
        for photo in photos:
            captions = photo.captions
            found = (one for text in captions for one in content_stems(text))
            counts = Counter(columns[one] for one in found if one in columns)
            self._counts[photo.image_id] = len(captions), counts

    def of_photos(self, image_ids: Sequence[int | None]) -> tuple[Tensor, Tensor]:
        """Return the counts for a batch of photos.

        The id None stands for a photo that could not be read. Its counts are 0.

        Returns:
            The number of captions of each photo that contain each stem, (B, S).
            The number of all captions of each photo, (B,).
        """
        counts = torch.zeros(len(image_ids), self._stems)
        captions = torch.zeros(len(image_ids))
        for row, image_id in enumerate(image_ids):
            captions[row], found = self._counts[image_id]
            counts[row, list(found)] = torch.tensor([*found.values()], dtype=torch.float)
        return counts, captions
