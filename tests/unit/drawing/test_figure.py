"""Figures: every map has the right position and brightness, in every format."""

from __future__ import annotations

import base64
import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from cutting import cut
from matplotlib.text import Text
from picture_helpers import UNUSUAL, brightest_cell, flat, make_caption, noisy, one_hot
from PIL import Image

from captioner.caption_types import END_NAME, Alternative, Caption, Keyword
from captioner.data.pixels import fit_photo
from captioner.drawing.figure import Figure, find_words, overlay
from captioner.drawing.heatmap import attention_image, attention_map, scale_of
from captioner.drawing.style import percent, probability
from captioner.errors import ConfigError
from captioner.geometry import Axis, Geometry
from captioner.text.vocabulary import BLANK

SVG = "{http://www.w3.org/2000/svg}"
WORDS = ["a", "brown", "dog", "and", "a", "cat"]


@dataclass
class Shown:
    title: str
    x: int
    y: int
    image: Image.Image
    """Cut out of the figure."""


def svg_of(figure: Figure) -> ET.Element:
    return ET.fromstring(figure.encode(".svg"))


def pictures_of(figure: Figure) -> list[Shown]:
    """The pictures whose places the SVG tells, cut out of the PNG."""
    root, page, found = svg_of(figure), figure.image(), []
    scale = page.width / float(root.attrib["width"].removesuffix("pt"))
    for element in root.iter(f"{SVG}image"):
        sides = (scale * float(element.attrib[n]) for n in ("x", "y", "width", "height"))
        x, y, width, height = map(round, sides)
        title = element.findtext(f"{SVG}title", "")
        found.append(Shown(title, x, y, page.crop((x, y, x + width, y + height))))
    return found


def maps_of(figure: Figure) -> list[Shown]:
    return [picture for picture in pictures_of(figure) if ": " in picture.title]


def assert_shown(pictures: Sequence[Shown], *expected: Image.Image) -> None:
    assert [one.image.tobytes() for one in pictures] == [one.tobytes() for one in expected]


def texts_of(figure: Figure) -> dict[str, Text]:
    return {text.get_text(): text for text in figure.figure.texts}


# --- maps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("smooth", [True, False])
def test_a_one_hot_map_is_brightest_in_its_region_of_a_rotated_photo(
    tmp_path: Path, smooth: bool
) -> None:
    grid, cells = (3, 5), [(0, 4), (2, 0), (1, 2)]
    exif = Image.Exif()
    exif[0x112] = 6  # stored rotated: shown turned by 90 degrees clockwise
    stored = flat((300, 120)).transpose(Image.Transpose.ROTATE_90)
    stored.save(tmp_path / "photo.jpg", exif=exif)

    maps = maps_of(overlay(tmp_path / "photo.jpg", one_hot(grid, *cells), smooth=smooth))

    assert [one.title for one in maps] == [f"attention: word{i}" for i in range(3)]
    assert [one.image.size for one in maps] == [(300, 120)] * 3
    assert [brightest_cell(one.image, grid) for one in maps] == cells


@pytest.mark.parametrize(
    ("size", "options"),
    [((180, 90), {}), ((60, 240), {"smooth": False}), ((120, 80), {"colormap": "viridis"})],
)
def test_panels_are_exact_and_in_reading_order(size: tuple[int, int], options: Any) -> None:
    photo, caption = noisy(size), make_caption(["a", "dog", "on", "it"], (5, 9))
    caption.gates[0] = caption.log_probs[0] = math.nan  # drawn as a dash

    shown = pictures_of(overlay(photo, caption, columns=2, theme="dark", **options))[:5]

    photo = fit_photo(photo, 640, at_least=160)
    maps = (attention_image(photo, alpha, **options) for alpha in caption.alphas)
    assert_shown(shown, photo, *maps)
    places = [(one.y, one.x) for one in shown]
    assert places == sorted(places)
    assert len({x for _, x in places}) == 2
    assert len({y for y, _ in places}) == 3


