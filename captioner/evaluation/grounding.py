"""Attention grounding: a measure of how much attention is on the object that a word names.

    words     a     dog   on    a     couch
    alphas    (T, Gh, Gw), each sums to 1
    names           dog               couch          captioner.evaluation.objects
    labels          (H, W)            (H, W)         1 on objects of this category, 0 elsewhere
    coverage        (Gh, Gw)          (Gh, Gw)       share of each region that the objects cover

    correctness = sum_i alpha_i coverage_i           sum over the regions i

On large objects, any map has a high correctness. Each value is therefore reported with baselines: a
uniform map, a centred Gaussian, and the maps of the caption's other words.

A crowd region is an area that COCO annotates as a group of objects. As in COCO's own evaluation,
crowd regions are ignored: if only a crowd region covers a pixel, the pixel counts neither as
attention nor as area. A name is measured if its category is in the photo. All other names are only
counted. The instances file must annotate every object of its categories, as COCO's files do.

Notation: T words, and a photo of H x W pixels. The grid of Gh x Gw regions covers the part of the
photo that the model sees.
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
    """The annotated objects in a set of photos. `labels` decodes their masks when it is called."""

    path: Path
    """The instances file, for error messages."""
    images: Mapping[int, dict[str, Any]]
    """COCO's entry for each photo, by image id. Photos without objects are included."""
    categories: frozenset[str]
    """Names of the annotated categories."""
    annotations: Mapping[tuple[int, str], list[dict[str, Any]]]
    """COCO annotations by image id and category."""

    def labels(self, image_id: int, category: str) -> Array | None:
        """Label the pixels of a photo that are on an object of a category.

        Returns:
            Labels of the pixels, (H, W), or None if the category is not annotated in the photo. A
            label is 1 on an object and 0 elsewhere. It is NaN if only a crowd region covers the
            pixel, because such a pixel may or may not be on an object.

        Raises:
            DataError: A mask is invalid, or does not have the size of the photo.
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
                    raise ValueError("its run-length code (RLE) ends before the last pixel")
                labels[pixels == 1] = math.nan if entry.get("iscrowd") == 1 else 1
            except Exception as error:  # pycocotools raises plain Exception
                raise DataError(
                    f"{self.path}: annotation {entry['id']} has an invalid mask ({error}); "
                    "use polygons or a run-length code that fit the size of the photo"
                ) from error
        return labels


def read_instances(path: str | Path) -> Instances:
    """Read a COCO instances file, such as ``instances_val2014.json``.

    Raises:
        ConfigError: pycocotools is not installed.
        DataError: The file is missing, or is not a COCO instances file.
    """
    if not is_installed("pycocotools"):
        raise ConfigError("object masks need pycocotools; run: pip install 'captioner[evaluate]'")
    data = read_coco(path, _FIELDS, "instances")
    names = {category["id"]: category["name"] for category in data["categories"]}
    images = {image["id"]: image for image in data["images"]}
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for entry in data["annotations"]:
        for key, known in (("image_id", images), ("category_id", names)):
            if entry[key] not in known:
                raise DataError(
                    f"{path}: annotation {entry['id']} refers to {key} {entry[key]}, but the file "
                    "does not list this id; add the missing entry or remove the annotation"
                )
        found.setdefault((entry["image_id"], names[entry["category_id"]]), []).append(entry)
    return Instances(Path(path), images, frozenset(names.values()), found)


def region_coverage(mask: NDArray[np.bool_], regions: Geometry, grid: tuple[int, ...]) -> Array:
    """Return the share of each region that a mask covers.

    The share is exact. A region is the rectangle of all points that are nearest to the region's
    centre. If its border cuts through a pixel, the pixel counts in proportion to the part inside.
    The sum of alphas times coverage is therefore the attention on the mask, if the attention of a
    region is spread evenly over its rectangle.

    Args:
        mask: The pixels of the photo, (H, W), True on the mask.
        regions: Positions of the regions in the photo.
        grid: Height and width of the grid in regions, Gh and Gw.

    Returns:
        The shares, (Gh, Gw), 0 to 1, and 0 for regions outside the photo.
    """
    rows, columns = (
        _overlaps(pixels, axis, count)
        for pixels, axis, count in zip(mask.shape, regions, grid, strict=True)
    )
    result: Array = rows @ mask.astype(np.float64) @ columns.T
    return result


def _overlaps(pixels: int, axis: Axis, cells: int) -> Array:
    """Return the share of each cell that each pixel fills along one axis, (cells, pixels).

    A cell is a row or column of the grid of regions.
    """
    # Rounding makes a border between two pixels exact. Without it, a mask that ends at the border
    # could still cover 1e-14 of the next region.
    borders = np.round(np.clip(axis.borders(cells), 0, 1) * pixels, 9)
    starts, stops = borders[:-1, None], borders[1:, None]
    inside = np.clip(np.arange(pixels + 1), starts, stops)  # pixel edges, clipped
    lengths = np.diff(inside, axis=1)
    return np.divide(lengths, stops - starts, out=np.zeros_like(lengths), where=stops > starts)


def _at_middles(labels: Array, regions: Geometry, grid: tuple[int, ...]) -> Array:
    """Return the label of the pixel in the middle of each region of the grid.

    If a middle lies exactly between pixels, the pixel to the right of it or below it is used.

    Args:
        labels: Labels of the pixels, (H, W).
        regions: Positions of the regions in the photo.
        grid: Height and width of the grid in regions, Gh and Gw.

    Returns:
        The labels, (Gh, Gw).
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
"""Results of `measure_words` that `Grounding.summary` averages, with intervals."""


