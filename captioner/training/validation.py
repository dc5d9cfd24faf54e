"""Validation: caption the photos with the same search as a user, and score the captions.

The model also scores the reference captions. Their cross-entropy is the validation loss.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from captioner.caption_types import Caption, CropBox
from captioner.data.batches import pad_captions
from captioner.data.example import Example
from captioner.data.features import FeatureCache
from captioner.data.images import image_size, open_image
from captioner.data.reading import read_ahead
from captioner.evaluation.metrics import CaptionEvaluator
from captioner.evaluation.report import describe_texts
from captioner.hardware import autocast, upload
from captioner.inference.captioner import Captioner
from captioner.model.losses import score_words
from captioner.options import SearchOptions
from captioner.text.vocabulary import PAD
from captioner.training.data import encode_captions, tokenized

BATCH = 32
"""Number of photos that are captioned together."""

MAX_NATS = 700.0
"""Loss (nats per word) at which the perplexity is capped: ``math.exp`` overflows above 709."""

_SCORES = {"CIDEr": "CIDEr", "BLEU-4": "Bleu_4"}
"""Metrics that ``training.select`` can name, with their keys in ``score_sentences``."""


def selection_score(scores: Mapping[str, float], select: str) -> float:
    """Return the validation score that selects the best model.

    A higher score is always better, so the validation loss is returned with a minus sign.

    Args:
        scores: The result of ``score_sentences``.
        select: The setting ``training.select``: CIDEr, BLEU-4 or loss.
    """
    return -scores["val_loss"] if select == "loss" else scores[_SCORES[select]]


def describe_selection(select: str, score: float) -> str:
    """Format the result of ``selection_score`` for messages.

    Examples are ``CIDEr 42.6`` (in points, 100 times the score) and ``validation loss 2.314``.
    """
    return f"validation loss {-score:.3f}" if select == "loss" else f"{select} {100 * score:.1f}"


@dataclass(frozen=True)
class Sentence:
    """The caption generated for a validation photo, and the loss of the photo's references."""

    photo: Example
    caption: Caption
    nats: float = 0.0
    """Cross-entropy of all reference captions of the photo, summed over their words (nats)."""
    words: int = 0
    """Number of words in the reference captions, including end tokens."""


def decode(
    captioner: Captioner,
    images: list[Example],
    search: SearchOptions,
    cache: FeatureCache | None = None,
) -> list[Sentence]:
    """Caption validation photos, and compute the loss of their reference captions.

    Each photo is captioned in its own style (``Example.style``). A photo that cannot be read stops
    the validation, because scores without this photo could not be compared with earlier scores.

    Args:
        captioner: The model to validate.
        images: The photos with their reference captions.
        search: The search options of the run.
        cache: Features to use instead of reading and encoding the photos.

    Returns:
        One item per photo. Photos of the same style are next to each other.

    Raises:
        ImageError: A photo cannot be read.
    """

    def prepare(image: Example) -> _Input:
        """Read a photo, or its features if there is a cache."""
        if cache is None:
            photo = captioner.prepare(open_image(image.path))  # as when a user captions it
            return torch.from_numpy(photo.pixels[0].copy()), photo.crop_box, photo.seed
        (row,) = cache.read([(image.image_id, False)])
        box = captioner.model.preprocessing.crop_box(*image_size(image.path))
        return row, box, image.image_id

    sentences: list[Sentence] = []
    for style in dict.fromkeys(image.style for image in images):
        of_style = [image for image in images if image.style == style]
        options = replace(search, style=style) if style else search
        with closing(read_ahead(prepare, of_style, ahead=BATCH + 1, threads=2)) as inputs:
            for start in range(0, len(of_style), BATCH):
                some = of_style[start : start + BATCH]
                sentences += _caption(captioner, some, list(islice(inputs, BATCH)), options)
    return sentences


_Input: TypeAlias = tuple[Tensor, CropBox, int]
"""Three values for each photo: its pixels or cached features, its crop box, and its random seed."""