@pytest.mark.parametrize("combine", ["mean", "max"])
def test_a_phrase_is_the_mean_or_maximum_of_its_words(combine: str) -> None:
    photo, caption = noisy((180, 120)), make_caption(WORDS)
    first, second = caption.alphas[1:3]
    by_hand = (first + second) / 2 if combine == "mean" else np.where(first > second, first, second)

    figure = overlay(photo, caption, only=["brown dog"], combine=combine)

    (panel,) = maps_of(figure)
    assert panel.title == "attention: brown dog"
    assert_shown([panel], attention_image(photo, by_hand))
    p = probability(float(caption.log_probs[1:3].sum()))
    kind = "mean" if combine == "mean" else "maximum"
    texts = {f"p {p}", f"{caption.gates[1:3].mean():.2f}", f"maps of several words: their {kind}"}
    assert texts <= set(texts_of(figure))


@pytest.mark.parametrize("scale", ["word", "common"])
def test_each_method_has_its_own_scale_and_an_explanation(scale: str) -> None:
    """Attention and relevance are not comparable, so neither may dim the other."""
    photo, attention = noisy((180, 120)), make_caption(WORDS)
    cam = replace(attention, alphas=make_caption(WORDS, seed=1).alphas, method="grad_cam")
    cam.alphas[2] = 0  # no region supports the word

    figure = overlay(photo, [attention, cam], labels=["attention", "Grad-CAM"], scale=scale)

    expected = [
        attention_image(photo, alpha, scale_max=scale_of(one) if scale == "common" else None)
        for one in (attention, cam)
        for alpha in one.alphas
    ]
    maps = maps_of(figure)
    assert_shown(maps, *expected)
    places = [(one.x, one.y) for one in maps]  # each word at the same place of every row
    assert len({y for _, y in places[:3]}) == 1
    assert [x for x, _ in places[:6]] == [x for x, _ in places[6:]]
    assert max(y for _, y in places[:6]) < min(y for _, y in places[6:])
    assert [text.get_text() for text in figure.figure.texts].count(attention.text) == 1
    texts = " ".join(texts_of(figure))
    kind = "one scale for all words of a method" if scale == "common" else "each word on its own"
    assert kind in texts
    assert "Grad-CAM: features of the region that raise the word's log p" in texts
    assert "focus: share of relevance" in " ".join(texts_of(overlay(photo, cam)))
    plain = " ".join(texts_of(overlay(photo, attention)))
    assert "focus: share of attention" in plain
    assert "attention: weight" not in plain
    overlay(photo, replace(cam, alphas=0 * cam.alphas)).image()  # nothing is relevant


def test_captions_are_apart_on_a_common_scale_with_labels() -> None:
    photo, strong = noisy((160, 90)), one_hot((2, 2), (0, 0), (1, 1))
    weak = replace(strong, words=("a", "cat"), alphas=np.full((2, 2, 2), 0.25, np.float32))

    figure = overlay(photo, [strong, weak], labels=["ours", "theirs"], scale="common")

    first, second = maps_of(figure)[:2], maps_of(figure)[2:]
    assert max(m.y for m in first) + 90 < min(m.y for m in second)
    assert [m.x for m in first] == [m.x for m in second]
    assert_shown(second[:1], attention_image(photo, weak.alphas[0], scale_max=1))
    texts = texts_of(figure)
    assert texts["ours"].get_position()[1] < first[0].y
    assert first[0].y < texts["theirs"].get_position()[1] < second[0].y
    assert {"word0 word1", "a cat"} <= set(texts)


def test_many_captions_wrap_and_different_grids_are_noted() -> None:
    captions = [make_caption(["a", "dog"], (3, 3 + i), seed=i) for i in range(5)]
    photo = noisy((180, 120))
    figure = overlay(photo, captions, labels=[f"model {i}" for i in range(5)])
    assert len({m.y for m in maps_of(figure)}) >= 2
    assert "3 × 3 and 3 × 4" in " ".join(texts_of(figure))
    assert_shown([one for one in pictures_of(figure) if one.title == "photo"], *[photo] * 5)


def test_maps_are_drawn_at_the_regions_positions() -> None:
    photo, caption = noisy((180, 180)), make_caption(["dog"], (3, 3))
    moved = replace(caption, geometry=Geometry(Axis(0.3, 0.3), Axis(0.01, 0.3, 0.0, 0.9)))
    figure = overlay(photo, moved)
    assert_shown(maps_of(figure), attention_image(photo, moved.alphas[0], regions=moved.regions))
    assert "hatched: not seen by the model" in texts_of(figure)


# --- words ---------------------------------------------------------------------------------------

