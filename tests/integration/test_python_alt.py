"""``captioner.suggest_alt`` and ``captioner.apply_alt``: `captioner alt` from Python."""

from __future__ import annotations

from html import escape
from pathlib import Path
from types import SimpleNamespace

import pytest

import captioner
from captioner.errors import ConfigError, DataError

PAGE = """<p><img src="1.png"></p>
<a href="/about/"><img src="2.png" alt=""></a>
<img src="3.png" alt="">
<img src="gone.png"> <img src="https://cdn.example/a.jpg">
"""


@pytest.fixture
def site(tiny: SimpleNamespace, tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "index.html").write_text(PAGE)
    for name in ("1.png", "2.png", "3.png"):
        (folder / name).write_bytes((tiny.photos / name).read_bytes())
    return folder


def test_texts_are_suggested_reviewed_and_written(tiny, site) -> None:
    found = captioner.suggest_alt(site, model=tiny.model, progress=False, beam_size=1)

    assert [one.image for one in found.images] == [
        "1.png", "2.png", "gone.png", "https://cdn.example/a.jpg",
    ]  # fmt: skip
    assert found.counts['with alt=""'] == 1
    [problem] = found.problems
    assert problem.startswith("index.html:4: gone.png: the file does not exist")
    text = captioner.load(tiny.model).caption(site / "1.png", beam_size=1).text
    assert found.images[0].alt.lower() == f"{text}."
    assert (site / "index.html").read_text() == PAGE
    with pytest.raises(DataError, match="no image is marked as reviewed"):
        captioner.apply_alt(site, found.images)

    found.images[0].reviewed = True
    found.images[1].alt = "About us"
    found.images[1].reviewed = True
    found.images[2].alt = "A correction"
    done = captioner.apply_alt(site, found.images)

    assert (done.written, done.kept) == (2, 0)
    assert done.problems == [
        "index.html:4: the text was changed, but is not marked as reviewed; set reviewed=True"
    ]
    expected = PAGE.replace("<img", f'<img alt="{escape(found.images[0].alt)}"', 1)
    expected = expected.replace('<img src="2.png" alt=""', '<img src="2.png" alt="About us"')
    assert (site / "index.html").read_text() == expected
    assert captioner.apply_alt(site, found.images).kept == 2


def test_a_review_is_not_overwritten(tiny, site, tmp_path) -> None:
    found = captioner.suggest_alt(site, model=captioner.load(tiny.model), empty=True)
    table = tmp_path / "alt.csv"

    assert found.save(table) == tmp_path / "alt.html"
    with pytest.raises(ConfigError, match=r"alt.csv already exists"):
        found.save(table)
    found.save(table, force=True)
    with pytest.raises(ConfigError, match="would be published with the site"):
        found.save(site / "alt.csv")


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("suggest_alt", {"site": "gone"}, "gone is not a folder; pass the folder with"),
        ("apply_alt", {"site": "gone", "texts": "alt.csv"}, "gone is not a folder"),
        ("suggest_alt", {"num_captions": 2}, "an image has only one alternative text"),
    ],
)
def test_wrong_arguments_are_one_line(function, arguments, message, tiny, site) -> None:
    if function == "suggest_alt":
        arguments = {"site": site, "model": tiny.model} | arguments
    with pytest.raises(ConfigError, match=message):
        getattr(captioner, function)(**arguments)
