"""Attention grounding: known answers, brute force and invalid files.

Most photos here are 12 x 8 pixels with a grid of 2 x 3, so a region is 4 x 4 pixels.
"""

from __future__ import annotations

import json
import math
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from captioner.caption_types import Caption, CropBox
from captioner.errors import DataError
from captioner.evaluation.bootstrap import resample_weights
from captioner.evaluation.grounding import (
    Instances,
    entropy,
    measure,
    movement,
    read_instances,
    region_coverage,
)
from captioner.geometry import Geometry

Array = NDArray[np.float64]

HEIGHT, WIDTH, GRID = 8, 12, (2, 3)
NAMES = {1: "dog", 2: "cat", 3: "person", 4: "hot dog"}
IDS = {name: number for number, name in NAMES.items()}
UNIFORM = np.full(GRID, 1 / 6)
WHOLE = CropBox()


def box(left: int, top: int, right: int, bottom: int) -> list[list[int]]:
    """Return a rectangle as a polygon."""
    return [[left, top, right, top, right, bottom, left, bottom]]


def pixels(left: int, top: int, right: int, bottom: int) -> NDArray[np.bool_]:
    mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def runs(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Return uncompressed run lengths in column order, which start with zeros."""
    values = mask.T.ravel().tolist()
    counts = [len([*run]) for _, run in groupby(values)]
    return {"size": list(mask.shape), "counts": [0, *counts] if values[0] else counts}


def packed(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Return compressed run lengths, as in a JSON file."""
    from pycocotools.mask import encode

    code = encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": code["size"], "counts": code["counts"].decode()}


CELL = box(0, 0, 4, 4)  # the first region
CROWD = runs(pixels(4, 0, 8, 4))  # the second


def entry(category: str, shape: Any, image_id: int = 1, crowd: bool = False) -> dict[str, Any]:
    return {
        "id": 7, "image_id": image_id, "category_id": IDS[category], "segmentation": shape,
        "iscrowd": int(crowd),
    }  # fmt: skip


@pytest.fixture
def read(tmp_path: Path):
    """Return a function that reads annotations from a file with three photos."""

    def read(*annotations: dict[str, Any]) -> Instances:
        size = {"height": HEIGHT, "width": WIDTH}
        content = {
            "images": [{"id": i, "file_name": f"{i}.jpg", **size} for i in (1, 2, 3)],
            "annotations": annotations,
            "categories": [{"id": i, "name": name} for i, name in NAMES.items()],
        }
        (tmp_path / "a.json").write_text(json.dumps(content))
        return read_instances(tmp_path / "a.json")

    return read


def caption(text: str, maps: Any = None, gates: Any = None, crop_box: CropBox = WHOLE) -> Caption:
    """Return a caption. Its maps are uniform by default."""
    words = tuple(text.split())
    alphas = np.full((len(words), *GRID), 1 / 6) if maps is None else np.asarray(maps, float)
    gates = np.ones(len(words)) if gates is None else np.asarray(gates, float)
    zeros = np.zeros(len(words), np.float32)
    return Caption(words, zeros, alphas.astype("f4"), gates.astype("f4"), -1.0, crop_box)


def spot(**shares: float) -> Array:
    """Return a map with these weights, e.g. ``spot(r0c0=0.7)``. The last region gets the rest."""
    alpha = np.zeros(GRID)
    for region, share in shares.items():
        alpha[int(region[1]), int(region[3])] = share
    alpha[-1, -1] += 1 - alpha.sum()
    return alpha


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-6)  # alphas are float32


def test_the_three_mask_formats_are_equal(read) -> None:
    mask = pixels(3, 1, 9, 6)
    for shape in (box(3, 1, 9, 6), runs(mask), packed(mask)):
        np.testing.assert_array_equal(read(entry("dog", shape)).labels(1, "dog"), mask)