QUERIED = make_caption(["a", "brown", "dog", "near", "a", "man", "'s", "hat"])
PIECES = replace(
    make_caption(["s", "now", BLANK, "man", "now"]), pieces=("s", "now", " ", "man", " now")
)


@pytest.mark.parametrize(
    ("query", "positions"),
    [
        ("Dog", [(2,)]),
        ("a", [(0,), (4,)]),
        ("  brown   dog ", [(1, 2)]),
        ("a man's hat", [(4, 5, 6, 7)]),
        ("man 's!", [(5, 6)]),
        ("'s", [(6,)]),
        ("3", [(2,)]),
        ("2 – 4", [(1, 2, 3)]),
        ("8-8", [(7,)]),
    ],
)
def test_find_words(query: str, positions: list[tuple[int, ...]]) -> None:
    assert find_words([QUERIED], [query]) == [positions]
    none = make_caption([])
    assert find_words([none, QUERIED], [query, query]) == [[], positions]  # of one caption
    assert find_words([none, none], []) == [[], []]
    assert find_words([make_caption(["a", "-lrb-", "dog"])], ["-lrb-"]) == [[(1,)]]


@pytest.mark.parametrize(
    ("query", "positions"),
    [("snow", [(0, 1)]), ("now", [(1,), (4,)]), ("snow man", [(0, 1, 2, 3)]), ("man", [(3,)])],
)
def test_find_words_of_pieces(query: str, positions: list[tuple[int, ...]]) -> None:
    assert find_words([PIECES], [query]) == [positions]


@pytest.mark.parametrize("query", ["cat", "dog brown", "brown near", "do", "og", "hat a", "", " "])
def test_a_missing_word_lists_the_words(query: str) -> None:
    with pytest.raises(ConfigError, match=r"is not in the caption \(1 a 2 brown 3 dog") as raised:
        find_words([QUERIED], ["a", query])
    assert repr(query) in str(raised.value)


@pytest.mark.parametrize("query", ["0", "9", "3-9", "4-2", "0-1", "99999999999999999999"])
def test_a_missing_position_lists_the_words(query: str) -> None:
    found = rf"position '{query}' is not in the caption \(1 a 2 brown"
    with pytest.raises(ConfigError, match=found):
        find_words([QUERIED], [query])


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        (make_caption(["a", "brown", "Dog", "on", "two", "'s", "the"]), ["brown", "Dog", "two"]),
        (make_caption(["it", "is", "the"]), ["it", "is", "the"]),
        (cut(make_caption(["a", "dog", "on", "a", "sofa"]), 2, [math.nan] * 5), ["dog", "sofa"]),
        (PIECES, ["s", "now", "man", "now"]),
        (make_caption([]), []),
    ],
)
def test_panels_of_content_words(caption: Caption, words: list[str]) -> None:
    maps = maps_of(overlay(noisy((60, 40)), caption, content_words=True))
    assert [one.title.removeprefix("attention: ") for one in maps] == words


def test_only_and_content_words_contradict() -> None:
    with pytest.raises(ConfigError, match="only and content_words both choose the words"):
        overlay(flat((40, 30)), QUERIED, only=["dog"], content_words=True)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_prob", "text"),
    [
        (1e-7, "1.00"),
        (math.log(0.0051), "0.01"),
        (math.log(0.0049), "5·10⁻³"),
        (math.log(0.00096), "1·10⁻³"),
        (-700.0 * math.log(10), "1·10⁻⁷⁰⁰"),
        (-math.inf, "–"),
        (math.nan, "–"),
    ],
)
def test_small_probabilities_do_not_become_zero(log_prob: float, text: str) -> None:
    assert probability(log_prob) == text


def test_the_focus_of_each_word_and_what_an_even_map_has() -> None:
    alphas = np.full((1, 5, 10), 0.6 / 45, np.float32)
    alphas[0, 2, 3:8] = 0.08
    caption = Caption(("a",), -np.ones(1, np.float32), alphas, np.ones(1, np.float32), -1.0)
    figure = overlay(flat((200, 150)), replace(caption, confidence=0.374))
    texts = texts_of(figure)
    assert {"focus 40%", "each word on its own scale", "37% likely to be right"} <= set(texts)
    assert "spread evenly: 10%" in " ".join(texts)


