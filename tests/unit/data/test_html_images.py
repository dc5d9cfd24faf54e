"""Images without alternative text in HTML: which they are, and what is written into their tags."""

from __future__ import annotations

from pathlib import Path

import pytest

from captioner.data.html_images import EMPTY, HAS_TEXT, LABELLED, HtmlPage
from captioner.errors import DataError


@pytest.fixture
def page(tmp_path: Path):
    def read(data: str | bytes) -> HtmlPage:
        file = tmp_path / "page.html"
        file.write_bytes(data.encode() if isinstance(data, str) else data)
        return HtmlPage(file)

    return read


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("<img src=a.jpg>", None),
        ("<IMG SRC='a.jpg' />", None),
        ("<input type=Image src=a.jpg>", None),
        ("<area href=/>", None),
        ("<figure><img src=a.jpg><figcaption> </figcaption></figure>", None),
        ("<noscript><img src=a.jpg></noscript>", None),
        ("<p aria-hidden=true>x</p><img src=a.jpg>", None),
        ('<img src=a.jpg alt="A dog">', "with alternative text"),
        ("<img src=a.jpg alt>", EMPTY),
        ('<img src=a.jpg alt="">', EMPTY),
        ('<img src=a.jpg alt="" title=x>', EMPTY),  # browsers ignore the title
        ('<img src=a.jpg alt="" role=none>', "decorative"),
        ('<img src=a.jpg alt="" aria-label=x>', "with a label or caption"),
        ('<a href=/><img src=a.jpg alt=""> Home</a>', EMPTY),
        ('<a href=/ aria-label=Home><img src=a.jpg alt=""></a>', EMPTY),
        ('<a href=/ aria-hidden=true><img src=a.jpg alt=""></a>', "decorative"),
        ('<a href=/><img src=a.jpg alt=""></a>', None),
        ('<a href=/><img src=a.jpg alt=""><img src=b.jpg alt=Home></a>', [EMPTY, HAS_TEXT]),
        ("<button><img src=a.jpg alt></button>", None),
        ('<input type=image src=a.jpg alt="">', None),
        ('<input type=image src=a.jpg alt="" aria-label=Go>', "with a label or caption"),
        ('<figure><img src=a.jpg alt=""><figcaption>A dog</figcaption></figure>', LABELLED),
        ('<img src=a.jpg alt="" b"c>', EMPTY),
        ("<img src=a.jpg role=presentation>", "decorative"),
        ("<img src=a.jpg width=1 height=1>", "decorative"),
        ("<div aria-hidden=true><p><img src=a.jpg></div>", "decorative"),
        ("<img src=a.jpg aria-label=x>", "with a label or caption"),
        ("<img src=a.jpg aria-labelledby=x>", "with a label or caption"),
        (
            "<figure><a href=/><img src=a.jpg></a><figcaption>A <b>dog</b></figcaption></figure>",
            "with a label or caption",
        ),
        ("<!-- <img src=a.jpg> -->", ""),
        ("<script>'<img src=a.jpg>'</script>", ""),
        ("<input type=text><area nohref>", ""),
    ],
)
def test_what_lacks_a_text(source, reason, page) -> None:
    found = page(f"<!doctype html>\n<title>x</title>{source}")
    expected = reason if isinstance(reason, list) else [] if reason == "" else [reason or ""]
    assert [image.reason for image in found.images] == expected


@pytest.mark.parametrize(
    "source",
    [
        "<p>{{ page.title }}</p>",
        "{% if x %}<img src=a.jpg>{% endif %}",
        "<img src='<%= x %>'>",
        "<% if x > 1 %><img src=a.jpg>",
        "<?php echo '<img src=a.jpg>' ?>",
        "---\nlayout: post\n---\n<img src=a.jpg>",
    ],
)
def test_templates_are_refused(source, page) -> None:
    with pytest.raises(DataError, match="a template; build the site"):
        page(source)


