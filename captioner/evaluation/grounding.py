"""Whether attention lies on the object that a word names, against COCO's instance masks.

    words     a     dog   on    a     couch
    alphas    (T, Gh, Gw), each sums to 1
    names           dog               couch          captioner.evaluation.objects
    masks           (H, W)            (H, W)         the objects of that category in the photo
    coverage        (Gh, Gw)          (Gh, Gw)       share of every region that they cover

    correctness = sum_i alpha_i coverage_i

A map that knows nothing of the photo is right too, the more the larger the object. Every number
therefore stands beside that of maps which are not the word's: an even one, one that looks at the
centre, and those of the caption's other words.

Crowd regions count as COCO counts them, neither right nor wrong: what only a crowd region of the
category covers is left out of the attention and out of the area. A name is measured only where its
category is in the photo; the others are counted. The file must name every object of its categories,
as COCO's do.
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
from captioner.evaluation.bootstrap import MIN_IMAGES, interval, weights
from captioner.evaluation.masks import Instances, Seen
from captioner.evaluation.objects import Name, find_names

Array = NDArray[np.float64]

_MEANS = (
    "correctness", "uniform", "centre", "shuffled", "pointing", "pointing_uniform",
    "pointing_centre",
)  # fmt: skip
_SHIFTS = ("-1", "0", "+1")


@dataclass(frozen=True)
class Occurrence:
    """One name in one caption, measured. NaN: it has no such number."""

    image_id: int
    category: str
    text: str
    """The name's words."""
    start: int
    """The place of its first word in the caption."""
    correctness: float
    """Share of the attention of the words' mean map that lies on the objects, 0 to 1."""
    uniform: float
    """The same of an even map: the objects' share of the area that the model saw."""
    centre: float
    """The same of a bell around the middle of the grid, a quarter of each side wide."""
    shuffled: float
    """The same of the mean map of the caption's other words, which is what one of them drawn at
    random would get; NaN where there are none."""
    shift: tuple[float, float, float]
    """The same of the word before, the name and the word after; all NaN where one is missing."""
    pointing: float
    """1 when the middle of the most attended region lies on an object, else 0; the mean over
    regions that share the first place; NaN where these point at a crowd region alone."""
    pointing_uniform: float
    """The same of a region drawn at random."""
    pointing_centre: float
    """The same of the middle of the part seen."""
    gate: float
    """The context gate, the mean over the name's words."""


