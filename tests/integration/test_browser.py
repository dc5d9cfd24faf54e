"""The viewer in headless Chromium: pointer, keyboard, touch and screen reader.

Every test fails on a network request, a console error or a policy violation. The tests are skipped
without Chromium; CI installs it (.ci/run).
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from browsing import drawn, out_of_order, violations
from cutting import cut
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Locator, expect
from playwright.sync_api import Page as Tab

from captioner.caption_types import END_NAME, Alternative, Caption, CropBox, Keyword
from captioner.drawing.heatmap import attention_image, scale_of
from captioner.drawing.pages import Entry, Page, gallery, page
from captioner.inference.photo_caption import shown_photo, with_photo

pytestmark = pytest.mark.slow

WORDS = ("a", "dog", "runs", "on", "grass")
GRID = (3, 4)


def make(
    words: tuple[str, ...] = WORDS, crop_box: CropBox | None = None, grid: tuple[int, int] = GRID
) -> Caption:
    """Word i has 0.99 of its attention on region i + 1, the rest spread over the others."""
    cells = grid[0] * grid[1]
    alphas = np.full((len(words), cells), 0.01 / (cells - 1), dtype=np.float32)
    for place in range(len(words)):
        alphas[place, (place + 1) % cells] = 0.99
    others = (Alternative("dog", -0.5), Alternative(END_NAME, -1.5), Alternative("cat", -3.0))
    return Caption(
        words=words,
        log_probs=np.linspace(-0.2, -2, len(words), dtype=np.float32),
        alphas=alphas.reshape(-1, *grid),
        gates=np.linspace(0.1, 1, len(words), dtype=np.float32),
        log_prob=-9.5,
        crop_box=crop_box or CropBox(),
        alternatives=(others,) * len(words),
    )


def photo(width: int = 90, height: int = 60) -> Image.Image:
    """A gradient, on which JPEG decoders agree, without equal pixels."""
    across = np.broadcast_to(np.linspace(30, 220, width), (height, width))
    down = np.broadcast_to(np.linspace(200, 20, height)[:, None], (height, width))
    return Image.fromarray(np.stack([across, down, across[:, ::-1]], axis=2).astype(np.uint8))


def word(tab: Tab, text: str) -> Locator:
    return tab.get_by_role("option", name=re.compile(rf"^{re.escape(text)},")).first


def inside(made: str) -> Image.Image:
    """The photo embedded in a page."""
    found = re.search(r"data:image/jpeg;base64,([\w+/=]+)", made)
    assert found is not None
    return Image.open(io.BytesIO(base64.b64decode(found[1]))).convert("RGB")


def assert_drawn(
    tab: Tab, made: Page, caption: Caption, alpha: Any, **options: Any
) -> NDArray[np.int64]:
    """Check that the heatmap is the one that Python draws; returns its pixels."""
    pixels = drawn(tab)
    wanted = attention_image(inside(made.html), alpha, regions=caption.regions, **options)
    assert np.abs(pixels - np.asarray(wanted).astype(np.int64)).max() <= 3
    return pixels


# --- the map -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "crop_box"), [((300, 50), None), ((40, 120), CropBox(0.2, 0.0, 0.8, 1.0))]
)
def test_hovering_a_word_shows_its_map_as_python_draws_it(visit, size, crop_box) -> None:
    caption = make(crop_box=crop_box)
    made = page(photo(*size), caption)
    tab = visit(made)

    for place, text in enumerate(WORDS):
        word(tab, text).hover()
        pixels = assert_drawn(tab, made, caption, caption.alphas[place])
        # The brightest pixel lies in the region with the most attention.
        row, column = np.unravel_index(pixels.sum(axis=2).argmax(), pixels.shape[:2])
        whole = caption.crop_box
        down = (row + 0.5) / pixels.shape[0]
        across = ((column + 0.5) / pixels.shape[1] - whole.left) / (whole.right - whole.left)
        assert (int(down * GRID[0]), int(across * GRID[1])) == divmod(place + 1, GRID[1])


@pytest.mark.parametrize("colormap", ["photo", "inferno"])
def test_scales_are_those_of_python_s_figures(visit, colormap) -> None:
    """Each method has its own; a word that hardly uses the photo matters for attention only."""
    attention = make()
    others = [0, 1, 2, 4]
    attention.alphas[others] = attention.alphas[others] * np.float32(0.5) + np.float32(0.5 / 12)
    closed = np.full_like(attention.gates, 0.01)
    other = replace(attention, alphas=attention.alphas.copy(), gates=closed, method="grad_cam")
    attention.gates[others] = 0.5
    attention.gates[3] = 0.01
    other.alphas[2] = 0
    made = page(photo(), [attention, other], labels=["attention", "Grad-CAM"], colormap=colormap)
    tab = visit(made)

    legend, common = tab.locator(".legend"), tab.get_by_label("one scale for all words")
    expect(legend).to_contain_text("each word on its own scale; focus: share of relevance")
    for one_scale in (False, True):
        common.set_checked(one_scale)
        for number, caption in enumerate((attention, other)):
            scale = {"scale_max": scale_of(caption)} if one_scale else {}
            for place, text in enumerate(WORDS):
                tab.get_by_role("option", name=re.compile(rf"^{text},")).nth(number).hover()
                alpha = caption.alphas[place]
                assert_drawn(tab, made, caption, alpha, colormap=colormap, **scale)
    expect(legend).to_contain_text("one scale")


# --- keys and screen readers ---------------------------------------------------------------------


def chosen(tab: Tab) -> list[str]:
    return tab.get_by_role("option", selected=True).all_inner_texts()


def test_arrow_keys_move_the_map(visit) -> None:
    caption = make()
    made = page(photo(), caption)
    tab = visit(made)

    for key, wanted in [
        ("ArrowRight", ["a"]),
        ("ArrowRight", ["dog"]),
        ("ArrowDown", ["runs"]),
        ("ArrowLeft", ["dog"]),
        ("End", ["all words"]),
        ("ArrowRight", ["all words"]),
        ("ArrowLeft", ["grass"]),
        ("Home", ["a"]),
        ("ArrowUp", ["a"]),
        ("Shift+ArrowRight", ["a", "dog"]),
        ("Shift+ArrowRight", ["a", "dog", "runs"]),
        ("Shift+ArrowLeft", ["a", "dog"]),
        ("Escape", []),
        ("ArrowRight", ["a"]),
    ]:
        tab.keyboard.press(key)
        assert chosen(tab) == wanted, key
        if wanted == ["all words"]:
            assert_drawn(tab, made, caption, caption.alphas.mean(axis=0))
    expect(word(tab, "a")).to_be_focused()
    assert_drawn(tab, made, caption, caption.alphas[0])
    tab.keyboard.press("ArrowRight")
    # Word 2 attends to row 1 of 3, column 3 of 4; its map is announced to screen readers.
    text = "dog: strongest at the top centre, focus 99%"
    expect(tab.locator("[aria-live]")).to_have_text(text)
    word(tab, "on").click(modifiers=["Shift"])
    assert_drawn(tab, made, caption, caption.alphas[1:4].mean(axis=0))


def test_every_control_is_reached_by_tab_and_has_a_name(visit) -> None:
    tab = visit(page(photo(), make()))
    name = """() => document.activeElement.getAttribute('aria-label')
        ?? document.activeElement.labels[0].textContent.trim()"""
    for expected in (
        "zoom out",
        "zoom in",
        "a, word 1 of 5, probability 82%",
        "play the sentence word by word",
        "Heatmap",
        "Smooth",
    ):
        tab.keyboard.press("Tab")
        assert tab.evaluate(name) == expected
    expect(tab.get_by_role("img")).to_have_accessible_name("a dog runs on grass")
    box = tab.get_by_role("listbox")
    expect(box).to_have_accessible_name("Words of the caption: a dog runs on grass")


def test_details_of_a_word_with_its_alternatives(visit) -> None:
    tab = visit(page(photo(), make()))

    word(tab, "dog").click()

    details = tab.locator(".details")
    expect(details).to_contain_text("probability52%")  # exp(-0.65)
    expect(details).to_contain_text("β 0.33")
    assert details.get_by_role("listitem").all_inner_texts() == [
        "dog\n61%",
        "end of the sentence\n22%",
        "cat\n5.0%",
    ]
    expect(details.locator(".current")).to_have_count(1)
    tab.mouse.move(*middle(tab, 0.6, 0.1))
    expect(tab.locator(".probe")).to_have_text("“dog” attends most here (99% of its attention)")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_left_out_words_are_explored_in_grey(visit, scheme, width) -> None:
    truth = [np.nan, 0.4, 0.93, np.nan, 0.31]
    whole, screen = make(), {"width": width, "height": 844}
    made = page(photo(), cut(whole, 3, truth), title="grass")
    tab = visit(made, color_scheme=scheme, viewport=screen)
    grass, colour = word(tab, "grass"), "e => getComputedStyle(e).color"

    expect(grass).to_have_attribute("title", "left out, 31% likely to be true")
    expect(word(tab, "runs")).to_have_attribute("title", "93% likely to be true")
    assert grass.evaluate(colour) != word(tab, "runs").evaluate(colour)
    expect(tab.locator(".doubtful")).to_have_text("dog")
    expect(tab.locator(".sentence .quiet")).to_have_text(
        "chance of being true: a dog runs 37% · on grass 31%"
    )
    expect(tab.locator(".legend")).to_contain_text("less than 50% likely to be true")
    grass.click()
    wanted = attention_image(inside(made.html), whole.alphas[4], regions=whole.regions)
    wanted = wanted.convert("L").convert("RGB")
    assert np.abs(drawn(tab) - np.asarray(wanted).astype(np.int64)).max() <= 3
    expect(tab.locator(".details")).to_contain_text("left out of the caption")
    expect(tab.locator(".details")).to_contain_text("likely to be true31%")
    tab.keyboard.press("ArrowRight")
    assert chosen(tab) == ["all words"]
    assert_drawn(tab, made, whole, whole.alphas[:3].mean(axis=0))
    expect(tab.locator(".details")).to_contain_text("likely to be true40%")
    assert violations(tab) == []


def test_playing_stops_after_the_sentence(visit) -> None:
    tab = visit(page(photo(), make()))
    tab.clock.install()
    word(tab, "runs").click()

    tab.get_by_role("button", name="play").click()
    seen = [chosen(tab)]
    for _ in range(2):
        tab.clock.run_for(900)
        seen.append(chosen(tab))

    assert seen == [["runs"], ["on"], ["grass"]]
    expect(tab.get_by_role("button", name="play")).to_be_visible()  # playing has stopped
    expect(tab.locator("[aria-live]")).to_have_text("a dog runs on grass")
    tab.keyboard.press("Home")
    tab.keyboard.press("Space")
    expect(tab.get_by_role("button", name="pause")).to_be_visible()
    tab.keyboard.press("Space")
    expect(tab.get_by_role("button", name="play")).to_be_visible()


# --- touch and small screens ---------------------------------------------------------------------


def touches(tab: Tab) -> Callable[..., None]:
    """``touches(tab)("touchMove", (x, y), ...)``: the fingers that are down."""
    device = tab.context.new_cdp_session(tab)

    def send(kind: str, *fingers: tuple[float, float]) -> None:
        points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(fingers)]
        device.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    return send


def test_words_are_selected_by_tapping_and_sliding(visit) -> None:
    tab = visit(page(photo(), make()), has_touch=True, viewport={"width": 390, "height": 844})
    word(tab, "runs").tap()
    assert chosen(tab) == ["runs"]
    expect(tab.locator(".stage")).not_to_have_class(re.compile("plain"))

    send = touches(tab)
    for kind, text in (("touchStart", "a"), ("touchMove", "dog"), ("touchMove", "grass")):
        box = word(tab, text).bounding_box()
        send(kind, (box["x"] + 5, box["y"] + 5))
        expect(word(tab, text)).to_have_attribute("aria-selected", "true")
        assert len(chosen(tab)) == 1
    send("touchEnd")


# --- zoom ----------------------------------------------------------------------------------------


def visible(tab: Tab) -> list[float]:
    """The visible part of the photo: left, top, width and height as fractions, from its place."""
    part: list[float] = tab.evaluate(
        """() => {
            const stage = document.querySelector(".stage").getBoundingClientRect();
            const photo = document.querySelector(".stage img").getBoundingClientRect();
            return [
                (stage.left - photo.left) / photo.width, (stage.top - photo.top) / photo.height,
                stage.width / photo.width, stage.height / photo.height,
            ];
        }"""
    )
    return part


def middle(tab: Tab, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
    box = tab.locator(".stage").bounding_box()
    assert box is not None
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def test_buttons_zoom_and_the_heatmap_follows(visit) -> None:
    caption = make()
    made = page(photo(), caption)
    tab = visit(made)
    word(tab, "a").click()  # region 1: the second of 4 columns, the first of 3 rows
    whole = drawn(tab)

    tab.mouse.dblclick(*middle(tab, 0.02, 0.02))  # its corners are round

    assert visible(tab) == pytest.approx([0.01, 0.01, 0.5, 0.5], abs=0.01)
    pixels = drawn(tab)
    row, column = np.unravel_index(pixels.sum(axis=2).argmax(), pixels.shape[:2])
    before = np.unravel_index(whole.sum(axis=2).argmax(), whole.shape[:2])
    assert np.abs(np.array([row, column]) - 2 * np.array(before)).max() <= 4
    tab.mouse.move(*middle(tab, 0.75, 0.3))
    expect(tab.locator(".probe")).to_contain_text("“a” attends most here")

    out, into = (tab.get_by_role("button", name=f"zoom {way}") for way in ("out", "in"))
    for _ in range(4):
        into.click()
    expect(into).to_have_attribute("aria-disabled", "true")
    assert visible(tab)[2] == pytest.approx(1 / 8, abs=0.01)
    for _ in range(6):
        out.click()
    expect(out).to_have_attribute("aria-disabled", "true")
    assert visible(tab) == pytest.approx([0, 0, 1, 1], abs=0.01)
    assert (drawn(tab) == whole).all()


def test_two_fingers_zoom(visit) -> None:
    tab = visit(page(photo(), make()), has_touch=True, viewport={"width": 390, "height": 844})
    send = touches(tab)

    for kind, apart in (("touchStart", 0.1), ("touchMove", 0.15), ("touchMove", 0.2)):
        send(kind, middle(tab, 0.5 - apart), middle(tab, 0.5 + apart))
    send("touchEnd")

    tab.locator(".stage.zoomed").wait_for()
    assert visible(tab) == pytest.approx([0.25, 0.25, 0.5, 0.5], abs=0.05)


# --- accessibility and print ---------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_pages_have_no_accessibility_violations(visit, scheme, width) -> None:
    screen = {"width": width, "height": 844}
    entries = [Entry(photo(), [make()], f"{n}.jpg") for n in range(3)]
    tab = visit(gallery(entries), color_scheme=scheme, viewport=screen, has_touch=width < 400)
    assert violations(tab) == []

    tab.locator(".entry a").first.click()
    word(tab, "dog").click()
    tab.get_by_role("button", name="zoom in").click()

    assert violations(tab) == []
    assert out_of_order(tab) == []


def focus_ring(tab: Tab) -> list[float]:
    """The share of each side of the focused element along which its focus changes the page."""
    box = tab.evaluate(
        """() => {
            const { x, y, width, height } = document.activeElement.getBoundingClientRect();
            return [x, y, x + width, y + height].map(Math.round);
        }"""
    )
    margin = 6
    left, top = max(box[0] - margin, 0), max(box[1] - margin, 0)
    clip = {"x": left, "y": top, "width": box[2] + margin - left, "height": box[3] + margin - top}

    def pixels() -> NDArray[np.int64]:
        return np.asarray(Image.open(io.BytesIO(tab.screenshot(clip=clip))).convert("L"), np.int64)  # type: ignore[arg-type]

    focused = pixels()
    tab.evaluate("() => document.activeElement.blur()")  # Tab continues from there
    changed = np.abs(focused - pixels()) > 40
    across, down = slice(box[0] - left, box[2] - left), slice(box[1] - top, box[3] - top)
    sides = (
        changed[: down.start, across].any(axis=0),
        changed[down.stop :, across].any(axis=0),
        changed[down, : across.start].any(axis=1),
        changed[down, across.stop :].any(axis=1),
    )
    return [float(side.mean()) for side in sides]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_focus_of_the_keyboard_is_visible(visit, scheme, width) -> None:
    """Source: WCAG 2.2, success criterion 2.4.7."""
    entries = [Entry(photo(), [make()], f"{n}.jpg") for n in range(2)]
    screen = {"width": width, "height": 844}
    tab = visit(gallery(entries), color_scheme=scheme, viewport=screen)
    # search, order and two photos; back, previous, next, two for zoom, words, play, three controls
    for count in (4, 10):
        for number in range(count):
            tab.keyboard.press("Tab")
            name = tab.evaluate("() => document.activeElement.outerHTML.slice(0, 80)")
            if "aria-disabled" in name or name.startswith("<body"):
                continue  # in grey, so is its ring; the end of the page
            assert min(focus_ring(tab)) > 0.6, (number, name)  # round buttons: 0.7
        tab.locator(".entry a").first.press("Enter") if count == 4 else None


# --- text of captions ----------------------------------------------------------------------------


def test_text_that_looks_like_markup_is_shown_as_text(visit) -> None:
    evil = '<img src=x onerror="window.bad=1">'
    closing = "</script><script>window.bad=1</script>"
    caption = make((evil, closing, "</option>"))
    tab = visit(page(photo(), caption, title=evil, labels=[closing]))

    tab.keyboard.press("ArrowRight")

    assert chosen(tab) == [evil]
    assert tab.evaluate("() => window.bad") is None
    expect(tab.get_by_role("heading", name=evil)).to_be_visible()
    expect(tab.locator(".label")).to_contain_text(closing)


def test_photos_and_captions_are_shown_without_javascript(visit) -> None:
    entries = [Entry(photo(), [make()], "x.jpg"), Entry(photo(), [make(("a", "cat"))], "y.jpg")]
    tab = visit(gallery(entries), java_script_enabled=False)

    expect(tab.get_by_text("a cat")).to_be_visible()
    assert tab.get_by_role("img").count() == 2


# --- the gallery ---------------------------------------------------------------------------------


def test_a_photo_is_found_and_opened_in_the_gallery(visit) -> None:
    captions = [("a", "dog"), ("a", "cat"), ("two", "dogs", "run")]
    tab = visit(
        gallery(
            Entry(photo(90, 60 + 10 * n), [make(words)], f"{n}.jpg")
            for n, words in enumerate(captions)
        )
    )
    tab.get_by_role("searchbox").fill("DOG run")
    expect(tab.get_by_text("1 of 3 photos")).to_be_visible()
    assert tab.locator(".entry:visible .text").all_inner_texts() == ["two dogs run"]
    tab.get_by_role("searchbox").fill("")

    tab.get_by_role("link", name="a cat").click()
    expect(tab.locator(".gallery")).to_be_hidden()
    expect(tab.get_by_role("listbox")).to_have_accessible_name("Words of the caption: a cat")
    tab.get_by_role("button", name="next photo").click()
    expect(tab.get_by_role("heading", name="2.jpg")).to_be_visible()
    tab.get_by_role("button", name="next photo").click()
    expect(tab.get_by_role("heading", name="0.jpg")).to_be_visible()
    tab.go_back()
    expect(tab.get_by_role("heading", name="2.jpg")).to_be_visible()
    tab.keyboard.press("ArrowRight")
    tab.get_by_label("smooth").focus()  # not a word, which has keys of its own
    assert chosen(tab) == ["two"]
    tab.keyboard.press("Escape")  # clears the selection
    assert chosen(tab) == []
    tab.keyboard.press("Escape")  # closes the photo
    expect(tab.locator(".gallery")).to_be_visible()


def test_the_gallery_is_sorted_by_name_or_confidence(visit) -> None:
    known = {"10.jpg": 0.2, "9.jpg": None, "b.jpg": 0.914, "a.jpg": 0.5}
    entries = [
        Entry(photo(), [replace(make(), confidence=confidence)], name)
        for name, confidence in known.items()
    ]
    tab = visit(gallery(entries))
    names, order = tab.locator(".entry .name"), tab.get_by_label("Sort by")
    assert names.all_inner_texts() == list(known)
    assert "91% likely to be right" in tab.locator(".entry").nth(2).inner_text()

    order.focus()
    tab.keyboard.press("ArrowDown")
    assert names.all_inner_texts() == ["9.jpg", "10.jpg", "a.jpg", "b.jpg"]
    tab.keyboard.press("ArrowDown")
    assert names.all_inner_texts() == ["b.jpg", "a.jpg", "10.jpg", "9.jpg"]
    tab.keyboard.press("ArrowDown")
    assert names.all_inner_texts() == ["10.jpg", "a.jpg", "b.jpg", "9.jpg"]

    tab.locator(".entry a").first.click()
    tab.get_by_role("button", name="next photo").click()
    expect(tab.get_by_role("heading", name="a.jpg")).to_be_visible()
    plain = visit(gallery([Entry(photo(), [make()], name) for name in known]))
    assert plain.get_by_label("Sort by").locator("option").count() == 2


def test_a_plain_page_shows_maps_without_numbers(visit) -> None:
    """The common scale of keywords and words also works without log-probabilities."""
    caption = replace(make(), keywords=(Keyword("dog", 0.9, np.zeros(GRID, np.float32)),))
    made = gallery([Entry(photo(), [caption], "x.jpg")], plain=True, scale="common", panel_size=0)
    tab = visit(made)

    tab.get_by_role("option", name="runs").click()

    scale = scale_of(caption)
    assert_drawn(tab, made, caption, caption.alphas[2], scale_max=scale)
    tab.mouse.move(*middle(tab, 0.6, 0.1))
    expect(tab.locator(".probe")).to_contain_text("attends most here")
    expect(tab.locator(".chosen")).to_have_text("runs")
    assert not re.search(r"\d|β|%", tab.locator("main").inner_text().replace("x.jpg", ""))
    labels = tab.get_by_role("option").evaluate_all("all => all.map((one) => one.ariaLabel)")
    assert not any("%" in label for label in labels)


# --- notebooks -----------------------------------------------------------------------------------


def test_a_caption_is_shown_in_a_notebook(visit, tmp_path) -> None:
    caption = with_photo([make()], shown_photo(photo(), b""))[0]
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><title>n</title>{caption._repr_html_()}", "utf-8")
    tab = visit(notebook.as_uri())
    frame = tab.frame_locator("iframe")

    frame.get_by_role("option", name=re.compile("^grass,")).click()

    expect(frame.locator(".chosen")).to_contain_text("grass")
