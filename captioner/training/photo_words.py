"""The words that each training photo is about; the targets of ``photo_words_loss``.

Notation: B photos, C content words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

from captioner.data.batches import EncodedImage
from captioner.data.coco import CaptionedImage
from captioner.errors import ConfigError, DataError
from captioner.model.losses import PhotoWords
from captioner.text.tokenizer import tokenize
from captioner.text.vocabulary import FUNCTION_WORDS, PAD, SPECIAL_NAMES, Vocabulary

NO_CATEGORY = ("__background__", "N/A")
"""Names of numbers that are not a COCO category."""


class WordsOfPhotos:
    """The content words of every photo: of its captions and of the names of its object classes."""

    def __init__(self, photos: Sequence[EncodedImage], vocabulary: Vocabulary) -> None:
        """Collect the words.

        Args:
            photos: The training photos.
            vocabulary: Of the trained model.

        Raises:
            ConfigError: The vocabulary is one of pieces.
            DataError: A photo has a class that COCO does not have.
        """
        if vocabulary.subwords is not None:
            raise ConfigError(
                "training.photo_words needs a model of whole words, but this one writes pieces of "
                "words (tokenizer bpe); give 0"
            )
        function_words = set(vocabulary.whole_words(FUNCTION_WORDS))
        numbers = range(len(SPECIAL_NAMES), len(vocabulary))
        content = [token for token in numbers if token not in function_words]
        self.tokens = torch.tensor(content)
        columns = {token: column for column, token in enumerate(content)}
        names = FasterRCNN_ResNet50_FPN_Weights.DEFAULT.meta["categories"]
        self._columns: dict[int, list[int]] = {}
        for photo in photos:
            tokens = {token for caption in photo.tokens for token in caption}
            for label in photo.image.labels:
                tokens.update(vocabulary.encode(tokenize(_class_name(label, names, photo.image))))
            found = sorted(columns[token] for token in tokens & columns.keys())
            self._columns[photo.image.image_id] = found

    def of_batch(self, image_ids: Sequence[int], tokens: Tensor) -> PhotoWords:
        """The words of a batch.

        Args:
            image_ids: (B,).
            tokens: (B, R, T + 1), see ``caption_losses``; a photo without captions gets no words.
        """
        present = torch.zeros(len(image_ids), len(self.tokens))
        for row, image_id in enumerate(image_ids):
            if tokens[row, 0, 0] != PAD:
                present[row, self._columns[image_id]] = 1.0
        return PhotoWords(self.tokens, present)


def _class_name(label: int | str, names: Sequence[str], image: CaptionedImage) -> str:
    if isinstance(label, str):
        return label
    if 0 < label < len(names) and names[label] not in NO_CATEGORY:
        return names[label]
    raise DataError(
        f"{image.path}: label {label} is not the number of a COCO category (1 to {len(names) - 1}, "
        "with gaps); give the name of the class"
    )
