"""Faithfulness: do the regions that an explanation ranks first matter for the word?

For each content word of a caption the regions of the photo are deleted in the order of their
relevance, most relevant first, or inserted into a blurred photo, and the word's log-probability is
measured given the same words before it:

    curve(f) = log p(word | share f of the regions deleted or inserted) - log p(word | photo)
    area     = mean of the curve over f from 0 to 1 (nats)

A faithful order finds the regions that the word depends on early: it has a low area under deletion
and a high one under insertion. Three orders that know nothing of the word's dependence are the
baselines: random, from the centre of the photo outwards, and least attended first.

Regions are replaced at two levels: in the grid of features, where the rest of the photo is
unchanged, and in the pixels of the encoder's input, where neighbouring features change too. A
deleted region becomes the mean of the photo (of its features, or its colour) or that of the blurred
photo.

Source: deletion and insertion, Petsiuk et al. 2018 (arXiv:1806.07421); deviations: regions instead
of single pixels, log-probabilities instead of probabilities, and the blur removes whole regions.

Notation: W content words, L regions, S steps, N scored versions of a photo.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from captioner.api import Captioner
from captioner.caption import CropBox
from captioner.config import (
    METHOD_TITLES,
    ExplanationMethod,
    FaithfulnessOptions,
    SearchOptions,
)
from captioner.data.images import open_image
from captioner.decoding.search import Hypothesis
from captioner.decoding.words import encode_search_words
from captioner.errors import DataError, ImageError, OptionError
from captioner.evaluation.bootstrap import (
    MIN_IMAGES,
    RESAMPLES,
    compare,
    interval,
    resample_weights,
)
from captioner.geometry import Geometry
from captioner.inference import Ensemble, Prepared
from captioner.models.explanations import WordScorer, rows_per_block
from captioner.vocabulary import FUNCTION_WORDS, UNKNOWN

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Score = Callable[[Indices, NDArray[np.bool_], Indices], Array]
"""From fills (N,), masks (N, L) of regions to fill, and words (N,) to log-probabilities (N,)."""

MEAN, BLUR = 0, 1
CURVES = {
    "deletion_mean": (MEAN, False),
    "deletion_blur": (BLUR, False),
    "insertion_blur": (BLUR, True),
}
"""The fill of each curve, and whether regions are inserted."""

METHODS: tuple[ExplanationMethod, ...] = ("attention", "gradient_input", "grad_cam", "occlusion")
"""``attention_gate`` is missing: the gate is one number per word, so the order is attention's."""
BASELINES = ("random", "centre", "least_attended")
ORDERS = (*METHODS, *BASELINES)

ENCODED_TOGETHER = 16
"""Versions of a photo that the encoder processes together."""


