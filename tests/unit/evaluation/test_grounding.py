"""Attention grounding: known answers, brute force and invalid files.

Most photos here are 12 x 8 pixels with a grid of 2 x 3, so a region is 4 x 4 pixels.
"""

from __future__ import annotations

import json
import math
from itertools import combinations, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from captioner.caption import Caption, CropBox
from captioner.errors import DataError
from captioner.evaluation.bootstrap import resample_weights
from captioner.evaluation.grounding import entropy, measure, movement
from captioner.evaluation.masks import (
    Instances,
    at_centres,
    read_instances,
    region_coverage,
)
from captioner.geometry import Geometry

DATA = Path(__file__).parents[4] / "shared" / "data"
Array = NDArray[np.float64]

HEIGHT, WIDTH, GRID = 8, 12, (2, 3)
NAMES = {1: "dog", 2: "cat", 3: "person", 4: "hot dog"}
IDS = {name: number for number, name in NAMES.items()}
UNIFORM = np.full(GRID, 1 / 6)
WHOLE = CropBox()


def even(grid: tuple[int, int], box: CropBox = WHOLE) -> Geometry:
    """Equal cells over a crop box."""
    return Geometry.even(grid, *box)


def box(left: int, top: int, right: int, bottom: int) -> list[list[int]]:
    """A rectangle as a polygon."""
    return [[left, top, right, top, right, bottom, left, bottom]]


