"""Figures: every map has the right position and brightness, in every format."""

from __future__ import annotations

import base64
import io
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from picture_helpers import (
    brightest_cell,
    flat,
    luma,
    make_caption,
    noisy,
    one_hot,
    panels_of,
    positions_of,
)
from PIL import Image

from captioner.caption import END_NAME, Alternative, Caption, CropBox
from captioner.drawing import Figure, attention_image, fit_photo, overlay, shared_scale
from captioner.drawing.fonts import percent, text_width
from captioner.drawing.primitives import Box, Picture, Text
from captioner.drawing.theme import THEMES
from captioner.errors import ConfigError
from captioner.geometry import Axis, Geometry

SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Embedded:
    title: str
    x: int
    y: int
    image: Image.Image


def svg_of(figure: Figure) -> ET.Element:
    return ET.fromstring(figure._drawing.svg())


def embedded(figure: Figure) -> list[Embedded]:
    """The pictures embedded in the SVG."""
    found = []
    for element in svg_of(figure).iter(f"{SVG}image"):
        assert "transform" not in element.attrib
        data = element.attrib["{http://www.w3.org/1999/xlink}href"]
        image = Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2])))
        assert image.size == (int(element.attrib["width"]), int(element.attrib["height"]))
        title = element.findtext(f"{SVG}title", "")
        found.append(
            Embedded(title, int(element.attrib["x"]), int(element.attrib["y"]), image.copy())
        )
    return found


def maps_of(figure: Figure) -> list[Embedded]:
    return [picture for picture in embedded(figure) if picture.title.startswith("attention: ")]


def texts_of(figure: Figure) -> list[str]:
    return ["".join(element.itertext()) for element in svg_of(figure).iter(f"{SVG}text")]


# --- maps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("smooth", [True, False])
def test_a_one_hot_map_is_brightest_in_its_region_of_a_rotated_photo(
    tmp_path: Path, smooth: bool
) -> None:
    grid, cells = (3, 5), [(0, 4), (2, 0), (1, 2)]
    upright = flat((150, 60))
    exif = Image.Exif()
    exif[0x112] = 6  # stored rotated: shown turned by 90 degrees clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "photo.jpg", exif=exif)

    figure = overlay(tmp_path / "photo.jpg", one_hot(grid, *cells), smooth=smooth)

    page, maps = figure.image(), maps_of(figure)
    assert [picture.title for picture in maps] == [f"attention: word{i}" for i in range(3)]
    for picture, cell in zip(maps, cells, strict=True):
        assert picture.image.size == (150, 60)
        assert brightest_cell(picture.image, grid) == cell
        x, y = picture.x, picture.y
        assert brightest_cell(page.crop((x, y, x + 150, y + 60)), grid) == cell


@pytest.mark.parametrize("size", [(500, 375), (640, 480), (120, 640), (200, 30)])
def test_photo_keeps_its_size_within_the_panel_size(size: tuple[int, int]) -> None:
    photo, caption = noisy(size), make_caption(["a", "dog"], (5, 9), CropBox(0.1, 0, 0.9, 1))
    places = panels_of(overlay(photo, caption).image(), caption, photo)
    assert places[0] == min(places, key=lambda place: (place[1], place[0]))


def test_the_pictures_in_the_svg_are_those_in_the_png() -> None:
    photo = noisy((90, 60))
    figure = overlay(photo, make_caption(["a", "dog"]), theme="dark")
    page = figure.image()
    for picture in embedded(figure):
        box = (
            picture.x,
            picture.y,
            picture.x + picture.image.width,
            picture.y + picture.image.height,
        )
        assert page.crop(box).tobytes() == picture.image.tobytes()
    assert len(embedded(figure)) == 4  # photo, two words, scale


def test_the_pdf_contains_every_panel_at_full_resolution() -> None:
    pdf = overlay(noisy((90, 60)), make_caption(["a", "dog"]))._drawing.pdf()
    sizes = re.findall(rb"/Type /XObject.{0,200}?/Width (\d+)", pdf, re.DOTALL)
    heights = re.findall(rb"/Subtype /Image.{0,200}?/Height (\d+)", pdf, re.DOTALL)
    assert sizes.count(b"90") == heights.count(b"60") == 3
    assert b"DejaVuSans" in pdf
    assert b"/Subtype /CIDFontType2" in pdf  # TrueType: letters are stored as text
    assert b"/Type3" not in pdf


