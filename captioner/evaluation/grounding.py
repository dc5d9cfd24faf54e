"""Attention grounding: how much attention lies on the object that a word names.

    words     a     dog   on    a     couch
    alphas    (T, Gh, Gw), each sums to 1
    names           dog               couch          captioner.evaluation.objects
    labels          (H, W)            (H, W)         where objects of that category are in the photo
    coverage        (Gh, Gw)          (Gh, Gw)       share of each region covered by the objects

    correctness = sum_i alpha_i coverage_i

Large objects give any map a high correctness, so each value is reported with baselines: a uniform
map, a centred Gaussian, and the maps of the other words of the caption.

As in COCO's own evaluation, crowd regions are ignored: pixels that only a crowd region of the
category covers count neither as attention nor as area. A name is measured only if its category is
in the photo; other names are counted. The instances file must annotate every object of its
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

from captioner.caption import Caption
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
    """The objects of a set of photos; masks are decoded on access."""

    path: Path
    """The file."""
    images: Mapping[int, dict[str, Any]]
    """COCO's entry of each photo by image id, including photos without objects."""
    categories: frozenset[str]
    """Names of the annotated categories."""
    annotations: Mapping[tuple[int, str], list[dict[str, Any]]]
    """COCO annotations by image id and category."""

    def labels(self, image_id: int, category: str) -> Array | None:
        """Where a category is in a photo; None if the photo has no annotation of it.

        Returns:
            (H, W): 1 on its objects, NaN where only a crowd region covers the pixel, so that it is
            unknown whether it is one of an object, else 0.

        Raises:
            DataError: A mask is neither polygons nor run lengths of the photo's size.
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
                if pixels.sum() != mask.area(runs):  # the rest is uninitialized memory
                    raise ValueError("the run lengths end before the last pixel")
                labels[pixels == 1] = math.nan if entry.get("iscrowd") == 1 else 1
            except Exception as error:  # pycocotools raises plain Exception
                raise DataError(
                    f"{self.path}: annotation {entry['id']} has an invalid mask ({error}); "
                    "give polygons or run lengths"
                ) from error
        return labels


def read_instances(path: str | Path) -> Instances:
    """Read a COCO instances file, e.g. ``instances_val2014.json``.

    Raises:
        ConfigError: pycocotools is not installed.
        DataError: The file is missing, not JSON or not a COCO instances file.
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
    """Share of each region of a grid that a mask (H, W) covers: (Gh, Gw), 0 outside the photo.

    Exact: a region is a rectangle of the pixels nearest to its centre, whose borders may cut
    through pixels, and a pixel counts by the part of it that lies inside. The sum of alphas times
    coverage therefore equals spreading the attention of every region evenly over its rectangle and
    summing over the pixels of the mask.
    """
    rows, columns = (
        _overlaps(pixels, axis, count)
        for pixels, axis, count in zip(mask.shape, regions, grid, strict=True)
    )
    result: Array = rows @ mask.astype(np.float64) @ columns.T
    return result


def _overlaps(pixels: int, axis: Axis, cells: int) -> Array:
    """Share of each cell that each pixel fills, along one axis: (cells, pixels)."""
    # Rounded, so that a border between two pixels is exact; otherwise a mask beside it would cover
    # 1e-14 of the region.
    borders = np.round(np.clip(axis.borders(cells), 0, 1) * pixels, 9)
    starts, stops = borders[:-1, None], borders[1:, None]
    inside = np.clip(np.arange(pixels + 1), starts, stops)  # pixel edges clipped to the cell
    lengths = np.diff(inside, axis=1)
    return np.divide(lengths, stops - starts, out=np.zeros_like(lengths), where=stops > starts)


def _at_middles(labels: Array, regions: Geometry, grid: tuple[int, ...]) -> Array:
    """The labels (H, W) of the pixel at the middle of each region of a grid: (Gh, Gw).

    See ``Axis.middles``. A middle between two pixels counts as the one to the right and below.
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
    """The part of a photo that words stand for, seen through a grid of Gh x Gw regions."""

    inside: Array
    """Share of each region that is inside, (Gh, Gw)."""
    known: Array
    """Share of each region that is not ignored, (Gh, Gw); see ``Instances.labels``."""
    middles: Array
    """Label of the pixel at the middle of each region, (Gh, Gw): 1 inside, NaN ignored, else 0."""
    centre: float
    """Label of the pixel at the centre of the part that the model sees."""

    @classmethod
    def seen(cls, labels: Array | None, caption: Caption) -> Target | str:
        """Return the target with these labels, (H, W), or why attention to it is not measured.

        ``absent``: there are no labels; ``unseen``: the target lies outside the part of the photo
        that the model sees; ``ignored``: it has crowd regions only.
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
    """Words of a caption that stand for something in the photo."""

    row: Mapping[str, Any]
    """Keys that identify the words in the report."""
    positions: Sequence[int]
    """The positions of the words, ascending."""
    target: Target | str
    """The target of the words, or why attention to it is not measured."""