class Word(NamedTuple):
    """A content word and what was measured for it."""

    photo: str
    """File name of the photo, or its index."""
    word: str
    log_prob: float
    """Given the photo as it is (nats)."""
    curves: dict[str, Array]
    """By level: (curves, orders, S + 1)."""

    def as_dict(self) -> dict[str, Any]:
        """Photo, word, log-probability and, by level, curve and order, the area."""
        areas = {
            level: {
                curve: dict(zip(ORDERS, np.round(area(of_curve), 4).tolist(), strict=True))
                for curve, of_curve in zip(CURVES, curves, strict=True)
            }
            for level, curves in self.curves.items()
        }
        return {"photo": self.photo, "word": self.word, "log_prob": self.log_prob, **areas}


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """What was measured for a set of captions."""

    options: FaithfulnessOptions
    photos: int
    """Number of photos that were read, with or without content words."""
    words: tuple[Word, ...]
    regions: int
    """L."""

    def summary(self, resamples: int = RESAMPLES) -> dict[str, Any]:
        """All results as JSON data.

        Returns:
            ``photos``, ``photos_with_words``, ``words``, ``steps``, ``regions``, ``log_prob`` (mean
            over words) and, by level, curve and order: ``area`` (mean over words), ``curve`` (at S
            + 1 equal steps), ``interval`` (95%, bootstrap over photos), and for methods
            ``over_random``, ``over_centre``, ``over_least_attended`` and ``over_attention``: how
            much better the area is (``difference``, positive is better) with its paired
            ``interval`` and ``significant``. Intervals are None for fewer than 30 photos.
            ``per_word`` lists the areas of every word.
        """
        photos = sorted({one.photo for one in self.words})
        found: dict[str, Any] = {
            "photos": self.photos,
            "photos_with_words": len(photos),
            "words": len(self.words),
            "steps": self.options.steps,
            "regions": self.regions,
        }
        if not self.words:
            return found
        found["log_prob"] = float(np.mean([one.log_prob for one in self.words]))
        weights = resample_weights(len(photos), resamples) if len(photos) >= MIN_IMAGES else None
        index = np.searchsorted(photos, [one.photo for one in self.words])
        for level in self.words[0].curves:
            values = np.stack([one.curves[level] for one in self.words])  # (W, curves, orders, S+1)
            found[level] = {
                curve: _summarize(values[:, number], index, weights, sign=-1 if number < 2 else 1)
                for number, curve in enumerate(CURVES)
            }
        found["per_word"] = [one.as_dict() for one in self.words]
        if weights is None:
            found["warning"] = (
                f"{len(photos)} photos with content words are too few for confidence intervals "
                f"(needs {MIN_IMAGES})"
            )
        return found


def _summarize(
    curves: Array, photos: Indices, weights: Array | None, *, sign: int
) -> dict[str, dict[str, Any]]:
    """The results of every order, from curves (W, orders, S + 1)."""
    areas = np.stack([area(curve) for curve in curves.transpose(1, 0, 2)])  # (orders, W)
    resampled = None
    if weights is not None:  # the words of a photo are drawn together
        counts = weights @ np.bincount(photos)
        sums = np.stack([np.bincount(photos, row) for row in areas])
        resampled = weights @ sums.T / counts[:, None]  # (resamples, orders)
    found: dict[str, dict[str, Any]] = {}
    for number, order in enumerate(ORDERS):
        one: dict[str, Any] = {
            "area": float(areas[number].mean()),
            "interval": None if resampled is None else list(interval(resampled[:, number])),
            "curve": [float(value) for value in curves[:, number].mean(axis=0)],
        }
        for baseline in ("attention", *BASELINES) if order in METHODS else ():
            if baseline == order:
                continue
            other = ORDERS.index(baseline)
            entry: dict[str, Any] = {
                "difference": sign * float(areas[number].mean() - areas[other].mean()),
                "interval": None,
                "significant": None,
            }
            if resampled is not None:
                test = compare(
                    sign * areas[number].mean(),
                    sign * areas[other].mean(),
                    sign * resampled[:, number],
                    sign * resampled[:, other],
                )
                entry |= {"interval": [test.low, test.high], "significant": test.significant}
            one[f"over_{baseline}"] = entry
        found[order] = one
    return found


def area(curves: Array) -> Array:
    """Area under curves at equal steps from 0 to 1, by the trapezoidal rule: (..., S + 1)."""
    result: Array = (curves[..., 1:] + curves[..., :-1]).mean(axis=-1) / 2
    return result


# --- curves --------------------------------------------------------------------------------------


