"""Faithfulness: do the regions that an explanation ranks first matter for the word?

For each content word of a caption the regions of the photo are deleted or inserted in the order of
their relevance, and the word's log-probability is measured given the same words before it; see
`evaluation.deletion`. Regions are replaced at two levels: in the grid of features, where the rest
is unchanged, and in the pixels of the encoder's input, where neighbouring features change too. A
deleted region becomes the mean of the photo (of its features, or its colour) or that of the blurred
photo.

Notation: W content words, L regions, V versions of a photo.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from captioner.caption import CropBox
from captioner.data.images import open_image
from captioner.data.progress import photo_bar
from captioner.errors import DataError, ImageError, OptionError
from captioner.evaluation.deletion import (
    METHODS,
    Array,
    Faithfulness,
    Indices,
    Score,
    Word,
    measure_orders,
    region_orders,
)
from captioner.evaluation.options import OnError, raise_error
from captioner.inference.captioner import Captioner
from captioner.inference.captions import given_hypothesis
from captioner.inference.engine import Ensemble, Prepared
from captioner.inference.torch_engine import TorchEngine
from captioner.model.explanations import WordScorer, rows_per_block
from captioner.options import FaithfulnessOptions, SearchOptions
from captioner.search.words import encode_search_words
from captioner.text.vocabulary import FUNCTION_WORDS, UNKNOWN

T = TypeVar("T")

ENCODED_TOGETHER = 16
"""Versions of a photo that the encoder processes together."""


# --- photos --------------------------------------------------------------------------------------


class _Photo:
    """One photo with its blurred copy, and the versions of it that are scored."""

    def __init__(self, ensemble: Ensemble, image: Image.Image) -> None:
        self.ensemble, engine = ensemble, ensemble.engines[0]
        prepared = ensemble.prepare(image)
        (self.pixels,), self.seed = prepared.pixels, prepared.seed
        y, x = engine.geometry
        # As wide as a region, so that a blurred region has lost its content.
        blur = ImageFilter.GaussianBlur((x.pitch, y.pitch))
        blurred = np.asarray(Image.fromarray(self.pixels).filter(blur))
        mean = np.rint(self.pixels.mean(axis=(0, 1))).astype(np.uint8)
        self.fills = np.stack([np.broadcast_to(mean, blurred.shape), blurred])
        self.grid, blurred_grid = self._encode([self.pixels, blurred])
        self.fill_grids = torch.stack([self.grid.mean(dim=0).expand_as(self.grid), blurred_grid])

    def _encode(self, pixels: Iterable[NDArray[np.uint8]]) -> Tensor:
        """Features (N, L, D) of several versions."""
        photos = [Prepared((one,), CropBox()) for one in pixels]
        features: Tensor = self.ensemble.encode(photos)[0]
        return features.float()

    @cached_property
    def regions(self) -> NDArray[np.intp]:
        """Index of the region of each pixel, (H, W); -1 where the encoder sees nothing."""
        engine, (height, width) = self.ensemble.engines[0], self.pixels.shape[:2]
        size = engine.preprocessing.image_size
        axes = engine.geometry.placed(size, 0.0, 0.0, 1.0, 1.0)
        (rows, seen_rows), (columns, seen_columns) = (
            axis.samples(pixels, count, smooth=False)
            for axis, pixels, count in zip(axes, (height, width), engine.grid, strict=True)
        )
        regions = rows[:, None].astype(np.intp) * engine.grid[1] + columns.astype(np.intp)
        return np.where(seen_rows[:, None] & seen_columns, regions, -1)

    def filled(self, level: str, fills: Indices, masks: NDArray[np.bool_]) -> Tensor:
        """Features (V, L, D) of versions; fills (V,) and masks (V, L) say what is filled."""
        if level == "pixels":
            hidden = np.pad(masks, ((0, 0), (0, 1)))[:, self.regions, None]  # (V, H, W, 1)
            return self._encode(np.where(hidden, self.fills[fills], self.pixels))
        device = self.grid.device
        mask = torch.from_numpy(masks).to(device).unsqueeze(2)
        return torch.where(mask, self.fill_grids[torch.from_numpy(fills).to(device)], self.grid)

    def score(self, level: str, scorer: WordScorer, positions: Indices) -> Score:
        """A function that scores versions; its words are those at the positions."""
        together = ENCODED_TOGETHER
        if level == "grid":
            together = max(1, rows_per_block(self.grid) // len(positions))

        def score(fills: Indices, masks: NDArray[np.bool_], of: Indices, words: Indices) -> Array:
            found = np.empty(len(words))
            for start in range(0, len(fills), together):
                block = slice(start, start + together)
                grids = self.filled(level, fills[block], masks[block])
                at = np.flatnonzero((of >= start) & (of < block.stop))
                at = at[np.argsort(-positions[words[at]], kind="stable")]  # as `one_word` needs
                rows, steps = (
                    torch.from_numpy(numbers[at]).to(grids.device)
                    for numbers in (of - start, positions[words])
                )
                found[at] = scorer.one_word(grids[rows], steps).cpu().double().numpy()
            return found

        return score


# --- captions ------------------------------------------------------------------------------------


def content_words(words: Sequence[str], tokens: Sequence[int], limit: int) -> Indices:
    """Positions of the words that name something, at most ``limit``, spread evenly.

    Not function words ("a", "with"), unknown words and, of a sub-word tokenizer, punctuation.
    """
    positions = [
        position
        for position, (word, token) in enumerate(zip(words, tokens, strict=True))
        if token != UNKNOWN
        and word.casefold() not in FUNCTION_WORDS
        and any(map(str.isalnum, word))
    ]
    return np.array(_spread(positions, limit), dtype=np.intp)


def _spread(items: Sequence[T], most: int) -> Sequence[T]:
    """At most this many of the items."""
    return items if len(items) <= most else [items[i * len(items) // most] for i in range(most)]


@torch.inference_mode()
def measure_photo(
    model: Captioner,
    image: Image.Image,
    options: FaithfulnessOptions,
    search: SearchOptions,
    *,
    reference: str | None = None,
    number: int = 0,
    name: str = "",
) -> list[Word]:
    """Measure the content words of the caption of one photo.

    Args:
        model: A single model.
        image: The photo, from ``data.images.open_image``.
        options: How to measure.
        search: How to caption.
        reference: Measure this caption instead of the model's.
        number: Seed of the random order of the photo's regions.
        name: Its file name.
    """
    ensemble, vocabulary = model.ensemble, model.stored.vocabulary
    engine = ensemble.engines[0]
    assert isinstance(engine, TorchEngine)  # see `measure`
    photo = _Photo(ensemble, image)
    start = vocabulary.start(search.style)
    grids = [photo.grid.unsqueeze(0)]
    memories = ensemble.memories(grids)
    if reference is None:
        tokens = encode_search_words(search, vocabulary)
        caption = ensemble.search(memories, search, tokens, start, [photo.seed])[0][0]
    else:
        given = vocabulary.encode(vocabulary.tokenize(reference))
        caption = given_hypothesis(ensemble.score(memories, [[given]], start), 0, given)
    words = vocabulary.shown(caption.tokens)
    positions = content_words(words, caption.tokens, options.max_words)
    if not len(positions):
        return []
    scorer = WordScorer(engine.exact_decoder, start, caption.tokens)
    relevances = {
        method: ensemble.explain(method, grids, 0, start, caption).astype(np.float64)[positions]
        for method in METHODS
    }
    orders = region_orders(relevances, engine.geometry, engine.grid, number)
    whole = scorer.every_word(grids[0])[0].cpu().double().numpy()[positions]
    curves = {}
    for level in ("grid", "pixels") if options.level == "both" else (options.level,):
        found = measure_orders(orders, options.steps, photo.score(level, scorer, positions))
        curves[level] = found - whole[:, None]
    return [
        Word(
            name,
            words[position],
            float(whole[index]),
            {level: found[:, :, index] for level, found in curves.items()},
        )
        for index, position in enumerate(positions)
    ]


def measure(
    model: Captioner,
    photos: Mapping[Path, str | None],
    options: FaithfulnessOptions,
    search: SearchOptions,
    *,
    on_error: OnError = raise_error,
    progress: bool = False,
) -> Faithfulness:
    """Measure the content words of the captions of several photos.

    Args:
        model: A single model, not an exported one.
        photos: The photos, with a caption to measure instead of the model's, or None.
        options: How to measure; ``max_photos`` of the photos are used.
        search: How to caption.
        on_error: Called with the error of a photo that cannot be read.
        progress: Show a progress bar.

    Raises:
        ConfigError: The model is an ensemble.
        DataError: There are no photos.
    """
    if len(model.ensemble.engines) > 1:
        raise OptionError("{faithfulness} is that of a single model, not of an ensemble; give one")
    if not photos:
        raise DataError("there are no photos to measure; give a folder with photos")
    chosen = _spread(list(photos), options.max_photos)
    words: list[Word] = []
    read = 0
    for number, path in enumerate(photo_bar(chosen, shown=progress)):
        try:
            image = open_image(path)
        except ImageError as error:
            on_error(error)
            continue
        read += 1
        reference = photos[path]
        words += measure_photo(
            model, image, options, search, reference=reference, number=number, name=path.name
        )
    return Faithfulness(options, read, tuple(words), math.prod(model.engine.grid))