class Target(NamedTuple):
    """The part of a photo that some words refer to, such as the dogs, as values of the regions.

    The regions form a grid of Gh x Gw.
    """

    inside: Array
    """Share of each region that is inside the target, (Gh, Gw)."""
    known: Array
    """Share of each region that is not ignored because of a crowd, (Gh, Gw). There, the labels are
    not NaN (see ``Instances.labels``)."""
    middles: Array
    """Label in the middle of each region, (Gh, Gw): 1 inside the target, NaN if ignored, else 0."""
    centre: float
    """Label in the centre of the part of the photo that the model sees: 1, 0 or NaN."""

    @classmethod
    def seen(cls, labels: Array | None, caption: Caption) -> Target | str:
        """Build the target from labels, or return the reason why it cannot be measured.

        The target is the part of the photo that some words refer to. There are three reasons:

        * ``absent``: there are no labels.
        * ``unseen``: the target is outside the part of the photo that the model sees.
        * ``ignored``: the target consists of crowd regions only.

        Args:
            labels: Labels of the pixels, (H, W), from ``Instances.labels``.
            caption: A caption of the photo, for its attention maps and regions.
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
    """Words of a caption, with the part of the photo that they refer to (the target)."""

    row: Mapping[str, Any]
    """Entries that identify the words in the report, such as the image id and the category."""
    positions: Sequence[int]
    """Positions of the words in the caption, ascending."""
    target: Target | str
    """The part of the photo that the words refer to, or the reason why it cannot be measured."""


def measure(captions: Mapping[int, Caption], instances: Instances) -> dict[str, Any]:
    """Measure, for every named object in the captions, how much attention is inside its mask.

    Args:
        captions: Captions by image id.
        instances: The annotated objects in these photos.

    Returns:
        The result of `Grounding.summary` for ``names``, with one more key. ``categories`` contains
        ``count``, ``correctness``, ``uniform`` and ``ratio`` of each category, the most frequent
        category first.

        A name is not measured for one of these reasons:

        * ``absent``: the category is not in the photo.
        * ``unseen``: the objects are outside the part of the photo that the model sees.
        * ``ignored``: only crowd regions show the category, or all attention is on crowd regions.

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
    """Yield the words of a caption that name annotated categories, such as "dog".

    Each name has its target: the part of the photo that shows objects of the category, or the
    reason (text) why it cannot be measured.
    """
    for category, start, stop in find_names(caption.words):
        if category in instances.categories:
            target = Target.seen(instances.labels(image_id, category), caption)
            yield Marked({"image_id": image_id, "category": category}, range(start, stop), target)


