"""Attention grounding: how much of the attention is on the object that a word names.

    words     a     dog   on    a     couch
    alphas    (T, Gh, Gw), each sums to 1
    names           dog               couch          captioner.evaluation.objects
    labels          (H, W)            (H, W)         where objects of that category are in the photo
    coverage        (Gh, Gw)          (Gh, Gw)       share of each region covered by the objects

    correctness = sum_i alpha_i coverage_i

On large objects, any map has a high correctness. Each value is therefore reported with baselines: a
uniform map, a centred Gaussian, and the maps of the other words of the caption.

As in COCO's own evaluation, crowd regions are ignored: pixels that only a crowd region of the
category covers count neither as attention nor as area. A name is measured only if its category is
in the photo. Other names are counted. The instances file must annotate every object of its
categories, as COCO's files do.

Notation: a photo of H x W pixels; a grid of Gh x Gw regions over the part that the model sees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioner.caption_types import Caption
from captioner.data.coco import Fields, read_coco
from captioner.errors import ConfigError, DataError
from captioner.evaluation.bootstrap import interval, resampled_means, too_few
from captioner.evaluation.objects import find_names
from captioner.extras import is_installed
from captioner.geometry import Axis, Geometry

Array = NDArray[np.float64]

# --- masks ---------------------------------------------------------------------------------------

_FIELDS: Fields = {
    "images": {"id": (int,), "file_name": (str,), "height": (int,), "width": (int,)},
    "annotations": {
        "id": (int,), "image_id": (int,), "category_id": (int,), "segmentation": (list, dict),
    },
    "categories": {"id": (int,), "name": (str,)},
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Instances:
    """The objects in a set of photos. Masks are decoded on access."""

    path: Path
    """The instances file, for error messages."""
    images: Mapping[int, dict[str, Any]]
    """COCO's entry for each photo by image id, including photos without objects."""
    categories: frozenset[str]
    """Names of the annotated categories."""
    annotations: Mapping[tuple[int, str], list[dict[str, Any]]]
    """COCO annotations by image id and category."""

    def labels(self, image_id: int, category: str) -> Array | None:
        """Return where the objects of a category are in a photo.

        Returns:
            Labels of the pixels, (H, W), or None if the photo has no annotation of the category. 1:
            on an object. NaN: only a crowd region covers the pixel, so it may or may not be on an
            object. 0: elsewhere.

        Raises:
            DataError: A mask consists neither of polygons nor of run lengths of the photo's size.
        """
        entries = self.annotations.get((image_id, category))
        if not entries:
            return None
        from pycocotools import mask
        from pycocotools.coco import COCO

        coco = COCO()
        coco.imgs = self.images
        image = self.images[image_id]
        labels = np.zeros((image["height"], image["width"]))
        for entry in sorted(entries, key=lambda one: one.get("iscrowd") != 1):  # crowds first
            try:
                runs = coco.annToRLE(entry)
                pixels = mask.decode(runs)
                if pixels.sum() != mask.area(runs):  # the other pixels are uninitialized memory
                    raise ValueError("the run lengths end before the last pixel")
                labels[pixels == 1] = math.nan if entry.get("iscrowd") == 1 else 1
            except Exception as error:  # pycocotools raises plain Exception
                raise DataError(
                    f"{self.path}: annotation {entry['id']} has an invalid mask ({error}); "
                    "use polygons or run lengths"
                ) from error
        return labels


def read_instances(path: str | Path) -> Instances:
    """Read a COCO instances file, e.g. ``instances_val2014.json``.

    Raises:
        ConfigError: pycocotools is not installed.
        DataError: The file is missing, or is not a COCO instances file in JSON.
    """
    if not is_installed("pycocotools"):
        raise ConfigError("masks need pycocotools; run: pip install 'captioner[evaluate]'")
    data = read_coco(path, _FIELDS, "instances")
    names = {category["id"]: category["name"] for category in data["categories"]}
    images = {image["id"]: image for image in data["images"]}
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for entry in data["annotations"]:
        for key, known in (("image_id", images), ("category_id", names)):
            if entry[key] not in known:
                raise DataError(
                    f"{path}: annotation {entry['id']} has the {key} {entry[key]}, which is not in "
                    "the file; remove the annotation or add that entry"
                )
        found.setdefault((entry["image_id"], names[entry["category_id"]]), []).append(entry)
    return Instances(Path(path), images, frozenset(names.values()), found)