def measure(captions: Mapping[int, Caption], instances: Instances) -> dict[str, Any]:
    """Measure every name of every caption against the masks of the photo.

    Args:
        captions: Caption by image id.
        instances: The objects of these photos.

    Returns:
        What `Grounding.summary` does, of ``names`` (``absent``: their category is not in the photo;
        ``unseen``: outside the crop that the model sees; ``ignored``: crowd regions only, or all
        attention on them), with ``categories`` (count, correctness, uniform and ratio, the most
        frequent first).

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
    """Mark the names of annotated categories in a caption."""
    for category, start, stop in find_names(caption.words):
        if category in instances.categories:
            target = Target.seen(instances.labels(image_id, category), caption)
            yield Marked({"image_id": image_id, "category": category}, range(start, stop), target)


class Grounding:
    """Attention maps measured so far, of names or phrases in the captions of photos.

    Source of ``correctness``: Liu et al. 2017, Attention Correctness in Neural Image Captioning
    (arXiv:1605.09553). Deviations: a name of several words uses their mean map instead of the best
    one; each region's attention is spread over the pixels nearest to its centre; crowd regions are
    ignored.
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
        """Summarize everything that was measured.

        Means are over names, or over phrases. ``ratio`` is mean correctness over mean uniform; 1 is
        no better than a uniform map. It is not a mean of ratios, in which small objects would
        dominate, since a ratio is bounded by 1 / area. ``over_uniform``, ``over_centre`` and
        ``over_shuffled`` are correctness minus the baseline; ``over_before`` and ``over_after`` are
        correctness minus the correctness of the word before or after. Their intervals are paired.
        ``shift`` and the last two cover the names with a word on both sides.

        ``intervals`` are 95% bootstrap intervals over photos, since the names of a photo are not
        independent; None for fewer than 30 photos with names.

        Args:
            unit: Plural of what was measured, such as ``names``, for the keys below.
            reasons: Why some were not measured, for their counts.

        Returns:
            The means, the differences, ``ratio``, ``gate``, ``entropy`` (mean over all words) and
            ``entropy_even`` (entropy of uniform maps, ln L; nats), ``movement`` (mean over captions
            of at least two words), ``shift``, ``intervals`` (low and high by key), the counts
            ``photos``, ``photos_with_names``, ``names``, ``measured`` and one for each reason, and
            ``per_name`` (every measured name, see `measure_words`). NaN where undefined.
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
        ``text`` (the words), ``start`` (the position of the first); ``correctness``, the share of
        the attention of their mean map inside the target, 0 to 1, and the share of baselines:
        ``uniform`` (equal attention to every region), ``centre`` (a Gaussian at the centre of the
        crop with sigma = 1/4 of each side), ``shuffled`` (the mean map of the other words);
        ``shift``, the correctness of the word before, the words and the word after, all NaN if one
        is missing;
        ``pointing``, 1 if the middle of the most attended region lies inside, else 0 (mean over
        ties), ``pointing_uniform`` (of a random region), ``pointing_centre`` (of the centre of the
        crop); ``gate``, mean context gate of the words. NaN where undefined. Or ``ignored``: all
        attention of the words is on crowd regions.
    """
    maps = np.asarray(caption.alphas, dtype=np.float64)
    inside, known, middles, centre = target
    grid = inside.shape

    def correctness(maps: Array) -> float:
        """sum_i alpha_i inside_i / sum_i alpha_i known_i of the sum of maps, (words, Gh, Gw)."""
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
    """Entropy of each map in nats: 0 for a single region, ln L for a uniform map over L regions.

    Args:
        maps: (T, ...), a map for each word that sums to 1 over the other axes.

    Returns:
        (T,).
    """
    array = np.asarray(maps, dtype=np.float64)
    logs = np.log(array, out=np.zeros_like(array), where=array > 0)
    result: Array = -(array * logs).sum(axis=tuple(range(1, array.ndim)))
    return result


def movement(maps: ArrayLike) -> float:
    """Mean total variation distance between the maps of all pairs of words of a caption.

    The distance is sum_i |alpha_i - alpha'_i| / 2, the share of attention that would have to move:
    0 if all words share one map, 1 if no two words attend to a common region.

    Args:
        maps: (T, ...), see `entropy`.

    Returns:
        0 to 1; NaN for fewer than two words.
    """
    array = np.asarray(maps, dtype=np.float64)
    count = len(array)
    if count < 2:
        return math.nan
    flat = array.reshape(count, -1)
    distances = np.abs(flat[:, None] - flat[None]).sum(axis=2) / 2  # (T, T), 0 on the diagonal
    return float(distances.sum() / (count * (count - 1)))


def _mean(values: ArrayLike) -> float:
    """Mean of the values that are not NaN; NaN if there are none."""
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    return float(array.mean()) if array.size else math.nan
