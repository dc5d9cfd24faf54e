"""Folders of photos: which files, in which order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from captioner.data.folders import EXTENSIONS, find_images
from captioner.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in [
        "b10.JPG",
        "b2.jpg",
        "B1.png",
        ".hidden.jpg",
        "notes.txt",
        "sub/1.webp",
        ".x/1.jpg",
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.jpg").mkdir()
    return tmp_path


def test_a_folders_images_are_in_natural_order(folder: Path):
    assert list(find_images([folder])) == [folder / n for n in ("B1.png", "b2.jpg", "b10.JPG")]


def test_numbers_sort_by_value(tmp_path: Path):
    ordered = ["1.jpg", "a-9.jpg", "a.jpg", "a1b.jpg", "a01c.jpg", "a2.jpg", "a10.jpg", "B.jpg"]
    for name in reversed(ordered):
        (tmp_path / name).touch()
    assert [path.name for path in find_images([tmp_path])] == ordered


def test_subfolders_are_searched_on_request(folder: Path):
    found = list(find_images([folder], recursive=True))
    assert [str(path.relative_to(folder)) for path in found] == [
        "B1.png",
        "b2.jpg",
        "b10.JPG",
        str(Path("sub", "1.webp")),
    ]


def test_files_are_returned_as_given(folder: Path):
    given = [folder / "notes.txt", "missing.jpg", folder / "sub", folder / ".hidden.jpg"]
    assert list(find_images(given)) == [
        folder / "notes.txt",
        Path("missing.jpg"),
        folder / "sub" / "1.webp",
        folder / ".hidden.jpg",
    ]


def test_every_extension_is_found(tmp_path: Path):
    for extension in EXTENSIONS:
        (tmp_path / f"a{extension.upper()}").touch()
    assert len(list(find_images([tmp_path]))) == len(EXTENSIONS) == 8


def test_an_empty_folder_is_an_error_at_once(folder: Path):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no images.*\.jpg .*\.tiff.*subfolders"):
        find_images([folder / "b2.jpg", folder / "empty"])


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links")
def test_folder_links_are_not_followed_and_broken_links_are_returned(folder: Path):
    (folder / "sub" / "up").symlink_to(folder, target_is_directory=True)
    (folder / "sub" / "2.png").symlink_to("nowhere.png")
    found = list(find_images([folder / "sub"], recursive=True))
    assert found == [folder / "sub" / "1.webp", folder / "sub" / "2.png"]