def test_same_attention_has_the_same_colour_in_every_word_and_caption() -> None:
    alphas = np.zeros((2, 2, 2), dtype=np.float32)
    alphas[0] = [[0.7, 0.2], [0.1, 0.0]]
    alphas[1] = [[0.3, 0.3], [0.2, 0.2]]
    one = np.ones(1, np.float32)
    captions = [Caption((word,), -one, alphas[i : i + 1], one, 0.0) for i, word in enumerate("ab")]
    whole = Caption(("a", "b"), np.zeros(2, np.float32), alphas, np.ones(2, np.float32), 0.0)
    for given in (whole, captions):  # one caption of two words, two captions of one word
        first, second = (m.image for m in maps_of(overlay(flat((40, 40)), given, smooth=False)))
        assert first.getpixel((30, 10)) == second.getpixel((10, 30)) == second.getpixel((30, 30))
        assert luma(first)[10, 10] > luma(second)[10, 10] + 20  # 0.7 against 0.3


def test_smooth_and_colormap_reach_the_panels() -> None:
    photo, caption = noisy((60, 40)), make_caption(["a", "dog"])
    panels_of(overlay(photo, caption, smooth=False).image(), caption, photo, smooth=False)
    page = overlay(photo, caption, colormap="viridis").image()
    panels_of(page, caption, photo, colormap="viridis")


# --- words, phrases, the whole caption -----------------------------------------------------------

WORDS = ["a", "brown", "dog", "and", "a", "cat"]


@pytest.mark.parametrize("combine", ["mean", "max"])
def test_a_phrase_is_the_mean_or_maximum_of_its_words(combine: str) -> None:
    photo, caption = noisy((60, 40)), make_caption(WORDS)
    first, second = caption.alphas[1:3]
    by_hand = (first + second) / 2 if combine == "mean" else np.where(first > second, first, second)
    expected = attention_image(
        photo, by_hand, scale_max=shared_scale(caption.alphas, caption.gates)
    )

    figure = overlay(photo, caption, only=["brown dog"], combine=combine)  # type: ignore[arg-type]

    (panel,) = maps_of(figure)
    assert panel.image.tobytes() == expected.tobytes()
    assert panel.title == "attention: brown dog"
    texts = texts_of(figure)
    assert f"{'mean' if combine == 'mean' else 'greatest'} of 2 words" in texts
    assert f"p {math.exp(float(caption.log_probs[1:3].sum())):.2f}" in texts
    assert f"{float(caption.gates[1:3].mean()):.2f}" in texts


def test_only_keeps_the_scale_and_the_given_order() -> None:
    photo, caption = noisy((60, 40)), make_caption(WORDS)
    whole = maps_of(overlay(photo, caption))
    chosen = maps_of(overlay(photo, caption, only=["cat", "a", "2", "2-3", "brown"]))
    titles = [picture.title.partition(": ")[2] for picture in chosen]
    assert titles == ["cat", "a", "a", "brown", "brown dog"]  # "2" and "brown" are the same
    for picture, index in zip(chosen, (5, 0, 4, 1), strict=False):
        assert picture.image.tobytes() == whole[index].image.tobytes()


def test_each_method_has_its_own_scale_and_an_explanation() -> None:
    """Attention and relevance are not comparable, so neither may dim the other."""
    photo, attention = noisy((60, 40)), make_caption(WORDS)
    cam = replace(make_caption(WORDS, seed=1), method="grad_cam")
    cam.alphas[2] = 0  # no region supports the word

    figure = overlay(photo, [attention, cam], labels=["attention", "Grad-CAM"])

    expected = [
        attention_image(photo, alpha, scale_max=shared_scale(one.alphas, gates))
        for one, gates in ((attention, attention.gates), (cam, None))
        for alpha in one.alphas
    ]
    drawn = [one for one in embedded(figure) if one.title.startswith(("attention: ", "Grad-CAM: "))]
    assert [one.image.tobytes() for one in drawn] == [one.tobytes() for one in expected]
    texts = " ".join(texts_of(figure))
    assert "each method on its own scale" in texts
    assert "Grad-CAM: features of the region that raise the word's log p" in texts
    assert "max of Grad-CAM" in texts
    alone = " ".join(texts_of(overlay(photo, cam)))
    assert "share of relevance per region" in alone
    assert "above the scale" not in alone  # gates do not matter here
    plain = " ".join(texts_of(overlay(photo, attention)))
    assert "share of attention per region" in plain
    assert "attention: weight" not in plain


def test_maps_without_any_relevance_can_be_drawn() -> None:
    caption = replace(make_caption(WORDS), method="occlusion")
    caption.alphas[:] = 0

    overlay(noisy((60, 40)), caption).image()


def test_coverage_is_one_more_panel() -> None:
    photo, caption = noisy((60, 40)), make_caption(WORDS)
    top = shared_scale(caption.alphas, caption.gates)
    mean = attention_image(photo, caption.alphas.mean(0), scale_max=top)
    for only, count in (((), 7), (("dog",), 2)):
        figure = overlay(photo, caption, only=only, coverage=True)
        maps = maps_of(figure)
        assert len(maps) == count
        assert maps[-1].image.tobytes() == mean.tobytes()
        assert {"all 6 words", "mean"} <= set(texts_of(figure))