def measure_orders(orders: Indices, steps: int, score: Score) -> Array:
    """Delete and insert the regions of a photo in given orders.

    Args:
        orders: Indices of the regions, first those to delete or insert first, (orders, W, L).
        steps: S.
        score: Scores versions of the photo; versions that several orders share are scored once.

    Returns:
        Log-probability of the words, (curves, orders, W, S + 1).
    """
    count, words, regions = orders.shape
    counts = np.rint(np.linspace(0, regions, steps + 1))
    ranks = orders.argsort(axis=2)
    first = ranks[:, :, None, :] < counts[:, None]  # (orders, W, S + 1, L), deleted or inserted
    masks = np.stack([~first if inserts else first for _, inserts in CURVES.values()])
    fills = np.array([fill for fill, _ in CURVES.values()])[:, None, None, None]
    fills = np.where(masks.any(axis=-1), fills, MEAN)  # without a mask there is nothing to fill
    word = np.broadcast_to(np.arange(words)[:, None], fills.shape)
    rows = np.concatenate([fills[..., None], masks, word[..., None]], axis=-1).astype(np.intp)
    unique, inverse = np.unique(rows.reshape(-1, regions + 2), axis=0, return_inverse=True)
    found = score(unique[:, 0], unique[:, 1:-1].astype(bool), unique[:, -1])
    return found[inverse.ravel()].reshape(len(CURVES), count, words, steps + 1)


def region_orders(
    relevances: Mapping[ExplanationMethod, Array],
    geometry: Geometry,
    grid: tuple[int, int],
    seed: int,
) -> Indices:
    """The orders of the regions of a photo, most relevant first.

    Args:
        relevances: By method of ``METHODS``, (W, L).
        geometry: Where the regions lie.
        grid: Gh and Gw.
        seed: Seed of the random order, which also orders equally relevant regions.

    Returns:
        (orders, W, L), in the order of ``ORDERS``.
    """
    regions = grid[0] * grid[1]
    random = np.random.default_rng(seed).permutation(regions)
    y, x = (
        (axis.middles(count) - (axis.start + axis.stop) / 2) / (axis.stop - axis.start)
        for axis, count in zip(geometry, grid, strict=True)
    )
    distances = (y[:, None] ** 2 + x**2).ravel()
    words = len(relevances["attention"])
    values = [
        *(relevances[method] for method in METHODS),
        np.zeros((words, regions)),
        np.broadcast_to(-distances, (words, regions)),
        -relevances["attention"],
    ]
    shuffled = np.stack(values)[..., random]
    order: Indices = random[np.argsort(-shuffled, axis=-1, kind="stable")]
    return order


# --- photos --------------------------------------------------------------------------------------


