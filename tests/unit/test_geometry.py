"""Positions of regions: centres, cells and coverage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from captioner.caption_types import Caption
from captioner.drawing.heatmap import attention_map
from captioner.errors import ConfigError
from captioner.evaluation.grounding import region_coverage
from captioner.geometry import Axis, Geometry

RESNET = Axis(0.5 / 224, 32 / 224)  # 7 regions at 224 pixels
LITE = Axis(31.5 / 288, 32 / 288)  # 9 regions at 288 pixels
CONVNEXT = Axis(16 / 230, 32 / 230, 0.0, 228 / 230)  # 7 regions at 230 pixels

axes = st.builds(
    Axis,
    st.floats(0.0, 0.2),
    st.floats(0.05, 0.2),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0.95, 1.0]),
)


def test_the_outer_cells_reach_to_the_edge() -> None:
    borders = RESNET.borders(7) * 224

    np.testing.assert_allclose(borders, [0, 16.5, 48.5, 80.5, 112.5, 144.5, 176.5, 224])


def test_cells_are_clipped_to_the_photo() -> None:
    np.testing.assert_allclose(RESNET.middles(7)[:2] * 224, [8.25, 32.5])
    np.testing.assert_allclose(LITE.middles(9)[[0, -1]] * 288, [31.5, (271.5 + 288) / 2])


def test_pixels_that_the_encoder_ignores_belong_to_no_cell() -> None:
    regions = Geometry(CONVNEXT, CONVNEXT)

    drawn = attention_map(np.full((7, 7), 1 / 49), (230, 230), regions, smooth=False)

    assert np.isnan(drawn[228:]).all()
    assert np.isnan(drawn[:, 228:]).all()
    assert not np.isnan(drawn[:228, :228]).any()
    assert not regions.covers_photo
    covered = region_coverage(np.pad(np.ones((2, 230), bool), ((228, 0), (0, 0))), regions, (7, 7))
    assert not covered.any()


@pytest.mark.parametrize("axis", [RESNET, LITE, CONVNEXT, Axis.even(8)])
def test_maps_are_interpolated_between_the_centres(axis: Axis) -> None:
    """A drawn map has each region's value at its centre and is linear in between."""
    count = 5
    values = np.arange(count) ** 2.0
    pixels = 4000

    drawn = attention_map(np.tile(values, (3, 1)), (pixels, 6), Geometry(Axis.even(3), axis))[2]

    at = (np.arange(pixels) + 0.5) / pixels
    seen = (at >= axis.start) & (at < axis.stop)
    np.testing.assert_allclose(
        drawn[seen], np.interp(at, axis.centres(count), values)[seen], atol=1e-3
    )


counts, sides = st.integers(1, 5), st.integers(20, 90)


@given(axes, axes, st.tuples(counts, counts), st.tuples(sides, sides))
def test_drawn_blocks_equal_the_measured_cells(
    y: Axis, x: Axis, grid: tuple[int, int], size: tuple[int, int]
) -> None:
    """Figures and mask metrics must divide a photo in the same way."""

    def pixels_of(axis: Axis, index: int, count: int, pixels: int) -> tuple[NDArray[np.bool_], ...]:
        """The pixels inside and outside; those on a border may be on either side."""
        low, high = axis.borders(count)[index : index + 2] * pixels
        middle = np.arange(pixels) + 0.5
        inside = (middle > low + 1e-3) & (middle < high - 1e-3)
        return inside, (middle < low - 1e-3) | (middle > high + 1e-3)

    for row, column in np.ndindex(grid):
        alpha = np.zeros(grid)
        alpha[row, column] = 1
        block = attention_map(alpha, size, Geometry(y, x), smooth=False)
        down, not_down = pixels_of(y, row, grid[0], size[1])
        across, not_across = pixels_of(x, column, grid[1], size[0])
        assert (block[np.ix_(down, across)] == 1).all()
        assert not np.nan_to_num(block[not_down]).any()
        assert not np.nan_to_num(block[:, not_across]).any()


@given(axes, st.integers(1, 9))
def test_coverage_of_a_full_mask_is_one_for_every_cell_inside(axis: Axis, count: int) -> None:
    cover = region_coverage(np.ones((40, 3), bool), Geometry(axis, Axis.even(1)), (count, 1))

    wide = np.diff(axis.borders(count)) > 1e-6
    np.testing.assert_allclose(cover[:, 0], wide, atol=1e-4)


def test_placing_in_a_crop() -> None:
    """An input of 224 pixels showing the middle half of a wide photo."""
    geometry = Geometry(Axis(0.5, 32, 0, 224), Axis(0.5, 32, 0, 224))

    placed = geometry.placed(224, 0.25, 0.0, 0.75, 1.0)

    assert placed.y == pytest.approx(RESNET)
    assert placed.x == pytest.approx((0.25 + 0.25 / 224, 16 / 224, 0.25, 0.75))


def test_json_round_trip() -> None:
    geometry = Geometry(RESNET, LITE)

    back = Geometry.from_dict(geometry.to_dict())

    assert back.y == pytest.approx(RESNET, abs=1e-6)
    assert back.x == pytest.approx(LITE, abs=1e-6)
    assert set(geometry.to_dict()["x"]) == {"first", "pitch", "start", "stop"}


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"x": {"first": 0.1}, "y": {}},
        {"x": RESNET._asdict(), "y": RESNET._asdict() | {"pitch": 0}},
        {"x": RESNET._asdict(), "y": RESNET._asdict() | {"pitch": "wide"}},
        {"x": RESNET._asdict() | {"start": 2}, "y": RESNET._asdict()},
        None,
    ],
)
def test_invalid_geometry_raises(data) -> None:
    with pytest.raises(ConfigError, match="geometry"):
        Geometry.from_dict(data)


def test_captions_default_to_equal_cells_of_the_crop_box() -> None:
    zeros = np.zeros(1, np.float32)
    caption = Caption(("dog",), zeros, np.ones((1, 2, 4), np.float32), zeros, 0.0)

    assert caption.regions == Geometry.even((2, 4))
    stored = caption.to_dict(attention=True)
    assert stored["region"] == [0, 0, 1, 1]
    assert stored["geometry"]["x"] == {"first": 0.125, "pitch": 0.25, "start": 0, "stop": 1}
    assert "geometry" not in caption.to_dict()
