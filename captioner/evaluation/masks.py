"""Instance masks in COCO's format, and how much of every region of a grid they cover.

Notation: a photo of H x W pixels; a grid of Gh x Gw regions over the part of it that a model saw.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.caption import CropBox
from captioner.data.coco import Fields, read_coco
from captioner.errors import ConfigError, DataError


class Masks(NamedTuple):
    """Where one category lies in one photo."""

    objects: NDArray[np.bool_]
    """(H, W) the pixels of its objects, all together."""
    crowds: NDArray[np.bool_]
    """(H, W) the pixels that only a crowd region covers: there may be such an object or not."""


@dataclass(frozen=True, eq=False)
class Instances:
    """The objects of a set of photos; their masks are decoded when they are asked for."""

    path: Path
    """The file they were read from."""
    names: Mapping[int, str]
    """File name of every photo by image id."""
    sizes: Mapping[int, tuple[int, int]]
    """(H, W) of every photo by image id; a photo without objects has an entry too."""
    categories: frozenset[str]
    """The names of the categories that were looked for in every photo."""
    annotations: Mapping[tuple[int, str], list[dict[str, Any]]]
    """COCO's annotations by image id and category."""

    def masks(self, image_id: int, category: str) -> Masks | None:
        """Where a category lies in a photo.

        Args:
            image_id: One of ``sizes``.
            category: One of ``categories``.

        Returns:
            The masks; None when the photo holds nothing of the category.

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

    def _decode(self, entry: dict[str, Any]) -> NDArray[np.bool_]:
        """(H, W) of one annotation: polygons, or run lengths as numbers or as a string."""
        from pycocotools import mask

        height, width = self.sizes[entry["image_id"]]
        shape = entry["segmentation"]
        try:
            if isinstance(shape, list):
                code = mask.merge(mask.frPyObjects(shape, height, width))
            elif isinstance(shape["counts"], list):
                code = mask.frPyObjects(shape, *shape["size"])
            else:
                code = shape
            with warnings.catch_warnings():  # decode warns of its own call of NumPy 2
                warnings.simplefilter("ignore", DeprecationWarning)
                pixels = mask.decode(code)
            # Runs that end too early leave the other pixels as the memory was.
            if pixels.sum() != mask.area(code):
                raise ValueError("the runs end before the last pixel")
        except Exception as error:  # pycocotools raises Exception itself
            raise DataError(
                f"{self.path}: the mask of annotation {entry['id']} is neither polygons nor run "
                f"lengths ({error}); give a COCO instances file"
            ) from error
        if pixels.shape != (height, width):
            raise DataError(
                f"{self.path}: the mask of annotation {entry['id']} has {pixels.shape} pixels, its "
                f"image {(height, width)}; give masks of the size of their photo"
            )
        result: NDArray[np.bool_] = pixels.astype(np.bool_)
        return result


def read_instances(path: str | Path) -> Instances:
    """Read a COCO instances file.

    Args:
        path: The JSON file, e.g. ``instances_val2014.json``.

    Returns:
        Its objects.

    Raises:
        DataError: The file is missing, is not JSON or not COCO instances (captions, for one).
    """
    path = Path(path)
    data = read_coco(path, _FIELDS, "instances")
    for image in data["images"]:
        if image["height"] < 1 or image["width"] < 1:
            raise DataError(
                f"{path}: image {image['id']} has {image['width']} x {image['height']} pixels; "
                "give its width and height, 1 or more"
            )
    names = {category["id"]: category["name"] for category in data["categories"]}
    sizes = {image["id"]: (image["height"], image["width"]) for image in data["images"]}
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for entry in data["annotations"]:
        for key, known in (("image_id", sizes), ("category_id", names)):
            if entry[key] not in known:
                raise DataError(
                    f"{path}: annotation {entry['id']} has the {key} {entry[key]}, which is not in "
                    "the file; remove the annotation or add what it belongs to"
                )
        found.setdefault((entry["image_id"], names[entry["category_id"]]), []).append(entry)
    files = {image["id"]: image["file_name"] for image in data["images"]}
    return Instances(path, files, sizes, frozenset(names.values()), found)


_FIELDS: Fields = {
    "images": {"id": (int,), "file_name": (str,), "height": (int,), "width": (int,)},
    "annotations": {
        "id": (int,), "image_id": (int,), "category_id": (int,), "segmentation": (list, dict),
    },
    "categories": {"id": (int,), "name": (str,)},
}  # fmt: skip


class Seen(NamedTuple):
    """How the objects of a category lie in a grid."""

    objects: NDArray[np.float64]
    """(Gh, Gw) share of every region that they cover."""
    counted: NDArray[np.float64]
    """(Gh, Gw) share of every region that no crowd region takes out."""
    crowded: bool
    """Whether a crowd region takes out anything."""
    hits: NDArray[np.bool_]
    """(Gh, Gw) whether the middle of the region lies on an object."""
    fair: NDArray[np.bool_]
    """(Gh, Gw) whether it lies outside of crowd regions."""
    middle: float
    """Whether the middle of the whole grid lies on an object, 1 or 0; NaN in a crowd region."""

    @classmethod
    def of(cls, masks: Masks, crop_box: CropBox, grid: tuple[int, int]) -> Seen:
        """Lay masks under a grid of Gh and Gw regions over a part of the photo."""
        hit, unfair = (at_centres(mask, crop_box, (1, 1)).item() for mask in masks)
        return cls(
            objects=coverage(masks.objects, crop_box, grid),
            counted=coverage(~masks.crowds, crop_box, grid),  # exactly 0 where 1 - crowds is 1e-16
            crowded=bool(coverage(masks.crowds, crop_box, grid).any()),
            hits=at_centres(masks.objects, crop_box, grid),
            fair=~at_centres(masks.crowds, crop_box, grid),
            middle=float("nan") if unfair else float(hit),
        )

    def correctness(self, maps: NDArray[np.float64]) -> float:
        """Share of the attention of some words' mean map that lies on the objects.

            sum_i alpha_i objects_i / sum_i alpha_i counted_i

        Args:
            maps: (words, Gh, Gw); none is fine, and they need not sum to 1.

        Returns:
            0 to 1; NaN without words, or where all attention lies in crowd regions.
        """
        counted = float((maps * self.counted).sum())
        return float((maps * self.objects).sum()) / counted if counted > 0 else float("nan")

    def pointing(self, alpha: NDArray[np.float64]) -> float:
        """Whether the middle of the most attended region lies on an object.

        Args:
            alpha: (Gh, Gw).

        Returns:
            1 or 0; the mean over the regions that share the first place, those whose middle lies
            in a crowd region left out; NaN where that leaves none.
        """
        top = (alpha == alpha.max()) & self.fair
        return float(self.hits[top].mean()) if top.any() else float("nan")


def coverage(
    mask: NDArray[np.bool_], crop_box: CropBox, grid: tuple[int, int]
) -> NDArray[np.float64]:
    """How much of every region of a grid a mask covers.

    Exact: a region is a rectangle whose borders may run through pixels, and a pixel counts by the
    part of it that lies inside. The sum of alphas times coverage is therefore what is found by
    resizing the map to the photo, every region a block of one value, and adding up the pixels of
    the mask.

    Args:
        mask: (H, W), the whole photo.
        crop_box: The part of the photo that the grid covers.
        grid: Gh and Gw.

    Returns:
        (Gh, Gw), the share of every region's area, 0 to 1.

    Raises:
        ConfigError: The region is empty or reaches out of the photo.
    """
    left, top, right, bottom = crop_box
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise ConfigError(
            f"the crop box {tuple(crop_box)} is empty or reaches out of the photo; "
            "0 <= left < right <= 1 and 0 <= top < bottom <= 1"
        )
    rows = _shares(mask.shape[0], _borders(mask.shape[0], top, bottom, grid[0]))
    columns = _shares(mask.shape[1], _borders(mask.shape[1], left, right, grid[1]))
    result: NDArray[np.float64] = rows @ mask.astype(np.float64) @ columns.T
    return result


def at_centres(
    mask: NDArray[np.bool_], crop_box: CropBox, grid: tuple[int, int]
) -> NDArray[np.bool_]:
    """Whether a mask covers the pixel in the middle of every region of a grid.

    Args:
        mask: (H, W), the whole photo.
        crop_box: The part of the photo that the grid covers.
        grid: Gh and Gw; (1, 1) asks for the middle of the region seen.

    Returns:
        (Gh, Gw). A middle that lies between two pixels counts as the one to the right and below.
    """
    rows = _borders(mask.shape[0], crop_box.top, crop_box.bottom, 2 * grid[0])[1::2]
    columns = _borders(mask.shape[1], crop_box.left, crop_box.right, 2 * grid[1])[1::2]
    return mask[np.ix_(rows.astype(np.intp), columns.astype(np.intp))]


def _borders(pixels: int, start: float, stop: float, cells: int) -> NDArray[np.float64]:
    """(cells + 1,) where the cells of one axis begin and end, pixels.

    Rounded, so that a crop's border that falls between two pixels does so exactly: an object
    beside it would be seen with 1e-14 of its area.
    """
    return np.round(np.linspace(start, stop, cells + 1) * pixels, 9)


def _shares(pixels: int, borders: NDArray[np.float64]) -> NDArray[np.float64]:
    """(cells, pixels) the share of every cell of one axis that every pixel fills."""
    starts, stops = borders[:-1, None], borders[1:, None]
    inside = np.clip(np.arange(pixels + 1), starts, stops)  # pixel edges, drawn into the cell
    result: NDArray[np.float64] = np.diff(inside, axis=1) / (stops - starts)
    return result
