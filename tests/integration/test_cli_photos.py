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
from captioner.cli.main import INTERRUPTED, NOT_DONE, OK, SOME_FAILED

Run = Callable[..., tuple[int, list[str], list[str]]]
ALL = [f"holiday/{n}.png" for n in (1, 2, 3, 4)]


@pytest.fixture
def lines(run: Any) -> Run:
    """A command's exit code, the photos that it lists, and its lines on standard error."""

    def command(*arguments: object) -> tuple[int, list[str], list[str]]:
        code, out, err = run(*arguments)
        listed = [line for line in out.split("\n") if line and not line.startswith("  ")]
        return code, [line.partition(": ")[0] for line in listed], err.splitlines()

    return command


@pytest.fixture
def caption(tiny: SimpleNamespace, lines: Run) -> Run:
    return lambda *given: lines("caption", *given, "--model", tiny.model)


@pytest.fixture
def attend(tiny: SimpleNamespace, lines: Run) -> Run:
    return lambda *given: lines("attend", *given, "--model", tiny.model, "--panel-size", 32)


@pytest.fixture
def folder(tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with ``holiday/1.png`` ... ``holiday/4.png``."""
    shutil.copytree(tiny.photos, tmp_path / "holiday")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pictures(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*_attention.*"))


# --- other files in folders ----------------------------------------------------------------------


def test_files_that_are_not_photos_are_counted(folder, caption):
    for name in ("a.txt", "b.TXT", "clip.mp4", ".hidden.jpg", ".DS_Store"):
        (folder / "holiday" / name).write_bytes(b"x")
    (folder / "holiday" / "more").mkdir()

    note = (
        "captioner: skipped 2 files that are not photos (2 .txt); 1 video ("
        "for videos, run captioner caption --every 5s); 1 hidden photo; "
        "1 subfolder (add --recursive to search them)"
    )
    assert caption("holiday") == (OK, ALL, [note])


def test_the_folder_of_copies_is_not_searched(folder, caption):
    copies = ("--recursive", "--embed", "holiday/copies", "--existing", "replace")
    for _ in range(2):
        code, photos, notes = caption("holiday", *copies)
        assert (code, photos) == (OK, ALL)
    assert notes[-1] == "captioner: skipped 4 photos in the folder of --embed, holiday/copies"
    assert not (folder / "holiday/copies/copies").exists()


def test_photos_that_cannot_be_decoded_make_the_command_fail(folder, caption, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setitem(sys.modules, "rawpy", None)
    for name in ("1.nef", "5.HEIC", "6.heic", "7.CR2", "8.nef", "9.nef", "10.jxl"):
        (folder / "holiday" / name).write_bytes(b"x")

    code, photos, notes = caption("holiday")

    assert (code, photos) == (SOME_FAILED, ALL)
    assert sorted(note.partition(":")[2].partition(":")[0] for note in notes) == [
        " skipped 1 camera RAW file next to a photo of the same name",
        " skipped 1 photo (1 .jxl)",
        " skipped 2 photos (2 .heic)",
        " skipped 3 photos (2 .nef, 1 .cr2)",
    ]
    assert any(note.endswith("XL is not supported; convert the photo to JPEG") for note in notes)


def test_a_pipe_costs_no_photo(folder, caption):
    os.mkfifo(folder / "holiday" / "pipe.jpg")
    for options in ((), ("--in-place",)):
        code, photos, (problem, *_) = caption("holiday", *options)
        assert (code, photos) == (SOME_FAILED, ALL)
        assert "pipe.jpg: the path is a pipe, socket or device" in problem


def test_names_of_all_characters(folder, caption):
    names = ["new\nline.png", "red\x1b[31m.png", "\x9b2J.png", os.fsdecode(b"bad\xff.png")]
    for name in (*names, "a собака.png"):
        shutil.copy(folder / "holiday" / "1.png", folder / name)
    (folder / "\x1b[2Jempty.png").touch()

    code, photos, (problem, _) = caption(".")

    escaped = [r"\x9b2J.png", "a собака.png", r"bad\udcff.png", r"new\nline.png"]
    assert (code, sorted(photos)) == (SOME_FAILED, [*escaped, r"red\x1b[31m.png"])
    assert r"\x1b[2Jempty.png" in problem
    assert "\x1b" not in problem


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
def test_a_list_of_names(written, folder, caption, monkeypatch):
    (folder / "list.txt").write_bytes(written)
    assert caption("--from-file", "list.txt") == (OK, [ALL[1], ALL[0]], [])

    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(written)))
    assert caption(ALL[2], "--from-file", "-") == (OK, [ALL[2], ALL[1], ALL[0]], [])


def test_invalid_names_in_a_list_are_reported_with_their_line(folder, caption):
    (folder / "list.txt").write_text("nowhere.jpg\nholiday/1.png\n\nhttps://a.b/c.jpg\n-\n")

    code, photos, notes = caption("--from-file", "list.txt")

    assert (code, photos) == (SOME_FAILED, ["holiday/1.png"])
    names = ("list.txt:1: nowhere.jpg", "list.txt:4: https://a.b/c.jpg", "list.txt:5: ./-")
    assert all(note.startswith(f"captioner: {n}: ") for n, note in zip(names, notes, strict=True))


def test_patterns_are_expanded_and_photos_captioned_once(folder, caption):
    problem = "captioner: holiday/*.jpg matches no files; check the pattern and the folder"
    assert caption("holiday/*.png", "holiday/*.jpg") == (SOME_FAILED, ALL, [problem])
    assert caption("holiday", "holiday/1.png", "./holiday/2.png") == (OK, ALL, [])
    (folder / "-dash.png").touch()
    code, _, (problem,) = caption("-dash.png")
    assert (code, "write ./-dash.png" in problem) == (NOT_DONE, True)


# --- attend: where pictures go -------------------------------------------------------------------


def test_pictures_are_saved_beside_their_photos_and_are_no_photos(folder, attend, caption):
    assert attend("holiday/1.png") == (OK, ["holiday/1.png"], [])
    assert pictures(folder) == ["holiday/1_attention.png"]
    code, _, (problem,) = attend("holiday/1.png")  # never overwritten
    assert (code, "holiday/1_attention.png exists; add --force" in problem) == (NOT_DONE, True)
    assert attend("holiday/1.png", "--force", "--format", "html")[0] == OK
    assert pictures(folder) == ["holiday/1_attention.html", "holiday/1_attention.png"]

    note = "skipped 1 file that is not a photo (1 .html); 1 picture made by captioner attend"
    assert caption("holiday") == (OK, ALL, [f"captioner: {note}"])
    made = "holiday/1_attention.png"
    assert caption(made) == (OK, [made], [])  # captioned if given by name


def test_subfolders_are_searched_and_kept_apart(folder, attend):
    shutil.copytree(folder / "holiday", folder / "holiday" / "more")
    shutil.copy(folder / "holiday" / "1.png", folder / "holiday" / "1.bmp")

    assert attend("holiday", "--recursive", "-o", "out")[0] == OK

    names = ["1.bmp", "1.png", "2", "3", "4", "more/1", "more/2", "more/3", "more/4"]
    assert pictures(folder / "out") == [f"{name}_attention.png" for name in names]


def test_an_interrupted_run_is_continued(folder, attend, monkeypatch):
    """Ctrl-C keeps finished pictures; the second run draws the others, with the same bytes."""
    each = ("--batch-size", 1)  # a photo's last bits may depend on the other photos of its batch
    assert attend("holiday", "-o", "whole", *each)[0] == OK
    draw, left = attend_module.overlay, [1, 1]

    def overlay(*given: Any, **options: Any) -> object:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return draw(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(attend_module, "overlay", overlay)
        code, _, notes = attend("holiday", "-o", "out", *each)

    whole, out = folder / "whole", folder / "out"
    assert (code, len(pictures(out))) == (INTERRUPTED, 2)
    assert "2 of 4 photos are finished" in notes[0]
    again = ("holiday", "-o", "out", "--skip-existing", *each)
    skipped = "captioner: {} of 4 photos were skipped, because they already have an output file"
    assert attend(*again) == (OK, ALL[2:], [skipped.format(2)])
    assert pictures(out) == pictures(whole)
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in pictures(out))

    monkeypatch.setattr("captioner.inference.captioner.load_model", None)  # there is nothing to do
    assert attend(*again) == (OK, [], [skipped.format(4)])
