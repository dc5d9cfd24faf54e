"""Photos given to ``captioner caption`` and ``attend``: folders, lists and patterns."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from captioner.cli import attend as attend_module
from captioner.cli.main import FAILED, INTERRUPTED, OK, USAGE, main

Run = Callable[..., int]


@pytest.fixture
def caption(tiny: SimpleNamespace) -> Run:
    return lambda *given: main(["caption", *map(str, given), "--model", str(tiny.model)])


@pytest.fixture
def attend(tiny: SimpleNamespace) -> Run:
    small = ("--model", str(tiny.model), "--panel-size", "32")
    return lambda *given: main(["attend", *map(str, given), *small])


@pytest.fixture
def folder(tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with ``holiday/1.png`` ... ``holiday/4.png``."""
    shutil.copytree(tiny.photos, tmp_path / "holiday")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def captioned(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """Names of captioned photos, and lines on standard error."""
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    lines = [line for line in out.split("\n") if line and not line.startswith("  ")]
    return [line.partition(": ")[0] for line in lines], err.splitlines()


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))


def pictures(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*_attention.*"))


# --- other files in folders ----------------------------------------------------------------------


def test_files_that_are_not_photos_are_counted(folder, caption, capsys):
    for name in ("a.txt", "b.TXT", "clip.mp4", ".hidden.jpg", ".DS_Store"):
        (folder / "holiday" / name).write_bytes(b"x")
    (folder / "holiday" / "more").mkdir()

    assert caption("holiday") == OK

    photos, notes = captioned(capsys)
    assert photos == [f"holiday/{n}.png" for n in (1, 2, 3, 4)]
    assert notes == [
        "captioner: skipped 2 files that are not photos (2 .txt); 1 video (captioner caption "
        "--every 5s captions their frames); 1 hidden photo; "
        "1 subfolder (give --recursive to search them)"
    ]


def test_a_pipe_costs_no_photo(folder, caption, capsys):
    os.mkfifo(folder / "holiday" / "pipe.jpg")
    for options in ((), ("--in-place",)):
        assert caption("holiday", *options) == FAILED
        assert "pipe.jpg: a pipe, socket or device" in capsys.readouterr().err


def test_photos_that_cannot_be_decoded_make_the_command_fail(folder, caption, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setitem(sys.modules, "rawpy", None)
    for name in ("1.nef", "5.HEIC", "6.heic", "7.CR2", "8.nef", "9.nef", "10.jxl"):
        (folder / "holiday" / name).write_bytes(b"x")

    assert caption("holiday") == FAILED

    photos, notes = captioned(capsys)
    assert len(photos) == 4
    assert sorted(notes) == [
        "captioner: skipped 1 camera RAW file beside a photo of the same name",
        "captioner: skipped 1 photo (1 .jxl): JPEG XL is not supported; convert it to JPEG",
        "captioner: skipped 2 photos (2 .heic): HEIC needs pillow-heif; run: pip install "
        "'captioner[heif]'",
        "captioner: skipped 3 photos (2 .nef, 1 .cr2): camera RAW needs rawpy; run: pip install "
        "'captioner[raw]'",
    ]


# --- lists, patterns, URLs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    [
        b"holiday/2.png\nholiday/1.png\n\n",
        b"holiday/2.png\r\nholiday/1.png",
        b"\xef\xbb\xbfholiday/2.png\nholiday/1.png\n",
        b"holiday/2.png\0holiday/1.png\0",
    ],
    ids=["lines", "windows", "byte order mark", "nul"],
)
def test_a_list_of_names(written, folder, caption, monkeypatch, capsys):
    (folder / "list.txt").write_bytes(written)
    assert caption("--from-file", "list.txt") == OK
    assert captioned(capsys) == (["holiday/2.png", "holiday/1.png"], [])

    feed(monkeypatch, written)
    assert caption("holiday/3.png", "--from-file", "-") == OK
    assert captioned(capsys)[0] == ["holiday/3.png", "holiday/2.png", "holiday/1.png"]


def test_invalid_names_in_a_list_are_reported_with_their_line(folder, caption, capsys):
    (folder / "list.txt").write_text("nowhere.jpg\nholiday/1.png\n\nhttps://a.b/c.jpg\n-\n")

    assert caption("--from-file", "list.txt") == FAILED

    assert captioned(capsys) == (
        ["holiday/1.png"],
        [
            "captioner: list.txt:1: nowhere.jpg: no such file; check the spelling and the folder",
            "captioner: list.txt:4: https://a.b/c.jpg: is a URL; download the image and give the "
            "file",
            "captioner: list.txt:5: ./-: no such file; check the spelling and the folder",
        ],
    )


