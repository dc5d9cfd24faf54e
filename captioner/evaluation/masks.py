"""COCO instance masks, and the share of each grid region that they cover.

Notation: a photo of H x W pixels; a grid of Gh x Gw regions over the part that the model sees.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.data.coco import Fields, read_coco
from captioner.errors import ConfigError, DataError
from captioner.geometry import Axis, Geometry
from captioner.hardware import is_installed

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Masks(NamedTuple):
    """Pixels of one category in one photo."""

    objects: Mask
    """(H, W) union of the masks of its objects."""
    crowds: Mask
    """(H, W) pixels covered by crowd regions only, where it is unknown which pixels are objects."""


@dataclass(frozen=True, eq=False)
class Instances:
    """The objects of a set of photos; masks are decoded on access."""

    path: Path
    """The file."""
    names: Mapping[int, str]
    """File name of each photo by image id."""
    sizes: Mapping[int, tuple[int, int]]
    """(H, W) of each photo by image id, including photos without objects."""
    categories: frozenset[str]
    """Names of the annotated categories."""
    annotations: Mapping[tuple[int, str], list[dict[str, Any]]]
    """COCO annotations by image id and category."""

    def masks(self, image_id: int, category: str) -> Masks | None:
        """Masks of a category in a photo; None if the photo has no annotation of it.

        Raises:
            DataError: A mask cannot be decoded.
        """
        entries = self.annotations.get((image_id, category))
        if not entries:
            return None
        union = {crowd: np.zeros(self.sizes[image_id], dtype=np.bool_) for crowd in (False, True)}
        for entry in entries:
            union[entry.get("iscrowd") == 1] |= self._decode(entry)
        return Masks(union[False], union[True] & ~union[False])

    def _decode(self, entry: dict[str, Any]) -> Mask:
        """Decode the polygons or run lengths (list or string) of one annotation to (H, W)."""
        from pycocotools import mask

        size, shape = self.sizes[entry["image_id"]], entry["segmentation"]
        try:
            if isinstance(shape, list):
                code = mask.merge(mask.frPyObjects(shape, *size))
            elif isinstance(shape["counts"], list):
                code = mask.frPyObjects(shape, *shape["size"])
            else:
                code = shape
            with warnings.catch_warnings():  # decode calls NumPy in a deprecated way
                warnings.simplefilter("ignore", DeprecationWarning)
                pixels: Mask = mask.decode(code).astype(np.bool_)
            # Run lengths that end early leave the remaining pixels uninitialized.
            if pixels.sum() != mask.area(code):
                raise ValueError("the run lengths end before the last pixel")
            if pixels.shape != size:
                raise ValueError(f"it has shape {pixels.shape}, its photo {size}")
        except Exception as error:  # pycocotools raises plain Exception
            raise DataError(
                f"{self.path}: annotation {entry['id']} has an invalid mask ({error}); "
                "give polygons or run lengths"
            ) from error
        return pixels


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
    sizes = {image["id"]: (image["height"], image["width"]) for image in data["images"]}
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for entry in data["annotations"]:
        for key, known in (("image_id", sizes), ("category_id", names)):
            if entry[key] not in known:
                raise DataError(
                    f"{path}: annotation {entry['id']} has the {key} {entry[key]}, which is not in "
                    "the file; remove the annotation or add that entry"
                )
        found.setdefault((entry["image_id"], names[entry["category_id"]]), []).append(entry)
    files = {image["id"]: image["file_name"] for image in data["images"]}
    return Instances(Path(path), files, sizes, frozenset(names.values()), found)


_FIELDS: Fields = {
    "images": {"id": (int,), "file_name": (str,), "height": (int,), "width": (int,)},
    "annotations": {
        "id": (int,), "image_id": (int,), "category_id": (int,), "segmentation": (list, dict),
    },
    "categories": {"id": (int,), "name": (str,)},
}  # fmt: skip


class GridMasks(NamedTuple):
    """The masks of a category resampled to a grid of Gh x Gw regions. Crowd pixels are ignored."""

    objects: Array
    """(Gh, Gw) share of each region covered by objects."""
    valid: Array
    """(Gh, Gw) share of each region outside crowd regions."""
    has_crowd: bool
    """Whether any crowd region overlaps the grid."""
    centre_hits: Mask
    """(Gh, Gw) whether the middle of the region lies on an object."""
    centre_valid: Mask
    """(Gh, Gw) whether the middle of the region lies outside crowd regions."""
    grid_centre: float
    """1 if the centre of what the model sees lies on an object, else 0; NaN in a crowd region."""

    @classmethod
    def from_masks(cls, masks: Masks, regions: Geometry, grid: tuple[int, int]) -> GridMasks:
        """Resample masks to a grid of (Gh, Gw) regions, which lie at ``regions`` in the photo."""
        whole = Geometry(*(Axis.even(1, axis.start, axis.stop) for axis in regions))
        hit, crowd = (at_centres(mask, whole, (1, 1)).item() for mask in masks)
        return cls(
            objects=region_coverage(masks.objects, regions, grid),
            # Not 1 - coverage of the crowds, which may be 1e-16 instead of 0.
            valid=region_coverage(~masks.crowds, regions, grid),
            has_crowd=bool(region_coverage(masks.crowds, regions, grid).any()),
            centre_hits=at_centres(masks.objects, regions, grid),
            centre_valid=~at_centres(masks.crowds, regions, grid),
            grid_centre=float("nan") if crowd else float(hit),
        )

    def correctness(self, maps: Array) -> float:
        """Share of the attention of the mean map that lies on the objects.

            sum_i alpha_i objects_i / sum_i alpha_i valid_i

        Args:
            maps: (words, Gh, Gw), possibly empty; maps need not sum to 1.

        Returns:
            0 to 1; NaN without words, or if all attention lies in crowd regions.
        """
        valid = float((maps * self.valid).sum())
        return float((maps * self.objects).sum()) / valid if valid > 0 else float("nan")

    def pointing(self, alpha: Array) -> float:
        """1 if the middle of the most attended region of a map (Gh, Gw) lies on an object, else 0.

        For ties the mean over the tied regions. Regions whose middle lies in a crowd region are
        ignored; NaN if none is left.
        """
        top = (alpha == alpha.max()) & self.centre_valid
        return float(self.centre_hits[top].mean()) if top.any() else float("nan")


def region_coverage(mask: Mask, regions: Geometry, grid: tuple[int, int]) -> Array:
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


def at_centres(mask: Mask, regions: Geometry, grid: tuple[int, int]) -> Mask:
    """Whether a mask (H, W) covers the pixel at the middle of each region of a grid: (Gh, Gw).

    See ``Axis.middles``. A middle between two pixels counts as the one to the right and below.
    """
    rows, columns = (
        np.clip(np.round(axis.middles(count) * pixels, 9), 0, pixels - 1).astype(np.intp)
        for pixels, axis, count in zip(mask.shape, regions, grid, strict=True)
    )
    return mask[np.ix_(rows, columns)]


def _overlaps(pixels: int, axis: Axis, cells: int) -> Array:
    """Share of each cell that each pixel fills, along one axis: (cells, pixels)."""
    # Rounded, so that a border between two pixels is exact; otherwise a mask beside it would cover
    # 1e-14 of the region.
    borders = np.round(np.clip(axis.borders(cells), 0, 1) * pixels, 9)
    starts, stops = borders[:-1, None], borders[1:, None]
    inside = np.clip(np.arange(pixels + 1), starts, stops)  # pixel edges clipped to the cell
    lengths = np.diff(inside, axis=1)
    return np.divide(lengths, stops - starts, out=np.zeros_like(lengths), where=stops > starts)