def test_doubtful_words_and_words_that_hardly_use_the_photo_are_noted() -> None:
    caption = make_caption(["a", "dog", "runs"])
    caption = replace(caption, gates=np.array([0.01, 0.9, 0.5], np.float32))
    caption.log_probs[:] = [-0.1, -3.0, -0.1]
    figure = overlay(flat((200, 150)), caption)
    texts = texts_of(figure)
    assert texts["a"].get_color() != texts["dog"].get_color() == texts["runs"].get_color()
    assert any("grey words: β below 0.1" in text for text in texts)
    assert any("doubtful word" in text for text in texts)
    dog = maps_of(figure)[1]
    assert dog.x < texts["?"].get_position()[0] < dog.x + dog.image.width
    rest = texts_of(overlay(flat((200, 150)), caption, only=["runs"]))
    assert not any("grey words" in text or "doubtful" in text for text in rest)


def test_left_out_words_follow_in_grey() -> None:
    photo, nan = noisy((200, 150)), math.nan
    whole = make_caption(["a", "black", "dog", "on", "a", "sofa"])
    caption = cut(whole, 3, [nan, 0.4, 0.9, nan, nan, 0.3])
    figure = overlay(photo, caption, coverage=True)

    maps, texts = maps_of(figure), texts_of(figure)
    *drawn, mean = [attention_image(photo, a) for a in (*whole.alphas, whole.alphas[:3].mean(0))]
    grey = [one.convert("L").convert("RGB") for one in drawn[3:]]
    assert_shown(maps, *drawn[:3], *grey, mean)
    said, rest = texts["a black dog"], texts["on a sofa"]
    assert said.get_color() != rest.get_color() == texts["sofa"].get_color()
    assert said.get_position()[0] < rest.get_position()[0]
    assert "chance of being true: a black dog 36% · on a sofa 30%" in texts
    assert any("left out" in text for text in texts)
    assert any("doubtful word, less than 50%" in text for text in texts)
    assert sum(text.get_text() == "?" for text in figure.figure.texts) == 1  # of black
    [sofa] = maps_of(overlay(photo, caption, only=["sofa"]))
    assert_shown([sofa], grey[-1])
    nothing = texts_of(overlay(photo, cut(whole, 0, [nan] * 6)))
    assert {"a black dog on a sofa", "on"} <= set(nothing)


def test_a_plain_figure_has_words_and_maps_only() -> None:
    photo, whole = noisy((200, 150)), make_caption(["a", "black", "dog", "on", "a", "sofa"])
    caption = replace(cut(whole, 3, [math.nan, 0.4, 0.9] + [0.1] * 3), confidence=0.5)

    figure = overlay(photo, caption, plain=True)

    maps = [attention_image(photo, alpha) for alpha in whole.alphas[:3]]
    assert_shown(pictures_of(figure), fit_photo(photo, 640, at_least=160), *maps)
    assert set(texts_of(figure)) == {"a black dog", "photo", "a", "black", "dog"}


def test_the_common_scale_is_that_of_the_words_shown() -> None:
    photo, caption = noisy((200, 150)), make_caption(["a", "couple", "giraffes"])
    caption.alphas[1] = 0
    caption.alphas[1, :, 0] = 1 / 7

    figure = overlay(photo, caption, only=["a", "giraffes"], scale="common")

    top = scale_of(caption, [0, 2])
    assert top != scale_of(caption)
    assert f"≥ {percent(top)}" in texts_of(figure)
    assert_shown(
        maps_of(figure), *(attention_image(photo, caption.alphas[i], scale_max=top) for i in (0, 2))
    )


def test_alternatives_are_below_their_word_and_the_chosen_one_is_marked() -> None:
    others = (
        (Alternative("cat", -0.5), Alternative("dog", -1.0), Alternative("cow", -9.0)),
        (Alternative(END_NAME, -0.1), Alternative("it", -3.0), Alternative("he", -4.0)),
    )
    caption = replace(make_caption(["dog", "runs"]), alternatives=others)
    figure = overlay(flat((300, 100)), caption, alternatives=2, columns=3)
    texts, (first, second) = texts_of(figure), maps_of(figure)
    x, y = texts["cat"].get_position()
    assert first.x < x < first.x + 300 < second.x < texts["(end)"].get_position()[0]
    assert y > first.y + 100
    assert texts["dog"].get_position()[1] == texts["▸"].get_position()[1] > y
    assert (texts["dog"].get_weight(), texts["cat"].get_weight()) == ("bold", "normal")
    assert not {"cow", "he"} & set(texts)
    with pytest.raises(
        ConfigError, match=r"3 alternatives .* model\.caption\(photo, alternatives=4"
    ):
        overlay(flat((40, 30)), caption, alternatives=4)


