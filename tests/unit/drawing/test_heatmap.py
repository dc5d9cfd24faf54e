"""Heatmaps: every region has the right position and brightness."""

from __future__ import annotations

import numpy as np
import pytest
from picture_helpers import flat, luma
from PIL import Image

from captioner.data.pixels import fit_photo
from captioner.drawing.heatmap import (
    CLOSED_GATE,
    COLORMAPS,
    attention_image,
    attention_map,
    most_attended,
    scale_bar,
    shared_scale,
)
from captioner.geometry import Geometry


def test_smooth_map_is_bilinear_between_centres_and_constant_outside() -> None:
    alpha = np.array([[0.0, 0.4], [0.2, 0.4]])
    result = attention_map(alpha, (8, 8))
    # Centres of the regions lie between pixels 1 and 2 and between 5 and 6.
    along = np.clip((np.arange(8) - 1.5) / 4, 0, 1)
    y, x = np.meshgrid(along, along, indexing="ij")
    expected = 0.4 * x * (1 - y) + 0.2 * (1 - x) * y + 0.4 * x * y
    np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("colormap", COLORMAPS)
def test_luminance_rises_over_photos_of_every_colour(colormap: str) -> None:
    alpha = np.linspace(0, 1, 17)[None]
    for colour in np.ndindex(4, 4, 4):
        photo = Image.new("RGB", (17, 1), tuple(85 * value for value in colour))
        image = attention_image(photo, alpha, scale_max=1.0, smooth=False, colormap=colormap)
        steps = np.diff(luma(image)[0])
        if colormap == "photo":  # black is hardly lit
            assert (steps > -0.5).all(), colour  # of rounding
            assert steps.sum() > 15, colour
        else:
            assert (steps > 0).all(), colour


def test_the_attended_part_keeps_the_photos_colours_and_the_rest_is_grey_and_dim() -> None:
    photo = Image.new("RGB", (60, 30), (200, 120, 40))
    lit, dim = (
        np.asarray(attention_image(photo, np.full((1, 1), level), scale_max=1.0), float)[0, 0]
        for level in (1.0, 0.0)
    )
    assert np.abs(lit - (200, 120, 40)).max() <= 0.08 * 255
    assert np.ptp(dim) < 0.15 * np.ptp(lit)
    assert luma(photo)[0, 0] * 0.35 == pytest.approx(dim @ (0.299, 0.587, 0.114), abs=1)


@pytest.mark.parametrize(("colormap", "level"), [("photo", 208), ("inferno", 128)])
def test_scale_bar_has_the_colours_of_the_maps(colormap: str, level: int) -> None:
    bar, levels = np.asarray(scale_bar(256, 3, colormap)), np.linspace(0, 1, 256)[None]
    photo = flat((256, 3), level)
    ramp = attention_image(photo, levels, scale_max=1, smooth=False, colormap=colormap)
    np.testing.assert_array_equal(bar, np.asarray(ramp))


def test_the_most_attended_tenth_is_rounded_and_at_least_one_region() -> None:
    assert most_attended([[0.1, 0.6, 0.3]]) == pytest.approx((0.6, 0.6))
    assert most_attended([[0.4, 0.3, 0.2, 0.1, *[0.0] * 21]]) == pytest.approx((0.2, 0.9))  # of 25
    assert most_attended(np.full((7, 7), 1 / 49)) == pytest.approx((1 / 49, 5 / 49))
    assert most_attended([[0.1, 0.2, 0.1]]) == pytest.approx((0.2, 0.5))  # attention x gate
    assert most_attended(np.zeros((2, 2))) == (0.0, 0.0)


def test_shared_scale() -> None:
    tenth = np.array([0.3, 0.2, 0.1, *[0.4 / 17] * 17])  # 2 of 20 regions reach 0.2
    assert shared_scale(tenth[None]) == pytest.approx(0.2)
    assert shared_scale([tenth[None], np.full((1, 20), 0.05)]) == pytest.approx(0.2)
    assert shared_scale([[[0.7, 0.3, 0.0]], [[0.9, 0.1, 0.0]]]) == pytest.approx(0.9)
    assert shared_scale(np.full((3, 7, 7), 1 / 49)) == pytest.approx(2 / 49)
    assert shared_scale(np.ones((1, 1, 1))) == 1.0
    assert shared_scale(np.zeros((0, 7, 7))) == 1.0


def test_a_word_with_a_nearly_closed_gate_does_not_set_the_scale() -> None:
    """Like the first "a" of many captions, which has the sharpest map and hardly uses it."""
    maps = np.array([[[0.9, 0.1, 0.0]], [[0.5, 0.3, 0.2]], [[0.2, 0.2, 0.6]]], np.float32)
    gates = np.array([0.01, 0.9, 0.8], np.float32)

    assert shared_scale(maps, gates) == pytest.approx(2 / 3)  # twice uniform
    assert shared_scale(np.repeat(maps, 2, axis=2) / 2, gates) == pytest.approx(1 / 3)
    assert shared_scale(maps, [0.01, 0.02, 0.0]) == pytest.approx(
        0.9
    )  # all count if all are closed
    assert shared_scale(maps, [CLOSED_GATE, 1.0, 1.0]) == pytest.approx(0.9)


def test_outside_the_crop_box_the_photo_is_dimmed() -> None:
    regions = Geometry.even((1, 1), 0.25, 0.0, 0.75, 1.0)
    for level in (90, 160, 255):
        alpha = np.zeros((4, 4))
        heat = luma(attention_image(flat((80, 40), level), alpha, scale_max=1.0, regions=regions))
        outside = np.concatenate([heat[:, :20], heat[:, 60:]], axis=1)
        assert outside.mean() < heat[:, 20:60].mean() < level
        assert np.ptp(heat[:, 20:60]) == 0
        assert np.ptp(outside) > 0
    values = attention_map(alpha, (80, 40), regions)
    assert np.isnan(values[:, :20]).all()
    assert np.isnan(values[:, 60:]).all()
    assert not np.isnan(values[:, 20:60]).any()


@pytest.mark.parametrize(
    ("size", "panel_size", "expected"),
    [
        ((5000, 4000), 640, (640, 512)),
        ((1, 5000), 640, (1, 640)),
        ((20, 30), 640, (107, 160)),
        ((1, 1), 640, (160, 160)),
        ((20, 30), 50, (33, 50)),
        ((20, 30), 0, (20, 30)),
        ((200, 300), 640, (200, 300)),
        ((900, 300), 1, (1, 1)),
    ],
)
def test_fit_photo_scales_large_photos_down_and_tiny_ones_up(
    size: tuple[int, int], panel_size: int, expected: tuple[int, int]
) -> None:
    assert fit_photo(flat(size), panel_size, 160).size == expected
