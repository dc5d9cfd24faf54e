"""The page as a file: everything inside, nothing from outside, text that stays text."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from captioner.caption import Alternative, Caption
from captioner.errors import ConfigError
from captioner.visualization import Entry, PhotoCaption, animate, gallery, overlay, page
from captioner.visualization.document import document, embedded, policy
from captioner.visualization.heatmap import LIGHT, palette

EVIL = '</script><script>bad()</script><img src=x onerror="bad()">\u2028&amp;'


def make(words: tuple[str, ...] = ("a", "dog"), grid: tuple[int, int] = (2, 3)) -> Caption:
    count = len(words)
    alphas = np.random.default_rng(0).dirichlet(np.ones(grid[0] * grid[1]), count)
    return Caption(
        words=words,
        log_probs=np.full(count, -0.5, dtype=np.float32),
        alphas=alphas.reshape(count, *grid).astype(np.float32),
        gates=np.full(count, 0.25, dtype=np.float32),
        log_prob=-1.5,
        alternatives=((Alternative("a", -0.5), Alternative("the", -2.0)),) * count,
    )


def photo(size: tuple[int, int] = (60, 40)) -> Image.Image:
    return Image.linear_gradient("L").resize(size).convert("RGB")


class Elements(HTMLParser):
    """The start tags of a document, and the text of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in self.inside:
            self.inside[self.tags[-1][0]].append(data)


