"""The served page as a person uses it: photos chosen, dropped, pasted; wishes; mistakes."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvicorn
from browsing import drawn
from PIL import Image
from playwright.sync_api import Page as Tab
from playwright.sync_api import expect

from captioner import load
from captioner.data.images import open_image
from captioner.serving.app import create_app
from captioner.serving.limits import Limits
from captioner.visualization import attention_image, shared_scale

pytestmark = pytest.mark.slow

LARGEST = 20_000  # bytes


@pytest.fixture(scope="module")
def served(tiny) -> Iterator[SimpleNamespace]:
    """``address``, and the ``model`` behind it."""
    model = load(tiny.model, device="cpu", precision="fp32")
    app = create_app(model, Limits(max_bytes=LARGEST, max_beam=4))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none", http="h11"))
    thread = threading.Thread(target=server.run)
    thread.start()
    for _ in range(600):  # a minute
        if server.started:
            break
        thread.join(0.1)
    assert server.started
    port = server.servers[0].sockets[0].getsockname()[1]
    yield SimpleNamespace(address=f"http://127.0.0.1:{port}/", model=model)
    server.should_exit = True
    thread.join()


@pytest.fixture
def tab(visit, served) -> Tab:
    return visit(served.address, allowed=served.address)


def upload(tab: Tab, *photos: Any) -> None:
    tab.locator("#file").set_input_files(photos)


def test_a_chosen_photo_is_captioned_and_explored(tab, served, tiny) -> None:
    photo = tiny.photos / "1.png"
    caption = served.model.caption(photo)

    upload(tab, photo)

    expect(tab.get_by_role("status")).to_have_text(caption.text)
    tab.get_by_role("option").nth(1).hover()
    wanted = attention_image(
        open_image(photo),
        caption.alphas[1],
        scale_max=shared_scale(caption.alphas),
        crop_box=caption.crop_box,
    )
    assert np.abs(drawn(tab) - np.asarray(wanted).astype(int)).max() <= 2
    tab.keyboard.press("ArrowRight")
    selected = tab.get_by_role("option", selected=True)
    expect(selected).to_have_text(caption.words[0])
    expect(tab.locator(".choices li")).to_have_count(5)


def test_wishes_are_granted_at_once(tab, served, tiny) -> None:
    photo = tiny.photos / "2.png"
    upload(tab, photo)
    expect(tab.get_by_role("listbox")).to_have_count(1)

    tab.get_by_label("beam size").fill("4")
    tab.get_by_label("captions").fill("3")
    tab.get_by_role("button", name="Caption", exact=True).click()

    expect(tab.get_by_role("listbox")).to_have_count(3)
    captions = served.model.captions(photo, beam_size=4, num_captions=3)
    names = [box.get_attribute("aria-label") for box in tab.get_by_role("listbox").all()]
    assert names == [f"Words of the caption: {caption.text}" for caption in captions]


def test_own_words_are_looked_for(tab, tiny) -> None:
    upload(tab, tiny.photos / "2.png")

    tab.get_by_label("own words").fill("the man's hat")
    tab.keyboard.press("Enter")

    expect(tab.get_by_role("status")).to_have_text("the man's hat")
    words = ["the", "man", "'s", "hat", "all words"]
    assert tab.get_by_role("option").all_inner_texts() == words
    expect(tab.get_by_label("beam size")).to_be_disabled()


@pytest.fixture
def refused(visit) -> Iterator[None]:
    """Browsers report every refused request on the console, whatever the page does about it."""
    yield
    kept = [line for line in visit.complaints if not re.match(r"console: Failed to load", line)]
    assert len(kept) < len(visit.complaints)
    visit.complaints[:] = kept


@pytest.mark.usefixtures("refused")
def test_what_the_server_refuses_is_told_and_can_be_mended(visit, served, tiny, tmp_path) -> None:
    tab = visit(served.address, allowed=served.address)
    (tmp_path / "notes.jpg").write_bytes(b"no photo at all")
    status = tab.get_by_role("status")

    upload(tab, tmp_path / "notes.jpg")
    expect(status).to_contain_text("not a supported image")
    expect(status).to_have_class(re.compile("wrong"))

    upload(tab, tiny.photos / "1.png")
    expect(tab.get_by_role("listbox")).to_have_count(1)
    tab.get_by_label("own words").fill("a gryphon runs")
    tab.keyboard.press("Enter")
    expect(status).to_contain_text("the model does not know gryphon")
    expect(tab.get_by_role("listbox")).to_have_count(1)  # the photo stays while it is mended

    tab.get_by_label("own words").fill("")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("listbox")).to_have_count(1)
    expect(status).not_to_have_class(re.compile("wrong"))


def test_a_file_that_is_too_large_is_not_even_sent(tab, tmp_path) -> None:
    (tmp_path / "large.jpg").write_bytes(b"x" * (LARGEST + 1))
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.method))

    upload(tab, tmp_path / "large.jpg")

    expect(tab.get_by_role("alert")).to_have_text("large.jpg has 20,001 bytes; give 20,000 at most")
    assert "POST" not in sent


def test_a_large_file_among_others_is_named_and_the_others_go_on(tab, tiny, tmp_path) -> None:
    (tmp_path / "large.jpg").write_bytes(b"x" * (LARGEST + 1))

    upload(tab, tmp_path / "large.jpg", tiny.photos / "1.png")

    expect(tab.get_by_role("listbox")).to_have_count(1)
    expect(tab.get_by_role("alert")).to_contain_text("large.jpg")
    upload(tab, tiny.photos / "2.png")
    expect(tab.get_by_role("alert")).to_have_text("")


def test_one_wish_is_one_request(tab, tiny) -> None:
    upload(tab, tiny.photos / "1.png")
    expect(tab.get_by_role("listbox")).to_have_count(1)
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.method))

    tab.get_by_label("captions").fill("2")
    tab.keyboard.press("Enter")

    expect(tab.get_by_role("listbox")).to_have_count(2)
    tab.get_by_role("button", name="Caption", exact=True).click()
    assert sent == ["POST"]


@pytest.mark.usefixtures("refused")
def test_the_strip_holds_thirty_photos_and_lets_go_of_older_ones(tab, tiny) -> None:
    upload(tab, *[tiny.photos / f"{1 + n % 4}.png" for n in range(20)])
    strip = tab.get_by_role("group", name="Photos").get_by_role("button")
    oldest = strip.first.get_by_role("img").get_attribute("src")

    upload(tab, *[tiny.photos / f"{1 + n % 4}.png" for n in range(20)])

    expect(strip).to_have_count(30)
    expect(tab.locator(".complaints")).to_be_empty()  # the older ones were asked to go
    expect(strip.nth(10)).to_have_attribute("aria-current", "true")  # the first of the new ones
    assert oldest not in [image.get_attribute("src") for image in strip.get_by_role("img").all()]
    assert (
        tab.evaluate(
            "(address) => new Promise((told) => { const image = new Image();"
            " image.onload = () => told('kept'); image.onerror = () => told('let go');"
            " image.src = address; })",
            oldest,
        )
        == "let go"
    )


@pytest.mark.usefixtures("refused")
def test_more_photos_than_the_strip_holds_are_told(tab, tiny) -> None:
    upload(tab, *[tiny.photos / f"{1 + n % 4}.png" for n in range(32)])
    told = "the page holds 30 photos; the first 2 are left out"
    expect(tab.locator(".complaints")).to_have_text(told)


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_a_photo_can_be_dropped_and_pasted(kind, tab, served, tiny) -> None:
    content = base64.b64encode((tiny.photos / "3.png").read_bytes()).decode()

    tab.evaluate(
        """async ([kind, content]) => {
            const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
            const carried = new DataTransfer();
            carried.items.add(new File([bytes], "3.png", {type: "image/png"}));
            const event = kind === "drop"
                ? new DragEvent("drop", {dataTransfer: carried, bubbles: true, cancelable: true})
                : new ClipboardEvent("paste", {clipboardData: carried, bubbles: true});
            document.querySelector("main").dispatchEvent(event);
        }""",
        [kind, content],
    )

    text = served.model.caption(tiny.photos / "3.png").text
    expect(tab.get_by_role("status")).to_have_text(text)


def test_several_photos_wait_in_a_strip(tab, served, tiny) -> None:
    photos = [tiny.photos / f"{n}.png" for n in (1, 2, 3)]
    said = [served.model.caption(photo).text for photo in photos]
    assert len(set(said)) == 3

    upload(tab, *photos)

    strip = tab.get_by_role("group", name="Photos").get_by_role("button")
    expect(tab.get_by_role("status")).to_have_text(said[0])
    for button, text in zip(strip.all(), said, strict=True):
        button.click()
        expect(tab.get_by_role("status")).to_have_text(text)
        expect(button).to_have_attribute("aria-current", "true")


def test_a_picture_that_browsers_cannot_show_has_its_caption(tab, served, tmp_path) -> None:
    Image.new("RGB", (30, 20), "green").save(tmp_path / "x.tiff")

    upload(tab, tmp_path / "x.tiff")

    text = served.model.caption(tmp_path / "x.tiff").text
    expect(tab.get_by_role("status")).to_have_text(text)
    expect(tab.get_by_text("This browser cannot show")).to_be_visible()


def test_what_is_transparent_is_seen_on_white_as_the_model_saw_it(tab, served, tmp_path) -> None:
    across = np.zeros((40, 60, 4), dtype=np.uint8)
    across[:, 20:40] = (255, 0, 0, 128)
    across[:, 40:] = (0, 0, 255, 255)
    Image.fromarray(across).save(tmp_path / "clear.png")
    caption = served.model.caption(tmp_path / "clear.png")

    upload(tab, tmp_path / "clear.png")
    expect(tab.get_by_role("status")).to_have_text(caption.text)

    tab.get_by_role("option").nth(1).hover()
    wanted = attention_image(
        open_image(tmp_path / "clear.png"),
        caption.alphas[1],
        scale_max=shared_scale(caption.alphas),
        crop_box=caption.crop_box,
    )
    assert np.abs(drawn(tab) - np.asarray(wanted).astype(int)).max() <= 2


@pytest.mark.parametrize(
    ("orientation", "size", "light"),
    [(1, (30, 20), True), (6, (30, 20), False), (3, (30, 20), False), (6, (20, 20), False)],
)
def test_no_light_falls_on_a_picture_that_the_browser_does_not_turn(  # noqa: PLR0917
    orientation, size, light, tab, served, tmp_path
) -> None:
    """The server turns a WebP upright as its EXIF says, Chromium does not."""
    turned = Image.Exif()
    turned[0x0112] = orientation
    Image.new("RGB", size, "green").save(tmp_path / "x.webp", exif=turned)

    upload(tab, tmp_path / "x.webp")

    text = served.model.caption(tmp_path / "x.webp").text
    expect(tab.get_by_role("status")).to_have_text(text)
    told = tab.get_by_text("This browser does not turn this picture upright")
    expect(told).to_have_count(0 if light else 1)
    expect(tab.locator(".stage")).to_have_count(1 if light else 0)


def test_escape_leads_to_the_photo_wherever_the_focus_is(tab, tiny) -> None:
    upload(tab, tiny.photos / "1.png")
    tab.get_by_role("option").nth(1).click()
    tab.get_by_label("smooth").focus()

    tab.keyboard.press("Escape")

    expect(tab.get_by_role("option", selected=True)).to_have_count(0)


@pytest.mark.usefixtures("refused")
def test_a_photo_that_failed_once_and_not_again_has_no_mark(tab, tiny) -> None:
    answers = iter([503])

    def once(route: Any) -> None:
        if status := next(answers, None):
            route.fulfill(status=status, json={"error": "busy"})
        else:
            route.continue_()

    tab.route("**/v1/captions*", once)
    upload(tab, tiny.photos / "1.png", tiny.photos / "2.png")
    button = tab.get_by_role("group", name="Photos").get_by_role("button").first
    expect(button).to_have_class("failed")
    expect(button).to_have_attribute("title", "1.png: busy")

    button.click()

    expect(button).not_to_have_class("failed")
    expect(button).to_have_attribute("title", "")


def test_nothing_sticks_out_of_a_phone(visit, served, tiny) -> None:
    screen = {"width": 320, "height": 640}
    tab = visit(served.address, allowed=served.address, viewport=screen, has_touch=True)
    assert tab.evaluate("() => document.documentElement.scrollWidth") <= 320

    upload(tab, tiny.photos / "1.png", tiny.photos / "2.png")
    tab.get_by_role("option").first.tap()

    expect(tab.get_by_role("option", selected=True)).to_have_count(1)
    assert tab.evaluate("() => document.documentElement.scrollWidth") <= 320


@pytest.mark.usefixtures("refused")
def test_a_server_that_is_gone_is_told(visit, served, tiny) -> None:
    tab = visit(served.address, allowed=served.address)
    tab.context.set_offline(True)

    upload(tab, tiny.photos / "1.png")

    expect(tab.get_by_role("status")).to_have_text("the server does not answer; is it running?")