def region_coverage(mask: NDArray[np.bool_], regions: Geometry, grid: tuple[int, ...]) -> Array:
    """Return the share of each region that a mask (H, W) covers, (Gh, Gw), 0 outside the photo.

    The result is exact. A region is the rectangle of points that are nearest to its centre. Its
    borders may cut through pixels, and such a pixel counts in proportion to the part inside. The
    sum of alphas times coverage is therefore the attention on the mask, if the attention of each
    region is spread evenly over its rectangle.
    """
    rows, columns = (
        _overlaps(pixels, axis, count)
        for pixels, axis, count in zip(mask.shape, regions, grid, strict=True)
    )
    result: Array = rows @ mask.astype(np.float64) @ columns.T
    return result


def _overlaps(pixels: int, axis: Axis, cells: int) -> Array:
    """Return the share of each cell that each pixel fills, along one axis, (cells, pixels)."""
    # Rounded, so that a border between two pixels is exact. Otherwise, a mask on the other side of
    # the border would cover 1e-14 of the region.
    borders = np.round(np.clip(axis.borders(cells), 0, 1) * pixels, 9)
    starts, stops = borders[:-1, None], borders[1:, None]
    inside = np.clip(np.arange(pixels + 1), starts, stops)  # pixel edges, clipped
    lengths = np.diff(inside, axis=1)
    return np.divide(lengths, stops - starts, out=np.zeros_like(lengths), where=stops > starts)


def _at_middles(labels: Array, regions: Geometry, grid: tuple[int, ...]) -> Array:
    """Return the label of the pixel at the middle of each region, (Gh, Gw).

    The labels are (H, W). If a middle is between pixels, the pixel to the right and below counts.
    See ``Axis.middles``.
    """
    rows, columns = (
        np.clip(np.round(axis.middles(count) * pixels, 9), 0, pixels - 1).astype(np.intp)
        for pixels, axis, count in zip(labels.shape, regions, grid, strict=True)
    )
    return labels[np.ix_(rows, columns)]


# --- attention -----------------------------------------------------------------------------------

_MEANS = (
    "correctness", "uniform", "centre", "shuffled", "pointing", "pointing_uniform",
    "pointing_centre",
)  # fmt: skip


class Target(NamedTuple):
    """The part of a photo that words refer to, in terms of the Gh x Gw regions of the grid."""

    inside: Array
    """Share of each region that is inside the target, (Gh, Gw)."""
    known: Array
    """Share of each region that is not ignored, (Gh, Gw); see ``Instances.labels``."""
    middles: Array
    """Label at the middle of each region, (Gh, Gw): 1 inside the target, NaN ignored, else 0."""
    centre: float
    """Label at the centre of the part of the photo that the model sees."""

    @classmethod
    def seen(cls, labels: Array | None, caption: Caption) -> Target | str:
        """Return the target with these labels, (H, W), or the reason why it cannot be measured.

        There are three reasons. ``absent``: the labels are missing. ``unseen``: the target is
        outside the part of the photo that the model sees. ``ignored``: the target consists of crowd
        regions.
        """
        if labels is None:
            return "absent"
        regions, grid = caption.regions, caption.alphas.shape[1:]
        inside = region_coverage(labels == 1, regions, grid)
        if not inside.any():
            crowds = region_coverage(np.isnan(labels), regions, grid)
            return "ignored" if crowds.any() or not (labels == 1).any() else "unseen"
        whole = Geometry(*(Axis.even(1, axis.start, axis.stop) for axis in regions))
        return cls(
            inside,
            region_coverage(~np.isnan(labels), regions, grid),
            _at_middles(labels, regions, grid),
            _at_middles(labels, whole, (1, 1)).item(),
        )


class Marked(NamedTuple):
    """Words of a caption that refer to something in the photo."""

    row: Mapping[str, Any]
    """Keys that identify the words in the report."""
    positions: Sequence[int]
    """The positions of the words, ascending."""
    target: Target | str
    """The target of the words, or the reason why it cannot be measured."""


def measure(captions: Mapping[int, Caption], instances: Instances) -> dict[str, Any]:
    """Measure how much of the attention of every name in the captions is inside the masks.

    Args:
        captions: Captions by image id.
        instances: The objects in these photos.

    Returns:
        The result of `Grounding.summary` for ``names``. The reasons for names that are not measured
        are ``absent`` (the category is not in the photo), ``unseen`` (it is outside the crop that
        the model sees) and ``ignored`` (crowd regions only, or all attention on crowd regions).
        ``categories`` has count, correctness, uniform and ratio of each category, the most frequent
        category first.

    Raises:
        DataError: A mask cannot be decoded.
    """
    found = Grounding()
    for image_id, caption in sorted(captions.items()):
        found.add(image_id, caption, _names(image_id, caption, instances))
    report = found.summary("names", ("absent", "unseen", "ignored"))
    names = report["per_name"]
    categories = [one["category"] for one in names]
    report["categories"] = {}
    for category, count in Counter(sorted(categories)).most_common():  # ties in alphabetical order
        own = [one for one in names if one["category"] == category]
        correctness, uniform = (
            _mean([one[key] for one in own]) for key in ("correctness", "uniform")
        )
        report["categories"][category] = {
            "count": count,
            "correctness": correctness,
            "uniform": uniform,
            "ratio": correctness / uniform,
        }
    return report