def test_the_legend_explains_white_lines() -> None:
    photo, caption = noisy((60, 40)), make_caption(WORDS)
    mask = np.zeros((40, 60), dtype=np.bool_)
    mask[10:20, 10:20] = True

    for outlines, expected in (((), False), ([{2: [mask]}], True)):
        texts = texts_of(overlay(photo, caption, outlines=outlines))
        assert any("white line" in text for text in texts) is expected


def test_a_word_may_be_missing_from_some_captions() -> None:
    photo, one, other = noisy((60, 40)), make_caption(WORDS), make_caption(["a", "horse"])

    titles = [
        m.title.partition(": ")[2] for m in maps_of(overlay(photo, [one, other], only=["dog"]))
    ]

    assert titles == ["dog"]
    with pytest.raises(ConfigError, match="'zebra' is not in the caption"):
        overlay(photo, [one, other], only=["dog", "zebra"])


def test_an_unknown_word_in_only_lists_the_words() -> None:
    for only in (["horse"], ["brown cat"], ["7"]):
        with pytest.raises(ConfigError, match="1 a 2 brown 3 dog 4 and 5 a 6 cat"):
            overlay(flat((40, 30)), make_caption(WORDS), only=only)


# --- numbers -------------------------------------------------------------------------------------


def with_numbers(gate: float, log_prob: float) -> Caption:
    caption = make_caption(["dog"])
    gates, log_probs = (np.array([value], np.float32) for value in (gate, log_prob))
    return replace(caption, gates=gates, log_probs=log_probs, log_prob=-1.0)


def test_gate_and_probability_are_written_above_the_word() -> None:
    photo = flat((200, 150))
    pages = [
        np.asarray(overlay(photo, with_numbers(*numbers)).image())
        for numbers in [(0.1, -1.0), (0.9, -1.0), (0.1, -1.2)]
    ]
    first, *others = pages
    changed = [np.nonzero((first != other).any(axis=(0, 2)))[0] for other in others]
    assert changed[0].max() < changed[1].min()  # β is left of p, without overlap
    texts = texts_of(overlay(photo, with_numbers(0.91, math.log(0.42))))
    assert {"β", "0.91", "p 0.42", "log p −1.00"} <= set(texts)


def test_the_gate_s_bar_is_as_long_as_the_gate() -> None:
    for gate in (0.25, 0.5, 1.0):
        figure = overlay(flat((200, 150)), with_numbers(gate, -1.0))
        boxes = [item for item in figure._drawing.items if isinstance(item, Box)]
        (filled,) = (box for box in boxes if box.colour == THEMES["light"].gate)
        (track,) = (box for box in boxes if box.colour == THEMES["light"].track)
        part = (filled.right - filled.left) / (track.right - track.left)
        assert part == pytest.approx(gate, abs=0.01)


@pytest.mark.parametrize(
    ("log_prob", "text"),
    [
        (0.0, "1.00"),
        (1e-7, "1.00"),
        (math.log(0.0051), "0.01"),
        (math.log(0.0049), "5·10⁻³"),
        (math.log(0.001), "1·10⁻³"),
        (math.log(0.00096), "1·10⁻³"),
        (math.log(3.2e-12), "3·10⁻¹²"),
        (-700.0 * math.log(10), "1·10⁻⁷⁰⁰"),
        (-math.inf, "–"),
        (math.nan, "–"),
    ],
)
def test_small_probabilities_do_not_become_zero(log_prob: float, text: str) -> None:
    assert f"p {text}" in texts_of(overlay(flat((200, 150)), with_numbers(0.5, log_prob)))


def test_nan_is_drawn_as_a_dash() -> None:
    nothing = np.full(2, np.nan, np.float32)
    caption = replace(
        make_caption(["a", "dog"]), log_probs=nothing, gates=nothing, log_prob=float("-inf")
    )
    figure = overlay(noisy((120, 80)), caption)
    panels_of(figure.image(), caption, noisy((120, 80)))
    assert {"p –", "–", "log p –"} <= set(texts_of(figure))


def test_the_scale_shows_zero_uniform_and_maximum() -> None:
    alphas = np.full((1, 5, 10), 0.75 / 49, np.float32)
    alphas[0, 2, 3] = 0.25
    one = np.ones(1, np.float32)
    texts = texts_of(overlay(flat((90, 60)), Caption(("a",), -one, alphas, one, -1.0)))
    assert {"0", "uniform 2%", "25%", "share of attention per region"} <= set(texts)


def test_a_word_above_the_scale_with_a_nearly_closed_gate_is_noted() -> None:
    caption = replace(
        make_caption(["a", "dog", "runs"]), gates=np.array([0.01, 0.9, 0.5], np.float32)
    )
    caption.alphas[0] = 0.0
    caption.alphas[0, 3, 3] = 1.0

    texts = texts_of(overlay(flat((200, 150)), caption))

    assert percent(float(caption.alphas[1:].max())) in texts
    assert any("above the scale: “a” (β below 0.1" in text for text in texts)
    without = texts_of(overlay(flat((200, 150)), caption, only=["dog"]))
    assert not any("above the scale" in text for text in without)


