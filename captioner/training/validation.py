"""Validation: caption the photos with the same search as a user, and score the captions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from captioner.api import Captioner
from captioner.caption import Caption
from captioner.config import SearchOptions
from captioner.data.coco import CaptionedImage
from captioner.data.features import FeatureCache
from captioner.data.images import image_size
from captioner.evaluation.metrics import score

BATCH = 64
"""Photos per batch when captioning from cached features."""


@dataclass(frozen=True)
class Sentence:
    """The caption generated for a validation photo."""

    image: CaptionedImage
    caption: Caption


def decode(
    captioner: Captioner,
    images: list[CaptionedImage],
    search: SearchOptions,
    cache: FeatureCache | None = None,
) -> list[Sentence]:
    """Caption the photos, each in its own style, from cached features if there are any.

    Raises:
        ImageError: A photo cannot be read; a score without it would not be comparable.
    """
    sentences: list[Sentence] = []
    for style in dict.fromkeys(image.style for image in images):
        of_style = [image for image in images if image.style == style]
        options = replace(search, style=style) if style else search
        if cache is not None:
            sentences += _from_features(captioner, of_style, options, cache)
            continue
        paths = (image.path for image in of_style)
        results = captioner.stream(paths, **vars(options))
        for image, result in zip(of_style, results, strict=True):
            if result.error is not None:
                raise result.error
            sentences.append(Sentence(image, result.captions[0]))
    return sentences


def _from_features(
    captioner: Captioner, images: list[CaptionedImage], search: SearchOptions, cache: FeatureCache
) -> Iterator[Sentence]:
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        features = cache.read([(image.image_id, False) for image in batch])
        preprocessing = captioner.model.preprocessing
        regions = [preprocessing.crop_box(*image_size(image.path)) for image in batch]
        seeds = [image.image_id for image in batch]
        captions = captioner.caption_features(features, regions, search, seeds)
        yield from (Sentence(image, best[0]) for image, best in zip(batch, captions, strict=True))


def score_sentences(sentences: list[Sentence]) -> dict[str, float]:
    """Score the captions against the references of their photos.

    Returns:
        Corpus scores by metric. With several styles, the mean over styles, and each style's own
        under names such as ``CIDEr/coco``.
    """
    styles = list(dict.fromkeys(s.image.style for s in sentences))
    scores = {
        style: score(
            {s.image.image_id: s.caption.text for s in sentences if s.image.style == style},
            {s.image.image_id: s.image.captions for s in sentences if s.image.style == style},
        ).corpus
        for style in styles
    }
    mean = {
        metric: sum(of_style[metric] for of_style in scores.values()) / len(styles)
        for metric in scores[styles[0]]
    }
    if len(styles) == 1:
        return mean
    return mean | {f"{m}/{style}": v for style in styles for m, v in scores[style].items()}