def test_keywords_have_neither_alternatives_nor_a_joint_probability() -> None:
    caption = make_caption(["dog", "runs"], alternatives=1)
    maps = np.random.default_rng(0).normal(size=(2, 7, 7)).astype(np.float32)
    keywords = (Keyword("sofa", 0.9, maps[0]), Keyword("red lamp", 0.5, maps[1]))
    shown = replace(caption, keywords=keywords)
    texts = texts_of(
        overlay(flat((300, 100)), shown, alternatives=1, only=["sofa", "red lamp", "1-2"])
    )
    assert {"p 0.90", "p 0.50", "sofa, red lamp"} <= set(texts)
    assert "p 0.45" not in texts


# --- outlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("panel_size", [0, 100])
def test_outlines_follow_the_border_of_the_mask(panel_size: int) -> None:
    photo, caption = flat((200, 120), 120), make_caption(["a", "dog"])
    mask = np.zeros((120, 200), dtype=bool)
    mask[30:90, 50:150] = True
    shrink = 2 if panel_size else 1
    rows, columns = (np.mgrid[: 120 // shrink, : 200 // shrink] + 0.5) * shrink
    distance = np.maximum(np.maximum(30 - rows, rows - 90), np.maximum(50 - columns, columns - 150))
    distance /= shrink
    plain, drawn = (
        overlay(photo, caption, outlines=outlines, panel_size=panel_size)
        for outlines in ((), [{1: [mask]}])
    )
    pairs = zip(pictures_of(plain)[:3], pictures_of(drawn)[:3], strict=True)
    for (before, after), outlined in zip(pairs, (True, False, True), strict=True):
        shown = np.asarray(after.image)
        changed = (np.asarray(before.image) != shown).any(axis=2)
        assert changed.any() == outlined
        if outlined:
            assert np.abs(distance[changed]).max() < 3
            assert np.median(shown[np.abs(distance) < 0.6]) > 180  # a bright line
            assert np.median(shown[(np.abs(distance) > 1) & (np.abs(distance) < 2)]) < 70  # edges
    assert any("white line" in text for text in texts_of(drawn))
    assert not any("white line" in text for text in texts_of(plain))


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".PNG", ".jpeg", ".svg"])
def test_the_extension_selects_the_format(tmp_path: Path, ending: str) -> None:
    figure = overlay(noisy((60, 40)), make_caption(["a", "dog"]))
    figure.save(tmp_path / f"figure{ending}")
    start = {".PNG": b"\x89PNG", ".jpeg": b"\xff\xd8", ".svg": b"<?xml"}[ending]
    assert (tmp_path / f"figure{ending}").read_bytes().startswith(start)
    if ending != ".svg":  # documents insert it at this width
        with Image.open(tmp_path / f"figure{ending}") as image:
            assert image.width / float(image.info["dpi"][0]) == pytest.approx(6.5, abs=0.05)
    with pytest.raises(ConfigError, match=r"use \.png, \.jpg, \.jpeg, \.svg, \.pdf"):
        figure.save(tmp_path / "figure.webp")
    assert len(list(tmp_path.iterdir())) == 1


def test_the_svg_has_text_pictures_and_no_requests() -> None:
    photo, words = noisy((18, 12)).resize((180, 120)), ["a", '<dog> & "cat"', "$x^2$", "猫"]
    figure = overlay(photo, make_caption(words), theme="dark")
    root = svg_of(figure)
    assert root.findtext(f"{SVG}title") == " ".join(words)
    width, height = (float(root.attrib[side].removesuffix("pt")) for side in ("width", "height"))
    assert height / width == pytest.approx(figure.size[1] / figure.size[0], abs=0.001)
    assert set(words) <= {text.text for text in root.iter(f"{SVG}text")}  # letters, no outlines
    svg = figure.encode(".svg").decode()
    assert re.findall(r"(?:href=\"|url\()(?!data:)[^\")]*", svg) == []
    for element, shown in zip(root.iter(f"{SVG}image"), pictures_of(figure), strict=True):
        data = element.attrib["{http://www.w3.org/1999/xlink}href"].partition("jpeg;base64,")[2]
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        assert np.abs(np.asarray(image, float) - np.asarray(shown.image, float)).mean() < 6