def test_what_only_looks_like_a_template_is_read(page) -> None:
    assert (
        page("<pre><code>{{ x }}</code></pre><script>'{{'</script><!-- {% --><p>{ 100% }").images
        == []
    )
    assert page("<?xml version='1.0'?><html>").images == []


def test_where_the_picture_is_and_what_the_image_does(page) -> None:
    found = page(
        """<a href="/"><img src="a.jpg"></a>
        <a href="/b"><img src="data:x" data-src="b.jpg"> Our <b>B</b></a>
        <picture><source srcset="s.jpg 1x, l.jpg 2x"><img src="c.jpg" srcset="d.jpg 9w, e.jpg 80w">
        </picture><button><img></button><input type="image" src="f.jpg"><area href="/c">"""
    )
    assert [(image.sources, image.link) for image in found.images] == [
        (["a.jpg"], "link to / without text"),
        (["b.jpg", "data:x"], 'link to /b with the text "Our B"'),
        (["c.jpg", "e.jpg", "d.jpg", "l.jpg", "s.jpg"], ""),
        ([], "button without text"),
        (["f.jpg"], "button without text"),
        ([], "link to /c without text"),
    ]


def test_damaged_markup_is_read(page) -> None:
    found = page("<a href=/><img alt=Logo><img srcset='a.jpg 1.2.3x'></a><![if x]><img <p></b>")
    assert [image.needs_text for image in found.images] == [False] * 3
    assert len(page("<p><![other[ x ]]><img>").images) == 1


TEXT = 'Zoë’s "dog" & <cat>'


@pytest.mark.parametrize(
    "data",
    [
        "<p>für</p><img src=é.jpg>".encode(),
        b"\xef\xbb\xbf<img src=a.jpg>\r\n\r<b>\n",
        b"<meta charset=iso-8859-1><p>f\xfcr \x80\x81<img\n src=\xe9.jpg\r\n/>",
        b"\xff\xfe" + "<p>für<img>".encode("utf-16-le"),
        "<meta charset='shift_jis'>表示ソ<img src=a.jpg>".encode("shift_jis"),
        b"no charset: f\xfcr \x81<img src=a.jpg class=x>",
        b"<meta charset=utf-8>not UTF-8: \xfc\xff<img src=a.jpg>",
        b"<meta charset=no-such>f\xc3\xbcr\x00<img src=a.jpg><p",
    ],
)
def test_all_other_bytes_stay(data, page) -> None:
    before = page(data)
    [image] = before.images
    written = before.with_texts([(image, TEXT)])
    codec = before.encoding
    start = len(before.text[: image.place[0]].encode(codec, "surrogateescape"))
    added = len(written) - len(data)
    assert written[:start] == data[:start]
    assert written[start + added :] == data[start:]
    assert [(one.alt, one.key) for one in page(written).images] == [(TEXT, image.key)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('<img src="a.jpg" alt="">', '<img src="a.jpg" alt="A dog">'),
        ('<p>für</p><IMG ALT="" src=a.jpg/>', '<p>für</p><IMG alt="A dog" src=a.jpg/>'),
        ("<img src=a.jpg alt>", '<img src=a.jpg alt="A dog">'),
        ("<img\n alt = ''\n src=a.jpg />", '<img\n alt="A dog"\n src=a.jpg />'),
        ('<img data-x="alt=1>2" alt="" alt="b">', '<img data-x="alt=1>2" alt="A dog" alt="b">'),
        ('<img title="x" alt=" " src=a.jpg>', '<img title="x" alt="A dog" src=a.jpg>'),
    ],
)
def test_an_empty_text_is_replaced_in_its_place(before, after, page) -> None:
    found = page(before)
    [image] = found.images
    written = found.with_texts([(image, "A dog")])
    assert written.decode() == after
    assert [(one.alt, one.key) for one in page(written).images] == [("A dog", image.key)]
