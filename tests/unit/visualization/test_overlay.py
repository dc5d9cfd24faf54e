"""The overlay: every map stands where and as bright as its numbers say, at every size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from captioner.caption import Caption, Region
from captioner.errors import ConfigError
from captioner.visualization import (
    COLORMAPS,
    attention_image,
    attention_map,
    fit_photo,
    overlay,
    scale_bar,
    shared_scale,
)

WHOLE = Region()
LUMA = np.array([0.299, 0.587, 0.114])
GRIDS = [(1, 1), (1, 5), (4, 1), (7, 7), (5, 9), (14, 14)]


def flat(size: tuple[int, int], level: int = 128) -> Image.Image:
    return Image.new("RGB", size, (level, level, level))


def luma(image: Image.Image) -> NDArray[np.float64]:
    return np.asarray(image, dtype=np.float64) @ LUMA


def noisy(size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_caption(
    words: list[str], grid: tuple[int, int] = (7, 7), region: Region = WHOLE, seed: int = 0
) -> Caption:
    rng = np.random.default_rng(seed)
    alphas = rng.random((len(words), *grid)) ** 4 + 1e-3
    alphas /= alphas.sum(axis=(1, 2), keepdims=True)
    log_probs = np.log(rng.uniform(0.05, 1.0, len(words))).astype(np.float32)
    gates = rng.random(len(words)).astype(np.float32)
    total = float(log_probs.sum())
    return Caption(tuple(words), log_probs, alphas.astype(np.float32), gates, total, region)


def panels_of(
    picture: Image.Image, caption: Caption, photo: Image.Image, **options: object
) -> list[tuple[int, int]]:
    """Where each panel stands in the picture, found by its pixels; every one must be there once."""
    page = np.asarray(picture)
    places = []
    for index in range(-1, len(caption.words)):
        panel = photo
        if index >= 0:
            panel = attention_image(
                photo,
                caption.alphas[index],
                scale_max=shared_scale(caption.alphas),
                region=caption.region,
                **options,  # type: ignore[arg-type]
            )
        wanted = np.asarray(panel)
        height, width = wanted.shape[:2]
        across, down = page.shape[1] - width + 1, page.shape[0] - height + 1
        starts = np.ones((down, across), dtype=bool)
        for x in range(min(width, 8)):  # only where the first pixels agree, the rest is looked at
            starts &= (page[:down, x : x + across] == wanted[0, x]).all(axis=2)
        rows, columns = np.nonzero(starts)
        found = [
            (int(x), int(y))
            for y, x in zip(rows, columns, strict=True)
            if (page[y : y + height, x : x + width] == wanted).all()
        ]
        assert len(found) == 1
        places += found
    return places


# The map: the right value at the right place.


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("size", [(70, 70), (120, 45), (45, 120)])
@pytest.mark.parametrize("region", [Region(), Region(0.2, 0.0, 0.8, 1.0)])
def test_one_hot_block_is_exactly_its_region(
    grid: tuple[int, int], size: tuple[int, int], region: Region
) -> None:
    (height, width), (columns, rows) = grid, size
    for index in {0, width - 1, (height * width) // 2, height * width - 1}:
        alpha = np.zeros(height * width, dtype=np.float32)
        alpha[index] = 1.0  # row-major: region = row * width + column
        row, column = divmod(index, width)
        got = np.nan_to_num(attention_map(alpha.reshape(grid), size, region, smooth=False))
        across = (np.arange(columns) + 0.5) / columns
        across = (across - region.left) / (region.right - region.left) * width
        down = (np.arange(rows) + 0.5) / rows * height
        # Computed in float64 here and there; a centre exactly on a border may fall on either side.
        clear = np.ix_(np.abs(down - down.round()) > 1e-6, np.abs(across - across.round()) > 1e-6)
        wanted = np.outer(np.floor(down) == row, np.floor(across) == column)
        np.testing.assert_array_equal(got[clear], wanted[clear].astype(np.float32))


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("grid", [(3, 5), (7, 7), (5, 2)])
def test_one_hot_region_lights_its_place_in_the_picture(
    grid: tuple[int, int], smooth: bool
) -> None:
    cell = 12
    photo = flat((grid[1] * cell, grid[0] * cell))
    for row, column in np.ndindex(grid):
        alpha = np.zeros(grid)
        alpha[row, column] = 1.0
        lit = luma(attention_image(photo, alpha, smooth=smooth))
        cells = lit.reshape(grid[0], cell, grid[1], cell).mean(axis=(1, 3))
        assert np.unravel_index(cells.argmax(), grid) == (row, column)
        if not smooth:
            dark = np.delete(cells.ravel(), row * grid[1] + column)
            assert np.ptp(dark) == 0
            assert cells.max() > dark[0] + 50


def test_smooth_map_is_bilinear_between_centres_and_level_outside() -> None:
    alpha = np.array([[0.0, 0.4], [0.2, 0.4]])
    got = attention_map(alpha, (8, 8))
    # Centres of the regions lie between pixels 1 and 2 and between 5 and 6.
    along = np.clip((np.arange(8) - 1.5) / 4, 0, 1)
    y, x = np.meshgrid(along, along, indexing="ij")
    wanted = 0.4 * x * (1 - y) + 0.2 * (1 - x) * y + 0.4 * x * y
    np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("grid", GRIDS)
def test_smooth_map_stays_within_the_values(grid: tuple[int, int]) -> None:
    alpha = np.random.default_rng(1).random(grid).astype(np.float32)
    got = attention_map(alpha, (53, 31))
    assert got.shape == (31, 53)
    assert got.min() >= alpha.min() - 1e-6
    assert got.max() <= alpha.max() + 1e-6


def test_smooth_map_has_the_value_of_the_region_at_its_centre() -> None:
    alpha = np.random.default_rng(2).random((3, 5)).astype(np.float32)
    got = attention_map(alpha, (5 * 7, 3 * 9))  # odd cells: a pixel lies on each centre
    np.testing.assert_allclose(got[4::9, 3::7], alpha, rtol=1e-5)


def test_uniform_attention_is_flat() -> None:
    got = attention_map(np.full((7, 9), 1 / 63), (50, 40))
    np.testing.assert_allclose(got, 1 / 63, rtol=1e-6)


# The colours: brighter means more, on one scale.


@pytest.mark.parametrize("colormap", COLORMAPS)
@pytest.mark.parametrize("level", [0, 60, 128, 200, 255])
def test_luminance_rises_with_attention(colormap: str, level: int) -> None:
    alpha = np.linspace(0, 1, 33)[None]
    image = attention_image(flat((33 * 4, 4), level), alpha, smooth=False, colormap=colormap)
    means = luma(image).reshape(4, 33, 4).mean(axis=(0, 2))
    assert (np.diff(means) > 0).all()


@pytest.mark.parametrize("colormap", COLORMAPS)
def test_luminance_rises_on_every_colour(colormap: str) -> None:
    alpha = np.linspace(0, 1, 17)[None]
    for colour in np.ndindex(4, 4, 4):
        photo = Image.new("RGB", (17, 1), tuple(85 * value for value in colour))
        image = attention_image(photo, alpha, smooth=False, colormap=colormap)
        assert (np.diff(luma(image)[0]) > 0).all(), colour


def test_scale_bar_has_the_colours_of_the_maps() -> None:
    bar = np.asarray(scale_bar(256, 3))
    ramp = attention_image(flat((256, 3)), np.linspace(0, 1, 256)[None], scale_max=1, smooth=False)
    np.testing.assert_array_equal(bar, np.asarray(ramp))


def test_same_attention_has_the_same_colour_in_every_word() -> None:
    alphas = np.zeros((2, 2, 2), dtype=np.float32)
    alphas[0] = [[0.7, 0.2], [0.1, 0.0]]
    alphas[1] = [[0.3, 0.3], [0.2, 0.2]]
    caption = Caption(("a", "b"), np.zeros(2, np.float32), alphas, np.ones(2, np.float32), 0.0)
    photo = flat((40, 40))
    picture = overlay(photo, caption, smooth=False)
    (_, first, second) = panels_of(picture, caption, photo, smooth=False)
    at = lambda place, x, y: picture.getpixel((place[0] + x, place[1] + y))  # noqa: E731
    assert at(first, 30, 10) == at(second, 10, 30) == at(second, 30, 30)  # 0.2 everywhere
    brightness = [luma(picture)[y + 10, x + 10] for x, y in (first, second)]
    assert brightness[0] > brightness[1] + 20  # 0.7 against 0.3


def test_shared_scale() -> None:
    assert shared_scale([[[0.7, 0.3, 0.0]], [[0.9, 0.1, 0.0]]]) == pytest.approx(0.9)
    assert shared_scale(np.full((3, 7, 7), 1 / 49)) == pytest.approx(2 / 49)
    assert shared_scale(np.ones((1, 1, 1))) == 1.0
    assert shared_scale(np.zeros((0, 7, 7))) == 1.0


def test_what_was_not_seen_is_dimmed() -> None:
    region = Region(0.25, 0.0, 0.75, 1.0)
    for level in (90, 160, 255):
        alpha = np.zeros((4, 4))
        lit = luma(attention_image(flat((80, 40), level), alpha, scale_max=1.0, region=region))
        outside = np.concatenate([lit[:, :20], lit[:, 60:]], axis=1)
        assert outside.mean() < lit[:, 20:60].mean() < level
        assert np.ptp(lit[:, 20:60]) == 0
        assert np.ptp(outside) > 0
    values = attention_map(alpha, (80, 40), region)
    assert np.isnan(values[:, :20]).all()
    assert np.isnan(values[:, 60:]).all()
    assert not np.isnan(values[:, 20:60]).any()


def test_photo_stays_recognisable() -> None:
    photo = noisy((60, 60))
    for alpha in (np.zeros((2, 2)), np.full((2, 2), 0.5), np.ones((2, 2))):
        lit = luma(attention_image(photo, alpha, scale_max=1.0))
        assert np.corrcoef(lit.ravel(), luma(photo).ravel())[0, 1] > 0.95


# The picture: sizes, words, inputs.


@pytest.mark.parametrize("size", [(500, 375), (640, 480), (120, 640), (200, 30)])
def test_photo_keeps_its_size_within_the_panel_size(size: tuple[int, int]) -> None:
    photo, caption = noisy(size), make_caption(["a", "dog"], (5, 9), Region(0.1, 0, 0.9, 1))
    picture = overlay(photo, caption)
    photo_place, *words = panels_of(picture, caption, photo)
    assert photo_place == min([photo_place, *words], key=lambda place: (place[1], place[0]))


def test_panels_stand_in_reading_order_and_apart() -> None:
    photo, caption = noisy((160, 90)), make_caption(["a", "dog", "on", "a", "red", "sofa"])
    places = panels_of(overlay(photo, caption, columns=3), caption, photo)
    assert [y for _, y in places] == sorted(y for _, y in places)
    assert len({x for x, _ in places}) == 3
    assert len({y for _, y in places}) == 3
    columns = sorted({x for x, _ in places})
    assert min(np.diff(columns)) > 160


@pytest.mark.parametrize(
    ("size", "panel_size", "wanted"),
    [
        ((5000, 4000), 640, (640, 512)),
        ((1, 5000), 640, (1, 640)),
        ((5000, 1), 640, (640, 1)),
        ((20, 30), 640, (20, 30)),
        ((640, 640), 640, (640, 640)),
        ((900, 300), 0, (900, 300)),
        ((900, 300), 1, (1, 1)),
    ],
)
def test_fit_photo_scales_down_only(
    size: tuple[int, int], panel_size: int, wanted: tuple[int, int]
) -> None:
    assert fit_photo(flat(size), panel_size).size == wanted


@pytest.mark.parametrize(
    "size", [(1, 1), (20, 30), (1, 5000), (5000, 1), (5000, 4000), (30, 900), (333, 250)]
)
@pytest.mark.parametrize("count", [0, 1, 30])
def test_every_size_and_length(size: tuple[int, int], count: int) -> None:
    if count == 30 and size == (5000, 4000):
        count = 3
    caption = make_caption([f"word{index}" for index in range(count)], (3, 4))
    picture = overlay(flat(size), caption)
    assert picture.mode == "RGB"
    panel = fit_photo(flat(size))
    assert picture.width > panel.width
    assert picture.height > panel.height
    corners = np.asarray(picture)[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 255).all()


def test_empty_caption_is_the_photo_and_a_note() -> None:
    photo, caption = noisy((200, 100)), make_caption([])
    picture = overlay(photo, caption)
    ((_, y),) = panels_of(picture, caption, photo)
    assert (luma(picture)[:y] < 200).any()  # the note


@pytest.mark.parametrize(
    "word",
    [
        "pneumonoultramicroscopicsilicovolcanoconiosis" * 3,
        "猫が座っている",
        "🐈",
        "line\nbreak",
        "tab\there",
        "\ud800",
        "",
        " ",
        "שלום",
        "i" * 5000,
    ],
)
def test_any_word_can_be_drawn(word: str) -> None:
    photo, caption = noisy((120, 80)), make_caption([word, "dog"])
    panels_of(overlay(photo, caption), caption, photo)


def test_unknown_numbers_are_drawn_as_unknown() -> None:
    whole = make_caption(["a", "dog"])
    nothing = np.full(2, np.nan, np.float32)
    caption = Caption(whole.words, nothing, whole.alphas, nothing, float("-inf"))
    panels_of(overlay(noisy((120, 80)), caption), caption, noisy((120, 80)))


def test_gate_and_probability_are_written_above_the_word() -> None:
    photo, caption = flat((200, 150)), make_caption(["dog"])
    title = {}
    for gate, log_prob in [(0.1, -1.0), (0.9, -1.0), (0.1, -2.0)]:
        changed = Caption(
            caption.words,
            np.array([log_prob], np.float32),
            caption.alphas,
            np.array([gate], np.float32),
            -1.0,
        )
        title[gate, log_prob] = np.asarray(overlay(photo, changed))
    first, *others = title.values()
    assert {other.shape for other in others} == {first.shape}
    changed_columns = [np.nonzero((first != other).any(axis=(0, 2)))[0] for other in others]
    assert changed_columns[0].max() < changed_columns[1].min()  # β left of p, and apart


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    photo, caption = noisy((60, 40)).convert("RGB" if mode == "LA" else mode), make_caption(["a"])
    photo = photo.convert("L").convert("LA") if mode == "LA" else photo
    assert overlay(photo, caption).tobytes() == overlay(photo.convert("RGB"), caption).tobytes()


def test_the_inputs_are_not_changed() -> None:
    photo, caption = noisy((60, 40)), make_caption(["a", "dog"])
    pixels, alphas = photo.tobytes(), caption.alphas.copy()
    assert overlay(photo, caption).tobytes() == overlay(photo, caption).tobytes()
    assert photo.tobytes() == pixels
    np.testing.assert_array_equal(caption.alphas, alphas)


def test_a_path_and_an_image_give_the_same_picture(tmp_path: Path) -> None:
    photo, caption = noisy((60, 40)), make_caption(["a", "dog"])
    photo.save(tmp_path / "photo.png")
    wanted = overlay(photo, caption).tobytes()
    assert overlay(tmp_path / "photo.png", caption).tobytes() == wanted
    assert overlay(str(tmp_path / "photo.png"), caption).tobytes() == wanted


def test_smooth_and_colormap_reach_the_panels() -> None:
    photo, caption = noisy((60, 40)), make_caption(["a", "dog"])
    panels_of(overlay(photo, caption, smooth=False), caption, photo, smooth=False)
    picture = overlay(photo, caption, colormap="viridis")
    panels_of(picture, caption, photo, colormap="viridis")


# Errors: one line that says what was given and what is allowed.


def broken(**changes: object) -> Caption:
    whole = make_caption(["a", "dog"])
    fields = {name: getattr(whole, name) for name in ("words", "log_probs", "alphas", "gates")}
    return Caption(**(fields | changes), log_prob=-1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"alphas": np.ones((2, 49))}, {}, r"2 words have the shape \(2, rows, columns\), not \(2"),
        ({"alphas": np.ones((3, 7, 7))}, {}, r"not \(3, 7, 7\)"),
        ({"alphas": np.ones((2, 0, 7))}, {}, r"not \(2, 0, 7\)"),
        ({"alphas": np.full((2, 7, 7), np.nan)}, {}, "NaN or infinity"),
        ({"gates": np.ones(3)}, {}, r"gates .* \(2,\), not \(3,\)"),
        ({"log_probs": np.ones((2, 1))}, {}, r"log_probs .* not \(2, 1\)"),
        ({}, {"colormap": "jet"}, "'jet'; choose one of inferno, magma, plasma, viridis"),
        ({}, {"panel_size": -1}, "panel_size is -1; give"),
        ({}, {"columns": 0}, "columns is 0; give"),
    ],
)
def test_errors(changes: dict[str, object], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        overlay(flat((40, 30)), broken(**changes), **options)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_errors_of_one_map() -> None:
    with pytest.raises(ConfigError, match="rows, columns"):
        attention_image(flat((40, 30)), np.ones(49))
    with pytest.raises(ConfigError, match="scale_max is 0"):
        attention_image(flat((40, 30)), np.ones((7, 7)), scale_max=0)
    with pytest.raises(ConfigError, match="empty"):
        attention_map(np.ones((7, 7)), (40, 30), Region(0.5, 0.0, 0.5, 1.0))


def test_knows_no_torch() -> None:
    code = (
        "import sys, captioner.visualization; sys.exit('torch' in sys.modules"
        " or 'matplotlib.pyplot' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_uniform_tick_can_be_drawn_wherever_it_falls() -> None:
    """Its place was a fraction of a pixel: where x + 1 - 1 < x, Pillow refused to draw."""
    for uniform_over_top in np.linspace(0.02, 0.5, 300):
        top = 1 / 64 / uniform_over_top
        alphas = np.full((1, 8, 8), (1 - top) / 63, np.float32)
        alphas[0, 3, 3] = top
        one = np.ones(1, np.float32)
        picture = overlay(flat((40, 30)), Caption(("dog",), -one, alphas, one, -1.0))
        assert picture.width > 40