@dataclass(frozen=True, eq=False)
class Grounding:
    """What was measured over a set of captions."""

    photos: tuple[int, ...]
    """The image ids of all captions."""
    occurrences: tuple[Occurrence, ...]
    """Every measured name, by photo and place."""
    names: int
    """Names found, of the categories that the file knows."""
    absent: int
    """Names of what is not in the photo: the model made it up, or took another word for it."""
    unseen: int
    """Names of what lies outside of the part of the photo that the model saw."""
    ignored: int
    """Names of what is there as a crowd region alone, or whose attention all lies on one."""
    entropy: float
    """Mean over all words of the captions, nats; NaN without words."""
    entropy_even: float
    """The same of even maps: ln L."""
    movement: float
    """Mean over captions of two words or more (`captioner.evaluation.attention.movement`)."""

    def summary(self, resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
        """All numbers, ready for JSON: None where there is nothing to measure.

        Means are over names. ``ratio`` is mean correctness over mean uniform, 1 for attention that
        is no better than even. It is no mean of ratios: in that, one small object weighs as much
        as a hundred large ones, since what a ratio can reach is 1 / area.

        ``over_uniform``, ``over_centre``, ``over_shuffled`` are correctness minus those, name by
        name; ``over_before`` and ``over_after`` minus that of the map of the word before and after,
        where there are both. Their intervals are paired: one that leaves out 0 tells the two apart,
        which intervals of the two themselves do not.

        ``intervals`` are 95% bootstrap intervals over photos: the names of a photo are not
        independent, so photos are drawn. Over fewer than 30 photos with names there is none.
        ``shift`` is over the names with a word on both sides.

        Args:
            resamples: How often the photos are drawn again.
            seed: Start of the random draws.

        Returns:
            The means by name, the differences, ``ratio``, ``shift``, ``intervals`` (low and high by
            name), the counts, ``gate``, ``entropy`` and ``entropy_even`` (nats), ``movement``, and
            ``categories`` (count, correctness, uniform and ratio of each, the most frequent first).
        """
        columns = {key: self._column(key) for key in _MEANS}
        shifts = np.array([one.shift for one in self.occurrences]).reshape(-1, 3)
        for key in ("uniform", "centre", "shuffled"):
            columns[f"over_{key}"] = columns["correctness"] - columns[key]
        for key, place in (("before", 0), ("after", 2)):
            columns[f"over_{key}"] = shifts[:, 1] - shifts[:, place]
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
            **{key: _number(value) for key, value in numbers.items()},
            "shift": {
                **{key: _number(_mean(shifts[:, i])) for i, key in enumerate(_SHIFTS)},
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
        """Low and high of every mean and of the ratio; None over too few photos."""
        if not self.occurrences:
            return dict.fromkeys((*columns, "ratio"))
        place = {image_id: index for index, image_id in enumerate(self.photos)}
        photo = np.array([place[one.image_id] for one in self.occurrences])
        drawn = weights(len(self.photos), resamples, seed)
        means: dict[str, Array] = {}
        photos: dict[str, int] = {}  # with a name that has such a number
        for key, column in columns.items():
            there = ~np.isnan(column)
            photos[key] = len(np.unique(photo[there]))
            sums = np.bincount(photo[there], column[there], len(self.photos))
            counts = np.bincount(photo[there], minlength=len(self.photos))
            means[key] = _divide(drawn @ sums, drawn @ counts)
        means["ratio"] = _divide(means["correctness"], means["uniform"])
        enough = {key: there >= MIN_IMAGES for key, there in photos.items()}
        enough["ratio"] = enough["correctness"]
        return {
            key: list(interval(values)) if enough[key] else None for key, values in means.items()
        }

    def _categories(self) -> dict[str, dict[str, Any]]:
        """Count, correctness, uniform and ratio of every category, the most frequent first."""
        named = np.array([one.category for one in self.occurrences])
        found = {}
        counts = Counter(sorted(named.tolist()))  # sorted: equal counts by name
        for category, count in counts.most_common():
            right, even = (self._column(key)[named == category] for key in _MEANS[:2])
            numbers = {"correctness": _mean(right), "uniform": _mean(even)}
            numbers["ratio"] = _ratio(right, even)
            found[category] = {"count": count, **{k: _number(v) for k, v in numbers.items()}}
        return found


def measure(captions: Mapping[int, Caption], instances: Instances) -> Grounding:
    """Measure every name of every caption against the photo's masks.

    Source of ``correctness``: Liu et al. 2017, Attention Correctness in Neural Image Captioning
    (arXiv:1605.09553). Deviations: a name of several words takes their mean map, where the paper
    takes the best of the words; the map is resized as blocks; crowd regions are left out.
    Source of ``pointing``: Zhang et al. 2016, Top-down Neural Attention by Excitation Backprop
    (arXiv:1608.00507). Deviations: no margin of 15 pixels around the object; the mean is over
    names, not over categories; crowd regions are left out.

    Args:
        captions: Caption by image id.
        instances: The objects of these photos, and maybe of others.

    Returns:
        The measured names and the counts of the others.

    Raises:
        DataError: A captioned photo is not in the instances file, or a mask cannot be decoded.
    """
    lacking = [image_id for image_id in sorted(captions) if image_id not in instances.sizes]
    if lacking:
        raise DataError(
            f"{len(lacking)} of {len(captions)} captioned photos are not in {instances.path} "
            f"(first: id {lacking[0]}); give the instances of the same photos"
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
    entropy_all, entropy_even, moved = _spread(list(captions.values()))
    return Grounding(
        photos=tuple(sorted(captions)),
        occurrences=tuple(found),
        names=counts["names"],
        absent=counts["absent"],
        unseen=counts["unseen"],
        ignored=counts["ignored"],
        entropy=entropy_all,
        entropy_even=entropy_even,
        movement=moved,
    )


_Lack = Literal["absent", "unseen", "ignored"]


def _outcomes(image_id: int, caption: Caption, instances: Instances) -> list[Occurrence | _Lack]:
    """What becomes of every name of a caption."""
    places: dict[str, Seen | _Lack] = {}
    outcomes: list[Occurrence | _Lack] = []
    for name in find_names(caption.words):
        if name.category not in instances.categories:
            continue
        if name.category not in places:
            places[name.category] = _look(image_id, name.category, caption, instances)
        place = places[name.category]
        outcomes.append(
            place if isinstance(place, str) else _occurrence(image_id, caption, name, place)
        )
    return outcomes


def _look(image_id: int, category: str, caption: Caption, instances: Instances) -> Seen | _Lack:
    """Where a category lies in the grid, or why it cannot be measured."""
    masks = instances.masks(image_id, category)
    if masks is None:
        return "absent"
    seen = Seen.of(masks, caption.crop_box, (caption.alphas.shape[1], caption.alphas.shape[2]))
    if seen.objects.any():
        return seen
    return "ignored" if seen.crowded or not masks.objects.any() else "unseen"


def _occurrence(image_id: int, caption: Caption, name: Name, seen: Seen) -> Occurrence | _Lack:
    """The numbers of one name."""
    _, start, stop = name
    maps = np.asarray(caption.alphas, dtype=np.float64)
    correctness = seen.correctness(maps[start:stop])
    if math.isnan(correctness):
        return "ignored"
    before = seen.correctness(maps[max(start - 1, 0) : start])
    shift = (before, correctness, seen.correctness(maps[stop : stop + 1]))
    even = np.ones((1, *maps.shape[1:]))
    return Occurrence(
        image_id=image_id,
        category=name.category,
        text=" ".join(caption.words[start:stop]),
        start=start,
        correctness=correctness,
        uniform=seen.correctness(even),
        centre=seen.correctness(_bell(maps.shape[1], maps.shape[2])),
        shuffled=seen.correctness(np.delete(maps, slice(start, stop), axis=0)),
        shift=(math.nan,) * 3 if any(map(math.isnan, shift)) else shift,
        pointing=seen.pointing(maps[start:stop].mean(axis=0)),
        pointing_uniform=seen.pointing(even[0]),
        pointing_centre=seen.middle,
        gate=float(np.mean(caption.gates[start:stop], dtype=np.float64)),
    )


def _bell(rows: int, columns: int) -> Array:
    """(1, Gh, Gw), a Gaussian around the middle, a quarter of each side its standard deviation.

    The width was fixed before anything was measured, and tuned on nothing.
    """
    down, across = ((np.arange(n) + 0.5) / n - 0.5 for n in (rows, columns))
    bell: Array = np.exp(-(down[:, None] ** 2 + across**2) / (2 * 0.25**2))
    return bell[None]


def _spread(captions: Sequence[Caption]) -> tuple[float, float, float]:
    """Entropy of the maps of all words, that of even maps, and movement within a caption."""
    every = [caption.alphas for caption in captions if len(caption.words)]
    entropies = [value for maps in every for value in entropy(maps)]
    even = [math.log(maps[0].size) for maps in every for _ in maps]
    moved = [movement(maps) for maps in every]
    return _mean(np.array(entropies)), _mean(np.array(even)), _mean(np.array(moved))


def _mean(values: Array) -> float:
    """The mean of what is there; NaN when nothing is."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if there.size else math.nan


def _ratio(correctness: Array, uniform: Array) -> float:
    return _mean(correctness) / _mean(uniform)


def _divide(values: Array, by: Array) -> Array:
    """Values / by, NaN where ``by`` is 0."""
    result: Array = np.divide(values, by, out=np.full(len(values), math.nan), where=by > 0)
    return result


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value
