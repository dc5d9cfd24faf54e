"""Faithfulness of explanations: whether the regions that an explanation ranks first matter most.

    curve(f) = log p(word | share f of the regions deleted or inserted) - log p(word | photo)
    area     = mean of the curve over f from 0 to 1 (nats)

For each content word of a caption, the regions of the photo are deleted or inserted in the order of
their relevance. After each step, the word's log-probability is measured after the same preceding
words. A faithful order starts with the regions that the word depends on: the area is low under
deletion and high under insertion. Three baseline orders ignore this dependence: random, from the
centre of the photo outwards, and least attended first.

Regions are replaced at one of two levels. At the level of the feature grid, the other features stay
unchanged. At the level of the encoder's input pixels, neighbouring features change too. A deleted
region is filled either with the photo's mean (its mean features, or its mean colour) or with the
same region of the blurred photo.

Source: Petsiuk et al. 2018 (arXiv:1806.07421). Deviations: the method deletes regions instead of
single pixels, measures log-probabilities instead of probabilities, and blurs whole regions away.

Notation: W content words of T words, L regions, S steps, V versions of a photo.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from captioner.caption_types import CropBox
from captioner.data.example import Example
from captioner.data.images import open_image
from captioner.data.reading import photo_bar
from captioner.errors import ConfigError, DataError, ImageError
from captioner.evaluation.bootstrap import compare, interval, resampled_means, too_few
from captioner.evaluation.options import OnError, raise_error
from captioner.geometry import Geometry
from captioner.inference.captioner import Captioner
from captioner.inference.engine import Ensemble, Prepared
from captioner.inference.torch_engine import TorchEngine
from captioner.model.explanations import WordScorer
from captioner.options import ExplanationMethod, FaithfulnessOptions, SearchOptions
from captioner.text.vocabulary import UNKNOWN, is_content_word

T = TypeVar("T")

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

MEAN, BLUR = 0, 1
"""The two fills of deleted regions."""

CURVES = {
    "deletion_mean": (MEAN, False),
    "deletion_blur": (BLUR, False),
    "insertion_blur": (BLUR, True),
}
"""For each curve, the fill of deleted regions, and True if regions are inserted, not deleted."""

METHODS: tuple[ExplanationMethod, ...] = ("attention", "gradient_input", "grad_cam", "occlusion")
"""The explanation methods to compare.

