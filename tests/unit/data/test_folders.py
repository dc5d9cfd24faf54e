"""Finding photos in folders: which files, and in which order."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from PIL import features

from captioner.data.folders import NamedFiles, Skipped, expand_pattern, find_images
from captioner.data.formats import FORMATS, RAW
from captioner.data.images import open_image
from captioner.errors import DataError, ImageError

NAMES = ("b10.JPG", "b2.jpg", "B1.png", ".hidden.jpg", "notes.txt", "sub/1.webp", ".x/1.jpg")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.jpg").mkdir()
    return tmp_path


def test_numbers_sort_by_value(tmp_path: Path):
    ordered = ["1.jpg", "a-9.jpg", "a.jpg", "a1b.jpg", "a01c.jpg", "a2.jpg", "a10.jpg", "B.jpg"]
    for name in reversed(ordered):
        (tmp_path / name).touch()
    assert [path.name for path in find_images([tmp_path])] == ordered


def test_every_format_that_can_be_decoded_is_found(tmp_path: Path):
    extensions = [extension for kind in FORMATS for extension in kind.extensions]
    assert len(set(extensions)) == len(extensions)
    for extension in extensions:
        (tmp_path / f"{extension[1:]}{extension.upper()}").touch()
    skipped = Skipped()

    found = {path.suffix.lower() for path in find_images([tmp_path], skipped=skipped)}

    assert found == {e for kind in FORMATS if kind.decodable for e in kind.extensions}
    assert {".jpg", ".jfif", ".png", ".tif", ".ppm", ".pgm", ".pbm", ".pnm", ".ico"} <= found
    assert set().union(*skipped.photos.values()) == set(extensions) - found
    assert ".jxl" in set(extensions) - found


def test_camera_raw_beside_its_photo_is_left_out(tmp_path: Path):
    for name in ("a.CR2", "a.JPG", "b.cr2", "b.xmp"):
        (tmp_path / name).touch()
    skipped = Skipped()

    found = find_images([tmp_path], skipped=skipped)

    assert [path.name for path in found] == ["a.JPG", *["b.cr2"] * RAW.decodable]
    assert (skipped.rest.total(), len(skipped.photos)) == (1, 1 - RAW.decodable)
    assert find_images([tmp_path / "a.CR2"]) == [tmp_path / "a.CR2"]


@pytest.mark.parametrize("codec", ["avif", "jpg_2000", "webp"])
def test_a_format_without_its_codec_is_counted(codec, tmp_path, monkeypatch):
    (kind,) = [kind for kind in FORMATS if kind.codec == codec]
    known = codec in {**features.modules, **features.codecs}  # to this version of Pillow
    assert kind.decodable == (known and features.check(codec))
    monkeypatch.setattr(features, "check", lambda name: name != codec)
    (tmp_path / f"a{kind.extensions[0]}").touch()
    (tmp_path / "a.png").touch()
    skipped = Skipped()

    assert find_images([tmp_path], skipped=skipped) == [tmp_path / "a.png"]

    assert skipped.photos == {kind: {kind.extensions[0]: 1}}
    assert "pip install --upgrade pillow" in kind.problem


def test_every_skipped_file_is_counted(folder: Path):
    for name in ("a.TXT", "b.txt", "c.mp4", "Makefile", "Mr. Smith and his dog", "x.xmp"):
        (folder / name).touch()
    skipped = Skipped()

    find_images([folder], skipped=skipped)

    assert skipped.others == {".txt": 3, ".mp4": 1, ".xmp": 1, "": 2}
    assert [noun for noun, _ in skipped.rest.elements()] == ["hidden photo", *["subfolder"] * 2]


def test_an_empty_folder_raises_immediately(folder: Path):
    (folder / "empty").mkdir()
    with pytest.raises(
        DataError,
        match=r"empty contains no photos.*JPEG, .*TIFF.*, and subfolders are not",
    ):
        find_images([folder / "b2.jpg", folder / "empty"])


def test_an_entry_that_cannot_be_read_costs_no_other(folder: Path):
    (folder / "loop.jpg").symlink_to("loop.jpg")
    os.mkfifo(folder / "pipe.jpg")
    closed = folder / "closed"
    closed.mkdir()
    skipped = Skipped()
    listdir = os.scandir

    def scandir(path: Path) -> Any:  # root may list any folder
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        found = find_images([folder], recursive=True, skipped=skipped)
        with pytest.raises(DataError, match=r"closed: the folder cannot be listed"):
            find_images([folder], recursive=True)
        with pytest.raises(DataError, match=r"closed: the folder cannot be listed"):
            find_images([closed], skipped=skipped)
        with pytest.raises(DataError, match=r"closed: the folder cannot be listed"):
            expand_pattern(f"{folder}/**/*.webp")
        matched = Skipped()
        assert expand_pattern(f"{folder}/**/*.webp", matched) == [f"{folder}/sub/1.webp"]
    assert matched.unlisted == skipped.unlisted
    assert [path.name for path in found] == [
        "B1.png", "b2.jpg", "b10.JPG", "loop.jpg", "pipe.jpg", "1.webp"
    ]  # fmt: skip
    problem = "the folder cannot be listed (Permission denied); check your permissions"
    assert skipped.unlisted == [f"{closed}: {problem}"]
    for name, problem in (("loop", "Too many levels"), ("pipe", "a pipe, socket or device; pass")):
        with pytest.raises(ImageError, match=problem):
            open_image(folder / f"{name}.jpg")


def test_an_empty_name_is_not_the_current_folder():
    with pytest.raises(DataError, match="a file name is empty"):
        find_images([""])


def test_patterns_match_as_in_a_shell_but_follow_no_links(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder)
    (folder / "sub" / "deep").mkdir()
    (folder / "sub" / "deep" / "2.webp").touch()
    assert expand_pattern("**/*.webp") == ["sub/1.webp", "sub/deep/2.webp"]
    (folder / "sub" / "self").symlink_to(".")
    (folder / "[x]").mkdir()
    (folder / "[x]" / "3.webp").touch()
    expected = ["[x]/3.webp", "sub/1.webp", "sub/deep/2.webp"]
    assert expand_pattern("**/*.webp") == expected
    assert expand_pattern(f"{folder}/**/*.webp") == [f"{folder}/{name}" for name in expected]
    assert expand_pattern("s*/**/deep/**/*.webp") == ["sub/deep/2.webp"]
    assert "sub/deep/2.webp" in expand_pattern("sub/**")
    assert expand_pattern("sub/self/*.webp") == ["sub/self/1.webp"]
    assert expand_pattern("sub/../*.png") == ["sub/../B1.png"]


def test_folder_links_are_not_followed_and_broken_links_are_returned(folder: Path):
    (folder / "sub" / "up").symlink_to(folder, target_is_directory=True)
    (folder / "sub" / "2.png").symlink_to("nowhere.png")
    skipped = Skipped()
    found = find_images([folder / "sub"], recursive=True, skipped=skipped)
    assert [noun for noun, _ in skipped.rest.elements()].count("link") == 1
    assert found == [folder / "sub" / "1.webp", folder / "sub" / "2.png"]


# --- names in tables ---


def test_names_are_found_whatever_their_form(tmp_path: Path):
    """In NFC and NFD, with invalid bytes as tables have them, space around, and encoded twice."""
    names = {
        unicodedata.normalize("NFD", "été/Zoë.jpg"): unicodedata.normalize("NFC", "été/Zoë.jpg"),
        unicodedata.normalize("NFC", "naïve.jpg"): unicodedata.normalize("NFD", "naïve.jpg"),
        os.fsdecode(b"caf\xe9.jpg"): "caf\\udce9.jpg",
        "\\udcff.jpg": "\\udcff.jpg",
        " space.jpg ": "space.jpg",
        "a\rb.jpg": "a\rb.jpg",
        "Brücke à Œuvre €.jpg": "BrÃ¼cke Ã\xa0 Å’uvre â‚¬.jpg",
        "ÁÝ.jpg": "Ã\x81Ã\x9d.jpg",
    }
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    both = [unicodedata.normalize(form, "ü.jpg") for form in ("NFC", "NFD")]
    for name in both:
        (tmp_path / name).touch()
    files = NamedFiles(tmp_path)
    for name, other in names.items():
        for spelled in (name, other, f"./{other}"):
            assert files.find(spelled) == tmp_path / name
    assert [files.find(name) for name in both] == [tmp_path / name for name in both]
    assert files.find("x" * 300) is files.find("none/a.jpg") is files.find("\0") is None


def test_names_of_strangers_do_not_lead_out_of_a_folder(tmp_path: Path):
    folder = tmp_path / "photos"
    (folder / "sub").mkdir(parents=True)
    for name in ("out.jpg", "photos/in.jpg", "photos/sub/in.jpg"):
        (tmp_path / name).touch()
    links = {"link.jpg": "../out.jpg", "up": "..", "same.jpg": "in.jpg", "loop.jpg": "loop.jpg"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe.jpg")
    (tmp_path / "other").symlink_to("photos")
    for top in (folder, tmp_path / "other"):
        files = NamedFiles(top)
        for name in ("in.jpg", "sub/in.jpg", "same.jpg", "./in.jpg"):
            assert files.find_below(name) == top / name
        for name, problem in {
            "../out.jpg": "leads out",
            "sub/../../out.jpg": "leads out",
            "sub/../in.jpg": "leads out",
            str(tmp_path / "out.jpg"): "absolute",
            "C:out.jpg": "absolute",
            "c:/out.jpg": "absolute",
            "..\\out.jpg": "backslash",
            "in.jpg\0": "NUL",
            " ": "empty",
            "link.jpg": "link",
            "up/out.jpg": "link",
            "up/photos/../out.jpg": "leads out",
            "loop.jpg": "does not exist",
            "pipe.jpg": "does not exist",
            "sub": "does not exist",
            ".": "does not exist",
        }.items():
            with pytest.raises(DataError, match=problem):
                files.find_below(name)


def test_a_path_that_is_too_long_does_not_stop_a_search(tmp_path: Path, monkeypatch):
    (tmp_path / "a.jpg").touch()
    monkeypatch.chdir(tmp_path)
    for _ in range(17):
        os.mkdir("d" * 250)  # noqa: PTH102 - relative, as the whole path is too long
        os.chdir("d" * 250)
    monkeypatch.chdir(tmp_path)
    skipped = Skipped()
    assert find_images([tmp_path], recursive=True, skipped=skipped) == [tmp_path / "a.jpg"]
    assert "cannot be listed" in skipped.unlisted[0]
