"""The served page in a browser: choosing, dropping and pasting photos; options; errors."""

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
from captioner.serving.keys import ApiKeys
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


def test_chosen_photo_is_captioned_and_explored(tab, served, tiny) -> None:
    photo = tiny.photos / "1.png"
    caption = served.model.caption(photo)

    upload(tab, photo)

    expect(tab.get_by_role("status")).to_have_text(caption.text)
    tab.get_by_role("option").nth(1).hover()
    wanted = attention_image(
        open_image(photo),
        caption.alphas[1],
        scale_max=shared_scale(caption.alphas, caption.gates),
        regions=caption.regions,
    )
    assert np.abs(drawn(tab) - np.asarray(wanted).astype(int)).max() <= 2
    tab.keyboard.press("ArrowRight")
    selected = tab.get_by_role("option", selected=True)
    expect(selected).to_have_text(caption.words[0])
    expect(tab.locator(".choices li")).to_have_count(5)


def test_options_apply_at_once(tab, served, tiny) -> None:
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


def test_own_caption_is_explained(tab, tiny) -> None:
    upload(tab, tiny.photos / "2.png")

    tab.get_by_label("test your own caption").fill("the man's hat")
    tab.keyboard.press("Enter")

    expect(tab.get_by_role("status")).to_have_text("the man's hat")
    words = ["the", "man", "'s", "hat", "all words"]
    assert tab.get_by_role("option").all_inner_texts() == words
    expect(tab.get_by_label("beam size")).to_be_disabled()


@pytest.fixture
def refused(visit) -> Iterator[None]:
    """Browsers log every failed request to the console; ignore those messages."""
    yield
    kept = [line for line in visit.complaints if not re.match(r"console: Failed to load", line)]
    assert len(kept) < len(visit.complaints)
    visit.complaints[:] = kept


@pytest.mark.usefixtures("refused")
def test_server_errors_are_shown_and_can_be_corrected(visit, served, tiny, tmp_path) -> None:
    tab = visit(served.address, allowed=served.address)
    (tmp_path / "notes.jpg").write_bytes(b"no photo at all")
    status = tab.get_by_role("status")

    upload(tab, tmp_path / "notes.jpg")
    expect(status).to_contain_text("not a supported image")
    expect(status).to_have_class(re.compile("failed"))

    upload(tab, tiny.photos / "1.png")
    expect(tab.get_by_role("listbox")).to_have_count(1)
    tab.get_by_label("test your own caption").fill("a gryphon runs")
    tab.keyboard.press("Enter")
    expect(status).to_contain_text("the model does not know gryphon")
    expect(tab.get_by_role("listbox")).to_have_count(1)  # the photo stays

    tab.get_by_label("test your own caption").fill("")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("listbox")).to_have_count(1)
    expect(status).not_to_have_class(re.compile("failed"))


def test_too_large_file_is_not_sent(tab, tmp_path) -> None:
    (tmp_path / "large.jpg").write_bytes(b"x" * (LARGEST + 1))
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.method))

    upload(tab, tmp_path / "large.jpg")

    expect(tab.get_by_role("alert")).to_have_text("large.jpg has 20,001 bytes; the limit is 20,000")
    assert "POST" not in sent


def test_too_large_file_does_not_stop_the_others(tab, tiny, tmp_path) -> None:
    (tmp_path / "large.jpg").write_bytes(b"x" * (LARGEST + 1))

    upload(tab, tmp_path / "large.jpg", tiny.photos / "1.png")

    expect(tab.get_by_role("listbox")).to_have_count(1)
    expect(tab.get_by_role("alert")).to_contain_text("large.jpg")
    upload(tab, tiny.photos / "2.png")
    expect(tab.get_by_role("alert")).to_have_text("")


def test_a_change_sends_one_request(tab, tiny) -> None:
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
def test_strip_keeps_the_last_thirty_photos(tab, tiny) -> None:
    upload(tab, *[tiny.photos / f"{1 + n % 4}.png" for n in range(20)])
    strip = tab.get_by_role("group", name="Photos").get_by_role("button")
    oldest = strip.first.get_by_role("img").get_attribute("src")

    upload(tab, *[tiny.photos / f"{1 + n % 4}.png" for n in range(20)])

    expect(strip).to_have_count(30)
    expect(tab.locator(".errors")).to_be_empty()  # removing older photos is not an error
    expect(strip.nth(10)).to_have_attribute("aria-current", "true")  # the first of the new ones
    assert oldest not in [image.get_attribute("src") for image in strip.get_by_role("img").all()]
    assert (
        tab.evaluate(
            "(address) => new Promise((resolve) => { const image = new Image();"
            " image.onload = () => resolve('kept'); image.onerror = () => resolve('let go');"
            " image.src = address; })",
            oldest,
        )
        == "let go"
    )


@pytest.mark.usefixtures("refused")
def test_skipped_photos_are_reported(tab, tiny) -> None:
    upload(tab, *[tiny.photos / f"{1 + n % 4}.png" for n in range(32)])
    note = "the page holds 30 photos; the first 2 were skipped"
    expect(tab.locator(".errors")).to_have_text(note)


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_drop_and_paste(kind, tab, served, tiny) -> None:
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


