"""The page in a browser, from the server and as a static site.

Every test fails if the page sends a request to another host, logs an error or violates its policy.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browsing import assert_as_python, drawn, out_of_order, results, saved, violations
from PIL import Image
from playwright.sync_api import Locator, Route, expect
from playwright.sync_api import Page as Tab
from running import running, static_server

from captioner import load
from captioner.cli.caption_formats import FORMATS
from captioner.data.colour import _cicp_profile
from captioner.data.images import open_image
from captioner.data.importers import unchanged_captions
from captioner.drawing.heatmap import attention_image
from captioner.drawing.pages import Entry, gallery
from captioner.serving.app import create_app
from captioner.serving.options import ServeOptions

pytestmark = pytest.mark.slow

LARGEST = 2_000_000  # bytes


@pytest.fixture(scope="module")
def served(tiny) -> Iterator[SimpleNamespace]:
    """``address`` of a server, and the ``model`` behind it."""
    model = load(tiny.model, device="cpu", precision="fp32")
    app = create_app(model, ServeOptions(grace=0, max_bytes=LARGEST, max_beam=4))
    with running(app) as server:
        yield SimpleNamespace(address=f"{server.url}/", model=model)


@pytest.fixture(scope="module", params=["server", "site"])
def page(request) -> Iterator[SimpleNamespace]:
    """``address`` and ``model`` of either kind of page."""
    if request.param == "server":
        yield request.getfixturevalue("served")
        return
    site = request.getfixturevalue("site")
    with static_server(site.folder) as address:
        yield SimpleNamespace(address=address, model=site.model)


@pytest.fixture
def open_page(visit, page) -> Callable[..., Tab]:
    """``open_page(**context options)``: a tab with the page, ready."""

    def opened(**options: Any) -> Tab:
        tab = visit(page.address, allowed=page.address, **options)
        if tab.locator(".device").count():
            expect(tab.locator(".device")).to_contain_text("Ready")
        return tab

    return opened


@pytest.fixture
def tab(visit, served) -> Tab:
    return visit(served.address, allowed=served.address)


def upload(tab: Tab, *photos: Any) -> None:
    tab.locator("#file").set_input_files(photos)


@pytest.fixture
def refused(visit) -> None:
    """Browsers log every failed request to the console, sometimes late."""
    visit.expected.append("console: Failed to load")


def card(tab: Tab, number: int) -> Locator:
    cards = tab.get_by_role("list", name="Photos").get_by_role("button")
    return cards.nth(number - 1)


def posts(tab: Tab) -> list[str]:
    """Return the list of addresses of requests for captions from now on."""
    sent: list[str] = []
    tab.on(
        "request", lambda request: sent.append(request.url) if request.method == "POST" else None
    )
    return sent


# --- on a server and as a site -------------------------------------------------------------------


def test_photos_are_captioned_and_explored(open_page, page, tiny) -> None:
    photos = [tiny.photos / f"{n}.png" for n in (1, 2, 3)]
    tab = open_page()
    assert_as_python(results(tab, *photos), page.model, photos)

    status = tab.get_by_role("status")
    texts = [page.model.caption(photo).text for photo in photos]
    for number, text in list(enumerate(texts, 1))[::-1]:
        card(tab, number).click()
        expect(status).to_have_text(text)
    caption = page.model.caption(photos[0], alternatives=5)
    options = tab.get_by_role("listbox").get_by_role("option")
    options.nth(1).hover()
    image, regions = open_image(photos[0]), caption.regions
    wanted = attention_image(image, caption.alphas[1], regions=regions)
    assert np.abs(drawn(tab) - np.asarray(wanted).astype(int)).max() <= 2
    words = [one.word.replace("<end>", "end of the sentence") for one in caption.alternatives[1]]
    assert tab.locator(".choices li span:first-child").all_inner_texts() == words
    options.nth(1).click()
    tab.keyboard.press("ArrowLeft")
    expect(options.first).to_have_attribute("aria-selected", "true")
    tab.get_by_label("maps").select_option("attention_gate")
    expect(tab.locator(".legend")).to_contain_text("share of relevance")
    tab.get_by_role("button", name="next photo").click()
    expect(status).to_have_text(texts[1])


@pytest.mark.usefixtures("page")
def test_options_and_own_words(open_page, page, tiny, visit) -> None:
    photo = tiny.photos / "2.png"
    tab = open_page()
    status = tab.get_by_role("status")
    results(tab, photo)

    tab.get_by_label("beam size").fill("4")
    tab.get_by_label("Captions", exact=True).fill("3")
    tab.keyboard.press("Enter")

    expect(tab.get_by_role("listbox")).to_have_count(3)
    captions = page.model.captions(photo, beam_size=4, num_captions=3)
    names = [box.get_attribute("aria-label") for box in tab.get_by_role("listbox").all()]
    assert names == [f"Words of the caption: {caption.text}" for caption in captions]

    own = tab.get_by_label("test your own caption")
    own.fill("The man's hat!")
    tab.keyboard.press("Enter")
    expect(status).to_have_text("the man's hat")
    explained = page.model.explain(photo, "the man's hat")
    expect(tab.locator(".total")).to_have_text(f"log p {explained.log_prob:.1f}")

    own.fill("a gryphon runs")
    tab.keyboard.press("Enter")
    expect(status).to_contain_text("he model does not know gryphon")
    own.fill("")  # the photo stays
    tab.keyboard.press("Enter")
    expect(status).not_to_have_class(re.compile("failed"))
    visit.complaints[:] = [one for one in visit.complaints if "Failed to load" not in one]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_page_has_no_accessibility_violations(scheme, width, open_page, tiny, tmp_path) -> None:
    screen = {"width": width, "height": 844}
    tab = open_page(color_scheme=scheme, viewport=screen, has_touch=width < 400)
    assert violations(tab) == []
    results(tab, *sorted(tiny.photos.iterdir()))
    assert violations(tab) == []
    tab.get_by_label("Captions", exact=True).fill("2")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("listbox")).to_have_count(2)
    tab.get_by_role("listbox").get_by_role("option").nth(1).click()
    tab.get_by_role("button", name="zoom in").click()
    (tmp_path / "empty.jpg").touch()
    upload(tab, tmp_path / "empty.jpg")
    expect(tab.get_by_role("alert")).to_contain_text("empty")

    assert violations(tab) == []
    assert out_of_order(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


# --- photos --------------------------------------------------------------------------------------


def test_only_photos_are_sent(tab, served, tmp_path) -> None:
    """A format that only the browser reads is converted: HEIC in Safari, AVIF in Chromium."""
    (tmp_path / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (tmp_path / "notes.jpg").write_bytes(b"no photo at all")
    for name in ("x.avif", "x.png"):
        Image.new("RGB", (64, 48), (200, 30, 40)).save(tmp_path / name)
    sent = posts(tab)

    upload(tab, *(tmp_path / name for name in ("IMG_1.HEIC", "notes.jpg", "x.avif")))

    expect(tab.get_by_role("status")).to_have_text(served.model.caption(tmp_path / "x.png").text)
    alerts = tab.get_by_role("alert")
    expect(alerts).to_contain_text(
        "IMG_1.HEIC: This is a HEIC photo, which this browser cannot convert."
    )
    expect(alerts).to_contain_text("notes.jpg: This is not a photo.")
    assert len(sent) == 1


def quarters(width: int, height: int) -> Image.Image:
    """Return a photo with a different colour in each quarter, so that all orientations differ."""
    image = Image.new("RGB", (width, height), (230, 20, 20))
    image.paste((20, 200, 30), (width // 2, 0, width, height // 2))
    image.paste((20, 30, 220), (0, height // 2, width // 2, height))
    image.paste((240, 240, 20), (width // 2, height // 2, width, height))
    return image


@pytest.mark.parametrize(
    ("orientation", "setting", "size"),
    [(1, 64, [2304, 1536]), (6, 64, [1536, 2304]), (1, 800, [2400, 1600])],
)
def test_a_large_photo_is_made_smaller_and_stays_upright(  # noqa: PLR0917
    orientation, setting, size, tab, served, tmp_path
) -> None:
    """The photo keeps twice the sides of the model's input, here set to 800 pixels.

    Its colours are in Display P3, as in photos from a phone.
    """
    turned = Image.Exif()
    turned[0x0112] = orientation
    photo = quarters(2400, 1600)
    photo.save(tmp_path / "large.jpg", exif=turned, quality=95, icc_profile=_cicp_profile(12, 13))
    with (tmp_path / "large.jpg").open("ab") as file:
        file.write(bytes(LARGEST))  # ignored after the end of the picture
    caption = served.model.caption(tmp_path / "large.jpg")

    def changed(route: Route) -> None:
        response = route.fetch()
        text = response.text().replace('"imageSize":64', f'"imageSize":{setting}')
        route.fulfill(response=response, body=text)

    tab.route(served.address, changed)
    tab.reload()
    with tab.expect_response("**/v1/captions*") as received:
        upload(tab, tmp_path / "large.jpg")

    answer = received.value.json()
    assert [answer["width"], answer["height"]] == size
    assert int(received.value.request.headers.get("content-length", "0")) < 1_000_000
    assert answer["captions"][0]["text"] == caption.text
    assert np.abs(np.array(answer["captions"][0]["alphas"]) - caption.alphas).max() < 0.02
    assert answer["captions"][0]["log_prob"] == pytest.approx(caption.log_prob, abs=0.05)


class Held:
    """Requests for captions that are held back until the test lets them through."""

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
        assert len(self.routes) == count

    def release(self) -> None:
        for route in self.routes:
            route.continue_()
        self.routes.clear()


def test_cancel_and_continue(tab, tiny) -> None:
    held = Held(tab)
    upload(tab, *[tiny.photos / f"{1 + n % 4}.png" for n in range(5)])
    held.wait(2)  # two at a time
    assert violations(tab) == []
    held.release()
    held.wait(2)

    tab.get_by_role("button", name="Cancel").click()

    expect(tab.locator(".count")).to_have_text("2 of 5 captioned")
    expect(tab.get_by_text("not captioned", exact=True)).to_have_count(3)
    expect(tab.get_by_role("button", name="Caption", exact=True)).to_be_focused()
    held.routes.clear()
    held.held = False
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


def test_photos_are_dropped_and_pasted(tab, served, tiny) -> None:
    """A drag of the operating system, for which Chromium makes the events and the files; Ctrl+V."""
    devtools = tab.context.new_cdp_session(tab)
    files = [str(tiny.photos / "3.png"), str(tiny.photos / "1.png")]
    data = {"items": [], "files": files, "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        devtools.send("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": data})

    status, model = tab.get_by_role("status"), served.model
    expect(status).to_have_text(model.caption(tiny.photos / "3.png").text)
    expect(tab.locator(".count")).to_have_text("2 of 2 captioned")

    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    content = base64.b64encode((tiny.photos / "2.png").read_bytes()).decode()
    tab.evaluate(
        """async (content) => {
            const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
            const picture = new Blob([bytes], {type: "image/png"});
            await navigator.clipboard.write([new ClipboardItem({"image/png": picture})]);
        }""",
        content,
    )

    tab.keyboard.press("Control+V")

    expect(status).to_have_text(model.caption(tiny.photos / "2.png").text)


def test_photos_of_folders_are_named_by_their_paths(tab, tiny, tmp_path) -> None:
    """These are the names with which ``captioner apply FOLDER`` finds them."""
    for name in ("holiday/x.png", "holiday/day 2/x.png", "other/x.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(tiny.photos / "1.png", tmp_path / name)
    (tmp_path / "holiday" / "notes.txt").write_text("no photo")
    (tmp_path / "holiday" / ".x.png").write_text("no photo")
    devtools = tab.context.new_cdp_session(tab)

    def drop(*names: str) -> None:
        files = [str(tmp_path / name) for name in names]
        data = {"items": [], "files": files, "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            event = {"type": kind, "x": 300, "y": 300, "data": data}
            devtools.send("Input.dispatchDragEvent", event)

    def named(*names: str) -> None:
        expect(tab.locator(".count")).to_have_text(f"{len(names)} of {len(names)} captioned")
        rows = csv.DictReader(io.StringIO(saved(tab, "CSV").read_text("utf-8")))
        assert sorted(row["image"] for row in rows) == sorted(names)

    tab.locator("#folder").set_input_files(tmp_path / "holiday")
    named("day 2/x.png", "x.png")
    expect(tab.get_by_role("alert")).to_be_empty()
    tab.get_by_role("button", name="Remove all").click()
    drop("holiday")
    named("day 2/x.png", "x.png")
    tab.get_by_role("button", name="Remove all").click()
    drop("holiday", "other")
    named("holiday/day 2/x.png", "holiday/x.png", "other/x.png")
    expect(tab.get_by_role("alert")).to_be_empty()


def test_equal_names_are_reported_before_and_at_the_download(tab, tiny, tmp_path) -> None:
    upload(tab, tiny.photos / "1.png")
    shutil.copy(tiny.photos / "2.png", tmp_path / "1.png")
    upload(tab, tmp_path / "1.png")
    expect(tab.get_by_role("alert")).to_contain_text("1.png")
    upload(tab, tiny.photos / "3.png")
    expect(tab.locator(".count")).to_have_text("3 of 3 captioned")
    saved(tab, "CSV")
    expect(tab.get_by_role("alert")).to_contain_text("1.png")


# --- results -------------------------------------------------------------------------------------


def nearly(data: Any) -> Any:
    """Return a value that equals numbers with small differences, which occur between batches."""
    if isinstance(data, dict):
        return {name: nearly(value) for name, value in data.items()}
    if isinstance(data, list):
        return [nearly(value) for value in data]
    return pytest.approx(data, abs=5e-4) if isinstance(data, float | int) else data


def content(html: str) -> tuple[str, Any]:
    """Return a page without the bytes of its photos, and its data."""
    found = re.search(r'id="captioner-data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    rest = html.replace(found[1], "").replace("&#x27;", "'")
    return re.sub(r"data:image/jpeg;base64,[\w+/=]+", "", rest), json.loads(found[1])


@pytest.mark.parametrize("count", [1, 3])
def test_captions_and_gallery_are_those_that_the_command_writes(  # noqa: PLR0917
    count, tab, visit, served, tiny, tmp_path
) -> None:
    photos = [tmp_path / f"=<{n}> & 'x'.png" for n in range(1, count + 1)]
    for number, photo in enumerate(photos, 1):
        photo.write_bytes((tiny.photos / f"{number}.png").read_bytes())
    upload(tab, *photos)
    expect(tab.locator(".count")).to_have_text(f"{count} of {count} captioned")
    captions = [served.model.captions(photo, alternatives=5) for photo in photos]
    entries = [Entry(*one, one[0].name) for one in zip(photos, captions, strict=True)]
    plain = [served.model.captions(photo) for photo in photos]
    texts = [{"image": e.title, "captions": [c.to_dict() for c in p]}
             for e, p in zip(entries, plain, strict=True)]  # fmt: skip

    made = json.loads(saved(tab, "JSON").read_text("utf-8"))
    assert made == nearly(texts)
    wanted = io.StringIO()
    FORMATS["csv"].write(wanted, made)
    assert saved(tab, "CSV").read_text("utf-8") == wanted.getvalue()
    page = saved(tab, "Gallery")
    text, data = content(page.read_text("utf-8"))
    wanted_text, wanted_data = content(gallery(entries).html)
    assert text == wanted_text
    assert data == nearly(wanted_data)
    opened = visit(page.rename(tmp_path / "all.html").as_uri())
    if count > 1:
        opened.locator(".entry a").last.click()
    opened.get_by_role("listbox").get_by_role("option").first.click()
    expect(opened.locator(".stage")).to_be_visible()


@pytest.mark.usefixtures("refused")
def test_left_out_words_are_grey_in_cards_pictures_and_downloads(tab, tiny) -> None:
    words: list[str] = []

    def said_less(route: Route) -> None:
        if "words=" in route.request.url:
            route.abort()
            return
        response = route.fetch()
        content = response.json()
        one = content["captions"][0]
        words[:] = one["words"]
        lists = ("words", "log_probs", "gates", "alphas")
        rest = {name: one[name][1:] for name in lists}
        rest |= {"text": "and the rest", "truth": [0.25] * len(rest["words"]), "phrases": []}
        said = {name: one[name][:1] for name in lists}
        one |= {**said, "text": words[0], "truth": [0.75], "phrases": [], "left_out": rest}
        route.fulfill(response=response, json=content)

    tab.route("**/v1/captions*", said_less)
    upload(tab, tiny.photos / "1.png")
    shown = card(tab, 1).locator(".text")
    expect(shown).to_contain_text("left out: and the rest")  # the response is there
    expect(shown).to_have_text(f"{words[0]} left out: and the rest")
    expect(shown.locator(".left-out")).to_be_visible()
    expect(tab.get_by_role("status")).to_have_text(words[0])
    [entry] = json.loads(saved(tab, "JSON").read_text("utf-8"))
    [one] = entry["captions"]
    assert (one["text"], one["truth"]) == (words[0], [0.75])
    assert one["left_out"].keys() == {"text", "words", "log_probs", "truth", "phrases"}
    drawing = ElementTree.parse(saved(tab, "SVG", "Download the figure")).getroot()
    titles = [text for text in drawing.iter() if text.get("font-size") == "16"]
    assert [text.text for text in titles] == words
    fills = [text.get("fill") for text in titles]
    assert fills == ["#14141b", *["#5b5b67"] * (len(words) - 1)]
    assert "left-out" in saved(tab, "Gallery").read_text("utf-8")
    field = tab.get_by_label("correct the caption")
    field.fill("a better one")
    field.press("Enter")
    expect(shown).to_have_text("a better one")


@pytest.mark.usefixtures("refused")
def test_captions_are_corrected_least_confident_first(tab, served, tiny) -> None:
    given = [tiny.photos / f"{n}.png" for n in (1, 2, 3, 4)]
    photos = [given[n] for n in (2, 0, 3, 1)]  # least confident first

    def rated(route: Route) -> None:
        if "words=" in route.request.url:
            route.abort()
            return
        data, response = route.request.post_data_buffer or b"", route.fetch()
        rank = next(n for n, photo in enumerate(photos, 1) if photo.read_bytes() in data)
        content = response.json()
        content["captions"][0]["confidence"] = rank / 10
        route.fulfill(response=response, json=content)

    tab.route("**/v1/captions*", rated)
    upload(tab, *given)
    expect(tab.locator(".count")).to_have_text("4 of 4 captioned")
    tab.get_by_label("least confident first").check()
    card(tab, 1).click()
    field = tab.get_by_label("correct the caption")
    expect(field).to_have_value(served.model.caption(photos[0]).text)
    field.fill(' two dogs, "Rex" & Zoë ')
    field.press("Enter")  # saves it, and shows the next one
    expect(field).to_have_value(served.model.caption(photos[1]).text)
    field.fill("left by a click")
    card(tab, 3).click()
    expect(tab.get_by_role("status")).to_have_text(served.model.caption(photos[2]).text)
    field.fill("not wanted")
    field.press("Enter")
    card(tab, 3).click()
    field.fill("")  # restores the model's
    field.press("Enter")

    table = saved(tab, "CSV")
    rows = list(csv.DictReader(io.StringIO(table.read_text("utf-8"))))
    assert [row["image"] for row in rows] == [photo.name for photo in photos]
    kept = [served.model.caption(photo).text for photo in photos[2:]]
    texts = ['two dogs, "Rex" & Zoë', "left by a click", *kept]
    assert [row["caption"] for row in rows] == texts
    assert [bool(row["confidence"]) for row in rows] == [False, False, True, True]
    written = {(photo.name, text) for photo, text in zip(photos[2:], kept, strict=True)}
    assert unchanged_captions(table).keys() == written
    tab.evaluate("Object.defineProperty(crypto, 'subtle', { value: undefined })")  # plain http
    assert unchanged_captions(saved(tab, "CSV")) == {}
    found = json.loads(saved(tab, "JSON").read_text("utf-8"))
    assert [entry["captions"][0]["text"] for entry in found] == texts
    tab.get_by_label("least confident first").uncheck()
    expect(card(tab, 1)).to_contain_text("1.png")


def test_downloads_show_corrected_captions(open_page, page, visit, tiny, tmp_path) -> None:
    """A correction has maps only if the model knows its words."""
    photos = [tiny.photos / f"{n}.png" for n in (1, 2)]
    tab = open_page()
    results(tab, *photos)
    field = tab.get_by_label("correct the caption")
    for text in ("The dog runs!", "Rex & Zoë"):
        field.fill(text)
        field.press("Enter")

    file = saved(tab, "Gallery")
    entries = content(file.read_text("utf-8"))[1]["entries"]
    [mapped], [other] = (entry["captions"] for entry in entries)
    wanted = page.model.explain(photos[0], "the dog runs")
    np.testing.assert_allclose(mapped["alphas"], wanted.alphas, atol=2e-3)
    assert mapped["words"] == ["The", "dog", "runs!"]
    assert mapped.keys().isdisjoint({"confidence", "left_out", "doubtful", "alternatives"})
    assert other == {"text": "Rex & Zoë", "words": [], "corrected": True}
    expect(tab.get_by_role("status")).to_have_text("The dog runs!")
    svg = ElementTree.parse(saved(tab, "SVG", "Download the figure")).getroot()
    assert svg.findtext("{*}title") == "The dog runs!"
    sentence = [one.text for one in svg.iter() if one.get("font-size") == "20"]
    assert sentence == ["The", "dog", "runs!"]
    html = saved(tab, "HTML", "Download the figure").read_text("utf-8")
    assert content(html)[1]["entries"][0]["captions"] == [mapped]
    tab.get_by_label("maps").select_option("attention_gate")
    expect(tab.locator(".legend")).to_contain_text("share of relevance")
    html = saved(tab, "HTML", "Download the figure").read_text("utf-8")
    assert content(html)[1]["entries"][0]["captions"][0]["text"] == "The dog runs!"

    opened = visit(file.rename(tmp_path / "all.html").as_uri())
    opened.locator(".entry a").first.click()
    assert opened.get_by_role("option").all_inner_texts() == [*mapped["words"], "all words"]
    opened.get_by_role("button", name="next photo").click()
    expect(opened.locator(".sentence")).to_have_text("Rex & Zoë")
    assert violations(opened) == []
    visit.complaints[:] = [one for one in visit.complaints if "Failed to load" not in one]


@pytest.mark.parametrize("chosen", [None, 1])
def test_overlays_are_downloaded(chosen, tab, served, tmp_path) -> None:
    quarters(80, 60).save(tmp_path / "colours.png")
    upload(tab, tmp_path / "colours.png")
    caption = served.model.caption(tmp_path / "colours.png")
    if chosen is not None:
        tab.get_by_role("listbox").get_by_role("option").nth(chosen).click()

    svg, png = (saved(tab, name, "Download the figure") for name in ("SVG", "PNG"))

    assert [svg.name, png.name] == ["colours_attention.svg", "colours_attention.png"]
    root = ElementTree.parse(svg).getroot()
    space = {"svg": "http://www.w3.org/2000/svg"}
    assert root.findtext("svg:title", namespaces=space) == caption.text
    words = [one.text for one in root.iterfind("svg:text", space) if one.get("font-size") == "20"]
    assert words == list(caption.words)
    panels = root.findall("svg:image", space)[:-1]  # without the colour scale
    numbers = range(len(caption.words)) if chosen is None else [chosen]
    image = Image.open(png)
    assert image.size == (int(root.get("width", "")), int(root.get("height", "")))
    photo, regions = open_image(tmp_path / "colours.png"), caption.regions
    for number, panel in zip(numbers, panels, strict=True):
        wanted = attention_image(photo, caption.alphas[number], regions=regions)
        x, y, width, height = (int(panel.get(name, "")) for name in ("x", "y", "width", "height"))
        embedded = base64.b64decode(panel.get("href", "").partition(",")[2])
        cropped = image.crop((x, y, x + width, y + height))
        for picture in (Image.open(io.BytesIO(embedded)), cropped):
            pixels = np.asarray(picture.convert("RGB").resize((80, 60)), dtype=int)
            assert np.abs(pixels - np.asarray(wanted, dtype=int)).mean() < 4


def test_all_captions_are_printed_without_controls(tab, served, tiny) -> None:
    upload(tab, tiny.photos / "1.png", tiny.photos / "2.png")
    expect(tab.locator(".count")).to_have_text("2 of 2 captioned")

    tab.emulate_media(media="print")

    for selector in (".drop", ".options", ".bar-row", ".controls", ".copy", ".overlay"):
        expect(tab.locator(selector)).to_be_hidden()
    for photo in ("1.png", "2.png"):
        text = served.model.caption(tiny.photos / photo).text
        expect(tab.get_by_text(text).first).to_be_visible()
    assert tab.pdf().startswith(b"%PDF")


@pytest.mark.usefixtures("refused")
def test_maps_of_another_method(tab, served, tiny) -> None:
    upload(tab, tiny.photos / "1.png")
    method, status = tab.get_by_label("maps"), tab.get_by_role("status")
    titles = ["attention", "attention × gate", "gradient × input", "Grad-CAM", "occlusion"]
    expect(tab.locator(".legend")).to_contain_text("share of attention")
    assert method.locator("option").all_inner_texts() == titles
    sent = posts(tab)

    method.select_option("occlusion")

    expect(tab.locator(".legend")).to_contain_text("share of relevance")
    assert [one.endswith("&method=occlusion") for one in sent] == [True]
    html = saved(tab, "HTML", "Download the figure").read_text("utf-8")
    [entry] = content(html)[1]["entries"]
    wanted = served.model.caption(tiny.photos / "1.png", method="occlusion")
    np.testing.assert_allclose(entry["captions"][0]["alphas"], wanted.alphas, atol=2e-3)

    method.select_option("attention")  # which the page has already
    expect(tab.locator(".legend")).to_contain_text("share of attention")
    assert len(sent) == 1
    tab.route("**/v1/captions**", lambda route: route.fulfill(status=500, json={"error": "broken"}))
    method.select_option("grad_cam")
    expect(status).to_have_text("Broken.")
    expect(method).to_have_value("attention")


# --- API keys ------------------------------------------------------------------------------------


def test_page_asks_for_the_key_once(visit, tiny, tmp_path) -> None:
    """The page also works below a proxy's prefix. Closing the dialog stops all photos."""
    key = "alice-0123456789abcdef"
    (tmp_path / "keys.txt").write_text(f"alice {key}\n")
    model = load(tiny.model, device="cpu", precision="fp32")
    keys = str(tmp_path / "keys.txt")
    app = create_app(model, ServeOptions(grace=0, root_path="/photos", api_key_file=keys))
    with running(app) as server:
        tab = visit(f"{server.url}/photos/", allowed=server.url)
        upload(tab, *[tiny.photos / f"{n}.png" for n in (1, 2, 3, 4)])
        dialog = tab.get_by_role("dialog")
        expect(dialog).to_be_visible()
        tab.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        button = tab.get_by_role("button", name="Caption", exact=True)
        expect(button).to_be_focused()
        expect(tab.locator(".count")).to_have_text("0 of 4 captioned, 1 failed")
        button.click()
        for typed in ("wrong", key):
            tab.get_by_label("API key").last.fill(typed)
            assert violations(tab) == []
            tab.keyboard.press("Enter")
            if typed == "wrong":
                expect(tab.get_by_text("does not accept this API key")).to_be_visible()
        expect(tab.locator(".count")).to_have_text("4 of 4 captioned")
        assert tab.evaluate("localStorage.length") == 0
    assert all("401" in complaint for complaint in visit.complaints)  # the browser's own
    visit.complaints.clear()