def test_objects_are_merged_and_override_crowds(read) -> None:
    """The masks are an object of two polygons, a second object, and a crowd that overlaps both."""
    two = box(0, 0, 2, 2) + box(5, 5, 7, 7)
    crowd = runs(pixels(0, 0, 12, 3))
    instances = read(entry("dog", two), entry("dog", CELL), entry("dog", crowd, crowd=True))

    found = instances.labels(1, "dog")

    objects = pixels(0, 0, 4, 4) | pixels(5, 5, 7, 7)
    np.testing.assert_array_equal(found == 1, objects)
    np.testing.assert_array_equal(np.isnan(found), pixels(0, 0, 12, 3) & ~objects)


DOG = entry("dog", CELL)


def test_annotations_of_missing_images(read) -> None:
    with pytest.raises(DataError, match="annotation 7 refers to image_id 9, but the file does not"):
        read({**DOG, "image_id": 9})


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (
            packed(np.zeros((20, 20), dtype=bool)) | {"size": [8, 12]},
            "annotation 7 has an invalid mask",
        ),
        ({"size": [4, 4], "counts": [0, 16]}, "invalid mask .*8 .* 4"),
    ],
)
def test_masks_that_cannot_be_decoded(read, shape: Any, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        measure({1: caption("dog")}, read(entry("dog", shape)))


def test_run_lengths_that_end_early_are_an_error(read, monkeypatch: pytest.MonkeyPatch) -> None:
    """For such run lengths, pycocotools returns uninitialized memory, which this test simulates."""
    held = np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH)
    monkeypatch.setattr("pycocotools.mask.decode", lambda code: held)
    with pytest.raises(
        DataError, match=r"7 has an invalid mask \(its run-length code \(RLE\) ends before"
    ):
        read(entry("dog", {"size": [8, 12], "counts": [5]})).labels(1, "dog")


@given(st.integers(0, 10**6))
def test_coverage_is_the_common_area_of_pixels_and_regions(seed: int) -> None:
    """The result is compared with a loop over all pairs of a region and a pixel."""
    random = np.random.default_rng(seed)
    height, width = random.integers(1, 10, size=2)
    mask = random.random((height, width)) < random.random()
    # Borders of the crop lie on pixels, between pixels and at the edge of the photo.
    (left, right), (top, bottom) = (np.sort(random.choice(25, 2, replace=False)) for _ in range(2))
    region = CropBox(left / 24, top / 24, right / 24, bottom / 24)
    grid = int(random.integers(1, 6)), int(random.integers(1, 5))
    expected = np.zeros(grid)
    tall = (region.bottom - region.top) * height / grid[0]
    wide = (region.right - region.left) * width / grid[1]
    for row, column in np.ndindex(grid):
        top, left = region.top * height + row * tall, region.left * width + column * wide
        for y, x in np.argwhere(mask):
            down = max(0.0, min(top + tall, y + 1) - max(top, y))
            across = max(0.0, min(left + wide, x + 1) - max(left, x))
            expected[row, column] += down * across / (tall * wide)

    np.testing.assert_allclose(
        region_coverage(mask, Geometry.even(grid, *region), grid), expected, atol=1e-7
    )