``attention_gate`` is left out: it multiplies the attention of a word by one number, the gate. The
order of the regions is therefore the same as for ``attention``.
"""
BASELINES = ("random", "centre", "least_attended")
"""Orders of regions to compare the methods with: random, from the centre of the photo outwards, and
least attended first."""
ORDERS = (*METHODS, *BASELINES)
"""All orders of regions to compare."""

TOGETHER = 16
"""Number of versions of a photo that are processed in one batch."""


# --- orders --------------------------------------------------------------------------------------


class Versions(NamedTuple):
    """The versions of a photo, each with a different set of regions deleted.

    A curve shows a word's log-probability after each deletion or insertion. Points of several
    curves can need the same version. This version is then scored only once.
    """

    fills: Indices
    """Fill of the deleted regions in each version, ``MEAN`` or ``BLUR``, (V,)."""
    masks: NDArray[np.bool_]
    """True for the deleted regions of each version, (V, L)."""
    points: Indices
    """Index of the version to score at each point of a curve, (curves, orders, W, S + 1)."""

    @classmethod
    def of(cls, orders: Indices, steps: int) -> Versions:
        """List all versions that occur when regions are deleted or inserted in several orders.

        A version is the photo with a set of its regions deleted.

        Args:
            orders: Region indices, most relevant first, (orders, W, L).
            steps: Number of steps of a curve, S.
        """
        regions = orders.shape[2]
        counts = np.rint(np.linspace(0, regions, steps + 1))
        ranks = orders.argsort(axis=2)
        first = ranks[:, :, None, :] < counts[:, None]  # (orders, W, S + 1, L)
        masks = np.stack([~first if inserts else first for _, inserts in CURVES.values()])
        fills = np.array([fill for fill, _ in CURVES.values()])[:, None, None, None]
        fills = np.where(masks.any(axis=-1), fills, MEAN)  # MEAN if nothing is deleted
        rows = np.concatenate([fills[..., None], masks], axis=-1).reshape(-1, regions + 1)
        rows, index = np.unique(rows, axis=0, return_inverse=True)
        return cls(rows[:, 0], rows[:, 1:].astype(bool), index.reshape(fills.shape))


def region_orders(
    relevances: Mapping[ExplanationMethod, Array],
    geometry: Geometry,
    grid: tuple[int, int],
    seed: int,
) -> Indices:
    """Sort the regions by each explanation method and each baseline order (such as random).

    Args:
        relevances: Relevance of the regions by method, (W, L).
        geometry: Positions of the regions in the photo.
        grid: Height and width of the grid in regions, Gh and Gw.
        seed: Seed of the random order, which also decides between equally relevant regions.

    Returns:
        Region indices, most relevant first, (orders, W, L).
    """
    random = np.random.default_rng(seed).permutation(grid[0] * grid[1])
    attention = relevances["attention"]
    centre = np.broadcast_to(-geometry.from_centre(grid).ravel(), attention.shape)
    baselines = (np.zeros_like(attention), centre, -attention)
    values = np.stack([*(relevances[method] for method in METHODS), *baselines])
    order: Indices = random[np.argsort(-values[..., random], axis=-1, kind="stable")]
    return order


# --- photos --------------------------------------------------------------------------------------


class _Photo:
    """A photo and its blurred copy, from which the versions to score are made."""

    def __init__(self, ensemble: Ensemble, image: Image.Image) -> None:
        self.ensemble, engine = ensemble, ensemble.engines[0]
        prepared = ensemble.prepare(image)
        (self.pixels,), self.seed = prepared.pixels, prepared.seed
        y, x = engine.geometry
        # The blur is as wide as a region, so that a blurred region loses its content.
        blur = ImageFilter.GaussianBlur((x.pitch, y.pitch))
        blurred = np.asarray(Image.fromarray(self.pixels).filter(blur))
        mean = np.rint(self.pixels.mean(axis=(0, 1))).astype(np.uint8)
        self.fills = np.stack([np.broadcast_to(mean, blurred.shape), blurred])
        self.grid, blurred_grid = self._encode([self.pixels, blurred])
        self.fill_grids = torch.stack([self.grid.mean(dim=0).expand_as(self.grid), blurred_grid])

    def _encode(self, pixels: Iterable[NDArray[np.uint8]]) -> Tensor:
        """Encode N versions, given as pixels (H, W, 3), as features, (N, L, D)."""
        photos = [Prepared((one,), CropBox()) for one in pixels]
        features: Tensor = self.ensemble.encode(photos)[0].float()
        return features

    @cached_property
    def regions(self) -> NDArray[np.intp]:
        """Index of each pixel's region, (H, W), or -1 for pixels that the encoder does not see."""
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
        """Return the features of the photo with regions deleted, (V, L, D).

        Args:
            level: Level at which regions are replaced: ``grid`` (features) or ``pixels``.
            fills: Fill of the deleted regions in each version, ``MEAN`` or ``BLUR``, (V,).
            masks: True for the deleted regions of each version, (V, L).
        """
        if level == "pixels":
            hidden = np.pad(masks, ((0, 0), (0, 1)))[:, self.regions, None]  # (V, H, W, 1)
            return self._encode(np.where(hidden, self.fills[fills], self.pixels))
        device = self.grid.device
        mask = torch.from_numpy(masks).to(device).unsqueeze(2)
        return torch.where(mask, self.fill_grids[torch.from_numpy(fills).to(device)], self.grid)

    def score(self, level: str, scorer: WordScorer, versions: Versions) -> Array:
        """Return the log-probability of every caption word for each version, (V, T).

        Args:
            level: Level at which regions are replaced: ``grid`` (features) or ``pixels``.
            scorer: Object that computes the log-probabilities of the caption's words from features.
            versions: The photo with different sets of regions deleted.
        """
        starts = range(0, len(versions.fills), TOGETHER)
        blocks = [slice(start, start + TOGETHER) for start in starts]
        grids = (self.filled(level, versions.fills[one], versions.masks[one]) for one in blocks)
        scores: Array = torch.cat([*map(scorer.every_word, grids)]).cpu().double().numpy()
        return scores


# --- captions ------------------------------------------------------------------------------------