@pytest.mark.parametrize(("width", "dpi"), [(6.5, 300), (20.0, 9)])
def test_pdf_and_svg_are_as_wide_as_asked_and_legible_there(width: float, dpi: int) -> None:
    words = ["a", "pneumonoultramicroscopicsilicovolcanoconiosis", "on", "a", "street"]
    photo, caption = noisy((180, 120)), make_caption(words, alternatives=3)
    figure = overlay(photo, caption, alternatives=3, width=width, dpi=dpi)
    root, pdf = svg_of(figure), figure.encode(".pdf")
    assert float(root.attrib["width"].removesuffix("pt")) == pytest.approx(72 * width, abs=0.01)
    assert b"/Subtype /CIDFontType2" in pdf  # TrueType: letters are stored as text
    assert b"/Type3" not in pdf
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", pdf)
    assert box
    assert float(box[1]) == pytest.approx(72 * width, abs=0.01)
    assert min(text.get_size() for text in figure.figure.texts) >= 6
    largest = 72 * 180 / max(float(e.attrib["width"]) for e in root.iter(f"{SVG}image"))
    resolution = min(dpi, largest)
    sizes = [Image.open(io.BytesIO(jpeg)).size for jpeg in jpegs_of(pdf)]
    assert len(sizes) == 2 + len(words)  # the photo, the words and the scale
    assert max(w for w, _ in sizes[:-1]) == pytest.approx(180 * resolution / largest, abs=1)


def jpegs_of(pdf: bytes) -> list[bytes]:
    """The pictures of a PDF, whose table of objects leads to them."""
    found = []
    table = pdf[int(pdf.split()[-2]) :]
    for number, offset in enumerate(map(int, re.findall(rb"(\d{10}) \d{5} n", table)), 1):
        assert pdf.startswith(b"%d 0 obj" % number, offset)
        if head := re.match(rb".*\n.*/DCTDecode.*/Length (\d+) >>\nstream\n", pdf[offset:]):
            begin = offset + head.end()
            found.append(pdf[begin : begin + int(head[1])])
    return found


def all_formats(photo: Image.Image) -> list[bytes]:
    caption = make_caption(["dog"], alternatives=2)
    figure = overlay(photo, caption, alternatives=2)
    return [figure.encode(suffix) for suffix in (".png", ".svg")]


def test_matplotlib_settings_are_ignored_and_kept() -> None:
    photo = noisy((60, 40))
    expected = all_formats(photo)
    strange: Any = {
        "figure.dpi": 300, "font.family": "serif", "text.hinting": "force_autohint",
        "path.sketch": (1, 2, 3), "savefig.bbox": "tight", "savefig.facecolor": "red",
        "svg.fonttype": "path", "svg.hashsalt": "x", "figure.constrained_layout.use": True,
    }  # fmt: skip
    with mpl.rc_context(strange):
        before = dict(mpl.rcParams)
        assert all_formats(photo) == expected
        assert dict(mpl.rcParams) == before


def test_threads_draw_equal_figures() -> None:
    photos = [noisy((40, 30 + i)) for i in range(2)]
    expected = [all_formats(photo) for photo in photos]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(all_formats, photos)) == expected


def test_a_map_is_drawn_in_axes_of_the_users_own() -> None:
    photo, caption = noisy((200, 100)), make_caption(["a", "dog", "runs"])
    ours, ax = plt.subplots()

    figure = overlay(photo, caption, ax=ax, only=["dog"], cmap="jet", alpha=0.3)

    assert figure.figure is ours
    below, above = ax.get_images()
    np.testing.assert_array_equal(below.get_array(), np.asarray(photo))
    expected = attention_map(caption.alphas[1], (200, 100), caption.regions)
    np.testing.assert_array_equal(above.get_array(), expected)
    assert (above.get_cmap().name, above.get_alpha()) == ("jet", 0.3)
    with pytest.raises(ConfigError, match="cmap is an unknown setting"):
        overlay(photo, caption, cmap="jet")
    with pytest.raises(AttributeError, match="theme"):  # of figures alone
        overlay(photo, caption, ax=ax, theme="dark")
    ours.clear()
    overlay(photo, cut(caption, 2, [math.nan] * 3), ax=(ax := ours.add_subplot()))
    expected = attention_map(caption.alphas[:2].mean(0), (200, 100), caption.regions)
    np.testing.assert_array_equal(ax.get_images()[1].get_array(), expected)
    seen = replace(caption, keywords=(Keyword("sofa", 0.9, caption.alphas[0]),))
    with pytest.raises(ConfigError, match="'sofa' is not in the caption"):
        overlay(photo, seen, ax=ax, only=["sofa"])
    plt.close(ours)