def pixels(left: int, top: int, right: int, bottom: int) -> NDArray[np.bool_]:
    mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def runs(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Uncompressed run lengths in column order, starting with zeros."""
    values = mask.T.ravel().tolist()
    counts = [len([*run]) for _, run in groupby(values)]
    return {"size": list(mask.shape), "counts": [0, *counts] if values[0] else counts}


def packed(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Compressed run lengths as in JSON."""
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


def coco(*annotations: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "images": [
            {"id": i, "file_name": f"{i}.jpg", "height": HEIGHT, "width": WIDTH} for i in (1, 2, 3)
        ],
        "annotations": list(annotations),
        "categories": [{"id": i, "name": name} for i, name in NAMES.items()],
        **changes,
    }


def put(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def read(tmp_path: Path):
    def read(*annotations: dict[str, Any], **changes: Any) -> Instances:
        return read_instances(put(tmp_path / "a.json", coco(*annotations, **changes)))

    return read


@pytest.fixture
def no_minimum_of_photos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report intervals for any number of photos."""
    monkeypatch.setattr("captioner.evaluation.bootstrap.MIN_IMAGES", 1)


def caption(text: str, maps: Any = None, gates: Any = None, crop_box: CropBox = WHOLE) -> Caption:
    """A caption; maps are uniform by default."""
    words = tuple(text.split())
    alphas = np.full((len(words), *GRID), 1 / 6) if maps is None else np.asarray(maps, float)
    gates = np.ones(len(words)) if gates is None else np.asarray(gates, float)
    zeros = np.zeros(len(words), np.float32)
    return Caption(words, zeros, alphas.astype("f4"), gates.astype("f4"), -1.0, crop_box)


def spot(**shares: float) -> Array:
    """A map with the given weights, e.g. ``spot(r0c0=0.7)``; the last region gets the rest."""
    alpha = np.zeros(GRID)
    for region, share in shares.items():
        alpha[int(region[1]), int(region[3])] = share
    alpha[-1, -1] += 1 - alpha.sum()
    return alpha


def only(instances: Instances, one: Caption) -> SimpleNamespace:
    """The measurements of the only name."""
    (found,) = measure({1: one}, instances)["per_name"]
    return SimpleNamespace(**found)


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-6)  # alphas are float32


# --- Reading -------------------------------------------------------------------------------------


def test_the_three_mask_formats_are_equal(read) -> None:
    mask = pixels(3, 1, 9, 6)
    for shape in (box(3, 1, 9, 6), runs(mask), packed(mask)):
        np.testing.assert_array_equal(read(entry("dog", shape)).masks(1, "dog").objects, mask)


def test_objects_are_merged_and_override_crowds(read) -> None:
    """An object of two polygons, a second object, and a crowd that overlaps both."""
    two = box(0, 0, 2, 2) + box(5, 5, 7, 7)
    crowd = runs(pixels(0, 0, 12, 3))
    instances = read(entry("dog", two), entry("dog", CELL), entry("dog", crowd, crowd=True))

    found = instances.masks(1, "dog")

    objects = pixels(0, 0, 4, 4) | pixels(5, 5, 7, 7)
    np.testing.assert_array_equal(found.objects, objects)
    np.testing.assert_array_equal(found.crowds, pixels(0, 0, 12, 3) & ~objects)


DOG = entry("dog", CELL)


def test_annotations_of_missing_images(read) -> None:
    with pytest.raises(DataError, match="annotation 7 has the image_id 9, which is not in the"):
        read({**DOG, "image_id": 9})


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (
            packed(np.zeros((20, 20), dtype=bool)) | {"size": [8, 12]},
            "annotation 7 has an invalid mask",
        ),
        (
            {"size": [4, 4], "counts": [0, 16]},
            r"has shape \(4, 4\), its photo \(8, 12\)\); give",
        ),
    ],
)
def test_masks_that_cannot_be_decoded(read, shape: Any, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        measure({1: caption("dog")}, read(entry("dog", shape)))


def test_run_lengths_that_end_early_are_an_error(read, monkeypatch: pytest.MonkeyPatch) -> None:
    """pycocotools returns uninitialized memory for them; simulated here."""
    held = np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH)
    monkeypatch.setattr("pycocotools.mask.decode", lambda code: held)
    with pytest.raises(DataError, match=r"7 has an invalid mask \(the run lengths end before"):
        read(entry("dog", {"size": [8, 12], "counts": [5]})).masks(1, "dog")


# --- Coverage ------------------------------------------------------------------------------------


@st.composite
def masks(draw: st.DrawFn) -> NDArray[np.bool_]:
    size = draw(st.tuples(st.integers(1, 7), st.integers(1, 9)))
    return np.random.default_rng(draw(st.integers(0, 999))).random(size) < draw(st.floats(0, 1))


@st.composite
def regions(draw: st.DrawFn) -> CropBox:
    """Crop boxes with borders on pixels, between pixels and at the edge of the photo."""
    left, right = sorted(draw(st.lists(st.integers(0, 24), min_size=2, max_size=2, unique=True)))
    top, bottom = sorted(draw(st.lists(st.integers(0, 24), min_size=2, max_size=2, unique=True)))
    return CropBox(left / 24, top / 24, right / 24, bottom / 24)


grids = st.tuples(st.integers(1, 5), st.integers(1, 4))


@given(masks(), regions(), grids)
def test_coverage_is_the_common_area_of_pixels_and_regions(mask, region, grid) -> None:
    """Compared with a loop over all pairs of a region and a pixel."""
    height, width = mask.shape
    expected = np.zeros(grid)
    tall = (region.bottom - region.top) * height / grid[0]
    wide = (region.right - region.left) * width / grid[1]
    for row, column in np.ndindex(grid):
        top, left = region.top * height + row * tall, region.left * width + column * wide
        for y, x in np.argwhere(mask):
            down = max(0.0, min(top + tall, y + 1) - max(top, y))
            across = max(0.0, min(left + wide, x + 1) - max(left, x))
            expected[row, column] += down * across / (tall * wide)

    np.testing.assert_allclose(region_coverage(mask, even(grid, region), grid), expected, atol=1e-7)


def test_rounding_does_not_include_an_object_beside_the_crop() -> None:
    """0.5 - 0.2 is slightly less than 0.3 in floating point."""
    for width in range(2, 700):
        side = width - 2 * (width // 3)
        region = CropBox(0.5 - side / width / 2, 0.0, 0.5 + side / width / 2, 1.0)
        mask = np.ones((1, width), dtype=bool)
        mask[:, width // 3 : width // 3 + side] = False
        assert not region_coverage(mask, even((1, 3), region), (1, 3)).any()


def test_centre_of_a_region() -> None:
    mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
    mask[2, 6] = mask[7, 11] = True
    assert at_centres(mask, even(GRID, CropBox()), GRID).tolist() == [
        [False, True, False],
        [False] * 3,
    ]
    # One region per pixel, and a crop of the last pixel.
    np.testing.assert_array_equal(
        at_centres(mask, even((HEIGHT, WIDTH), CropBox()), (HEIGHT, WIDTH)), mask
    )
    assert at_centres(mask, even((1, 1), CropBox(11 / 12, 7 / 8, 1, 1)), (1, 1)).tolist() == [
        [True]
    ]


# --- Answers by hand -----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_minimum_of_photos")
def test_a_uniform_map_has_the_uniform_correctness(read) -> None:
    found = measure({1: caption("a dog runs")}, read(DOG))

    for key in ("correctness", "uniform", "shuffled", "pointing", "pointing_uniform"):
        assert found[key] == close(1 / 6), key
    assert found["ratio"] == close(1)
    assert found["intervals"]["ratio"] == close([1, 1])


def test_the_centre_by_hand(read) -> None:
    found = only(read(entry("dog", box(4, 0, 8, 8))), caption("dog"))

    side = math.exp(-((1 / 3) ** 2) / (2 * 0.25**2))  # a third of the width from the middle
    assert found.centre == close(1 / (1 + 2 * side))
    assert found.pointing_centre == 1


def test_only_the_part_that_was_seen_counts(read) -> None:
    """The crop is the right two thirds, x from 4 to 12, with a grid of 1 x 2."""
    region = CropBox(1 / 3, 0, 1, 1)
    one = caption("dog", [[[0.75, 0.25]]], crop_box=region)

    found = only(read(entry("dog", box(0, 0, 8, 8))), one)
    assert (found.correctness, found.uniform) == (close(0.75), close(0.5))
    assert found.pointing == 1

    found = only(read(entry("dog", box(6, 0, 8, 4))), one)
    assert (found.correctness, found.uniform) == (close(0.75 / 4), close(1 / 8))

    outside = measure({1: one}, read(DOG))
    assert (outside["unseen"], outside["measured"]) == (1, 0)


def test_a_name_of_two_words_uses_their_mean(read) -> None:
    maps = [spot(r0c0=share) for share in (0.1, 0.2, 0.6, 0.5)]
    one = caption("a hot dog lies", maps, gates=[1, 0.2, 0.4, 1])

    found = only(read(entry("hot dog", CELL)), one)

    assert (found.image_id, found.category) == (1, "hot dog")
    assert (found.text, found.start) == ("hot dog", 1)
    assert found.correctness == close(0.4)
    assert found.shuffled == close(0.3)
    assert found.shift == (close(0.1), close(0.4), close(0.5))
    assert found.gate == close(0.3)
    assert found.pointing == 0.0  # 0.8 + 0.4 in the last region, 0.2 + 0.6 in the first


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"r0c0": 0.4, "r1c1": 0.4}, 1 / 2),
        ({"r0c0": 0.3, "r1c1": 0.3, "r0c2": 0.3}, 1 / 3),
        ({"r0c0": 0.4, "r1c1": 0.45}, 0),
    ],
)
def test_pointing_of_ties(read, shares: dict[str, float], expected: float):
    assert only(read(DOG), caption("dog", [spot(**shares)])).pointing == close(expected)


def test_the_ratio_is_a_ratio_of_means(read) -> None:
    """A small dog missed, a large cat found: the mean of 0 / (1/6) and 1 / (4/6) is 0.75."""
    instances = read(DOG, entry("cat", box(4, 0, 12, 8)))
    found = measure({1: caption("dog cat", [spot(), spot(r0c1=1)])}, instances)

    assert found["ratio"] == close(0.5 / ((1 / 6 + 4 / 6) / 2))
    assert found["categories"] == {
        "cat": {"count": 1, "correctness": close(1), "uniform": close(4 / 6), "ratio": close(1.5)},
        "dog": {"count": 1, "correctness": 0, "uniform": close(1 / 6), "ratio": 0},
    }


# --- Crowds --------------------------------------------------------------------------------------


def test_crowd_regions_are_ignored(read) -> None:
    instances = read(DOG, entry("dog", CROWD, crowd=True))
    one = caption("big dog", [spot(r0c0=0.2, r0c1=0.5), spot(r0c0=0.5, r0c1=0.3)])

    found = only(instances, one)

    assert found.correctness == close(0.5 / 0.7)
    assert found.uniform == close(1 / 5)
    assert found.shuffled == close(0.2 / 0.5)
    assert found.pointing == 1
    assert found.pointing_uniform == close(1 / 5)


def test_pointing_at_a_crowd_is_undefined(read) -> None:
    instances = read(DOG, entry("dog", CROWD, crowd=True))

    at_crowd = measure({1: caption("dog", [spot(r0c0=0.3, r0c1=0.6)])}, instances)
    assert math.isnan(at_crowd["per_name"][0]["pointing"])
    assert math.isnan(at_crowd["pointing"])
    assert at_crowd["intervals"]["pointing"] is None
    assert at_crowd["correctness"] == close(0.3 / 0.4)

    tie = spot(r0c1=0.4, r1c0=0.4)
    assert only(instances, caption("dog", [tie])).pointing == 0  # the other half of the tie

    middle = read(DOG, entry("dog", runs(pixels(4, 2, 8, 6)), crowd=True))
    assert math.isnan(only(middle, caption("dog")).pointing_centre)


def test_attention_entirely_on_a_crowd(read) -> None:
    instances = read(DOG, entry("dog", CROWD, crowd=True))

    found = measure({1: caption("dog", [spot(r0c1=1)])}, instances)
    assert (found["ignored"], found["measured"]) == (1, 0)

    # If this holds for a neighbour, the shift is undefined.
    maps = [spot(r0c1=1), spot(r0c0=1), spot(r0c0=0.5)]
    beside = only(instances, caption("a dog runs", maps))
    assert all(math.isnan(value) for value in beside.shift)
    assert beside.shuffled == close(0.5)  # mean map of the two other words outside the crowd


def test_a_category_with_crowd_regions_only(read) -> None:
    crowd = entry("dog", CROWD, crowd=True)
    found = measure({1: caption("dog")}, read(crowd))
    assert (found["ignored"], found["measured"]) == (1, 0)

    # The crop, the right two thirds, contains the crowd only.
    seen = caption("dog", [[[0.5, 0.5]]], crop_box=CropBox(1 / 3, 0, 1, 1))
    found = measure({1: seen}, read(DOG, crowd))
    assert (found["ignored"], found["unseen"], found["measured"]) == (1, 0, 0)


# --- Summary -------------------------------------------------------------------------------------


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


def test_entropy_covers_all_words(read) -> None:
    maps = [spot(r0c0=0.5), UNIFORM, spot(r0c0=1)]
    found = measure({1: caption("a dog runs", maps), 2: caption("grass")}, read(DOG))

    assert found["entropy"] == close((math.log(2) + math.log(6) + 0 + math.log(6)) / 4)
    assert found["entropy"] == close(np.concatenate([entropy(maps), entropy([UNIFORM])]).mean())
    assert found["entropy_even"] == close(math.log(6))
    assert found["movement"] == close(movement(maps))  # captions of one word are ignored


def test_no_intervals_for_few_photos_with_names(read) -> None:
    """Photos without names do not count."""
    captions = {1: caption("a dog"), 2: caption("some grass"), 3: caption("a dog")}
    found = measure(captions, read(DOG))

    assert (found["photos"], found["photos_with_names"], found["measured"]) == (3, 1, 1)
    assert set(found["intervals"].values()) == {None}
    assert found["correctness"] is not None


@pytest.mark.usefixtures("no_minimum_of_photos")
def test_intervals_equal_a_loop_over_resampled_photos(read) -> None:
    """Photos with three names, one and none; shuffled is undefined in the second."""
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


# --- Entropy and movement ------------------------------------------------------------------------


@st.composite
def word_maps(draw: st.DrawFn, words: int = 1) -> Array:
    """(T, Gh, Gw) with at least ``words`` words; some regions may be 0."""
    shape = draw(st.tuples(st.integers(words, 5), st.integers(1, 3), st.integers(1, 4)))
    seed = draw(st.integers(0, 1000))
    generator = np.random.default_rng(seed)
    sharpness = draw(st.sampled_from([0.0, 1.0, 30.0]))
    weights = np.exp(sharpness * generator.normal(size=shape)) * generator.integers(2, size=shape)
    weights[:, 0, 0] += 1e-9  # no map may be all zeros
    return weights / weights.sum(axis=(1, 2), keepdims=True)


@given(word_maps(words=2))
def test_movement_is_the_mean_over_all_pairs_of_words(array: Array) -> None:
    pairs = [np.abs(one - two).sum() / 2 for one, two in combinations(array, 2)]

    assert movement(array) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert -1e-12 <= movement(array) <= 1 + 1e-12


def test_short_captions_have_no_movement() -> None:
    assert math.isnan(movement(np.full((1, 2, 3), 1 / 6)))
    empty = np.zeros((0, 2, 3))  # ``Caption.alphas`` of an empty caption
    assert entropy(empty).shape == (0,)
    assert math.isnan(movement(empty))