def test_maps_are_drawn_at_the_regions_positions() -> None:
    photo, caption = noisy((90, 90)), make_caption(["dog"], (3, 3))
    moved = replace(caption, geometry=Geometry(Axis(0.3, 0.3), Axis(0.01, 0.3, 0.0, 0.9)))

    figure = overlay(photo, moved)

    top = shared_scale(caption.alphas, caption.gates)
    expected = attention_image(photo, caption.alphas[0], scale_max=top, regions=moved.regions)
    shown = [item.image for item in figure._drawing.items if isinstance(item, Picture)]
    assert expected.tobytes() in [image.tobytes() for image in shown]
    assert any("hatched" in text for text in texts_of(figure))


@pytest.mark.slow
def test_the_uniform_tick_can_be_drawn_at_any_position() -> None:
    """Even at a fractional pixel."""
    for uniform_over_top in np.linspace(0.02, 0.5, 25):
        top = 1 / 64 / uniform_over_top
        alphas = np.full((1, 8, 8), (1 - top) / 63, np.float32)
        alphas[0, 3, 3] = top
        one = np.ones(1, np.float32)
        figure = overlay(flat((40, 30)), Caption(("dog",), -one, alphas, one, -1.0))
        bar = next(picture for picture in embedded(figure) if picture.title == "scale")
        ticks = [i for i in figure._drawing.items if isinstance(i, Box) and i.top >= bar.y]
        (tick,) = ticks
        middle = (tick.left + tick.right) / 2
        expected = bar.x + bar.image.width * uniform_over_top
        assert middle == pytest.approx(expected, abs=1.5)


# --- alternatives --------------------------------------------------------------------------------


def test_alternatives_are_below_their_word_and_the_chosen_one_is_marked() -> None:
    alternatives = (
        (Alternative("cat", -0.5), Alternative("dog", -1.0), Alternative("cow", -9.0)),
        (Alternative(END_NAME, -0.1), Alternative("it", -3.0), Alternative("he", -4.0)),
    )
    caption = replace(make_caption(["dog", "runs"]), alternatives=alternatives)
    figure = overlay(flat((300, 100)), caption, alternatives=2, columns=3)
    items = figure._drawing.items
    below = {i.text: i for i in items if isinstance(i, Text) and i.text in ("cat", "(end)", "it")}
    first, second = maps_of(figure)
    assert first.x < below["cat"].x < first.x + 300 < second.x < below["(end)"].x
    assert below["cat"].y > first.y + 100
    (chosen,) = (i for i in items if isinstance(i, Text) and i.text == "dog" and i.y > first.y)
    assert chosen.bold
    assert not below["cat"].bold
    marks = [i for i in items if isinstance(i, Text) and i.text == "▸"]
    assert [mark.y for mark in marks] == [chosen.y]  # "runs" is not among its alternatives
    texts = texts_of(figure)
    assert "cow" not in texts
    assert "he" not in texts
    assert {f"{math.exp(-0.5):.2f}", f"{math.exp(-0.1):.2f}"} <= set(texts)
    lengths = {
        round((i.right - i.left), 1)
        for i in items
        if isinstance(i, Box) and i.colour == THEMES["light"].other
    }
    assert len(lengths) == 3  # cat, (end), it
    assert max(lengths) / sorted(lengths)[1] == pytest.approx(math.exp(0.4), rel=0.02)


@pytest.mark.parametrize("known", [0, 2])
def test_missing_alternatives_are_an_error(known: int) -> None:
    caption = make_caption(["a", "dog"], alternatives=known)
    message = rf"has {known or 'no'} alternatives .* model\.caption\(photo, alternatives=3\)"
    with pytest.raises(ConfigError, match=message):
        overlay(flat((40, 30)), caption, alternatives=3)
    overlay(flat((40, 30)), make_caption([]), alternatives=3)


# --- several captions ----------------------------------------------------------------------------


def test_captions_are_side_by_side_with_aligned_rows_and_labels() -> None:
    photo = noisy((160, 90))
    captions = [make_caption(["a", "dog"]), make_caption(["the", "cat", "on", "it"], seed=3)]
    figure = overlay(photo, captions, labels=["ours", "theirs"])
    left, right = maps_of(figure)[:2], maps_of(figure)[2:]
    assert max(m.x for m in left) + 160 < min(m.x for m in right)
    assert {m.y for m in left} <= {m.y for m in right}
    items = {i.text: i for i in figure._drawing.items if isinstance(i, Text)}
    assert items["ours"].x == min(m.x for m in left)
    assert items["theirs"].y == items["ours"].y < min(m.y for m in left)
    assert {"a dog", "the cat on it"} <= set(items)
    assert len(positions_of(figure.image(), photo)) == 2


