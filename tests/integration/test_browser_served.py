"""The served page in a browser: choosing, dropping and pasting photos; options; errors."""

from __future__ import annotations

import base64
import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browsing import drawn, out_of_order, serving, violations
from PIL import Image
from playwright.sync_api import Locator, Route, expect
from playwright.sync_api import Page as Tab

from captioner import load
from captioner.cli.formats import WRITERS
from captioner.data.images import open_image
from captioner.drawing.heatmap import attention_image, shared_scale
from captioner.drawing.pages import Entry, gallery
from captioner.serving.app import create_app
from captioner.serving.keys import ApiKeys
from captioner.serving.options import Limits

pytestmark = pytest.mark.slow

LARGEST = 2_000_000  # bytes


@pytest.fixture(scope="module")
def served(tiny) -> Iterator[SimpleNamespace]:
    """``address``, and the ``model`` behind it."""
    model = load(tiny.model, device="cpu", precision="fp32")
    app = create_app(model, Limits(max_bytes=LARGEST, max_beam=4))
    with serving(app) as address:
        yield SimpleNamespace(address=address, model=model)


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
    tab.get_by_role("listbox").get_by_role("option").nth(1).hover()
    wanted = attention_image(
        open_image(photo),
        caption.alphas[1],
        scale_max=shared_scale(caption.alphas, caption.gates),
        regions=caption.regions,
    )
    assert np.abs(drawn(tab) - np.asarray(wanted).astype(int)).max() <= 2
    tab.keyboard.press("ArrowRight")
    selected = tab.get_by_role("listbox").get_by_role("option", selected=True)
    expect(selected).to_have_text(caption.words[0])
    expect(tab.locator(".choices li")).to_have_count(5)


@pytest.fixture
def refused(visit) -> None:
    """Browsers log every failed request to the console, sometimes late."""
    visit.expected.append("console: Failed to load")


def card(tab: Tab, number: int) -> Locator:
    return cards(tab).nth(number - 1)


def cards(tab: Tab) -> Locator:
    return tab.get_by_role("list", name="Photos").get_by_role("button")


def posts(tab: Tab) -> list[str]:
    """The addresses of requests for captions, from now on."""
    sent: list[str] = []
    tab.on(
        "request", lambda request: sent.append(request.url) if request.method == "POST" else None
    )
    return sent


def saved(tab: Tab, name: str, within: str) -> Path:
    """The file that a button downloads."""
    group = tab.get_by_role("group", name=within)
    with tab.expect_download() as download:
        group.get_by_role("button", name=name).click()
    file = Path(download.value.path())
    return file.rename(file.with_name(download.value.suggested_filename))


@pytest.mark.usefixtures("refused")
def test_server_errors_are_shown_and_can_be_corrected(visit, served, tiny, tmp_path) -> None:
    tab = visit(served.address, allowed=served.address)
    whole = (tiny.photos / "1.png").read_bytes()
    (tmp_path / "broken.png").write_bytes(whole[: len(whole) // 2])
    status = tab.get_by_role("status")

    upload(tab, tmp_path / "broken.png", tiny.photos / "2.png")
    expect(tab.locator(".count")).to_have_text("1 of 2 captioned, 1 failed")
    expect(status).to_have_class(re.compile("failed"))
    expect(card(tab, 1)).to_contain_text(status.inner_text())
    expect(status).to_have_text("The image is truncated; copy or download the file again.")

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


# --- files that are no photos --------------------------------------------------------------------

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("IMG_1.HEIC", HEIC, "This is a HEIC photo, which this browser cannot convert."),
        ("notes.jpg", b"no photo at all", "This is not a photo."),
    ],
)
def test_other_files_are_not_sent(  # noqa: PLR0917
    name, content, problem, tab, tiny, tmp_path
) -> None:
    (tmp_path / name).write_bytes(content)
    sent = posts(tab)

    upload(tab, tmp_path / name)

    alert = tab.get_by_role("alert")
    expect(alert).to_contain_text(f"{name}: {problem}")
    assert sent == []

    upload(tab, tmp_path / name, tiny.photos / "1.png")  # the others are captioned
    expect(tab.get_by_role("listbox")).to_have_count(1)
    expect(alert).to_contain_text(name)
    upload(tab, tiny.photos / "2.png")
    expect(alert).to_have_text("")