class Word(NamedTuple):
    """A content word of a caption, and its log-probability as regions are deleted or inserted."""

    photo: str
    """File name of the photo."""
    word: str
    log_prob: float
    """Log-probability of the word for the unchanged photo, in nats."""
    curves: dict[str, Array]
    """Values of all curves by level (``grid`` or ``pixels``), (curves, orders, S + 1)."""


def measured_positions(words: Sequence[str], tokens: Sequence[int], limit: int) -> Indices:
    """Choose up to ``limit`` content words of a caption to measure, and return their positions.

    The chosen words are evenly spaced among all content words. Words outside the vocabulary are not
    measured.

    Args:
        words: The T words of the caption.
        tokens: The token id of each word, (T,).
        limit: Largest number of words to measure.

    Returns:
        The positions, (W,), ascending.
    """
    positions = [
        position
        for position, (word, token) in enumerate(zip(words, tokens, strict=True))
        if token != UNKNOWN and is_content_word(word.casefold())
    ]
    return np.array(_spread(positions, limit), dtype=np.intp)


def _spread(items: Sequence[T], limit: int) -> Sequence[T]:
    """Return all items, or ``limit`` evenly spaced items if there are more."""
    count = len(items)
    return items if count <= limit else [items[i * count // limit] for i in range(limit)]


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
    """Measure how much content words in one photo's caption depend on the regions of the photo.

    Regions are deleted and inserted in the orders of the explanation methods and baselines. The
    changes in the words' log-probabilities are returned.

    Args:
        model: A single model, not an ensemble.
        image: The photo.
        options: Options for measuring faithfulness.
        search: Search options.
        reference: Caption to measure. By default, the model captions the photo.
        number: Seed of the random order of regions.
        name: File name of the photo.

    Returns:
        The measured words, at most ``options.max_words``. The list is empty if the caption has no
        content words.
    """
    ensemble, vocabulary = model.ensemble, model.stored.vocabulary
    engine = ensemble.engines[0]
    assert isinstance(engine, TorchEngine)  # callers load the model in PyTorch
    photo = _Photo(ensemble, image)
    start = vocabulary.start(search.style)
    grids = [photo.grid.unsqueeze(0)]
    memories = ensemble.memories(grids)
    if reference is None:
        caption = ensemble.search(memories, search, vocabulary, [photo.seed])[0][0]
    else:
        given = vocabulary.encode(vocabulary.tokenize(reference))
        caption = ensemble.score(memories, [[given]], start).hypothesis(0, given)
    words = vocabulary.shown(caption.tokens)
    positions = measured_positions(words, caption.tokens, options.max_words)
    if not len(positions):
        return []
    scorer = WordScorer(engine.exact_decoder, start, caption.tokens)
    relevances: dict[ExplanationMethod, Array] = {}
    for method in METHODS:
        maps = caption.alphas
        if method != "attention":
            maps = engine.relevance(method, photo.grid, start, caption.tokens)
        relevances[method] = maps.astype(np.float64)[positions]
    orders = region_orders(relevances, engine.geometry, engine.grid, number)
    versions = Versions.of(orders, options.steps)
    whole = scorer.every_word(grids[0])[0].cpu().double().numpy()[positions]
    curves = {}
    for level in ("grid", "pixels") if options.level == "both" else (options.level,):
        found = photo.score(level, scorer, versions)[:, positions]  # (V, W)
        found = found[versions.points, np.arange(len(positions))[:, None]]
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
    photos: Sequence[Example],
    options: FaithfulnessOptions,
    search: SearchOptions,
    *,
    on_error: OnError = raise_error,
    progress: bool = False,
) -> dict[str, Any]:
    """Measure the faithfulness of explanations for content words in captions of several photos.

    If a photo has reference captions, its first reference is measured. Otherwise, the model
    captions the photo, and this caption is measured.

    Args:
        model: A single model that runs in PyTorch.
        photos: The photos, with or without reference captions.
        options: Options for measuring faithfulness.
        search: Search options.
        on_error: Called with the error of each photo that cannot be read and is left out.
        progress: Show a progress bar.

    Returns:
        The result of `summarize`.

    Raises:
        ConfigError: The model is an ensemble.
        DataError: There are no photos.
    """
    if len(model.ensemble.engines) > 1:
        raise ConfigError("faithfulness cannot be measured for an ensemble; pass a single model")
    if not photos:
        raise DataError("the folder contains no photos to measure; use a folder with photos")
    chosen = _spread(photos, options.max_photos)
    words: list[Word] = []
    read = 0
    for number, photo in enumerate(photo_bar(chosen, shown=progress)):
        try:
            image = open_image(photo.path)
        except ImageError as error:
            on_error(error)
            continue
        read += 1
        how: Any = {"reference": next(iter(photo.captions), None), "name": photo.path.name}
        words += measure_photo(model, image, options, search, number=number, **how)
    return summarize(words, read, options.steps, math.prod(model.engine.grid))


# --- summary -------------------------------------------------------------------------------------


def summarize(words: Sequence[Word], photos: int, steps: int, regions: int) -> dict[str, Any]:
    """Summarize the measurements of all words as JSON data.

    Args:
        words: The measured words.
        photos: Number of photos that were read.
        steps: Number of steps of a curve, S.
        regions: Number of regions of a photo, L.

    Returns:
        Results for all words, and results by level, curve and order.

        * For all words: ``photos``, ``photos_with_words``, ``words``, ``steps`` and ``regions`` are
          counts. ``log_prob`` is a mean over words. ``per_word`` lists the areas of every word.
        * For each level, curve and order: ``area`` is a mean over words. ``interval`` is its 95%
          bootstrap interval over photos. ``curve`` contains the mean curve at S + 1 equal steps.
        * For explanation methods, ``over_random``, ``over_centre``, ``over_least_attended`` and
          ``over_attention`` compare the area with another order. ``difference`` is positive if the
          method is better. ``interval`` and ``significant`` come from a paired bootstrap.

        With fewer than 30 photos, all intervals are None.
    """
    owners = [one.photo for one in words]
    names = sorted(set(owners))
    found: dict[str, Any] = {
        "photos": photos,
        "photos_with_words": len(names),
        "words": len(words),
        "steps": steps,
        "regions": regions,
    }
    if not words:
        return found
    found["log_prob"] = float(np.mean([one.log_prob for one in words]))
    rows = [dict[str, Any](photo=one.photo, word=one.word, log_prob=one.log_prob) for one in words]
    for level in words[0].curves:
        curves = np.stack([one.curves[level] for one in words])  # (W, curves, orders, S + 1)
        areas: Array = (curves[..., 1:] + curves[..., :-1]).mean(axis=-1) / 2  # trapezoidal rule
        found[level] = {
            curve: _compare_orders(curves[:, n], areas[:, n], owners, sign=1 if inserts else -1)
            for n, (curve, (_, inserts)) in enumerate(CURVES.items())
        }
        for row, of_word in zip(rows, np.round(areas, 4).tolist(), strict=True):
            row[level] = {
                curve: dict(zip(ORDERS, of_curve, strict=True))
                for curve, of_curve in zip(CURVES, of_word, strict=True)
            }
    found["per_word"] = rows
    return found | too_few(len(names), "photos with content words", "confidence intervals")


def _compare_orders(
    curves: Array, areas: Array, owners: Sequence[str], *, sign: int
) -> dict[str, dict[str, Any]]:
    """Compare all orders of deleting or inserting regions, for one level and one kind of curve.

    Args:
        curves: Curves of the words, (W, orders, S + 1).
        areas: Areas under these curves, (W, orders).
        owners: File name of each word's photo, (W,).
        sign: 1 if a high area is good, -1 if a low area is good.

    Returns:
        The results of each order: its area, and its differences from the baselines (see
        `summarize`).
    """
    columns = dict(zip(ORDERS, areas.T, strict=True))
    resampled = resampled_means(sorted(set(owners)), owners, columns)
    found: dict[str, dict[str, Any]] = {}
    for number, (order, area) in enumerate(columns.items()):
        found[order] = {
            "area": float(area.mean()),
            "interval": interval(resampled[order]),
            "curve": curves[:, number].mean(axis=0).tolist(),
        }
        others = ("attention", *BASELINES) if order in METHODS else ()
        for other in others:
            if other != order:
                test = compare(sign * (resampled[order] - resampled[other]))
                found[order][f"over_{other}"] = {
                    "difference": sign * float(area.mean() - columns[other].mean()),
                    "interval": test.interval,
                    "significant": test.significant,
                }
    return found
