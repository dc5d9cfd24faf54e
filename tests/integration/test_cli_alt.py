"""``captioner alt``: from a site to a reviewed table and back."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from captioner.cli.main import FAILED, OK, USAGE

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
                    row.update(alt=text, reviewed="yes")
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
    assert code == FAILED  # pictures without a suggestion are reported
    assert "--apply alt.csv" in out
    for reported in ("layout.html", "//cdn.example/3.png", "gone.png", "1 in links"):
        assert reported in err
    rows = table()
    files = ["img/a 1.png"] * 4 + ["blog/img/2.png"] + ["https://cdn.example/3.png", "gone.png"]
    files += ["http://[x", "x" * 300 + ".png"]
    assert sorted(row["image"] for row in rows) == sorted(files)
    assert len({row["alt"] for row in rows if row["image"] == "img/a 1.png"}) == 1
    assert all(row["alt"] for row in rows[:5])
    assert not any(row["alt"] for row in rows[5:])
    assert alt("--apply", "alt.csv")[0] == FAILED  # nothing was reviewed
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


def test_changed_pages_are_reported(alt) -> None:
    alt()
    table(texts={"index.html:3": "A dog", "blog/post.htm:1": "A cat"})
    index = Path("site/index.html")
    index.write_bytes(index.read_bytes().replace(b'<img src="img/a 1.png">', b"", 1))
    Path("site/blog/post.htm").unlink()
    code, _, err = alt("--apply", "alt.csv")
    assert code == FAILED
    assert "index.html:3: <img" in err
    assert "post.htm does not exist" in err
    assert index.read_bytes().count(b'alt="A dog"') == 1


def test_tables_of_strangers_stay_in_the_site(alt) -> None:
    """Every bad row is one line, and the good ones are written."""
    Path("outside.html").write_text("<img src=a.png>")
    Path("site/text.txt").write_text("<img src=a.png>")
    Path("site/good.html").write_text("<img src=a.png>")
    Path("site/link.html").symlink_to("../outside.html")
    names = ["../outside.html", str(Path("outside.html").resolve()), "link.html", "text.txt"]
    tag = "A dog,yes,<img src=a.png>"
    rows = ["page,line,alt,reviewed,tag", *(f"{name},1,{tag}" for name in [*names, "good.html"])]
    Path("alt.csv").write_text("\n".join([*rows, f"good.html,1,{tag}".replace("yes", "maybe")]))
    code, _, err = alt("--apply", "alt.csv")
    assert (code, len(err.splitlines())) == (FAILED, len(names) + 2)
    assert all(f"/{name} ".replace("//", "/") in err for name in names)
    assert "reviewed is 'maybe'" in err
    assert Path("site/good.html").read_text() == '<img alt="A dog" src=a.png>'
    assert Path("outside.html").read_text() == Path("site/text.txt").read_text()


def test_a_correction_without_a_tick_is_reported(alt) -> None:
    alt()
    rows = table(texts={"blog/post.htm:1": "A cat"})
    (text, *_) = (row["alt"] for row in rows if row["alt"] and not row["reviewed"])
    lines = Path("alt.csv").read_text("utf-8")
    Path("alt.csv").write_text(lines.replace(f";{text};", ";A dog;", 1), "utf-8")
    code, _, err = alt("--apply", "alt.csv")
    assert code == FAILED
    assert err.count("the text was changed, but is not reviewed") == 1


@pytest.mark.parametrize(
    "arguments", [["-o", "site/alt.csv"], ["-o", "alt.txt"], ["--num-captions", "2"]]
)
def test_usage_errors(arguments, alt) -> None:
    assert alt(*arguments)[0] == USAGE
    assert not list(Path().glob("**/alt.*"))


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
    tab.keyboard.press("Tab")
    tab.keyboard.press("Space")  # no key takes back a correction
    expect(card.get_by_role("checkbox")).to_be_checked()
    expect(tab.get_by_role("status")).to_have_text("3 of 9 reviewed")  # the same picture thrice
    with tab.expect_download() as download:
        tab.get_by_role("link", name="Download alt.csv").click()
    assert alt("--apply", download.value.path())[0] == OK
    changed = [name for name, data in contents().items() if data != before[name]]
    assert sorted(changed) == ["index.html", "post.htm"]
    assert contents()["index.html"].count(b"Rex") == 2