def _caption(
    captioner: Captioner,
    images: list[Example],
    given: list[_Input],
    options: SearchOptions,
) -> Iterator[Sentence]:
    """Caption a batch of photos of one style, and compute the loss of their reference captions."""
    inputs, crop_boxes, seeds = zip(*given, strict=True)
    model, device, vocabulary = captioner.model, captioner.device, captioner.stored.vocabulary
    photos = upload(torch.stack(inputs), device)  # outside autocast, which allows only one type
    with torch.inference_mode(), autocast(captioner.precision, device):
        features = model.to_features(photos)
    captions = captioner.caption_features(features, crop_boxes, options, seeds)
    encoded = encode_captions(images, tokenized(images, vocabulary), vocabulary, sys.maxsize)
    starts = [vocabulary.start(options.style)] * len(encoded)
    tokens = pad_captions([photo.tokens for photo in encoded], starts)
    with torch.inference_mode(), autocast(captioner.precision, device):
        scored = score_words(model.decoder, model.decoder.memory(features), tokens)
        nats = scored.nats().sum(dim=(1, 2)).cpu()
    counts = (tokens[..., 1:] != PAD).sum(dim=(1, 2))
    best = (of_photo[0] for of_photo in captions)
    yield from map(Sentence, images, best, nats.tolist(), counts.tolist())


def score_sentences(sentences: list[Sentence]) -> dict[str, float]:
    """Score the captions of all validation photos, and return the scores by name.

    The names are pycocoevalcap's, such as ``CIDEr`` and ``Bleu_4`` (1.0 is 100 points), and also
    ``val_loss`` (nats per word of the references) and ``perplexity``, its exponential.

    With several styles, each score is the mean over styles (for the perplexity, the geometric
    mean). The scores of each style are added under names such as ``CIDEr/coco``.
    """
    styles = list(dict.fromkeys(s.photo.style for s in sentences))
    scores = {
        style: _score_style([s for s in sentences if s.photo.style == style]) for style in styles
    }
    mean = {
        metric: sum(of_style[metric] for of_style in scores.values()) / len(styles)
        for metric in scores[styles[0]]
    }
    for of_style in (mean, *scores.values()):
        of_style["perplexity"] = math.exp(min(of_style["val_loss"], MAX_NATS))
    if len(styles) == 1:
        return mean
    return mean | {f"{m}/{style}": v for style in styles for m, v in scores[style].items()}


def _score_style(sentences: Sequence[Sentence]) -> dict[str, float]:
    """Return the scores of one style, except for the perplexity."""
    references = {s.photo.image_id: s.photo.captions for s in sentences}
    captions = {s.photo.image_id: s.caption.text for s in sentences}
    corpus = CaptionEvaluator(references).score(captions).corpus
    nats = math.fsum(s.nats for s in sentences)  # exact, so the number of processes does not matter
    return {**corpus, "val_loss": nats / max(1, sum(s.words for s in sentences))}


def describe(sentences: Sequence[Sentence]) -> dict[str, float]:
    """Return the shares (0 to 1) of captions that break off and of empty captions.

    ``bad_endings`` is the share of captions with a last word that cannot end a caption, such as
    "the". ``empty_captions`` is the share of captions without words.
    """
    endings = describe_texts(sentence.caption.text for sentence in sentences)["bad_endings"]
    empty = sum(not sentence.caption.words for sentence in sentences) / len(sentences)
    return {"bad_endings": endings, "empty_captions": empty}


def summary(row: Mapping[str, Any]) -> str:
    """Format a row of metrics.jsonl as one line for the terminal."""
    name = "reward" if "reward" in row else "loss"
    styles = [key.removeprefix("CIDEr/") for key in row if key.startswith("CIDEr/")]
    of_styles = (f"; {style}: {describe_scores(row, f'/{style}')}" for style in styles)
    return (
        f"epoch {row['epoch']}: {name} {row[name]:.3f}, {describe_scores(row)}, "
        f"bad endings {100 * row['bad_endings']:.1f}%{''.join(of_styles)}"
    )


def describe_scores(scores: Mapping[str, Any], style: str = "") -> str:
    """Format the result of ``score_sentences`` as one line for the terminal.

    Metrics are shown in points, 100 times the score. ``style`` is the suffix of the scores' names
    for one style, such as ``/coco``, or empty for the mean over styles.
    """
    loss, perplexity = scores[f"val_loss{style}"], scores[f"perplexity{style}"]
    return (
        f"validation loss {loss:.3f} (perplexity {perplexity:.1f}), CIDEr "
        f"{100 * scores[f'CIDEr{style}']:.1f}, BLEU-4 {100 * scores[f'Bleu_4{style}']:.1f}"
    )
