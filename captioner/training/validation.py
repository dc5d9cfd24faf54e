"""Validation by real decoding: the photos are captioned as a user would, and scored."""

from __future__ import annotations

from dataclasses import dataclass

from captioner.api import Captioner
from captioner.caption import Caption
from captioner.config import SearchOptions
from captioner.data.coco import CaptionedImage
from captioner.evaluation.metrics import Scores, score


@dataclass(frozen=True)
class Sentence:
    """What the model said about one validation photo."""

    image: CaptionedImage
    caption: Caption


def decode(
    captioner: Captioner, images: list[CaptionedImage], search: SearchOptions
) -> list[Sentence]:
    """Caption the photos.

    Raises:
        ImageError: A photo cannot be read; a score over the others would compare with nothing.
    """
    sentences = []
    results = captioner.stream((image.path for image in images), search)
    for image, result in zip(images, results, strict=True):
        if result.error is not None:
            raise result.error
        sentences.append(Sentence(image, result.captions[0]))
    return sentences


def score_sentences(sentences: list[Sentence]) -> Scores:
    """Score the sentences against their photos' captions."""
    return score(
        {s.image.image_id: s.caption.text for s in sentences},
        {s.image.image_id: s.image.captions for s in sentences},
    )