def data_of(text: str) -> Any:
    found = re.search(r'id="captioner-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_what_the_caption_says() -> None:
    caption = make()

    told = data_of(page(photo(), caption, title="x.jpg").html)

    assert told["entries"] == [
        {"title": "x.jpg", "labels": [], "captions": [caption.as_dict(attention=True)]}
    ]
    assert np.allclose(told["entries"][0]["captions"][0]["alphas"], caption.alphas, atol=1e-6)
    assert told["look"] == {"palette": palette(), "light": LIGHT._asdict(), "smooth": True}


def test_the_photo_is_inside_upright_and_of_the_size_that_was_asked(tmp_path: Path) -> None:
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


def test_text_stays_text() -> None:
    made = page(photo(), make(("a", EVIL)), title=EVIL, labels=[EVIL]).html

    elements = Elements(made)
    assert [tag for tag, _ in elements.tags if tag == "script"] == ["script"] * 3
    assert [tag for tag, _ in elements.tags if tag == "img"] == ["img"]
    assert not any(name.startswith("on") for _, attributes in elements.tags for name in attributes)
    assert data_of(made)["entries"][0]["captions"][0]["words"] == ["a", EVIL]
    assert f"<h1>{html.escape(EVIL)}</h1>" in made


def test_nothing_comes_from_outside() -> None:
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
    for kind in ("script", "style"):
        texts = re.findall(rf"<{kind}>(.*?)</{kind}>", made, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts)
        assert rules[f"{kind}-src"].split() == [f"'sha256-{digest}'" for digest in digests]
        assert len(texts) == 2


def test_the_policy_of_a_page_without_scripts_allows_none() -> None:
    rules = policy(document("x", "<body></body>", styles=[], scripts=[]), connect="'self'")

    assert "script-src 'none'" in rules
    assert "connect-src 'self'" in rules


@pytest.mark.parametrize("text", [EVIL, "<!--", "]]>", "\u2029", "naïve 狗 🐕"])
def test_embedded_data_come_back_and_cannot_leave(text: str) -> None:
    made = embedded({"a": [text]}, "it")

    assert Elements(made).tags == [("script", {"type": "application/json", "id": "it"})]
    inside = made.removeprefix('<script type="application/json" id="it">')
    inside = inside.removesuffix("</script>")
    assert json.loads(inside) == {"a": [text]}
    assert not set("<>&\u2028\u2029") & set(inside)


def test_a_page_is_saved_under_an_html_name_only(tmp_path: Path) -> None:
    made = page(photo(), make())

    made.save(tmp_path / "x.html")

    assert (tmp_path / "x.html").read_text(encoding="utf-8") == made.html
    with pytest.raises(ConfigError, match=r"x\.png.*\.html"):
        made.save(tmp_path / "x.png")
    assert [p.name for p in tmp_path.iterdir()] == ["x.html"]


def test_the_same_page_is_the_same_bytes() -> None:
    assert page(photo(), make()).html == page(photo(), make()).html


def test_the_theme_is_the_readers_unless_it_is_given() -> None:
    assert "data-theme" not in page(photo(), make()).html.partition("<style>")[0]
    assert '<html lang="en" data-theme="dark">' in page(photo(), make(), theme="dark").html


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(ConfigError, match="one photo or more"):
        gallery([])
    with pytest.raises(ConfigError, match="2 labels for 1 captions"):
        page(photo(), make(), labels=["x", "y"])
    with pytest.raises(ConfigError, match="photo 1 of the page has no caption"):
        page(photo(), [])
    with pytest.raises(ConfigError, match="unknown colormap 'jet'"):
        page(photo(), make(), colormap="jet")
    with pytest.raises(ConfigError, match="unknown theme '\">'; choose one of auto, "):
        page(photo(), make(), theme='">')
    with pytest.raises(ConfigError, match=r"1: 65600 x 2 pixels, .* 65500 a side; give a pan"):
        page(Image.new("RGB", (65_600, 2)), make(), panel_size=0)
    broken = make()
    broken.alphas[0, 0, 0] = np.nan
    with pytest.raises(ConfigError, match="NaN"):
        page(photo(), broken)
    unknown = make()
    unknown.gates[0] = np.inf
    with pytest.raises(ConfigError, match="log_probs or gates of 'a dog'"):
        page(photo(), unknown)
    short = make()
    object.__setattr__(short, "alphas", short.alphas[:1])
    with pytest.raises(ConfigError, match=r"alphas of a caption of 2 words"):
        page(photo(), short)


def test_what_is_no_caption_or_no_entry_is_named() -> None:
    for draw in (overlay, animate, page):
        for given in ("a dog", None, 3):
            with pytest.raises(ConfigError, match=rf"not {type(given).__name__}; give one"):
                draw(photo(), given)
    with pytest.raises(ConfigError, match="not list; give one"):
        animate(photo(), [make()])
    with pytest.raises(ConfigError, match=r"photo 1 .* str; give captioner\.Entry\("):
        gallery(["photo.jpg"])


def test_a_name_that_is_no_text_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    page(photo(), make(), title="\udcffname.jpg").save(tmp_path / "x.html")

    assert "<h1>?name.jpg</h1>" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_a_caption_without_words_has_a_page() -> None:
    empty = Caption(
        (), np.zeros(0, np.float32), np.zeros((0, 2, 3), np.float32), np.zeros(0, np.float32), -1.0
    )

    assert "no words" in page(photo(), empty).html


def test_a_notebook_shows_a_page_in_a_frame_of_its_own() -> None:
    made = page(photo(), make(("a", EVIL)))

    ((tag, attributes),) = Elements(made._repr_html_()).tags

    assert tag == "iframe"
    assert attributes["srcdoc"] == made.html
    assert attributes["sandbox"] == "allow-scripts"


def test_a_caption_of_a_photo_shows_itself_and_is_still_the_caption() -> None:
    plain = make()

    caption = PhotoCaption.of([plain], photo((1600, 400)))[0]

    assert caption.as_dict(attention=True) == plain.as_dict(attention=True)
    with Image.open(io.BytesIO(caption.photo)) as small:
        assert small.size == (640, 160)
    ((_, attributes),) = Elements(caption._repr_html_()).tags
    told = data_of(str(attributes["srcdoc"]))
    assert told["entries"][0]["captions"] == [plain.as_dict(attention=True)]