def test_quoted_patterns_are_expanded(folder, caption, capsys):
    assert caption("holiday/*.png", "holiday/*.jpg") == FAILED
    assert captioned(capsys) == (
        [f"holiday/{n}.png" for n in (1, 2, 3, 4)],
        ["captioner: holiday/*.jpg: no file matches this pattern; check it and the folder"],
    )


def test_a_photo_named_twice_is_captioned_once(folder, caption, capsys):
    assert caption("holiday", "holiday/1.png", "./holiday/2.png") == OK
    assert captioned(capsys) == ([f"holiday/{n}.png" for n in (1, 2, 3, 4)], [])


def test_control_characters_in_names_are_escaped(folder, caption, capsys):
    names = ["new\nline.png", "red\x1b[31m.png", "\x9b2J.png", os.fsdecode(b"bad\xff.png")]
    for name in names:
        shutil.copy(folder / "holiday" / "1.png", folder / name)
    (folder / "\x1b[2Jempty.png").touch()

    assert caption(".") == FAILED

    photos, notes = captioned(capsys)
    assert sorted(photos) == [r"\x9b2J.png", r"bad\udcff.png", r"new\nline.png", r"red\x1b[31m.png"]
    assert r"\x1b[2Jempty.png" in notes[0]
    assert "\x1b" not in "".join(notes)


def test_a_name_that_looks_like_an_option(folder, caption, capsys):
    (folder / "-dash.png").touch()
    assert caption("-dash.png") == USAGE
    assert "give ./-dash.png" in captioned(capsys)[1][0]


# --- attend: where pictures go -------------------------------------------------------------------


def test_pictures_are_saved_beside_their_photos(folder, attend, capsys):
    assert attend("holiday/1.png") == OK

    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("holiday/1.png: ")
    assert second == "  saved as holiday/1_attention.png"
    assert pictures(folder) == ["holiday/1_attention.png"]
    assert attend("holiday/1.png") == USAGE  # never overwritten
    assert "holiday/1_attention.png exists; give --force" in captioned(capsys)[1][0]
    assert attend("holiday/1.png", "--force", "--format", "html") == OK
    assert pictures(folder) == ["holiday/1_attention.html", "holiday/1_attention.png"]


def test_pictures_are_not_photos(folder, attend, caption, capsys):
    assert attend("holiday", "holiday/1.png") == OK
    assert len(pictures(folder)) == 4
    capsys.readouterr()

    assert caption("holiday") == OK
    assert captioned(capsys) == (
        [f"holiday/{n}.png" for n in (1, 2, 3, 4)],
        ["captioner: skipped 4 pictures made by captioner attend"],
    )
    assert caption("holiday/1_attention.png") == OK  # captioned if given by name
    assert captioned(capsys) == (["holiday/1_attention.png"], [])


def test_subfolders_are_searched_and_kept_apart(folder, attend, capsys):
    shutil.copytree(folder / "holiday", folder / "holiday" / "more")
    shutil.copy(folder / "holiday" / "1.png", folder / "holiday" / "1.bmp")

    assert attend("holiday", "--recursive", "-o", "out") == OK

    names = ["1.bmp", "1.png", "2", "3", "4", "more/1", "more/2", "more/3", "more/4"]
    assert pictures(folder / "out") == [f"{name}_attention.png" for name in names]


def test_an_interrupted_run_is_continued(folder, attend, monkeypatch, capsys):
    """Ctrl-C keeps finished pictures; the second run draws the others, with the same bytes."""
    assert attend("holiday", "-o", "whole") == OK
    draw, left = attend_module.overlay, [1, 1]

    def overlay(*given: Any, **options: Any) -> object:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return draw(*given, **options)

    monkeypatch.setattr(attend_module, "overlay", overlay)
    capsys.readouterr()
    assert attend("holiday", "-o", "out") == INTERRUPTED

    assert len(pictures(folder / "out")) == 2
    assert captioned(capsys)[1] == [
        "captioner: 2 of 4 photos are finished; to continue, run the same command with "
        "--skip-existing",
        "captioner: interrupted",
    ]
    monkeypatch.setattr(attend_module, "overlay", draw)
    assert attend("holiday", "-o", "out", "--skip-existing") == OK
    assert captioned(capsys) == (
        ["holiday/3.png", "holiday/4.png"],
        ["captioner: 2 of 4 photos already have a picture; skipped"],
    )
    whole, out = folder / "whole", folder / "out"
    assert pictures(out) == pictures(whole)
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in pictures(out))

    monkeypatch.setattr(
        "captioner.inference.captioner.load_model", None
    )  # nothing to do, so no model is loaded
    assert attend("holiday", "-o", "out", "--skip-existing") == OK
    assert captioned(capsys) == ([], ["captioner: 4 of 4 photos already have a picture; skipped"])
