"""``captioner.write_caption``, ``remove_caption`` and ``apply_captions``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

import captioner
from captioner.caption_types import Caption
from captioner.data.cells import digest_cell
from captioner.data.images import open_image
from captioner.data.metadata import (
    Mark,
    embed_description,
    find_embedded,
    find_in_sidecar,
    set_description,
)
from captioner.data.write_captions import remove_captions
from captioner.errors import ConfigError, DataError

TIME = 1_600_000_000_000_000_000


def dog() -> Caption:
    one = np.zeros(2, np.float32)
    maps = np.full((2, 1, 1), 1, np.float32)
    return Caption(("a", "dog"), one, maps, one, -1.5, confidence=0.75)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "a.jpg"
    Image.new("RGB", (32, 24), "red").save(path)
    os.utime(path, ns=(TIME, TIME))
    return path


def test_a_caption_is_written_into_the_photo_and_removed_again(photo: Path) -> None:
    before = photo.read_bytes()

    assert captioner.write_caption(photo, dog(), in_place=True, keywords=["pet"]) == photo

    found = find_embedded(photo.read_bytes())
    assert (found.text, found.own, [*found.keywords]) == ("a dog", True, ["pet"])
    assert photo.stat().st_mtime_ns == TIME
    assert captioner.remove_caption(photo) == 1
    assert find_embedded(photo.read_bytes()).text == ""
    assert (photo.stat().st_mtime_ns, open_image(photo).size) == (TIME, (32, 24))
    assert len(photo.read_bytes()) <= len(before) + 100
    assert captioner.remove_caption(photo) == 0


def test_a_text_is_by_a_person_and_stays(photo: Path) -> None:
    captioner.write_caption(str(photo), "Rex in the garden", in_place=True)

    assert not find_embedded(photo.read_bytes()).own
    with pytest.raises(ConfigError) as caught:
        captioner.write_caption(photo, dog(), in_place=True)
    assert str(caught.value) == (
        f'{photo} already has a description by a person; add existing="skip" to keep existing '
        'captions, or existing="replace" to replace them'
    )  # fmt: skip
    for kept in ({"existing": "skip"}, {"existing": "replace-own"}, {"skip_existing": True}):
        assert captioner.write_caption(photo, dog(), in_place=True, **kept) is None
    assert captioner.remove_caption(photo) == 0
    assert find_embedded(photo.read_bytes()).text == "Rex in the garden"
    assert captioner.write_caption(photo, dog(), in_place=True, force=True) == photo
    assert find_embedded(photo.read_bytes()).text == "a dog"


def test_copies_and_sidecars_leave_the_photo_alone(photo: Path, tmp_path: Path) -> None:
    before = photo.read_bytes()

    copy = captioner.write_caption(photo, dog(), embed=tmp_path / "out")
    xmp = captioner.write_caption(photo, dog(), sidecar="xmp")
    txt = captioner.write_caption(photo, dog(), sidecar="txt", prefix="photo:")

    assert (copy, xmp, txt) == (tmp_path / "out/a.jpg", tmp_path / "a.xmp", tmp_path / "a.txt")
    assert find_embedded(Path(str(copy)).read_bytes()).own
    assert find_in_sidecar(Path(str(xmp)).read_bytes()).own
    assert Path(str(txt)).read_text() == "photo: a dog\n"
    assert photo.read_bytes() == before
    assert captioner.remove_caption(photo) == 1  # the sidecar; text files have no marks
    assert not (tmp_path / "a.xmp").exists()


@pytest.mark.parametrize(
    ("caption", "options", "message"),
    [
        (dog(), {}, 'pass in_place=True, embed="folder" or sidecar="xmp"'),
        (dog(), {"folder": "x"}, "folder is an unknown option; did you mean embed?"),
        (dog(), {"sidecar": "json"}, "sidecar is 'json'; "),
        (dog(), {"in_place": True, "sidecar": "txt"}, "sidecar and in_place=True cannot be comb"),
        (dog(), {"in_place": True, "prefix": "x"}, 'prefix needs sidecar="txt"; '),
        (dog(), {"in_place": True, "existing": "append"}, 'existing="append" needs sidecar="txt"'),
        (["a dog"], {"in_place": True}, "caption is ['a dog']; pass the result of model.caption"),
        (" ", {"in_place": True}, "the caption is empty"),
    ],
)
def test_wrong_arguments_are_one_line(
    photo: Path, caption: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        captioner.write_caption(photo, caption, **options)
    assert message in str(caught.value)
    assert "--" not in str(caught.value)


def test_a_photo_that_cannot_be_edited_names_the_python_options(tmp_path: Path) -> None:
    photo = tmp_path / "a.gif"
    Image.new("RGB", (8, 8)).save(photo)
    with pytest.raises(DataError, match=r'a\.gif: .*sidecar="xmp".*exiftool=True'):
        captioner.write_caption(photo, dog(), in_place=True)
    with pytest.raises(DataError, match=r"none\.jpg: No such file"):
        captioner.write_caption(tmp_path / "none.jpg", dog(), in_place=True)
    with pytest.raises(DataError, match=r"none\.jpg: No such file"):
        captioner.remove_caption(tmp_path / "none.jpg")


def test_apply_writes_a_table(photo: Path, tmp_path: Path) -> None:
    table = tmp_path / "captions.csv"
    table.write_text("image,caption\na.jpg,Rex\nmissing.jpg,Lost\n")

    applied = captioner.apply_captions(table, in_place=True)

    assert applied.written == 1
    assert [*map(str, applied.problems)] == [
        f"{table}: photo 'missing.jpg' in {tmp_path}: the file does not exist; correct the name in "
        "the table, or set images to the folder of the photo"
    ]
    assert find_embedded(photo.read_bytes())[:1] == ("Rex",)
    assert not find_embedded(photo.read_bytes()).own
    with pytest.raises(ConfigError, match='existing="replace"'):
        captioner.apply_captions(table, in_place=True)
    assert captioner.apply_captions(table, images=tmp_path, in_place=True, force=True).written == 1


def test_a_name_of_several_photos_is_not_written(photo: Path, tmp_path: Path) -> None:
    """The page of the server writes names without folders, so two rows may have the same name."""
    before, table = photo.read_bytes(), tmp_path / "captions.csv"
    Image.new("RGB", (32, 24)).save(tmp_path / "b.jpg")
    rows = "a.jpg,1,one\na.jpg,2,two\na.jpg,1,three\nb.jpg,1,four\nb.jpg,2,five\n"
    table.write_text(f"image,rank,caption\n{rows}")
    written, problems = captioner.apply_captions(table, in_place=True)
    assert (written, len(problems)) == (1, 1)
    assert "'a.jpg'" in problems[0]
    assert photo.read_bytes() == before
    assert find_embedded((tmp_path / "b.jpg").read_bytes()).text == "four"


def test_captions_in_a_table_that_nobody_changed_stay_machine_written(
    photo: Path, tmp_path: Path
) -> None:
    table = tmp_path / "captions.csv"
    changed, same = (f"a.jpg,{text},0.75,{digest_cell('a dog')}" for text in ("Rex", "a dog"))
    before = photo.read_bytes()
    for row, own in ((changed, False), (same, True), ("a.jpg,a dog,0.75,", False)):
        table.write_text(f"image,caption,confidence,digest\n{row}\n")
        captioner.apply_captions(table, in_place=True, force=True)
        assert find_embedded(photo.read_bytes()).own is own
        photo.write_bytes(before)


def test_the_same_caption_keeps_its_mark(photo: Path, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("image,caption\na.jpg,a dog\n")
    for place in ({"in_place": True}, {"sidecar": "xmp"}):
        path = captioner.write_caption(photo, dog(), **place)
        before = path.read_bytes()
        for options in ({}, {"force": True}, {"existing": "replace-own"}):
            assert captioner.apply_captions(table, **place, **options).written == 0
        assert path.read_bytes() == before
    assert captioner.apply_captions(table, embed=tmp_path / "copies").written == 0
    assert find_embedded((tmp_path / "copies/a.jpg").read_bytes()).own


@pytest.mark.parametrize("kind", ["jpg", "dng", "heic"])
def test_a_sidecar_does_not_hide_a_text_by_a_person(kind: str, photo: Path) -> None:
    packet = set_description(None, "Rex")
    if kind == "jpg":
        photo.write_bytes(embed_description(photo.read_bytes(), "Rex"))
    elif kind == "dng":
        picture = Image.open(photo)
        photo = photo.with_suffix(".dng")
        picture.save(photo, "tiff", tiffinfo={700: packet})
    else:  # only the packet matters
        photo = photo.with_suffix(".heic")
        photo.write_bytes(b"\0\0\0\x18ftypheic" + packet)
    with pytest.raises(ConfigError, match="already has a description by a person"):
        captioner.write_caption(photo, dog(), sidecar="xmp")
    for kept in ("skip", "replace-own"):
        assert captioner.write_caption(photo, dog(), sidecar="xmp", existing=kept) is None
    assert captioner.write_caption(photo, dog(), sidecar="xmp", existing="replace")


def test_a_sidecar_may_hide_a_caption_by_captioner(photo: Path) -> None:
    captioner.write_caption(photo, dog(), in_place=True)
    assert captioner.write_caption(photo, dog(), sidecar="xmp") == photo.with_suffix(".xmp")


def test_a_sidecar_does_not_hide_keywords_by_a_person(photo: Path) -> None:
    photo.write_bytes(embed_description(photo.read_bytes(), "", ["pet"]))
    xmp = captioner.write_caption(photo, dog(), sidecar="xmp")
    assert b"pet" in xmp.read_bytes()
    captioner.remove_caption(photo)
    assert b"pet" in xmp.read_bytes()


def test_the_other_name_of_a_sidecar_counts(photo: Path) -> None:
    captioner.write_caption(photo, dog(), sidecar="xmp")
    with pytest.raises(ConfigError, match=r"by captioner; .*existing=\"replace-own\""):
        captioner.write_caption(photo, dog(), sidecar="xmp", sidecar_name="photo.jpg.xmp")


def test_a_second_sidecar_and_a_description_in_exif_are_reported(
    photo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    photo.with_suffix(".xmp").write_bytes(set_description(None, "", ["pet"]))
    for description, reported in (("Rex", 1), ("OLYMPUS DIGITAL CAMERA", 0), (" ", 0)):
        exif = Image.Exif()
        exif[ExifTags.Base.ImageDescription] = description
        Image.new("RGB", (32, 24)).save(photo, exif=exif)
        caplog.clear()
        captioner.write_caption(photo, dog(), sidecar="xmp", sidecar_name="photo.jpg.xmp")
        assert caplog.text.count("second sidecar") == 1
        assert caplog.text.count("EXIF") == reported
        photo.with_name("a.jpg.xmp").unlink()
    captioner.write_caption(photo, dog(), sidecar="xmp", sidecar_name="photo.xmp")
    assert caplog.text.count("second sidecar") == 1


@pytest.mark.parametrize("place", [{"in_place": True}, {"sidecar": "xmp"}])
def test_marks_and_keywords_beside_a_corrected_text_are_removed(
    place: dict[str, Any], photo: Path
) -> None:
    path = captioner.write_caption(photo, dog(), keywords=["pet"], **place)
    # A program that knows XMP only corrects the text there.
    path.write_bytes(path.read_bytes().replace(b'x-default">a dog<', b'x-default">a Rex<'))

    assert captioner.remove_caption(photo) == 0

    data = path.read_bytes()
    assert b"a Rex" in data
    for gone in (b"pet", b"a dog", b"captioner"):
        assert gone not in data


def test_captions_that_only_exiftool_can_remove_are_reported(photo: Path) -> None:
    packet = set_description(None, "a dog", mark=Mark())
    other = photo.with_suffix(".heic")
    other.write_bytes(b"\0\0\0\x18ftypheic" + packet)
    with pytest.raises(DataError, match=r"not removed from .*a\.heic.*exiftool=True"):
        captioner.remove_caption(photo.parent)
    other.write_bytes(b"\0\0\0\x18ftypheic")
    assert captioner.remove_caption(photo.parent) == 0


def test_names_that_are_no_photos_are_reported_and_the_rest_is_done(
    photo: Path, tmp_path: Path
) -> None:
    table, problems = tmp_path / "captions.csv", list[str]()
    table.write_text("image,caption\na.jpg,one\n")
    captioner.write_caption(photo, dog(), in_place=True)
    names = [str(table), str(tmp_path / "none"), str(photo)]
    removed = remove_captions(names, exiftool=False, report=problems.append)
    assert (removed.captions, removed.failed) == (1, 2)
    assert all(problem.startswith(name) for problem, name in zip(problems, names, strict=False))