def test_strip_switches_between_photos(tab, served, tiny) -> None:
    photos = [tiny.photos / f"{n}.png" for n in (1, 2, 3)]
    texts = [served.model.caption(photo).text for photo in photos]
    assert len(set(texts)) == 3

    upload(tab, *photos)

    strip = tab.get_by_role("group", name="Photos").get_by_role("button")
    expect(tab.get_by_role("status")).to_have_text(texts[0])
    for button, text in zip(strip.all(), texts, strict=True):
        button.click()
        expect(tab.get_by_role("status")).to_have_text(text)
        expect(button).to_have_attribute("aria-current", "true")


def test_unsupported_format_shows_the_caption_only(tab, served, tmp_path) -> None:
    Image.new("RGB", (30, 20), "green").save(tmp_path / "x.tiff")

    upload(tab, tmp_path / "x.tiff")

    text = served.model.caption(tmp_path / "x.tiff").text
    expect(tab.get_by_role("status")).to_have_text(text)
    expect(tab.get_by_text("This browser does not support this image format")).to_be_visible()


def test_transparency_is_shown_on_white(tab, served, tmp_path) -> None:
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
        scale_max=shared_scale(caption.alphas, caption.gates),
        regions=caption.regions,
    )
    assert np.abs(drawn(tab) - np.asarray(wanted).astype(int)).max() <= 2


@pytest.mark.parametrize(
    ("orientation", "size", "shown"),
    [(1, (30, 20), True), (6, (30, 20), False), (3, (30, 20), False), (6, (20, 20), False)],
)
def test_no_attention_on_an_image_with_another_orientation(  # noqa: PLR0917
    orientation, size, shown, tab, served, tmp_path
) -> None:
    """The server applies the EXIF orientation of WebP files, Chromium does not."""
    turned = Image.Exif()
    turned[0x0112] = orientation
    Image.new("RGB", size, "green").save(tmp_path / "x.webp", exif=turned)

    upload(tab, tmp_path / "x.webp")

    text = served.model.caption(tmp_path / "x.webp").text
    expect(tab.get_by_role("status")).to_have_text(text)
    note = tab.get_by_text("This browser does not apply this image's EXIF orientation")
    expect(note).to_have_count(0 if shown else 1)
    expect(tab.locator(".stage")).to_have_count(1 if shown else 0)


def test_escape_works_from_any_focus(tab, tiny) -> None:
    upload(tab, tiny.photos / "1.png")
    tab.get_by_role("option").nth(1).click()
    tab.get_by_label("smooth").focus()

    tab.keyboard.press("Escape")

    expect(tab.get_by_role("option", selected=True)).to_have_count(0)


@pytest.mark.usefixtures("refused")
def test_failure_mark_is_removed_on_success(tab, tiny) -> None:
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


def test_page_fits_a_phone(visit, served, tiny) -> None:
    screen = {"width": 320, "height": 640}
    tab = visit(served.address, allowed=served.address, viewport=screen, has_touch=True)
    assert tab.evaluate("() => document.documentElement.scrollWidth") <= 320

    upload(tab, tiny.photos / "1.png", tiny.photos / "2.png")
    tab.get_by_role("option").first.tap()

    expect(tab.get_by_role("option", selected=True)).to_have_count(1)
    assert tab.evaluate("() => document.documentElement.scrollWidth") <= 320


@pytest.mark.usefixtures("refused")
def test_unreachable_server(visit, served, tiny) -> None:
    tab = visit(served.address, allowed=served.address)
    tab.context.set_offline(True)

    upload(tab, tiny.photos / "1.png")

    expect(tab.get_by_role("status")).to_have_text("the server does not respond; is it running?")


def test_page_asks_for_the_key_once(visit, tiny, tmp_path) -> None:
    (tmp_path / "keys.txt").write_text("alice alice-0123456789abcdef\n")
    model = load(tiny.model, device="cpu", precision="fp32")
    app = create_app(model, keys=ApiKeys(tmp_path / "keys.txt"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none", http="h11"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.1)
        port = server.servers[0].sockets[0].getsockname()[1]
        address = f"http://127.0.0.1:{port}/"
        tab = visit(address, allowed=address)
        upload(tab, tiny.photos / "1.png")
        for key in ("wrong", "alice-0123456789abcdef"):
            tab.get_by_label("API key").last.fill(key)
            tab.keyboard.press("Enter")
            if key == "wrong":
                expect(tab.get_by_text("does not accept this API key")).to_be_visible()
        status = tab.get_by_role("status")
        expect(status).to_have_text(model.caption(tiny.photos / "1.png").text)
        upload(tab, tiny.photos / "2.png")
        expect(status).to_have_text(model.caption(tiny.photos / "2.png").text)
        assert tab.evaluate("localStorage.length") == 0
        assert len(visit.complaints) == 2  # the browser's own, of the refusals
        assert all("401" in complaint for complaint in visit.complaints)
        visit.complaints.clear()
    finally:
        server.should_exit = True
        thread.join()