class Grounding:
    """Measurements of the attention on names or phrases in captions.

    `add` is called for each caption, and then `summary` returns the result.

    Source of ``correctness``: Liu et al. 2017, Attention Correctness in Neural Image Captioning
    (arXiv:1605.09553). Deviations: a name of several words is measured on the mean of their maps,
    not on the best map. The attention of a region is spread over the pixels nearest to its centre.
    Crowd regions are ignored.
    Source of ``pointing``: Zhang et al. 2016, Top-down Neural Attention by Excitation Backprop
    (arXiv:1608.00507). Deviations: objects have no margin of 15 pixels. The mean is over names, not
    over categories. Crowd regions are ignored.
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
        """Add the measurements of one caption.

        Args:
            photo: Identifier of the photo.
            caption: The caption with its attention maps.
            marked: The names or phrases in the caption. Each has its target, the part of the photo
                that it refers to.
        """
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

        Args:
            unit: Plural noun for the measured things: ``names`` or ``phrases``. It is part of some
                keys.
            reasons: Reasons why a name was not measured. Each reason becomes a count.

        Returns:
            A dictionary, described here for ``names``. Undefined values are NaN.

            * ``correctness``, its baselines, ``pointing``, its baselines and ``gate``: means over
              names; see `measure_words`.
            * ``over_uniform``, ``over_centre``, ``over_shuffled``: correctness minus the baseline.
            * ``over_before``, ``over_after``: correctness minus the correctness of the word before
              or after the name. Only names with a word on both sides count.
            * ``shift``: mean correctness of the word before, of the name, and of the word after.
              The means are over names with a word on both sides, and ``names`` counts them.
            * ``ratio``: mean correctness divided by mean ``uniform``. At 1, attention is no better
              than a uniform map. A mean of ratios would be dominated by small objects, because a
              ratio can be as high as 1 / area.
            * ``entropy``: mean over all words (nats). ``entropy_even``: entropy of uniform maps,
              ln L for L regions (nats). ``movement``: mean over captions of two or more words.
            * ``intervals``: low and high end by key, 95%, from a bootstrap over photos, because the
              names in a photo are not independent. Intervals of differences are paired. They are
              None if fewer than 30 photos contain names.
            * ``photos``, ``photos_with_names``, ``names``, ``measured``, and one key per reason:
              counts.
            * ``per_name``: the result of `measure_words` for every measured name.
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
    """Measure the attention on one name or phrase. Several words count by the mean of their maps.

    Args:
        caption: The caption with its attention maps.
        positions: Positions of the words to measure, ascending.
        target: The part of the photo that the words refer to.

    Returns:
        ``ignored`` if all attention of the words is on crowd regions. Otherwise, a dictionary in
        which undefined values are NaN:

        * ``text``: the words. ``start``: the position of the first word.
        * ``correctness``: share of the attention inside the target, 0 to 1.
        * ``uniform``, ``centre``, ``shuffled``: correctness of three baselines. They are equal
          attention to every region, a Gaussian in the centre of the crop (sigma: 1/4 of each side),
          and the mean map of the caption's other words.
        * ``shift``: correctness of the preceding word, of the measured words, and of the following
          word. All three are NaN if the preceding or the following word is missing.
        * ``pointing``: 1 if the middle of the most attended region is inside the target, else 0,
          averaged over ties.
        * ``pointing_uniform``, ``pointing_centre``: pointing of two baselines, a random region and
          the centre of the crop.
        * ``gate``: mean context gate of the words.
    """
    maps = np.asarray(caption.alphas, dtype=np.float64)
    inside, known, middles, centre = target
    grid = inside.shape

    def correctness(maps: Array) -> float:
        """Return the share of the attention inside the target, over n maps (n, Gh, Gw).

        Crowd regions are ignored.
        """
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

    The entropy is 0 if all attention is on one region, and ln L for a uniform map over L regions.

    Args:
        maps: One map per word, (T, ...). Each map sums to 1.
    """
    array = np.asarray(maps, dtype=np.float64)
    logs = np.log(array, out=np.zeros_like(array), where=array > 0)
    result: Array = -(array * logs).sum(axis=tuple(range(1, array.ndim)))
    return result


def movement(maps: ArrayLike) -> float:
    """Return the mean distance between the attention maps of two words of a caption.

    The distance of two maps is their total variation distance, sum_i |alpha_i - alpha'_i| / 2: the
    share of attention that differs. The mean is over all pairs of words. It is 0 if all words have
    the same map, and 1 if no two words attend to a common region.

    Args:
        maps: One map per word, (T, ...). Each map sums to 1.

    Returns:
        The mean distance, 0 to 1, or NaN if the caption has fewer than two words.
    """
    array = np.asarray(maps, dtype=np.float64)
    count = len(array)
    if count < 2:
        return math.nan
    flat = array.reshape(count, -1)
    distances = np.abs(flat[:, None] - flat[None]).sum(axis=2) / 2  # (T, T), 0 on the diagonal
    return float(distances.sum() / (count * (count - 1)))


def _mean(values: ArrayLike) -> float:
    """Return the mean of all values that are not NaN, or NaN if all values are NaN."""
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    return float(array.mean()) if array.size else math.nan
