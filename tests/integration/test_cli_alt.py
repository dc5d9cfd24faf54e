"""``captioner alt``: from a site to a reviewed table and back."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from captioner.cli.main import NOT_DONE, OK, SOME_FAILED
from captioner.drawing.pages import review_id

INDEX = """<!doctype html>\r
<a href="/about/"><img src="/img/a%201.png?v=2"></a>
<img src="img/a 1.png"><img src="img/a 1.png">
<img src="img/a 1.png" alt="">
<img src="https://me.example/blog/img/2.png"> <img src="//cdn.example/3.png"> <img src=gone.png>
<img src="http://[x"><img src="LONG.png">
""".replace("LONG", "x" * 300)
POST = '<meta charset="iso-8859-1"><p>f\xfcr</p><img src="../img/a 1.png">'
TEMPLATE = '<img src="{{ image }}"><img src="img/a 1.png">'


@pytest.fixture
def alt(tiny, tmp_path, monkeypatch, run) -> Callable[..., tuple[int, str, str]]:
    """Runs the command beside ``site``."""
    monkeypatch.chdir(tmp_path)
    pages = {"index.html": INDEX.encode(), "blog/post.htm": POST.encode("latin-1"),
             "layout.html": TEMPLATE.encode()}  # fmt: skip
    for name, data in pages.items():
        file = Path("site", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    for name, photo in (("img/a 1.png", "1.png"), ("img/2.png", "2.png"), ("blog/img", None)):
        Path("site", name).parent.mkdir(exist_ok=True)
        if photo:
            Path("site", name).write_bytes((tiny.photos / photo).read_bytes())
    Path("site/blog/img").symlink_to("../img")
    return lambda *arguments: run("alt", "site", *arguments, "--model", tiny.model)


def table(**changes: Any) -> list[dict[str, str]]:
    """The rows of alt.csv; ``changes(rows)`` are written back."""
    rows = list(csv.DictReader(Path("alt.csv").read_text("utf-8-sig").splitlines()))
    if changes:
        for place, text in changes["texts"].items():
            for row in rows:
                if f"{row['page']}:{row['line']}" == place:
                    row.update(alt=text, reviewed="x")
        with Path("alt.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter=";")  # as some spreadsheets do
            writer.writeheader()
            writer.writerows(rows)
    return rows


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path("site").glob("**/*.htm*")}


def test_only_what_was_reviewed_is_written(alt) -> None:
    before = contents()
    code, out, err = alt("--url", "https://me.example/")
    assert code == SOME_FAILED  # pictures without a suggestion are reported
    assert "--apply alt.csv" in out
    for reported in (
        "layout.html",
        "//cdn.example/3.png",
        "gone.png",
        "1 listed image is the only content of a link",
    ):
        assert reported in err
    rows = table()
    files = ["img/a 1.png"] * 4 + ["blog/img/2.png"] + ["https://cdn.example/3.png", "gone.png"]
    files += ["http://[x", "x" * 300 + ".png"]
    assert sorted(row["image"] for row in rows) == sorted(files)
    assert len({row["suggested"] for row in rows if row["image"] == "img/a 1.png"}) == 1
    assert all(row["suggested"] for row in rows[:5])
    assert not any(row["suggested"] for row in rows[5:])
    linked = [row["link"] for row in rows[:5] if not row["alt"]]
    assert linked == ["link to /about/ without text"]  # a person writes where it leads
    assert alt("--apply", "alt.csv")[0] == NOT_DONE  # nothing was reviewed
    assert contents() == before

    table(texts={"blog/post.htm:1": 'für "Zoë" 犬', "index.html:2": "About us"})
    assert alt("--apply", "alt.csv")[0] == OK
    written = contents()
    assert written["layout.html"] == before["layout.html"]
    assert written["post.htm"] == before["post.htm"].replace(
        b"<img", '<img alt="für &quot;Zoë&quot; &#29356;"'.encode("latin-1")
    )
    assert written["index.html"] == before["index.html"].replace(b"<img", b'<img alt="About us"', 1)
    assert alt("--apply", "alt.csv")[0] == OK  # again
    assert contents() == written


def test_a_review_is_continued_after_the_site_was_built_again(alt) -> None:
    alt()
    table(texts={"index.html:2": "About us", "blog/post.htm:1": "A cat"})
    reviewed, page = Path("alt.csv").read_bytes(), Path("alt.html").read_bytes()
    index = Path("site/index.html")
    index.write_text(f"{INDEX}\n<p>New:</p>\n<img src=/img/2.png>")
    code, _, err = alt()
    assert (code, "--resume" in err) == (NOT_DONE, True)
    assert (Path("alt.csv").read_bytes(), Path("alt.html").read_bytes()) == (reviewed, page)

    assert alt("--resume")[0] == SOME_FAILED  # pictures without a suggestion
    *kept, new = table()
    assert (new["image"], bool(new["alt"]), new["reviewed"]) == ("img/2.png", True, "")
    texts = {row["page"]: row["alt"] for row in kept if row["reviewed"]}
    assert texts == {"index.html": "About us", "blog/post.htm": "A cat"}
    assert review_id(Path("alt.html")) in page.decode()  # the browser finds what it has stored
    assert alt("--apply", "alt.csv")[0] == OK
    assert index.read_text().count('alt="About us"') == 1
    assert alt("--resume", "--apply", "alt.csv")[0] == NOT_DONE


def test_pictures_outside_the_site_are_not_shown(alt, tiny) -> None:
    """A table from a stranger may contain any name."""
    Path("secret.png").write_bytes((tiny.photos / "1.png").read_bytes())
    Path("alt.csv").write_text(
        "page,image,alt,reviewed,tag,suggested\n"
        "gone.html,../secret.png,A,yes,<img>,A\ngone.html,gone.png,A,yes,<img>,A\n"
    )
    assert alt("--resume")[0] == SOME_FAILED
    text = Path("alt.html").read_text()
    assert '"../secret.png":' not in text
    assert "secret.png" in text


@pytest.mark.parametrize("name", ["hugo.toml", "_config.yml", "mkdocs.yml"])
def test_the_sources_of_a_site_are_an_error(name, tmp_path, run) -> None:
    (tmp_path / name).touch()
    code, _, err = run("alt", str(tmp_path))
    assert (code, name in err) == (NOT_DONE, True)


def test_changed_pages_are_reported(alt) -> None:
    alt()
    table(texts={"index.html:3": "A dog", "blog/post.htm:1": "A cat"})
    index = Path("site/index.html")
    before = index.read_bytes().replace(b'<img src="img/a 1.png">', b"", 1)
    index.write_bytes(before)  # of two equal images, one is left
    Path("site/blog/post.htm").unlink()
    code, _, err = alt("--apply", "alt.csv")
    assert code == SOME_FAILED
    assert err.count("index.html:3: <img") == 2
    assert "post.htm: the file does not exist" in err
    assert index.read_bytes() == before


def test_tables_of_strangers_stay_in_the_site(alt) -> None:
    """Every bad row is one line, and the good ones are written."""
    Path("outside.html").write_text("<img src=a.png>")
    Path("site/text.txt").write_text("<img src=a.png>")
    Path("site/good.html").write_text("<img src=a.png>")
    Path("site/link.html").symlink_to("../outside.html")
    names = ["../outside.html", str(Path("outside.html").resolve()), "link.html", "text.txt"]
    tag = 'A dog,yes,<img src="a.png">'
    rows = ["page,line,alt,reviewed,tag", *(f"{name},1,{tag}" for name in [*names, "good.html"])]
    Path("alt.csv").write_text("\n".join([*rows, f"good.html,1,{tag}".replace("yes", "maybe")]))
    code, _, err = alt("--apply", "alt.csv")
    assert (code, len(err.splitlines())) == (SOME_FAILED, len(names) + 2)
    assert all(f"/{name}: ".replace("//", "/") in err for name in names)
    assert "the column 'reviewed' has 'maybe'" in err
    assert Path("site/good.html").read_text() == '<img alt="A dog" src=a.png>'
    assert Path("outside.html").read_text() == Path("site/text.txt").read_text()


def test_a_correction_without_a_tick_is_reported(alt) -> None:
    alt()
    rows = table(texts={"blog/post.htm:1": "A cat"})
    (text, *_) = (row["alt"] for row in rows if row["alt"] and not row["reviewed"])
    lines = Path("alt.csv").read_text("utf-8")
    Path("alt.csv").write_text(lines.replace(f";{text};", ";A dog;", 1), "utf-8")
    code, _, err = alt("--apply", "alt.csv")
    assert code == SOME_FAILED
    assert err.count("the text was changed but is not reviewed") == 1


@pytest.mark.parametrize(
    "arguments", [["-o", "site/alt.csv"], ["-o", "alt.txt"], ["--num-captions", "2"]]
)
def test_usage_errors(arguments, alt) -> None:
    assert alt(*arguments)[0] == NOT_DONE
    assert not list(Path().glob("**/alt.*"))


# --- images with alt="" ---

GENERATED = {
    # `![](1.png)` and `[![](2.png)](about.md)` as the generators write them.
    "hugo": (
        '<p><img src="/1.png" alt="">',
        '\n<a href="/about/"><img src="/2.png" alt=""></a></p>',
    ),
    "jekyll": (
        '<p><img src="/1.png" alt="" />',
        '\n<a href="/a/"><img src="/2.png" alt="" /></a></p>',
    ),
    "mkdocs": (
        '<p><img alt="" src="1.png" />',
        '\n<a href="a/"><img alt="" src="2.png" /></a></p>',
    ),
}


@pytest.fixture
def generated(tiny, tmp_path, monkeypatch, run, request) -> Callable[..., tuple[int, str, str]]:
    """Run the command next to ``site``, with a page of the generator that ``request`` names."""
    monkeypatch.chdir(tmp_path)
    Path("site").mkdir()
    Path("site/index.html").write_text("".join(GENERATED[request.param]))
    for name in ("1.png", "2.png"):
        Path("site", name).write_bytes((tiny.photos / name).read_bytes())
    return lambda *arguments: run("alt", "site", *arguments, "--model", tiny.model)


@pytest.mark.parametrize("generated", GENERATED, indirect=True)
def test_an_empty_text_is_listed_where_a_link_has_nothing_else(generated) -> None:
    code, _, err = generated()
    assert code == OK
    assert '1 image has alt="", because the image is decorative' in err
    assert "add --empty" in err
    assert [(row["image"], row["before"]) for row in table()] == [("2.png", "empty")]


@pytest.mark.parametrize("generated", GENERATED, indirect=True)
def test_empty_texts_are_listed_on_request_and_written(generated) -> None:
    before = contents()["index.html"].decode()
    code, _, err = generated("--empty")
    assert (code, "--empty" in err) == (OK, False)
    rows = table()
    assert sorted(row["image"] for row in rows) == ["1.png", "2.png"]
    assert all(row["suggested"] for row in rows)
    first, second = ('alt=""', 'alt="A dog"'), ('alt=""', 'alt="About us"')
    lines = {row["image"]: f"index.html:{row['line']}" for row in rows}
    table(texts={lines["1.png"]: "A dog", lines["2.png"]: "About us"})
    assert generated("--apply", "alt.csv")[0] == OK
    after = contents()["index.html"].decode()
    assert after == before.replace(*first, 1).replace(*second, 1)
    code, _, err = generated("--apply", "alt.csv")
    assert (code, "0 alternative texts written, 2 already in the pages" in err) == (OK, True)
    assert contents()["index.html"].decode() == after


def test_a_decorative_image_stays_empty_but_a_link_does_not(alt) -> None:
    """An image that is all of a link cannot be reviewed as decorative."""
    Path("site/index.html").write_text(
        '<img src="img/2.png" alt="">\n<a href="/"><img src="img/2.png" alt=""></a>'
    )
    Path("site/blog/post.htm").unlink()
    alt("--empty")
    before = contents()
    table(texts={"index.html:1": "", "index.html:2": ""})
    code, _, err = alt("--apply", "alt.csv")
    assert code == SOME_FAILED
    assert 'index.html:2: <img src="img/2.png"> is the only content of a link or button' in err
    assert "0 alternative texts written, 1 already in the pages" in err
    assert contents() == before


def test_only_failures_have_an_exit_status(alt) -> None:
    """Not pictures of other servers, drawings and spacers, which have a note or are left alone."""
    from PIL import Image

    Path("site/logo.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    Image.new("RGB", (1, 1)).save("site/pixel.gif")
    Path("site/layout.html").unlink()
    Path("site/index.html").write_text(
        "<img src=logo.svg><img src=https://cdn.example/a.jpg><img src=pixel.gif>"
        "<img src=img/2.png>"
    )
    code, _, err = alt()
    assert code == OK
    assert "logo.svg: the file is an SVG drawing, not a supported image" in err
    assert "a.jpg: the picture is on a different server and is not fetched" in err
    assert "1 decorative" in err
    assert len([row for row in table() if row["note"]]) == 2
    Path("site/img/2.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    code, _, err = alt("--force")
    assert code == SOME_FAILED
    assert err.count("img/2.png: ") == 1


# --- the page ---


@pytest.mark.slow
def test_the_table_is_reviewed_in_a_browser(alt, visit) -> None:
    from browsing import violations
    from playwright.sync_api import expect

    alt()
    before = contents()
    tab = visit(Path("alt.html").resolve().as_uri())
    assert violations(tab) == []
    card = tab.locator(".review li").filter(has_text="post.htm:1")
    card.get_by_role("textbox").fill('=Two dogs, "Rex" & Zoë')
    expect(card.get_by_role("checkbox")).to_be_checked()
    expect(card).to_contain_text("reviewed with your text in place of")
    expect(tab.get_by_role("status")).to_have_text("3 of 9 reviewed, not downloaded yet")
    with tab.expect_download() as download:
        tab.get_by_role("link", name="Download alt.csv").click()
    expect(tab.get_by_role("status")).to_have_text("3 of 9 reviewed")  # the same picture thrice
    assert alt("--apply", download.value.path())[0] == OK
    changed = [name for name, data in contents().items() if data != before[name]]
    assert sorted(changed) == ["index.html", "post.htm"]
    assert contents()["index.html"].count(b"Rex") == 2

    Path("alt.csv").write_bytes(Path(download.value.path()).read_bytes())
    alt("--resume")
    tab = visit(Path("alt.html").resolve().as_uri())
    last = tab.locator(".review li").last
    expect(last.get_by_role("textbox")).to_have_value('=Two dogs, "Rex" & Zoë')
    expect(last.get_by_role("checkbox")).to_be_checked()
    expect(last).to_contain_text("reviewed with your text in place of")
    expect(tab.get_by_role("status")).to_have_text("3 of 9 reviewed")


@pytest.mark.slow
def test_no_key_takes_a_correction_back(alt, visit) -> None:
    """The review as a person does it who has no mouse."""
    from playwright.sync_api import expect

    Path("site/index.html").write_text(
        '<img src="img/2.png">\n<a href="/"><img src="img/a 1.png"></a>\n<img src="logo.svg">'
    )
    Path("site/logo.svg").write_text("<svg/>")
    Path("site/blog/post.htm").unlink()
    alt()
    tab = visit(Path("alt.html").resolve().as_uri())
    keyboard, status = tab.keyboard, tab.get_by_role("status")

    def card(text: str) -> Any:
        return tab.locator(".review li").filter(has_text=text)

    def write(text: str) -> None:
        keyboard.press("Control+a")
        keyboard.press("Delete")
        keyboard.type(text)

    def focus(one: Any) -> None:
        for _ in range(20):
            keyboard.press("Tab")
            if one.evaluate("one => one === document.activeElement"):
                return
        raise AssertionError("the Tab key does not reach it")

    photo, link, logo = card("index.html:1"), card("index.html:2"), card("index.html:3")
    focus(photo.get_by_role("textbox"))
    write("A correction")
    keyboard.press("Tab")
    keyboard.press("Space")  # as the page asks for texts that are right
    expect(photo.get_by_role("checkbox")).to_be_checked()
    expect(photo).to_contain_text("reviewed with your text in place of")
    expect(status).to_have_text("1 of 3 reviewed, not downloaded yet")

    tab.once("dialog", lambda dialog: dialog.dismiss())
    tab.evaluate("location.reload()")  # the browser asks, and the person stays
    expect(photo.get_by_role("textbox")).to_have_value("A correction")
    tab.once("dialog", lambda dialog: dialog.accept())
    tab.reload()  # the person insists, and the browser has kept the text
    expect(photo.get_by_role("textbox")).to_have_value("A correction")
    expect(status).to_have_text("1 of 3 reviewed")

    focus(link.get_by_role("textbox"))
    write("")
    keyboard.press("Tab")
    keyboard.press("Space")
    expect(link.get_by_role("checkbox")).not_to_be_checked()
    expect(link).to_contain_text("contains nothing else, so it needs a text")
    keyboard.press("Shift+Tab")
    write("Home")
    focus(logo.get_by_role("checkbox"))
    keyboard.press("Space")  # empty, as it was
    expect(logo).to_contain_text('reviewed as decorative, with alt=""')
    focus(photo.get_by_role("textbox"))
    write("")
    expect(photo).to_contain_text('reviewed as decorative, with alt=""')
    expect(status).to_have_text("3 of 3 reviewed, not downloaded yet")
    focus(tab.get_by_role("link"))
    with tab.expect_download() as download:
        keyboard.press("Enter")
    assert alt("--apply", download.value.path())[0] == OK
    assert Path("site/index.html").read_text() == (
        '<img alt="" src="img/2.png">\n<a href="/"><img alt="Home" src="img/a 1.png"></a>\n'
        '<img alt="" src="logo.svg">'
    )