def test_one_scale_for_all_captions() -> None:
    photo, strong = flat((60, 60)), one_hot((2, 2), (0, 0))
    weak = replace(strong, alphas=np.full((1, 2, 2), 0.25, np.float32))
    pair = maps_of(overlay(photo, [strong, weak]))
    alone = maps_of(overlay(photo, weak))
    assert pair[1].image.tobytes() == attention_image(photo, weak.alphas[0], scale_max=1).tobytes()
    assert luma(alone[0].image).mean() > luma(pair[1].image).mean()


def test_many_captions_wrap_and_different_grids_are_noted() -> None:
    captions = [make_caption(["a", "dog"], (3, 3 + i), seed=i) for i in range(5)]
    figure = overlay(noisy((90, 60)), captions, labels=[f"model {i}" for i in range(5)])
    rows = {m.y for m in maps_of(figure)}
    assert len(rows) >= 2
    assert "3 × 3 and 3 × 4" in " ".join(texts_of(figure))
    assert len(positions_of(figure.image(), noisy((90, 60)))) == 5


# --- outlines ------------------------------------------------------------------------------------


def test_outlines_follow_the_border_of_the_mask() -> None:
    photo, caption = flat((200, 120), 120), make_caption(["a", "dog"])
    mask = np.zeros((120, 200), dtype=bool)
    mask[30:90, 50:150] = True
    plain, drawn = (overlay(photo, caption, outlines=outlines) for outlines in ((), [{1: [mask]}]))
    panels = [p for p in embedded(plain) if p.title != "scale"]
    rows, columns = np.mgrid[:120, :200] + 0.5
    distance = np.maximum(np.maximum(30 - rows, rows - 90), np.maximum(50 - columns, columns - 150))
    before, after = (np.asarray(figure.image()) for figure in (plain, drawn))
    for panel, outlined in zip(panels, (True, False, True), strict=True):
        window = np.s_[panel.y : panel.y + 120, panel.x : panel.x + 200]
        changed = (before[window] != after[window]).any(axis=2)
        assert changed.any() == outlined
        if outlined:
            assert np.abs(distance[changed]).max() < 3
            line = np.median(after[window][np.abs(distance) < 0.6])
            edges = np.median(after[window][(np.abs(distance) > 1) & (np.abs(distance) < 2)])
            assert line > 180  # a bright line
            assert edges < 70  # with dark edges


def test_outlines_are_scaled_down_with_the_photo() -> None:
    mask = np.zeros((400, 800), dtype=bool)
    mask[100:, 600:] = True  # up to the photo's border
    caption = make_caption(["dog"])
    figure = overlay(flat((800, 400)), caption, outlines=[{0: [mask]}], panel_size=200)
    paths = [e.attrib["d"] for e in svg_of(figure).iter(f"{SVG}path")]
    assert len(paths) == 4  # two tones on two panels
    for path in paths:
        points = np.array([[float(v) for v in p.split()] for p in re.split("[MLZ]", path) if p])
        on_left = np.abs(points[:, 0] - 150) < 0.3
        on_top = np.abs(points[:, 1] - 25) < 0.3
        on_border = (points[:, 0] > 199.7) | (points[:, 1] > 99.7)
        assert (on_left | on_top | on_border).all()
        assert on_left.any()
        assert on_top.any()


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".png", ".PNG", ".jpg", ".jpeg", ".svg", ".pdf"])
def test_the_extension_selects_the_format(tmp_path: Path, ending: str) -> None:
    figure = overlay(noisy((60, 40)), make_caption(["a", "dog"]))
    path = tmp_path / f"figure{ending}"
    figure.save(path)
    figure.save(str(path))
    start = {".png": b"\x89PNG", ".jpg": b"\xff\xd8", ".svg": b"<?xml", ".pdf": b"%PDF"}
    data = path.read_bytes()
    assert data.startswith(start[ending.lower().replace("jpeg", "jpg")])
    if data.startswith(b"\x89PNG"):
        assert Image.open(path).tobytes() == figure.image().tobytes()
        assert data == figure._repr_png_()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["figure.webp", "figure", "figure.html", "figure.svgz"])
def test_an_unknown_extension_lists_the_supported_ones(tmp_path: Path, name: str) -> None:
    figure = overlay(noisy((60, 40)), make_caption(["a"]))
    with pytest.raises(ConfigError, match=r"use \.png, \.jpg, \.jpeg, \.svg, \.pdf"):
        figure.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


CODE = """
import hashlib, sys
sys.path.insert(0, {folder!r})
from picture_helpers import make_caption, noisy
from captioner.drawing import overlay
figure = overlay(noisy((60, 40)), make_caption(["a", "dog"], alternatives=2), alternatives=2)
drawing = figure._drawing
for data in (drawing.svg().encode(), drawing.pdf(), figure._repr_png_()):
    print(hashlib.sha256(data).hexdigest())
"""


