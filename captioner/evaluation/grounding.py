"""Attention grounding: how much attention lies on the object that a word names.

    words     a     dog   on    a     couch
    alphas    (T, Gh, Gw), each sums to 1
    names           dog               couch          captioner.evaluation.objects
    masks           (H, W)            (H, W)         objects of that category in the photo
    coverage        (Gh, Gw)          (Gh, Gw)       share of each region covered by the objects

    correctness = sum_i alpha_i coverage_i

Large objects give any map a high correctness, so each value is reported with baselines: a uniform
map, a centred Gaussian, and the maps of the other words of the caption.

As in COCO's own evaluation, crowd regions are ignored: pixels that only a crowd region of the
category covers count neither as attention nor as area. A name is measured only if its category is
in the photo; other names are counted. The instances file must annotate every object of its
categories, as COCO's files do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from captioner.caption import Caption
from captioner.errors import DataError
from captioner.evaluation.attention import entropy, movement
from captioner.evaluation.bootstrap import MIN_IMAGES, RESAMPLES, interval, resample_weights
from captioner.evaluation.masks import GridMasks, Instances
from captioner.evaluation.objects import Name, find_names

Array = NDArray[np.float64]

_MEANS = (
    "correctness", "uniform", "centre", "shuffled", "pointing", "pointing_uniform",
    "pointing_centre",
)  # fmt: skip
_SHIFTS = ("-1", "0", "+1")


@dataclass(frozen=True)
class Occurrence:
    """Measurements of one name in one caption; NaN where undefined."""

    image_id: int
    category: str
    text: str
    """The words of the name."""
    start: int
    """Index of its first word in the caption."""
    correctness: float
    """Share of the attention of the mean map of the words on the objects, 0 to 1."""
    uniform: float
    """Correctness of a map with equal attention to every region."""
    centre: float
    """Correctness of a Gaussian at the centre of the crop with sigma = 1/4 of each side."""
    shuffled: float
    """Correctness of the mean map of the other words of the caption; NaN without other words."""
    shift: tuple[float, float, float]
    """Correctness of the word before, the name and the word after; all NaN if one is missing."""
    pointing: float
    """1 if the middle of the most attended region lies on an object, else 0; mean over ties; NaN if
    all tied middles lie in crowd regions."""
    pointing_uniform: float
    """Expected pointing of a random region."""
    pointing_centre: float
    """Pointing of the centre of the crop."""
    gate: float
    """Mean context gate of the words."""


@dataclass(frozen=True, eq=False)
class Grounding:
    """Grounding measurements over a set of captions."""

    photos: tuple[int, ...]
    """Image ids of all captions."""
    occurrences: tuple[Occurrence, ...]
    """Every measured name, by photo and position."""
    names: int
    """Number of names whose category is in the instances file."""
    absent: int
    """Names whose category is not in the photo."""
    unseen: int
    """Names whose objects lie outside the crop that the model sees."""
    ignored: int
    """Names with crowd regions only, or whose attention lies entirely on them."""
    entropy: float
    """Mean over all words in nats; NaN without words."""
    entropy_even: float
    """Entropy of uniform maps: ln L."""
    movement: float
    """Mean `attention.movement` over captions of at least two words."""

    def summary(self, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Any]:
        """All results as JSON data, None where undefined.

        Means are over names. ``ratio`` is mean correctness over mean uniform; 1 is no better than a
        uniform map. It is not a mean of ratios, in which small objects would dominate, since a
        ratio is bounded by 1 / area.

        ``over_uniform``, ``over_centre`` and ``over_shuffled`` are correctness minus the baseline,
        averaged over names; ``over_before`` and ``over_after`` are correctness minus that of the
        word before or after. Their intervals are paired. ``shift`` and the last two cover the names
        with a word on both sides.

        ``intervals`` are 95% bootstrap intervals over photos, since the names of a photo are not
        independent; None for fewer than 30 photos with names.

        Args:
            resamples: Number of bootstrap resamples.
            seed: Seed of the bootstrap.

        Returns:
            The means, the differences, ``ratio``, ``shift``, ``intervals`` (low and high by key),
            the counts, ``gate``, ``entropy`` and ``entropy_even`` (nats), ``movement``, and
            ``categories`` (count, correctness, uniform and ratio, the most frequent first).
        """
        columns = {key: self._column(key) for key in _MEANS}
        shifts = np.array([one.shift for one in self.occurrences]).reshape(-1, 3)
        for key in ("uniform", "centre", "shuffled"):
            columns[f"over_{key}"] = columns["correctness"] - columns[key]
        for key, index in (("before", 0), ("after", 2)):
            columns[f"over_{key}"] = shifts[:, 1] - shifts[:, index]
        shifts = shifts[~np.isnan(shifts).any(axis=1)]
        numbers = {
            **{key: _mean(column) for key, column in columns.items()},
            "ratio": _ratio(columns["correctness"], columns["uniform"]),
            "gate": _mean(self._column("gate")),
            "entropy": self.entropy,
            "entropy_even": self.entropy_even,
            "movement": self.movement,
        }
        return {
            **{key: _json_number(value) for key, value in numbers.items()},
            "shift": {
                **{key: _json_number(_mean(shifts[:, i])) for i, key in enumerate(_SHIFTS)},
                "names": len(shifts),
            },
            "intervals": self._intervals(columns, resamples, seed),
            "photos": len(self.photos),
            "photos_with_names": len({one.image_id for one in self.occurrences}),
            "names": self.names,
            "measured": len(self.occurrences),
            "absent": self.absent,
            "unseen": self.unseen,
            "ignored": self.ignored,
            "categories": self._categories(),
        }

    def _column(self, key: str) -> Array:
        return np.array([getattr(one, key) for one in self.occurrences], dtype=np.float64)

    def _intervals(
        self, columns: Mapping[str, Array], resamples: int, seed: int
    ) -> dict[str, list[float] | None]:
        """Low and high of each mean and of the ratio; None for too few photos."""
        if not self.occurrences:
            return dict.fromkeys((*columns, "ratio"))
        index = {image_id: number for number, image_id in enumerate(self.photos)}
        photo = np.array([index[one.image_id] for one in self.occurrences])
        weights = resample_weights(len(self.photos), resamples, seed)
        means: dict[str, Array] = {}
        photos: dict[str, int] = {}  # number of photos with a defined value
        for key, column in columns.items():
            defined = ~np.isnan(column)
            photos[key] = len(np.unique(photo[defined]))
            sums = np.bincount(photo[defined], column[defined], len(self.photos))
            counts = np.bincount(photo[defined], minlength=len(self.photos))
            means[key] = _divide(weights @ sums, weights @ counts)
        means["ratio"] = _divide(means["correctness"], means["uniform"])
        photos["ratio"] = photos["correctness"]
        return {
            key: list(interval(values)) if photos[key] >= MIN_IMAGES else None
            for key, values in means.items()
        }

    def _categories(self) -> dict[str, dict[str, Any]]:
        """Count, correctness, uniform and ratio of each category, the most frequent first."""
        categories = np.array([one.category for one in self.occurrences])
        found = {}
        counts = Counter(sorted(categories.tolist()))  # sorted: ties in alphabetical order
        for category, count in counts.most_common():
            correctness, uniform = (
                self._column(key)[categories == category] for key in ("correctness", "uniform")
            )
            numbers = {"correctness": _mean(correctness), "uniform": _mean(uniform)}
            numbers["ratio"] = _ratio(correctness, uniform)
            found[category] = {"count": count, **{k: _json_number(v) for k, v in numbers.items()}}
        return found


def measure(captions: Mapping[int, Caption], instances: Instances) -> Grounding:
    """Measure every name of every caption against the masks of the photo.

    Source of ``correctness``: Liu et al. 2017, Attention Correctness in Neural Image Captioning
    (arXiv:1605.09553). Deviations: a name of several words uses their mean map instead of the best
    one; each region's attention is spread over the pixels nearest to its centre; crowd regions are
    ignored.
    Source of ``pointing``: Zhang et al. 2016, Top-down Neural Attention by Excitation Backprop
    (arXiv:1608.00507). Deviations: no margin of 15 pixels around objects; the mean is over names,
    not over categories; crowd regions are ignored.

    Args:
        captions: Caption by image id.
        instances: The objects of at least these photos.

    Raises:
        DataError: A captioned photo is not in the instances file, or a mask cannot be decoded.
    """
    missing = [image_id for image_id in sorted(captions) if image_id not in instances.sizes]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(captions)} captioned photos are not in {instances.path} "
            f"(first: id {missing[0]}); give the instances of the same photos"
        )
    counts: Counter[str] = Counter()
    found: list[Occurrence] = []
    for image_id, caption in sorted(captions.items()):
        for outcome in _outcomes(image_id, caption, instances):
            counts["names"] += 1
            if isinstance(outcome, Occurrence):
                found.append(outcome)
            else:
                counts[outcome] += 1
    entropy_all, entropy_even, mean_movement = _spread(list(captions.values()))
    return Grounding(
        photos=tuple(sorted(captions)),
        occurrences=tuple(found),
        names=counts["names"],
        absent=counts["absent"],
        unseen=counts["unseen"],
        ignored=counts["ignored"],
        entropy=entropy_all,
        entropy_even=entropy_even,
        movement=mean_movement,
    )


_NotMeasured = Literal["absent", "unseen", "ignored"]


def _outcomes(
    image_id: int, caption: Caption, instances: Instances
) -> list[Occurrence | _NotMeasured]:
    """The measurements of each name of a caption, or why it was not measured."""
    masks: dict[str, GridMasks | _NotMeasured] = {}
    outcomes: list[Occurrence | _NotMeasured] = []
    for name in find_names(caption.words):
        if name.category not in instances.categories:
            continue
        if name.category not in masks:
            masks[name.category] = _grid_masks(image_id, name.category, caption, instances)
        found = masks[name.category]
        outcomes.append(
            found if isinstance(found, str) else _measure_name(image_id, caption, name, found)
        )
    return outcomes


def _grid_masks(
    image_id: int, category: str, caption: Caption, instances: Instances
) -> GridMasks | _NotMeasured:
    """The masks of a category on the grid of a caption, or why they cannot be measured."""
    masks = instances.masks(image_id, category)
    if masks is None:
        return "absent"
    grid = (caption.alphas.shape[1], caption.alphas.shape[2])
    found = GridMasks.from_masks(masks, caption.regions, grid)
    if found.objects.any():
        return found
    return "ignored" if found.has_crowd or not masks.objects.any() else "unseen"


def _measure_name(
    image_id: int, caption: Caption, name: Name, masks: GridMasks
) -> Occurrence | _NotMeasured:
    _, start, stop = name
    maps = np.asarray(caption.alphas, dtype=np.float64)
    correctness = masks.correctness(maps[start:stop])
    if math.isnan(correctness):
        return "ignored"
    before = masks.correctness(maps[max(start - 1, 0) : start])
    shift = (before, correctness, masks.correctness(maps[stop : stop + 1]))
    uniform = np.ones((1, *maps.shape[1:]))
    return Occurrence(
        image_id=image_id,
        category=name.category,
        text=" ".join(caption.words[start:stop]),
        start=start,
        correctness=correctness,
        uniform=masks.correctness(uniform),
        centre=masks.correctness(_centre_gaussian(caption)),
        shuffled=masks.correctness(np.delete(maps, slice(start, stop), axis=0)),
        shift=(math.nan,) * 3 if any(map(math.isnan, shift)) else shift,
        pointing=masks.pointing(maps[start:stop].mean(axis=0)),
        pointing_uniform=masks.pointing(uniform[0]),
        pointing_centre=masks.grid_centre,
        gate=float(np.mean(caption.gates[start:stop], dtype=np.float64)),
    )


def _centre_gaussian(caption: Caption) -> Array:
    """A Gaussian at the centre of what the model sees with sigma = 1/4 of each side, not tuned.

    Returns:
        (1, Gh, Gw).
    """
    distances = caption.regions.from_centre(caption.alphas.shape[1:])
    gaussian: Array = np.exp(-distances / (2 * 0.25**2))
    return gaussian[None]


def _spread(captions: Sequence[Caption]) -> tuple[float, float, float]:
    """Mean entropy of all maps, that of uniform maps, and mean movement within a caption."""
    alphas = [caption.alphas for caption in captions if len(caption.words)]
    entropies = [value for maps in alphas for value in entropy(maps)]
    uniform = [math.log(maps[0].size) for maps in alphas for _ in maps]
    movements = [movement(maps) for maps in alphas]
    return _mean(np.array(entropies)), _mean(np.array(uniform)), _mean(np.array(movements))


def _mean(values: Array) -> float:
    """Mean of the values that are not NaN; NaN if there are none."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan


def _ratio(correctness: Array, uniform: Array) -> float:
    return _mean(correctness) / _mean(uniform)


def _divide(values: Array, by: Array) -> Array:
    """Values / by, NaN where ``by`` is 0."""
    result: Array = np.divide(values, by, out=np.full(len(values), math.nan), where=by > 0)
    return result


def _json_number(value: float) -> float | None:
    """Convert NaN, which JSON lacks, to None."""
    return None if math.isnan(value) else value
