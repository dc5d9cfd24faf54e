"""Pages as files: self-contained, with escaped text and a Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cutting import cut
from picture_helpers import make_caption, noisy
from PIL import Image

from captioner.caption_types import DOUBTFUL, DOUBTFUL_TRUTH, Caption
from captioner.drawing.heatmap import CLOSED_GATE, HEATMAP_STYLE, palette
from captioner.drawing.pages import Entry, embedded, gallery, page
from captioner.errors import ConfigError
from captioner.inference.photo_caption import shown_photo, with_photo

EVIL = '</script><script>bad()</script><img src=x onerror="bad()">\u2028&amp;'


def make(words: tuple[str, ...] = ("a", "dog")) -> Caption:
    return make_caption([*words], (2, 3), alternatives=2)


def photo(size: tuple[int, int] = (60, 40)) -> Image.Image:
    return noisy(size)


class Elements(HTMLParser):
    """The start tags of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def data_of(text: str) -> Any:
    found = re.search(r'id="captioner-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_embeds_the_caption() -> None:
    caption = make()

    data = data_of(page(photo(), caption, title="x.jpg", colormap="magma", scale="common").html)
    plain = data_of(page(photo(), caption).html)["look"]

    assert (plain["palette"], plain["scale"]) == ("", "word")
    assert data["entries"] == [
        {"title": "x.jpg", "labels": [], "captions": [caption.to_dict(attention=True)]}
    ]
    assert np.allclose(data["entries"][0]["captions"][0]["alphas"], caption.alphas, atol=1e-6)
    assert data["look"] == {
        "palette": palette("magma"),
        "heatmap": HEATMAP_STYLE._asdict(),
        "closed_gate": CLOSED_GATE,
        "doubtful_below": DOUBTFUL,
        "doubtful_truth": DOUBTFUL_TRUTH,
        "scale": "common",
        "smooth": True,
        "plain": False,
    }


def test_the_photo_is_embedded_upright_at_the_panel_size(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (40, 90), "red").save(tmp_path / "turned.jpg", exif=turned)

    made = page(tmp_path / "turned.jpg", make(), panel_size=45).html

    (image,) = [attributes for tag, attributes in Elements(made).tags if tag == "img"]
    assert (image["width"], image["height"]) == ("45", "20")
    kind, _, content = str(image["src"]).partition(",")
    assert kind == "data:image/jpeg;base64"
    inside = Image.open(io.BytesIO(base64.b64decode(content)))
    assert inside.size == (45, 20)
    assert np.abs(np.asarray(inside).astype(int) - [255, 0, 0]).max() < 4


def test_text_is_escaped() -> None:
    made = page(photo(), make(("a", EVIL)), title=EVIL, labels=[EVIL]).html

    elements = Elements(made)
    assert [tag for tag, _ in elements.tags if tag == "script"] == ["script"] * 4
    assert [tag for tag, _ in elements.tags if tag == "img"] == ["img"]
    assert not any(name.startswith("on") for _, attributes in elements.tags for name in attributes)
    assert data_of(made)["entries"][0]["captions"][0]["words"] == ["a", EVIL]
    assert f"<h1>{html.escape(EVIL)}</h1>" in made


def test_a_page_makes_no_requests() -> None:
    made = gallery([Entry(photo(), [make()], "x"), Entry(photo(), [make()], "y")]).html

    for _, attributes in Elements(made).tags:
        for name in ("src", "href", "srcset", "action"):
            assert str(attributes.get(name) or "#").startswith(("#", "data:"))
    assert not re.search(r"https?://|@import|url\(", made)


def test_only_the_pages_own_scripts_may_run() -> None:
    made = page(photo(), make(), title=EVIL).html
    elements = Elements(made)

    (rule,) = [
        str(attributes["content"])
        for tag, attributes in elements.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]

    rules = dict(part.split(" ", 1) for part in rule.split("; "))
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == "'none'"
    for kind, count in (("script", 3), ("style", 2)):
        texts = re.findall(rf"<{kind}>(.*?)</{kind}>", made, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts)
        assert rules[f"{kind}-src"].split() == [f"'sha256-{digest}'" for digest in digests]
        assert len(texts) == count


@pytest.mark.parametrize("text", [EVIL, "<!--", "]]>", "\u2029", "naïve 狗 🐕"])
def test_embedded_data_round_trip_and_cannot_close_the_element(text: str) -> None:
    made = embedded({"a": [text]})

    assert Elements(made).tags == [("script", {"type": "application/json", "id": "captioner-data"})]
    inside = made.removeprefix('<script type="application/json" id="captioner-data">')
    inside = inside.removesuffix("</script>")
    assert json.loads(inside) == {"a": [text]}
    assert not set("<>&\u2028\u2029") & set(inside)


def test_an_undecodable_name_is_shown_with_a_question_mark(tmp_path: Path) -> None:
    made = page(photo(), make(), title="\udcffname.jpg")
    made.save(tmp_path / "x.html")

    assert "?name.jpg" in made._repr_html_()
    assert "<h1>?name.jpg</h1>" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_a_photo_that_jpeg_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="65501 x 1 pixels"):
        page(photo((65_501, 1)), make(), panel_size=0)


def test_the_list_of_photos_shows_left_out_words_after_the_caption() -> None:
    made = page(photo(), cut(make(("a", "dog", "<b>")), 2, [0.5] * 3)).html

    assert 'alt="a dog"' in made
    assert re.search(r'>a dog</span> <span class="left-out">.*left out: </span>&lt;b&gt;<', made)


def test_the_list_of_photos_shows_the_confidence() -> None:
    sure = replace(make(), confidence=0.421)
    made = gallery([Entry(photo(), [sure]), Entry(photo(), [make()])]).html
    assert made.count('<span class="sure">42% likely to be right</span>') == 1
    assert made.count('class="sure"') == 1


def test_a_plain_page_has_no_numbers_and_no_left_out_words() -> None:
    truth = [0.5, 0.9, 0.1]
    captions = [replace(cut(make(("a", "dog", "barks")), 2, truth), confidence=0.421)]
    entries = [Entry(photo(), captions, f"{n}.jpg") for n in range(2)]

    made = gallery(entries, plain=True, title="Summer").html

    assert "<h1>Summer</h1>" in made
    elements = Elements(made)
    classes = {attributes.get("class") for _, attributes in elements.tags}
    assert classes.isdisjoint({"sure", "left-out", "numbers"})
    [caption] = data_of(made)["entries"][0]["captions"]
    assert caption.keys() == {"text", "words", "gates", "alphas", "geometry"}
    assert caption["text"] == "a dog"


def test_a_caption_without_words_has_a_page() -> None:
    assert "no words" in page(photo(), make(())).html


def test_a_photo_caption_encodes_its_photo_only_when_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make()
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", None)
        caption = with_photo([plain], shown_photo(photo((1600, 400)), b""))[0]

    assert caption.to_dict(attention=True) == plain.to_dict(attention=True)
    assert isinstance(caption.photo, Image.Image)
    assert caption.photo.size == (640, 160)
    ((_, attributes),) = Elements(caption._repr_html_() or "").tags
    data = data_of(str(attributes["srcdoc"]))
    assert data["entries"][0]["captions"] == [plain.to_dict(attention=True)]