class _Photo:
    """One photo with its blurred copy, and the versions of it that are scored."""

    def __init__(self, ensemble: Ensemble, image: Image.Image) -> None:
        self.ensemble, model = ensemble, ensemble.models[0]
        prepared = ensemble.prepare(image)
        (self.pixels,) = prepared.pixels
        y, x = model.geometry
        # As wide as a region, so that a blurred region has lost its content.
        blur = ImageFilter.GaussianBlur((x.pitch, y.pitch))
        blurred = np.asarray(Image.fromarray(self.pixels).filter(blur))
        mean = np.rint(self.pixels.mean(axis=(0, 1))).astype(np.uint8)
        self.fills = (np.broadcast_to(mean, blurred.shape), blurred)
        self.grid, blurred_grid = self._encode([self.pixels, blurred])
        self.fill_grids = torch.stack([self.grid.mean(dim=0).expand_as(self.grid), blurred_grid])

    def _encode(self, pixels: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Features (N, L, D) of several versions."""
        photos = [Prepared((one,), CropBox()) for one in pixels]
        return self.ensemble.encode(photos)[0].float()

    def region_of_pixels(self) -> NDArray[np.intp]:
        """Index of the region of each pixel, (H, W); -1 where the encoder sees nothing."""
        model, (height, width) = self.ensemble.models[0], self.pixels.shape[:2]
        size = model.preprocessing.image_size
        axes = model.geometry.placed(size, 0.0, 0.0, 1.0, 1.0)
        (rows, seen_rows), (columns, seen_columns) = (
            axis.samples(pixels, count, smooth=False)
            for axis, pixels, count in zip(axes, (height, width), model.grid, strict=True)
        )
        regions = rows[:, None].astype(np.intp) * model.grid[1] + columns.astype(np.intp)
        return np.where(seen_rows[:, None] & seen_columns, regions, -1)

    def score_grids(self, scorer: WordScorer, positions: Indices) -> Score:
        """Score versions whose features are replaced; words are those at the positions."""

        def score(fills: Indices, masks: NDArray[np.bool_], words: Indices) -> Array:
            found = np.empty(len(words))
            late = np.argsort(-positions[words], kind="stable")  # as `one_word` needs them
            rows = rows_per_block(self.grid)
            for block in (late[start : start + rows] for start in range(0, len(late), rows)):
                mask = torch.from_numpy(masks[block]).to(self.grid.device).unsqueeze(2)
                filled = self.fill_grids[torch.from_numpy(fills[block]).to(self.grid.device)]
                versions = torch.where(mask, filled, self.grid)
                found[block] = _one_word(scorer, versions, positions[words[block]])
            return found

        return score

    def score_pixels(self, scorer: WordScorer, positions: Indices) -> Score:
        """Score versions whose pixels are replaced."""
        labels = self.region_of_pixels()

        def score(fills: Indices, masks: NDArray[np.bool_], words: Indices) -> Array:
            found = np.empty(len(words))
            rows = np.concatenate([fills[:, None], masks], axis=1)
            versions, inverse = np.unique(rows, axis=0, return_inverse=True)
            inverse = inverse.ravel()
            for start in range(0, len(versions), ENCODED_TOGETHER):
                block = versions[start : start + ENCODED_TOGETHER]
                pixels = []
                for fill, *mask in block:
                    hidden = np.append(np.array(mask, dtype=bool), False)[labels]
                    pixels.append(np.where(hidden[..., None], self.fills[fill], self.pixels))
                grids = self._encode(pixels)
                at = np.flatnonzero((inverse >= start) & (inverse < start + len(block)))
                at = at[np.argsort(-positions[words[at]], kind="stable")]
                grids = grids[torch.from_numpy(inverse[at] - start).to(grids.device)]
                found[at] = _one_word(scorer, grids, positions[words[at]])
            return found

        return score


def _one_word(scorer: WordScorer, grids: Tensor, positions: Indices) -> Array:
    at = torch.from_numpy(positions).to(grids.device)
    values: Array = scorer.one_word(grids, at).double().cpu().numpy()
    return values


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
    if len(positions) > limit:
        positions = [positions[i * len(positions) // limit] for i in range(limit)]
    return np.array(positions, dtype=np.intp)


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
        number: Index of the photo, the seed of its random order.
        name: Its file name.
    """
    ensemble, vocabulary = model.ensemble, model.stored.vocabulary
    photo = _Photo(ensemble, image)
    start = vocabulary.start(search.style)
    grids = [photo.grid.unsqueeze(0)]
    memories = ensemble.memories(grids)
    if reference is None:
        tokens = encode_search_words(search, vocabulary)
        seed = zlib.crc32(photo.pixels.tobytes())
        caption = ensemble.search(memories, search, tokens, start, [seed])[0][0]
    else:
        given = vocabulary.encode(vocabulary.tokenize(reference))
        caption = _given(ensemble, memories, given, start)
    words = vocabulary.shown(caption.tokens)
    positions = content_words(words, caption.tokens, options.max_words)
    if not len(positions):
        return []
    scorer = WordScorer(ensemble.exact_decoder, start, caption.tokens)
    relevances = {
        method: ensemble.explain(method, grids, 0, start, caption).double().numpy()[positions]
        for method in METHODS
    }
    orders = region_orders(relevances, model.model.geometry, model.model.grid, number)
    whole = scorer.every_word(grids[0])[0].double().cpu().numpy()[positions]
    curves = {}
    for level in ("grid", "pixels") if options.level == "both" else (options.level,):
        versions = photo.score_grids if level == "grid" else photo.score_pixels
        found = measure_orders(orders, options.steps, versions(scorer, positions))
        curves[level] = found - whole[:, None]
    return [
        Word(
            name or str(number),
            words[position],
            float(whole[index]),
            {level: found[:, :, index] for level, found in curves.items()},
        )
        for index, position in enumerate(positions)
    ]


def _given(ensemble: Ensemble, memories: Any, tokens: list[int], start: int) -> Hypothesis:
    """A given caption with its attention."""
    scores = ensemble.score(memories, [[tokens]], start)
    length = len(tokens)
    log_probs = scores.log_probs[0, 0, range(length), tokens].cpu()
    alphas, gates = scores.alphas[0, 0, :length].cpu(), scores.gates[0, 0, :length].cpu()
    return Hypothesis(tokens, log_probs, alphas, gates, float(log_probs.sum()), ended=True)


def measure(
    model: Captioner,
    photos: Mapping[Path, str | None],
    options: FaithfulnessOptions,
    search: SearchOptions,
    *,
    on_error: Callable[[ImageError], None],
    progress: Callable[[Iterable[Path]], Iterable[Path]] = lambda paths: paths,
) -> Faithfulness:
    """Measure the content words of the captions of several photos.

    Args:
        model: A single model.
        photos: The photos, with a caption to measure instead of the model's, or None.
        options: How to measure; ``max_photos`` of the photos are used.
        search: How to caption.
        on_error: Called with the error of a photo that cannot be read.
        progress: Wraps the photos, such as a progress bar.

    Raises:
        ConfigError: The model is an ensemble.
        DataError: There are no photos.
    """
    if len(model.ensemble.models) > 1:
        raise OptionError("{faithfulness} is that of a single model, not of an ensemble; give one")
    if not photos:
        raise DataError("there are no photos to measure; give a folder with photos")
    chosen = list(photos)
    if len(chosen) > options.max_photos:
        count = options.max_photos
        chosen = [chosen[i * len(chosen) // count] for i in range(count)]
    words: list[Word] = []
    read = 0
    for number, path in enumerate(progress(chosen)):
        try:
            image = open_image(path)
        except ImageError as error:
            on_error(error)
            continue
        read += 1
        words += measure_photo(
            model,
            image,
            options,
            search,
            reference=photos[path],
            number=number,
            name=path.name,
        )
    return Faithfulness(options, read, tuple(words), model.model.grid[0] * model.model.grid[1])


# --- text ----------------------------------------------------------------------------------------

_TITLES = METHOD_TITLES | {
    "attention": "attention (x gate)",
    "gradient_input": "gradient x input",
    "least_attended": "least attended",
}


def as_lines(found: Mapping[str, Any]) -> list[str]:
    """The summary as lines of text."""
    lines = [
        f"faithfulness: {found['words']} content words of {found['photos_with_words']} photos, "
        f"{found['steps']} steps of {found['regions']} regions",
    ]
    if not found["words"]:
        return lines
    lines.append(
        "mean change of a word's log-probability (nats) and 95% interval over photos; of "
        f"{found['log_prob']:.2f} on average"
    )
    for level in ("grid", "pixels"):
        if level not in found:
            continue
        heads = [f"{name.replace('_', ', '):<26}" for name in CURVES]
        lines += ["", f"{level:<20}{''.join(heads)}".rstrip()]
        for order in ORDERS:
            cells = [f"{_cell(found[level][curve][order]):<26}" for curve in CURVES]
            lines.append(f"{_TITLES.get(order, order):<20}{''.join(cells)}".rstrip())
    lines += [
        "",
        "Lower is better for deletion, higher for insertion. * better than random; ** better than "
        "centre as well",
        "(95% interval of the paired difference). The gate does not change the order of regions.",
    ]
    if "warning" in found:
        lines.append(f"note: {found['warning']}")
    return lines


def _cell(one: Mapping[str, Any]) -> str:
    text = f"{one['area']:6.2f}"
    if one["interval"] is not None:
        text += f" ({one['interval'][0]:.2f} to {one['interval'][1]:.2f})"
    better = [
        name in one and one[name]["significant"] and one[name]["difference"] > 0
        for name in ("over_random", "over_centre")
    ]
    return f"{text} {'**' if all(better) else '*' if better[0] else ''}".rstrip()