@pytest.mark.slow
def test_the_same_figure_gives_the_same_bytes_in_every_process() -> None:
    code = CODE.format(folder=str(Path(__file__).parent))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "SOURCE_DATE_EPOCH": date},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, date in (("1", "0"), ("2", "1700000000"))
    }
    assert len(outputs) == 1
    pdf = overlay(noisy((60, 40)), make_caption(["a"]))._drawing.pdf()
    assert b"CreationDate" not in pdf


@pytest.mark.slow
def test_matplotlib_settings_are_ignored_and_kept() -> None:
    photo, caption = noisy((60, 40)), make_caption(["a", "dog"], alternatives=2)

    def all_formats() -> tuple[bytes, ...]:
        drawing = overlay(photo, caption, alternatives=2)._drawing
        return drawing.image().tobytes(), drawing.svg().encode(), drawing.pdf()

    expected = all_formats()
    strange = {
        "figure.dpi": 300, "savefig.dpi": 33, "font.family": "serif", "font.size": 40,
        "text.hinting": "force_autohint", "pdf.fonttype": 3, "pdf.compression": 9,
        "path.sketch": (1, 2, 3), "image.composite_image": True, "savefig.bbox": "tight",
        "lines.antialiased": False, "patch.linewidth": 5, "text.parse_math": True,
        "image.origin": "lower", "image.interpolation": "bicubic", "text.antialiased": False,
    }  # fmt: skip
    with mpl.rc_context(strange):
        before = dict(mpl.rcParams)
        assert all_formats() == expected
        assert dict(mpl.rcParams) == before


@pytest.mark.slow
def test_threads_draw_equal_figures() -> None:
    photos = [noisy((40, 30 + i)) for i in range(3)]

    def draw(photo: Image.Image) -> tuple[bytes, bytes]:
        drawing = overlay(photo, make_caption(["a", "dog"]))._drawing
        return drawing.image().tobytes(), drawing.pdf()

    expected = [draw(photo) for photo in photos]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(draw, photos)) == expected


def test_the_svg_has_text_with_an_embedded_font_and_no_requests() -> None:
    figure = overlay(noisy((60, 40)), make_caption(["a", '<dog> & "cat"', "$x^2$", "猫"]))
    svg = figure._drawing.svg()
    root = svg_of(figure)
    assert root.findtext(f"{SVG}title") == 'a <dog> & "cat" $x^2$ 猫'
    texts = texts_of(figure)
    assert {'<dog> & "cat"', "$x^2$", "猫"} <= set(
        texts
    )  # DejaVu has no 猫, but the viewer may have a font for it
    assert svg.count("@font-face") == 2
    outside = re.findall(r"(?:href=\"|url\()(?!data:)[^\")]*", svg)
    assert outside == []
    assert "<path" not in svg  # letters are not outlines


def test_mathtext_is_not_interpreted(tmp_path: Path) -> None:
    words = ["$", "$$", "$\\frac{1}$", "a$b$c", "\\alpha", "{", "%", "_^", "$x^2$"]
    figure = overlay(noisy((90, 60)), make_caption(words))
    figure.image()
    figure.save(tmp_path / "figure.pdf")
    assert set(words) <= set(texts_of(figure))
    widths = []
    for word in ("$x$", "x"):
        figure = overlay(flat((90, 60)), make_caption([word]))
        (panel,) = maps_of(figure)
        title = figure.image().crop((panel.x, panel.y - 40, panel.x + 100, panel.y - 20))
        widths.append(np.nonzero(luma(title) < 128)[1].max())
    assert widths[0] > 1.8 * widths[1]  # the dollar signs are visible


# --- the page ------------------------------------------------------------------------------------


def test_panels_are_in_reading_order_and_apart() -> None:
    photo, caption = noisy((160, 90)), make_caption(["a", "dog", "on", "a", "red", "sofa"])
    places = panels_of(overlay(photo, caption, columns=3).image(), caption, photo)
    assert [y for _, y in places] == sorted(y for _, y in places)
    assert len({x for x, _ in places}) == 3
    assert len({y for _, y in places}) == 3
    columns = sorted({x for x, _ in places})
    assert min(np.diff(columns)) > 160


def boxes_of(figure: Figure) -> list[tuple[float, float, float, float, object]]:
    """Extent of texts and pictures: left, top, right, bottom."""
    boxes: list[tuple[float, float, float, float, object]] = []
    for item in figure._drawing.items:
        if isinstance(item, Text):
            wide = text_width(item.text, item.size, item.bold)
            left = item.x - {"left": 0, "center": wide / 2, "right": wide}[item.align]
            top, bottom = item.y - 0.73 * item.size, item.y + 0.2 * item.size
            boxes.append((left, top, left + wide, bottom, item))
        elif isinstance(item, Picture):
            right, bottom = item.x + item.image.width, item.y + item.image.height
            boxes.append((item.x, item.y, right, bottom, item.title))
    return boxes