def test_a_format_that_only_the_browser_reads_is_converted(tab, served, tmp_path) -> None:
    """As HEIC is in Safari; Chromium reads AVIF."""
    Image.new("RGB", (64, 48), (200, 30, 40)).save(tmp_path / "x.avif")
    Image.new("RGB", (64, 48), (200, 30, 40)).save(tmp_path / "x.png")

    upload(tab, tmp_path / "x.avif")

    text = served.model.caption(tmp_path / "x.png").text
    expect(tab.get_by_role("status")).to_have_text(text)
    expect(tab.locator(".stage")).to_be_visible()


# --- large photos --------------------------------------------------------------------------------


def quarters(width: int, height: int) -> Image.Image:
    """A photo with a colour in each quarter, so that every orientation differs."""
    image = Image.new("RGB", (width, height), (230, 20, 20))
    image.paste((20, 200, 30), (width // 2, 0, width, height // 2))
    image.paste((20, 30, 220), (0, height // 2, width // 2, height))
    image.paste((240, 240, 20), (width // 2, height // 2, width, height))
    return image


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_large_photo_is_made_smaller_and_stays_upright(
    orientation, tab, served, tmp_path
) -> None:
    turned = Image.Exif()
    turned[0x0112] = orientation
    quarters(2400, 1600).save(tmp_path / "large.jpg", exif=turned, quality=95)
    with (tmp_path / "large.jpg").open("ab") as file:
        file.write(bytes(LARGEST))  # ignored after the end of the picture
    caption = served.model.caption(tmp_path / "large.jpg")

    with tab.expect_response("**/v1/captions*") as received:
        upload(tab, tmp_path / "large.jpg")

    size = [2304, 1536] if orientation < 5 else [1536, 2304]
    answer = received.value.json()
    assert [answer["width"], answer["height"]] == size
    assert int(received.value.request.headers.get("content-length", "0")) < 1_000_000
    assert answer["captions"][0]["text"] == caption.text
    alphas = np.array(answer["captions"][0]["alphas"])
    assert np.abs(alphas - caption.alphas).max() < 0.02
    expect(tab.locator(".stage")).to_be_visible()


def test_a_large_photo_keeps_twice_the_sides_of_the_model_s_input(visit, served, tmp_path) -> None:
    """As if the model's input had 900 x 900 pixels."""
    quarters(3000, 2000).save(tmp_path / "large.png")
    with (tmp_path / "large.png").open("ab") as file:
        file.write(bytes(LARGEST))
    tab = visit(served.address, allowed=served.address)
    with_settings(tab, served, '"imageSize":64', '"imageSize":900')

    with tab.expect_response("**/v1/captions*") as received:
        upload(tab, tmp_path / "large.png")

    assert received.value.json()["height"] == 1800


def with_settings(tab: Tab, served: SimpleNamespace, given: str, wanted: str) -> None:
    """Reload the page with another setting."""

    def changed(route: Route) -> None:
        response = route.fetch()
        assert given in response.text()
        route.fulfill(response=response, body=response.text().replace(given, wanted))

    tab.route(served.address, changed)
    tab.reload()


# --- many photos ---------------------------------------------------------------------------------


def test_all_photos_are_captioned(tab, served, tiny) -> None:
    photos = [tiny.photos / f"{n}.png" for n in (1, 2, 3)]
    texts = [served.model.caption(photo).text for photo in photos]
    assert len(set(texts)) == 3

    upload(tab, *photos)

    status = tab.get_by_role("status")
    for number, (photo, text) in enumerate(zip(photos, texts, strict=True), 1):
        expect(card(tab, number)).to_have_accessible_name(f"{text} {photo.name}")
    expect(tab.locator(".count")).to_have_text("3 of 3 captioned")
    expect(tab.locator(".announcement")).to_have_text("3 of 3 captioned")
    expect(tab.get_by_role("progressbar")).to_be_hidden()
    expect(status).to_have_text(texts[0])
    for number, text in enumerate(texts, 1):
        card(tab, number).click()
        expect(status).to_have_text(text)
        expect(card(tab, number)).to_have_attribute("aria-current", "true")
    tab.get_by_role("button", name="next photo").click()
    expect(status).to_have_text(texts[0])


class Held:
    """Requests for captions that wait until they are let through."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self.routes: list[Route] = []
        self.held = True
        tab.route("**/v1/captions*", self.add)

    def add(self, route: Route) -> None:
        if self.held:
            self.routes.append(route)
        else:
            route.continue_()

    def wait(self, count: int) -> None:
        for _ in range(6000):  # a minute
            if len(self.routes) == count:
                break
            self.tab.wait_for_timeout(10)
        self.tab.wait_for_timeout(100)
        assert len(self.routes) == count

    def release(self, *, all_to_come: bool = False) -> None:
        self.held = not all_to_come
        for route in self.routes:
            route.continue_()
        self.routes.clear()


def test_cancel_and_continue(tab, tiny) -> None:
    held = Held(tab)
    upload(tab, *[tiny.photos / f"{1 + n % 4}.png" for n in range(5)])
    held.wait(2)
    held.release()
    held.wait(2)

    tab.get_by_role("button", name="Cancel").click()

    expect(tab.locator(".count")).to_have_text("2 of 5 captioned")
    expect(tab.get_by_text("not captioned", exact=True)).to_have_count(3)
    expect(tab.get_by_role("button", name="Cancel")).to_be_hidden()
    expect(tab.get_by_role("button", name="Caption", exact=True)).to_be_focused()
    held.routes.clear()
    held.release(all_to_come=True)
    card(tab, 2).click()
    expect(tab.get_by_text("not captioned", exact=True)).to_have_count(3)
    tab.get_by_role("button", name="Caption", exact=True).focus()
    tab.keyboard.press("Enter")
    expect(tab.locator(".count")).to_have_text("5 of 5 captioned")


@pytest.mark.usefixtures("refused")
def test_a_busy_server_is_asked_again(tab, tiny) -> None:
    refusals = iter([429, 503, 429])
    times: list[float] = []

    def busy(route: Route) -> None:
        times.append(time.monotonic())
        if status := next(refusals, None):
            headers = {"Retry-After": "1"}
            route.fulfill(status=status, headers=headers, json={"error": "try again"})
        else:
            route.continue_()

    tab.route("**/v1/captions*", busy)
    upload(tab, tiny.photos / "1.png", tiny.photos / "2.png", tiny.photos / "3.png")

    expect(tab.locator(".count")).to_have_text("3 of 3 captioned")
    assert len(times) == 6
    assert times[2] - times[0] > 0.9  # no request of the two in parallel comes before


# --- results -------------------------------------------------------------------------------------


def test_captions_are_downloaded_as_the_command_writes_them(tab, served, tiny) -> None:
    photos = [tiny.photos / "1.png", tiny.photos / "2.png"]
    tab.get_by_label("captions", exact=True).fill("2")
    upload(tab, *photos)
    expect(tab.locator(".count")).to_have_text("2 of 2 captioned")
    entries = [
        {
            "image": photo.name,
            "captions": [
                caption.as_dict() for caption in served.model.captions(photo, num_captions=2)
            ],
        }
        for photo in photos
    ]

    made = json.loads(saved(tab, "JSON", "Download all results").read_text("utf-8"))
    assert made == nearly(entries)
    wanted = io.StringIO()
    WRITERS["csv"](wanted, made)
    assert saved(tab, "CSV", "Download all results").read_text("utf-8") == wanted.getvalue()


def nearly(data: Any) -> Any:
    """The same with numbers that may differ a little, as they do between batches."""
    if isinstance(data, dict):
        return {name: nearly(value) for name, value in data.items()}
    if isinstance(data, list):
        return [nearly(value) for value in data]
    return pytest.approx(data, abs=5e-4) if isinstance(data, float | int) else data


def content(html: str) -> tuple[str, Any]:
    """A page without the bytes of its photos, and its data."""
    found = re.search(r'id="captioner-data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    rest = html.replace(found[1], "")
    return re.sub(r"data:image/jpeg;base64,[\w+/=]+", "", rest), json.loads(found[1])


@pytest.mark.parametrize("count", [1, 3])
def test_the_gallery_is_the_one_that_the_command_makes(  # noqa: PLR0917
    count, tab, visit, served, tiny, tmp_path
) -> None:
    photos = [tmp_path / f"<{n}> & 'x'.png" for n in range(1, count + 1)]
    for number, photo in enumerate(photos, 1):
        photo.write_bytes((tiny.photos / f"{number}.png").read_bytes())
    upload(tab, *photos)
    expect(tab.locator(".count")).to_have_text(f"{count} of {count} captioned")
    entries = [
        Entry(photo, served.model.captions(photo, alternatives=5), photo.name) for photo in photos
    ]

    made = saved(tab, "Gallery", "Download all results")

    text, data = content(made.read_text("utf-8"))
    wanted, wanted_data = content(gallery(entries).html)
    assert text.replace("&#x27;", "'") == wanted.replace("&#x27;", "'")
    assert data == nearly(wanted_data)
    page = visit(made.rename(tmp_path / "all.html").as_uri())
    if count > 1:
        page.locator(".entry a").last.click()
    page.get_by_role("listbox").get_by_role("option").first.click()
    expect(page.locator(".stage")).to_be_visible()


@pytest.mark.parametrize("chosen", [None, 1])
def test_overlays_are_downloaded(chosen, tab, served, tmp_path) -> None:
    quarters(80, 60).save(tmp_path / "colours.png")
    upload(tab, tmp_path / "colours.png")
    caption = served.model.caption(tmp_path / "colours.png")
    if chosen is not None:
        tab.get_by_role("listbox").get_by_role("option").nth(chosen).click()

    svg = saved(tab, "SVG", "Download the overlay")
    png = saved(tab, "PNG", "Download the overlay")

    assert [svg.name, png.name] == ["colours_attention.svg", "colours_attention.png"]
    root = ElementTree.parse(svg).getroot()
    space = {"svg": "http://www.w3.org/2000/svg"}
    assert root.findtext("svg:title", namespaces=space) == caption.text
    words = [one.text for one in root.iterfind("svg:text", space) if one.get("font-size") == "20"]
    assert words == list(caption.words)
    panels = root.findall("svg:image", space)[:-1]  # without the colour scale
    numbers = range(len(caption.words)) if chosen is None else [chosen]
    assert len(panels) == len(numbers)
    image = Image.open(png)
    assert image.size == (int(root.get("width", "")), int(root.get("height", "")))
    for number, panel in zip(numbers, panels, strict=True):
        wanted = attention_image(
            open_image(tmp_path / "colours.png"),
            caption.alphas[number],
            scale_max=shared_scale(caption.alphas, caption.gates),
            regions=caption.regions,
        )
        x, y, width, height = (int(panel.get(name, "")) for name in ("x", "y", "width", "height"))
        embedded = base64.b64decode(panel.get("href", "").partition(",")[2])
        for picture in (
            Image.open(io.BytesIO(embedded)),
            image.crop((x, y, x + width, y + height)),
        ):
            pixels = np.asarray(picture.convert("RGB").resize((80, 60)), dtype=int)
            assert np.abs(pixels - np.asarray(wanted, dtype=int)).mean() < 4


# --- drop, paste and camera ----------------------------------------------------------------------


def test_files_are_dropped(tab, served, tiny) -> None:
    """A drag of the operating system: Chromium makes the events and the files."""
    devtools = tab.context.new_cdp_session(tab)
    files = [str(tiny.photos / "3.png"), str(tiny.photos / "1.png")]
    data = {"items": [], "files": files, "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver"):
        devtools.send("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": data})
    expect(tab.locator("body")).to_have_class(re.compile("dragging"))
    devtools.send("Input.dispatchDragEvent", {"type": "drop", "x": 300, "y": 300, "data": data})

    expect(tab.locator("body")).not_to_have_class(re.compile("dragging"))
    text = served.model.caption(tiny.photos / "3.png").text
    expect(tab.get_by_role("status")).to_have_text(text)
    expect(tab.locator(".count")).to_have_text("2 of 2 captioned")


def test_a_copied_picture_is_pasted(visit, served, tiny) -> None:
    """Ctrl+V with a picture in the browser's clipboard."""
    granted = ["clipboard-read", "clipboard-write"]
    tab = visit(served.address, allowed=served.address, permissions=granted)
    content = base64.b64encode((tiny.photos / "3.png").read_bytes()).decode()
    tab.evaluate(
        """async (content) => {
            const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
            const picture = new Blob([bytes], {type: "image/png"});
            await navigator.clipboard.write([new ClipboardItem({"image/png": picture})]);
        }""",
        content,
    )

    tab.keyboard.press("Control+V")

    text = served.model.caption(tiny.photos / "3.png").text
    expect(tab.get_by_role("status")).to_have_text(text)


# --- accessibility and print ---------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_page_has_no_accessibility_violations(  # noqa: PLR0917
    scheme, width, visit, served, tiny, tmp_path
) -> None:
    options = {"viewport": {"width": width, "height": 844}, "has_touch": width < 400}
    tab = visit(served.address, allowed=served.address, color_scheme=scheme, **options)
    assert violations(tab) == []
    tab.get_by_role("button", name="Caption", exact=True).click()
    assert violations(tab) == []

    held = Held(tab)
    upload(tab, *[tiny.photos / f"{1 + n % 4}.png" for n in range(9)])
    held.wait(2)
    assert violations(tab) == []
    held.release(all_to_come=True)
    expect(tab.locator(".count")).to_have_text("9 of 9 captioned")
    assert violations(tab) == []
    assert out_of_order(tab) == []

    tab.get_by_label("captions", exact=True).fill("3")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("listbox")).to_have_count(3)
    tab.get_by_role("listbox").get_by_role("option").nth(1).click()
    tab.get_by_role("button", name="zoom in").click()
    (tmp_path / "empty.jpg").touch()
    upload(tab, tmp_path / "empty.jpg")
    expect(tab.get_by_role("alert")).to_contain_text("empty")
    assert violations(tab) == []
    assert out_of_order(tab) == []


def test_all_captions_are_printed_without_controls(visit, served, tiny) -> None:
    tab = visit(served.address, allowed=served.address, color_scheme="dark")
    upload(tab, tiny.photos / "1.png", tiny.photos / "2.png")
    expect(tab.locator(".count")).to_have_text("2 of 2 captioned")
    controls = [".drop", ".options", ".bar-row", ".controls", ".copy", ".overlay"]
    for selector in controls:
        expect(tab.locator(selector)).to_be_visible()

    tab.emulate_media(media="print")

    expect(tab.locator("body")).to_have_css("background-color", "rgb(255, 255, 255)")
    for selector in controls:
        expect(tab.locator(selector)).to_be_hidden()
    for photo in ("1.png", "2.png"):
        expect(
            tab.get_by_text(served.model.caption(tiny.photos / photo).text).first
        ).to_be_visible()
    assert tab.pdf().startswith(b"%PDF")


# --- the method of the maps ----------------------------------------------------------------------


@pytest.mark.usefixtures("refused")
def test_maps_of_another_method(tab, served, tiny) -> None:
    upload(tab, tiny.photos / "1.png")
    caption = served.model.caption(tiny.photos / "1.png")
    method, status = tab.get_by_label("maps"), tab.get_by_role("status")
    expect(method).to_have_value("attention")
    titles = ["attention", "attention × gate", "gradient × input", "Grad-CAM", "occlusion"]
    assert method.locator("option").all_inner_texts() == titles
    expect(tab.locator(".legend")).to_contain_text("share of attention per region")
    tab.get_by_role("listbox").get_by_role("option", name="word 1").first.click()
    sent = posts(tab)

    method.select_option("occlusion")

    expect(tab.locator(".legend")).to_contain_text("share of relevance per region")
    expect(status).to_have_text(caption.text)
    assert len(sent) == 1
    assert sent[0].endswith("&method=occlusion")
    expect(tab.get_by_role("listbox").get_by_role("option", selected=True)).to_have_count(1)
    assert violations(tab) == []
    html = saved(tab, "HTML", "Download the overlay").read_text("utf-8")
    [entry] = content(html)[1]["entries"]
    wanted = served.model.caption(tiny.photos / "1.png", method="occlusion")
    np.testing.assert_allclose(entry["captions"][0]["alphas"], wanted.alphas, atol=2e-3)
    assert "by the method named" in html

    method.select_option("attention")  # which the page has already
    expect(tab.locator(".legend")).to_contain_text("share of attention per region")
    assert len(sent) == 1

    tab.route("**/v1/captions**", lambda route: route.fulfill(status=500, json={"error": "broken"}))
    method.select_option("grad_cam")
    expect(status).to_have_text("Broken.")
    expect(method).to_have_value("attention")


# --- API keys ------------------------------------------------------------------------------------

KEY = "alice-0123456789abcdef"


@pytest.fixture
def keyed(tiny, tmp_path, visit) -> Iterator[Tab]:
    """The page of a server that needs an API key."""
    (tmp_path / "keys.txt").write_text(f"alice {KEY}\n")
    model = load(tiny.model, device="cpu", precision="fp32")
    app = create_app(model, keys=ApiKeys(tmp_path / "keys.txt"), root_path="/photos")
    with serving(app) as address:
        yield visit(f"{address}photos/", allowed=address)
    refused = all("401" in complaint for complaint in visit.complaints)  # the browser's own
    assert refused, visit.complaints
    visit.complaints.clear()


def test_page_asks_for_the_key_once(keyed, visit, tiny) -> None:
    upload(keyed, tiny.photos / "1.png")
    for key in ("wrong", KEY):
        field = keyed.get_by_label("API key").last
        field.fill(key)
        assert violations(keyed) == []
        keyed.keyboard.press("Enter")
        if key == "wrong":
            expect(keyed.get_by_text("does not accept this API key")).to_be_visible()
    expect(keyed.locator(".count")).to_have_text("1 of 1 captioned")
    upload(keyed, tiny.photos / "2.png", tiny.photos / "3.png")
    expect(keyed.locator(".count")).to_have_text("3 of 3 captioned")
    assert keyed.evaluate("localStorage.length") == 0
    assert len(visit.complaints) == 2


def test_a_closed_key_dialog_stops_all_photos(keyed, tiny) -> None:
    upload(keyed, *[tiny.photos / f"{n}.png" for n in (1, 2, 3, 4)])
    dialog = keyed.get_by_role("dialog")
    expect(dialog).to_be_visible()
    keyed.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    button = keyed.get_by_role("button", name="Caption", exact=True)
    expect(button).to_be_focused()
    expect(keyed.get_by_text("This server needs an API key. Press “Caption”").first).to_be_visible()
    expect(keyed.locator(".count")).to_have_text("0 of 4 captioned, 1 failed")
    keyed.wait_for_timeout(300)
    expect(dialog).to_have_count(0)

    button.click()
    keyed.get_by_label("API key").last.fill(KEY)
    keyed.keyboard.press("Enter")

    expect(keyed.locator(".count")).to_have_text("4 of 4 captioned")