def _names(image_id: int, caption: Caption, instances: Instances) -> Iterator[Marked]:
    """Mark the words of a caption that name annotated categories."""
    for category, start, stop in find_names(caption.words):
        if category in instances.categories:
            target = Target.seen(instances.labels(image_id, category), caption)
            yield Marked({"image_id": image_id, "category": category}, range(start, stop), target)


class Grounding:
    """Measurements of attention maps, for names or phrases in the captions of photos.

    Source of ``correctness``: Liu et al. 2017, Attention Correctness in Neural Image Captioning
    (arXiv:1605.09553). Deviations: a name of several words uses their mean map instead of the best
    map; the attention of each region is spread over the pixels nearest to its centre; crowd regions
    are ignored.
    Source of ``pointing``: Zhang et al. 2016, Top-down Neural Attention by Excitation Backprop
    (arXiv:1608.00507). Deviations: no margin of 15 pixels around objects; the mean is over names,
    not over categories; crowd regions are ignored.
    """

    def __init__(self) -> None:
        self._photos: set[Any] = set()
        self._owners: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._entropies: list[float] = []
        self._even: list[float] = []
        self._movements: list[float] = []

    def add(self, photo: Any, caption: Caption, marked: Iterable[Marked]) -> None:
        """Measure the maps of all words of a caption, and the attention of its marked words."""
        self._photos.add(photo)
        if len(caption.words):
            self._entropies += entropy(caption.alphas).tolist()
            self._even += [math.log(one.size) for one in caption.alphas]
            self._movements.append(movement(caption.alphas))
        for row, positions, target in marked:
            found = target if isinstance(target, str) else measure_words(caption, positions, target)
            if isinstance(found, str):
                self._counts[found] += 1
            else:
                self._owners.append(photo)
                self._rows.append({**row, **found})

    def summary(self, unit: str, reasons: Sequence[str]) -> dict[str, Any]:
        """Summarize all measurements.

        Means are over names, or over phrases. ``ratio`` is mean correctness divided by mean
        uniform. 1 means no better than a uniform map. A mean of ratios would be dominated by small
        objects, because a ratio can be as high as 1 / area.

        ``over_uniform``, ``over_centre`` and ``over_shuffled`` are correctness minus the baseline.
        ``over_before`` and ``over_after`` are correctness minus the correctness of the word before
        or after. Their intervals are paired. ``shift``, ``over_before`` and ``over_after`` cover
        only names with a word on both sides.

        ``intervals`` are 95% bootstrap intervals over photos, because the names in one photo are
        not independent. With fewer than 30 photos with names, they are None.

        Args:
            unit: Plural noun for the measured things, such as ``names``. It is part of some keys.
            reasons: The reasons to count, for names that were not measured.

        Returns:
            Means, differences and ``ratio``, as above, and ``shift``. ``gate`` is a mean over
            names, ``entropy`` a mean over all words (nats), ``entropy_even`` the entropy of uniform
            maps, ln L (nats), and ``movement`` a mean over captions of at least two words.
            ``intervals`` has low and high by key. The counts are ``photos``,
            ``photos_with_names``, ``names``, ``measured`` and one count per reason. ``per_name``
            lists every measured name; see `measure_words`. Undefined values are NaN.
        """
        rows = self._rows
        columns = {key: np.array([one[key] for one in rows], np.float64) for key in _MEANS}
        shifts = np.array([one["shift"] for one in rows]).reshape(-1, 3)
        for key in ("uniform", "centre", "shuffled"):
            columns[f"over_{key}"] = columns["correctness"] - columns[key]
        columns["over_before"] = shifts[:, 1] - shifts[:, 0]
        columns["over_after"] = shifts[:, 1] - shifts[:, 2]
        drawn = resampled_means(sorted(self._photos), self._owners, columns)
        drawn["ratio"] = drawn["correctness"] / drawn["uniform"]
        photos = len(set(self._owners))
        return {
            **{key: _mean(column) for key, column in columns.items()},
            "ratio": _mean(columns["correctness"]) / _mean(columns["uniform"]),
            "gate": _mean([one["gate"] for one in rows]),
            "entropy": _mean(self._entropies),
            "entropy_even": _mean(self._even),
            "movement": _mean(self._movements),
            "shift": {
                **dict(zip(("-1", "0", "+1"), map(_mean, shifts.T), strict=True)),
                unit: int((~np.isnan(shifts[:, 0])).sum()),
            },
            "intervals": {key: interval(one) for key, one in drawn.items()},
            "photos": len(self._photos),
            f"photos_with_{unit}": photos,
            unit: len(rows) + self._counts.total(),
            "measured": len(rows),
            **{reason: self._counts[reason] for reason in reasons},
            **too_few(photos, f"photos with {unit}", "confidence intervals"),
            f"per_{unit[:-1]}": rows,
        }