LONG = [
    "a",
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "of",
    "W" * 30,
    "dog",
    "i",
    "standing",
]


@pytest.mark.parametrize("size", [(1, 1), (90, 60), (60, 180), (500, 100), (200, 600), (640, 480)])
@pytest.mark.parametrize("options", [{}, {"alternatives": 3, "coverage": True}, {"only": ["2-4"]}])
def test_nothing_overlaps_or_leaves_the_figure(
    size: tuple[int, int], options: dict[str, object]
) -> None:
    low = np.full(len(LONG), -9.0, np.float32)
    caption = replace(make_caption(LONG, alternatives=3), log_probs=low, log_prob=-1234.5)
    cases: list[tuple[object, list[str]]] = [(caption, [])]
    if "only" not in options:
        short = make_caption(LONG[:3], alternatives=3)
        cases.append(([caption, short], ["L" * 99, "b"]))
    for captions, labels in cases:
        figure = overlay(flat(size), captions, labels=labels, **options)  # type: ignore[arg-type]
        boxes, (width, height) = boxes_of(figure), figure.size
        for left, top, right, bottom, what in boxes:
            assert left >= 0 and top >= 0 and right <= width and bottom <= height, what  # noqa: PT018
        for index, one in enumerate(boxes):
            for other in boxes[:index]:
                apart_x = one[0] >= other[2] - 0.5 or other[0] >= one[2] - 0.5
                apart_y = one[1] >= other[3] - 0.5 or other[1] >= one[3] - 0.5
                assert apart_x or apart_y, (one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [(1, 1), (20, 30), (1, 5000), (5000, 1), (5000, 4000), (30, 900), (333, 250)]
)
@pytest.mark.parametrize("count", [0, 1, 40])
def test_every_size_and_length(size: tuple[int, int], count: int) -> None:
    if count == 40 and size == (5000, 4000):
        count = 3
    caption = make_caption([f"word{index}" for index in range(count)], (3, 4))
    figure = overlay(flat(size), caption, panel_size=320)
    page = figure.image()
    assert page.mode == "RGB"
    assert page.size == figure.size
    panel = fit_photo(flat(size), 320)
    assert page.width > panel.width
    assert page.height > panel.height
    corners = np.asarray(page)[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 255).all()


def test_text_is_readable_when_printed() -> None:
    for size in ((640, 480), (480, 640), (640, 640)):
        figure = overlay(flat(size), make_caption([f"word{i}" for i in range(12)]))
        smallest = min(item.size for item in figure._drawing.items if isinstance(item, Text))
        assert 7 * 72 * smallest / figure.size[0] >= 4.8  # points, on 7 inches


@pytest.mark.parametrize("size", [(12000, 2), (2, 12000)])
def test_a_figure_too_large_to_draw_is_an_error(size: tuple[int, int]) -> None:
    columns = 6 if size[0] > size[1] else 1
    with pytest.raises(ConfigError, match=r"would have \d+ x \d+ pixels \(.*use a smaller panel"):
        overlay(flat(size), make_caption(["a"] * 5), panel_size=0, columns=columns)


def test_an_empty_caption_is_the_photo_and_a_note() -> None:
    photo, caption = noisy((200, 100)), make_caption([])
    figure = overlay(photo, caption, coverage=True)
    ((_, y),) = panels_of(figure.image(), caption, photo)
    assert (luma(figure.image())[:y] < 200).any()  # the note
    assert "No words, so no attention to show." in " ".join(texts_of(figure))


UNUSUAL = [
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 3,
    "猫が座っている",
    "🐈",
    "👩‍🚀",
    "line\nbreak",
    "tab\there",
    "nul\0l",
    "\ud800",
    "\uffff",
    "",
    " ",
    "שלום",
    "i" * 5000,
]


@pytest.mark.slow
@pytest.mark.parametrize("word", UNUSUAL)
def test_any_word_can_be_drawn(word: str) -> None:
    photo, caption = noisy((120, 80)), make_caption([word, "dog"], alternatives=1)
    figure = overlay(photo, caption, labels=[word], alternatives=1)
    panels_of(figure.image(), caption, photo)
    svg_of(figure)


def test_any_words_can_be_drawn_in_a_pdf(tmp_path: Path) -> None:
    caption = make_caption(UNUSUAL, alternatives=1)
    overlay(noisy((120, 80)), caption, alternatives=1).save(tmp_path / "figure.pdf")
    pdf = (tmp_path / "figure.pdf").read_bytes()
    widths = re.findall(rb"/Type /XObject.{0,200}?/Width (\d+)", pdf, re.DOTALL)
    assert widths.count(b"120") == 1 + len(UNUSUAL)  # the photo, and every word's panel