@pytest.mark.parametrize("size", [(640, 427), (512, 512)])
def test_ten_words_fit_a_column_of_a_paper(size: tuple[int, int]) -> None:
    words = ["a", "woman", "in", "a", "red", "coat", "is", "walking", "a", "dog"]
    caption = replace(make_caption(words), confidence=0.5)
    figure = overlay(flat(size), caption, width=3.3, content_words=True)
    assert figure.size[1] / figure.figure.dpi <= 4
    assert min(text.get_size() for text in figure.figure.texts) >= 6
    everything = overlay(flat(size), caption, width=3.3)
    assert everything.size[1] / everything.figure.dpi <= 6


# --- the page ------------------------------------------------------------------------------------

LONG = f"a pneumonoultramicroscopicsilicovolcanoconiosis of {'W' * 30} dog i standing".split()


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((1, 1), {"alternatives": 3, "coverage": True}),
        ((60, 180), {"only": ["2-4"]}),
        ((500, 100), {}),
        ((300, 200), {"width": 3.3}),
        ((300, 200), {"width": 3.3, "alternatives": 3}),
        ((300, 200), {"plain": True}),
    ],
)
def test_nothing_overlaps_or_leaves_the_figure(size: tuple[int, int], options: Any) -> None:
    low = np.full(len(LONG), -9.0, np.float32)
    caption = replace(make_caption(LONG, alternatives=3), log_probs=low, log_prob=-1234.5)
    short = make_caption(LONG[:4], alternatives=3)
    several = [caption, cut(replace(short, confidence=0.5), 2, [0.5] * 4)]
    for captions, labels in (([caption], []), (several, ["L" * 99, "b"])):
        figure = overlay(flat(size), captions, labels=labels, **options)
        width, height = figure.size
        boxes: list[tuple[float, float, float, float, str]] = [
            (one.x, one.y, one.x + one.image.width, one.y + one.image.height, one.title)
            for one in pictures_of(figure)
        ]
        for text in figure.figure.texts:
            left, _, right, _ = text.get_window_extent().extents
            bottom = text.get_position()[1]
            boxes.append((left, bottom - 0.73 * text.get_size(), right, bottom, text.get_text()))
        for left, top, right, bottom, name in boxes:
            assert 0 <= left <= right <= width, name
            assert 0 <= top <= bottom <= height, name
        for one, other in combinations(boxes, 2):
            apart_x = one[0] >= other[2] - 1 or other[0] >= one[2] - 1
            apart_y = one[1] >= other[3] - 0.5 or other[1] >= one[3] - 0.5
            assert apart_x or apart_y, (one, other)


def test_a_figure_too_large_to_draw_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"would have \d+ x \d+ pixels, but the limits .*use a smaller panel"
    ):
        overlay(flat((12000, 2)), make_caption(["a"] * 5), panel_size=0, columns=6)
    with pytest.raises(ConfigError, match="the limits are 9 pixels"):
        overlay(flat((40, 30)), make_caption(["a"]), max_pixels=9)


def test_an_empty_caption_is_the_photo_and_a_note() -> None:
    photo = noisy((200, 100))
    figure = overlay(photo, make_caption([]), coverage=True, alternatives=2)
    assert_shown(pictures_of(figure), photo)
    assert "No words, so no attention to" in " ".join(texts_of(figure))


def test_any_word_can_be_drawn() -> None:
    photo, caption = noisy((180, 120)), make_caption(UNUSUAL, alternatives=1)
    figure = overlay(photo, caption, labels=["\ud800"], alternatives=1)
    figure.encode(".jpg")
    svg_of(figure)
    pdf = figure.encode(".pdf")
    assert len(re.findall(rb"/Width 180\b", pdf)) == 1 + len(UNUSUAL)


def test_labels_and_captions_must_match() -> None:
    with pytest.raises(ConfigError, match="labels has 2 entries for 1 captions"):
        overlay(flat((40, 30)), make_caption(["a", "dog"]), labels=["a", "b"])