def test_rounding_does_not_include_an_object_beside_the_crop() -> None:
    """0.5 - 0.2 is slightly less than 0.3 in floating point."""
    for width in range(2, 700):
        side = width - 2 * (width // 3)
        region = CropBox(0.5 - side / width / 2, 0.0, 0.5 + side / width / 2, 1.0)
        mask = np.ones((1, width), dtype=bool)
        mask[:, width // 3 : width // 3 + side] = False
        assert not region_coverage(mask, Geometry.even((1, 3), *region), (1, 3)).any()


def pixel_by_pixel(
    one: Caption, words: slice, masks: Any, crop: tuple[int, int, int, int]
) -> dict[str, Any] | str:
    """Measure a name by spreading the attention of each region over its pixels."""
    (left, top, right, bottom), (objects, crowds) = crop, masks
    start, stop = words.start, words.stop
    tall, wide = (bottom - top) // GRID[0], (right - left) // GRID[1]
    ys, xs = np.indices(GRID)
    middles = top + ys * tall + tall // 2, left + xs * wide + wide // 2
    seen = np.zeros((HEIGHT, WIDTH), dtype=bool)
    seen[top:bottom, left:right] = True

    def correctness(maps: Array) -> float:
        spread = np.zeros((HEIGHT, WIDTH))
        spread[seen] = np.kron(maps.sum(axis=0), np.ones((tall, wide))).ravel()
        valid = spread[~crowds].sum()
        return float(spread[objects].sum() / valid) if valid else math.nan

    def pointing(alpha: Array) -> float:
        candidates = (alpha == alpha.max()) & ~crowds[middles]
        return float(objects[middles][candidates].mean()) if candidates.any() else math.nan

    if not (objects & seen).any():
        return "unseen" if objects.any() and not (crowds & seen).any() else "ignored"
    maps, uniform = one.alphas.astype(float), np.ones((1, *GRID))
    if math.isnan(correctness(maps[words])):
        return "ignored"
    neighbours = slice(max(start - 1, 0), start), words, slice(stop, stop + 1)
    shift = [correctness(maps[near]) for near in neighbours]
    far = ((xs + 0.5) / GRID[1] - 0.5) ** 2 + ((ys + 0.5) / GRID[0] - 0.5) ** 2
    middle = (top + bottom) // 2, (left + right) // 2
    return {
        "correctness": correctness(maps[words]),
        "uniform": correctness(uniform),
        "centre": correctness(np.exp(-far / (2 * 0.25**2))[None]),
        "shuffled": correctness(np.delete(maps, words, axis=0)),
        "pointing": pointing(maps[words].mean(axis=0)),
        "pointing_uniform": pointing(uniform[0]),
        "pointing_centre": math.nan if crowds[middle] else float(objects[middle]),
        "gate": one.gates[words].mean(),
        "shift": [math.nan] * 3 if any(map(math.isnan, shift)) else shift,
    }


@settings(max_examples=400)
@given(st.integers(0, 10**6))
def test_a_name_is_measured_as_pixel_by_pixel(seed: int) -> None:
    """Names have one or two words. Maps have ties and zeros, and photos have crowds and crops."""
    random = np.random.default_rng(seed)
    name = ["dog"] if random.integers(2) else ["hot", "dog"]
    start = int(random.integers(3))
    text = " ".join(["very"] * start + name + ["thing"] * int(random.integers(3)))
    weights = random.integers(3, size=(len(text.split()), *GRID)) + 1e-3 * random.integers(2)
    tall, wide = (int(random.integers(1, 5)) for _ in GRID)
    left, top = (int(random.integers(most + 1)) for most in (WIDTH - 3 * wide, HEIGHT - 2 * tall))
    crop = left, top, left + 3 * wide, top + 2 * tall
    region = CropBox(*np.divide(crop, (WIDTH, HEIGHT, WIDTH, HEIGHT)))
    one = caption(text, weights, random.random(len(weights)), region)
    shapes = [pixels(*np.sort(random.integers(13, size=(2, 2)), axis=0).ravel()) for _ in range(2)]
    noise = random.random((2, HEIGHT, WIDTH)) < 0.5 + seed % 2
    shapes = [shape & some for shape, some in zip(shapes, noise, strict=True)]
    instances = Instances(
        Path(), {1: {"height": HEIGHT, "width": WIDTH}}, frozenset(NAMES.values()),
        {(1, " ".join(name)): [entry("dog", runs(s), crowd=n > 0) for n, s in enumerate(shapes)]},
    )  # fmt: skip

    found = measure({1: one}, instances)

    masks = shapes[0], shapes[1] & ~shapes[0]
    expected = pixel_by_pixel(one, slice(start, start + len(name)), masks, crop)
    if isinstance(expected, str):
        assert (found["measured"], found[expected]) == (0, 1)
        return
    [measured] = found["per_name"]
    assert (measured["text"], measured["start"]) == (" ".join(name), start)
    assert [*measured["shift"]] == pytest.approx(expected.pop("shift"), nan_ok=True)
    assert {key: measured[key] for key in expected} == pytest.approx(expected, nan_ok=True)


def test_the_ratio_is_a_ratio_of_means(read) -> None:
    """A small dog is missed, a large cat found: the mean of 0 / (1/6) and 1 / (4/6) is 0.75."""
    instances = read(DOG, entry("cat", box(4, 0, 12, 8)))
    found = measure({1: caption("dog cat", [spot(), spot(r0c1=1)])}, instances)

    assert found["ratio"] == close(0.5 / ((1 / 6 + 4 / 6) / 2))
    assert found["categories"] == {
        "cat": {"count": 1, "correctness": close(1), "uniform": close(4 / 6), "ratio": close(1.5)},
        "dog": {"count": 1, "correctness": 0, "uniform": close(1 / 6), "ratio": 0},
    }


def test_every_name_is_counted_once(read) -> None:
    instances = read(DOG, entry("person", CROWD, crowd=True), entry("cat", CELL, image_id=2))
    region = CropBox(0.5, 0.5, 1, 1)
    captions = {
        1: caption("a man and a dog near a cat on a couch"),  # ignored, measured, absent, unknown
        2: caption("a cat", crop_box=region),  # unseen
        3: caption("grass"),
    }

    found = measure(captions, instances)

    counts = ("photos", "names", "measured", "absent", "unseen", "ignored")
    assert [found[key] for key in counts] == [3, 4, 1, 1, 1, 1]
    # Too few photos for intervals, because photos without names do not count.
    assert (found["photos_with_names"], set(found["intervals"].values())) == (1, {None})


def test_entropy_covers_all_words(read) -> None:
    maps = [spot(r0c0=0.5), UNIFORM, spot(r0c0=1)]
    found = measure({1: caption("a dog runs", maps), 2: caption("grass")}, read(DOG))

    assert found["entropy"] == close((math.log(2) + math.log(6) + 0 + math.log(6)) / 4)
    assert found["entropy"] == close(np.concatenate([entropy(maps), entropy([UNIFORM])]).mean())
    assert found["entropy_even"] == close(math.log(6))
    assert found["movement"] == close(movement(maps))  # captions of one word are ignored


def test_intervals_equal_a_loop_over_resampled_photos(read, monkeypatch) -> None:
    """Photos have three names, one name or no names. In the second, ``shuffled`` is undefined."""
    monkeypatch.setattr("captioner.evaluation.bootstrap.MIN_IMAGES", 1)
    generator = np.random.default_rng(0)
    texts = {1: "a dog near a cat or a dog", 2: "cat", 3: "some grass"}
    captions = {
        i: caption(t, generator.dirichlet(np.ones(6), len(t.split())).reshape(-1, *GRID))
        for i, t in texts.items()
    }
    shapes = entry("cat", box(2, 2, 9, 7)), entry("cat", box(1, 1, 6, 6), image_id=2)
    found = measure(captions, read(DOG, *shapes))

    values: dict[str, list[float]] = {"correctness": [], "shuffled": [], "ratio": []}
    for row in resample_weights(3):
        drawn = [one for one in found["per_name"] for _ in range(int(row[one["image_id"] - 1]))]
        if drawn:
            values["correctness"].append(np.mean([one["correctness"] for one in drawn]))
            values["ratio"].append(
                values["correctness"][-1] / np.mean([one["uniform"] for one in drawn])
            )
        shuffled = [one["shuffled"] for one in drawn if not math.isnan(one["shuffled"])]
        if shuffled:
            values["shuffled"].append(np.mean(shuffled))

    for key, drawn_values in values.items():
        assert found["intervals"][key] == pytest.approx(np.percentile(drawn_values, [2.5, 97.5])), (
            key
        )


@given(st.integers(0, 1000))
def test_movement_is_the_mean_over_all_pairs_of_words(seed: int) -> None:
    random = np.random.default_rng(seed)
    maps = random.dirichlet(np.full(6, 0.1), size=random.integers(2, 6))
    maps = np.where(maps < 0.01, 0, maps).reshape(-1, *GRID)
    pairs = [np.abs(one - two).sum() / 2 for one, two in combinations(maps, 2)]

    assert movement(maps) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def test_short_captions_have_no_movement() -> None:
    assert math.isnan(movement(np.full((1, 2, 3), 1 / 6)))
    empty = np.zeros((0, 2, 3))  # ``Caption.alphas`` of an empty caption
    assert entropy(empty).shape == (0,)
    assert math.isnan(movement(empty))