# --- themes --------------------------------------------------------------------------------------


def contrast(one: str, other: str) -> float:
    """WCAG 2: the ratio of the relative luminances."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", ["light", "dark"])
def test_contrast_is_wcag_aa(name: str) -> None:
    theme = THEMES[name]
    for text in (theme.text, theme.muted):
        assert contrast(text, theme.background) >= 4.5
    assert contrast(theme.text, theme.highlight) >= 4.5
    for bar in (theme.gate, theme.chosen):
        assert contrast(bar, theme.background) >= 3
        assert contrast(bar, theme.track) >= 3
    assert contrast(theme.other, theme.background) >= 3


def test_the_dark_theme_changes_only_the_background() -> None:
    photo, caption = noisy((90, 60)), make_caption(["a", "dog"])
    page = overlay(photo, caption, theme="dark").image()
    assert luma(page)[0, 0] < 40
    panels_of(page, caption, photo)
    with pytest.raises(ConfigError, match="'blue'; choose one of light, dark"):
        overlay(photo, caption, theme="blue")  # type: ignore[arg-type]


# --- inputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    photo, caption = noisy((60, 40)).convert("RGB" if mode == "LA" else mode), make_caption(["a"])
    photo = photo.convert("L").convert("LA") if mode == "LA" else photo
    expected = overlay(photo.convert("RGB"), caption).image().tobytes()
    assert overlay(photo, caption).image().tobytes() == expected


def test_the_inputs_are_not_changed() -> None:
    photo, caption = noisy((60, 40)), make_caption(["a", "dog"])
    pixels, alphas = photo.tobytes(), caption.alphas.copy()
    first, second = (overlay(photo, caption, coverage=True).image().tobytes() for _ in range(2))
    assert first == second
    assert photo.tobytes() == pixels
    np.testing.assert_array_equal(caption.alphas, alphas)


def test_the_returned_image_is_a_copy() -> None:
    figure = overlay(noisy((60, 40)), make_caption(["a", "dog"]))
    mine = figure.image()
    mine.paste((0, 0, 0), (0, 0, *mine.size))
    assert figure.image().getpixel((0, 0)) == (255, 255, 255)


def test_a_path_and_an_image_give_the_same_picture(tmp_path: Path) -> None:
    photo, caption = noisy((60, 40)), make_caption(["a", "dog"])
    photo.save(tmp_path / "photo.png")
    expected = overlay(photo, caption).image().tobytes()
    assert overlay(tmp_path / "photo.png", caption).image().tobytes() == expected
    assert overlay(str(tmp_path / "photo.png"), [caption]).image().tobytes() == expected


# --- errors --------------------------------------------------------------------------------------


def broken(**changes: object) -> Caption:
    return replace(make_caption(["a", "dog"]), **changes)  # type: ignore[arg-type]


MASK = np.zeros((30, 40), dtype=bool)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"alphas": np.ones((2, 49))},
            {},
            r"2 words must have shape \(2, rows, columns\), not \(2",
        ),
        ({"alphas": np.ones((3, 7, 7))}, {}, r"not \(3, 7, 7\)"),
        ({"alphas": np.ones((2, 0, 7))}, {}, r"not \(2, 0, 7\)"),
        ({"alphas": np.full((2, 7, 7), np.nan)}, {}, "NaN or infinity"),
        ({"gates": np.ones(3)}, {}, r"gates .* \(2,\), not \(3,\)"),
        ({"log_probs": np.ones((2, 1))}, {}, r"log_probs .* not \(2, 1\)"),
        ({"alternatives": ((),)}, {}, "alternatives at 2 positions, not 1"),
        ({}, {"colormap": "jet"}, "'jet'; choose one of inferno, magma, plasma, viridis"),
        ({}, {"panel_size": -1}, "panel_size is -1; use"),
        ({}, {"columns": 0}, "columns is 0; use"),
        ({}, {"alternatives": -1}, "alternatives is -1; use"),
        ({}, {"labels": ["a", "b"]}, "2 labels for 1 captions"),
        ({}, {"labels": "a"}, "labels must be a list"),
        ({}, {"outlines": [{}, {}]}, "2 outlines for 1 captions"),
        ({}, {"outlines": [{2: [MASK]}]}, "outlines has position 2, but the caption has 2 words"),
        ({}, {"outlines": [{0: [MASK.T]}]}, r"the photo\'s shape \(30, 40\), not \(40, 30\)"),
        ({}, {"combine": "sum"}, "combine is 'sum'; use mean or max"),
    ],
)
def test_errors(changes: dict[str, object], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        overlay(flat((40, 30)), broken(**changes), **options)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_no_caption_is_an_error() -> None:
    with pytest.raises(ConfigError, match="captions is empty"):
        overlay(flat((40, 30)), [])