def measure_words(
    caption: Caption, positions: Sequence[int], target: Target
) -> dict[str, Any] | str:
    """Measure the mean map of some words of a caption.

    Returns:
        ``ignored`` if all attention of the words is on crowd regions. Otherwise a dictionary, with
        NaN for undefined values:

        * ``text``: the words. ``start``: the position of the first word.
        * ``correctness``: share of the attention inside the target, 0 to 1. The same for three
          baselines: ``uniform`` (equal attention to every region), ``centre`` (a Gaussian at the
          centre of the crop with sigma = 1/4 of each side) and ``shuffled`` (the mean map of the
          other words).
        * ``shift``: the correctness of the word before, of the words, and of the word after. All
          three are NaN if a neighbour is missing.
        * ``pointing``: 1 if the middle of the most attended region is inside the target, else 0,
          averaged over ties. The same for a random region, ``pointing_uniform``, and for the centre
          of the crop, ``pointing_centre``.
        * ``gate``: mean context gate of the words.
    """
    maps = np.asarray(caption.alphas, dtype=np.float64)
    inside, known, middles, centre = target
    grid = inside.shape

    def correctness(maps: Array) -> float:
        """Return sum_i alpha_i inside_i / sum_i alpha_i known_i for the sum of maps (n, Gh, Gw)."""
        weight = float((maps * known).sum())
        return float((maps * inside).sum()) / weight if weight > 0 else math.nan

    first, last, named = positions[0], positions[-1], maps[[*positions]]
    if math.isnan(correctness(named)):
        return "ignored"
    neighbours = maps[max(first - 1, 0) : first], named, maps[last + 1 : last + 2]
    shift = [*map(correctness, neighbours)]
    uniform = np.ones((1, *grid))
    gaussian = np.exp(-caption.regions.from_centre(grid) / (2 * 0.25**2))[None]  # not tuned
    mean = named.mean(axis=0)
    return {
        "text": " ".join(caption.words[position] for position in positions),
        "start": first,
        "correctness": correctness(named),
        "uniform": correctness(uniform),
        "centre": correctness(gaussian),
        "shuffled": correctness(np.delete(maps, [*positions], axis=0)),
        "shift": [math.nan] * 3 if any(map(math.isnan, shift)) else shift,
        "pointing": _mean(middles[mean == mean.max()]),
        "pointing_uniform": _mean(middles),
        "pointing_centre": centre,
        "gate": float(np.mean(caption.gates[[*positions]], dtype=np.float64)),
    }


def entropy(maps: ArrayLike) -> Array:
    """Return the entropy of each map in nats, (T,).

    It is 0 if all attention is on one region, and ln L for a uniform map over L regions.

    Args:
        maps: One map per word, (T, ...). Each map sums to 1.
    """
    array = np.asarray(maps, dtype=np.float64)
    logs = np.log(array, out=np.zeros_like(array), where=array > 0)
    result: Array = -(array * logs).sum(axis=tuple(range(1, array.ndim)))
    return result


def movement(maps: ArrayLike) -> float:
    """Return the mean distance between the maps of all pairs of words of a caption.

    The total variation distance, sum_i |alpha_i - alpha'_i| / 2, is the share of attention that
    differs. It is 0 if all words have the same map, and 1 if no two words attend to a common
    region.

    Args:
        maps: One map per word, (T, ...). Each map sums to 1.

    Returns:
        The mean distance, 0 to 1, or NaN for fewer than two words.
    """
    array = np.asarray(maps, dtype=np.float64)
    count = len(array)
    if count < 2:
        return math.nan
    flat = array.reshape(count, -1)
    distances = np.abs(flat[:, None] - flat[None]).sum(axis=2) / 2  # (T, T), 0 on the diagonal
    return float(distances.sum() / (count * (count - 1)))


def _mean(values: ArrayLike) -> float:
    """Return the mean of all values that are not NaN, or NaN without such values."""
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    return float(array.mean()) if array.size else math.nan
