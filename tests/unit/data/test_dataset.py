"""Writing imported photos as COCO captions: splits, ids, checks."""

from __future__ import annotations

import contextlib
import io
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pycocotools.coco import COCO

from captioner.data.dataset import prepare_dataset, split_randomly, write_coco
from captioner.data.example import NO_ID, UNSPLIT, Example
from captioner.data.importers import import_captions
from captioner.data.options import DatasetOptions
from captioner.errors import DataError


def load(file: Path) -> COCO:
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(file))


def photo(name: str, *captions: str, image_id: int = NO_ID, split: str = UNSPLIT) -> Example:
    return Example(image_id, Path(name), captions or ("a dog .",), split=split)


def write(photos: list[Example], folder: Path, **options: Any) -> Any:
    return write_coco(photos, DatasetOptions(source="", output=str(folder), **options))


def names_of(photos: list[Example], split: str) -> list[str]:
    return [str(photo.path) for photo in photos if photo.split == split]


@pytest.mark.parametrize("count", [3, 4, 10, 40])
def test_splits_do_not_depend_on_the_order(count: int):
    photos = [photo(f"{number}.jpg", "one", "two") for number in range(count)]
    found = split_randomly(photos, validation=0.2, test=0.2)
    assert sorted(one.path for one in found) == sorted(one.path for one in photos)
    for split in ("val", "test"):
        assert len(names_of(found, split)) == max(1, round(0.2 * count))
    random.Random(count).shuffle(photos)
    assert split_randomly(photos, validation=0.2, test=0.2) == found


def test_splits_are_the_same_on_every_machine():
    photos = [photo(f"{number}.jpg") for number in range(10)]
    found = split_randomly(photos, validation=0.2, test=0.1, seed=0)
    assert names_of(found, "val") == ["2.jpg", "8.jpg"]
    assert names_of(found, "test") == ["9.jpg"]
    assert split_randomly(photos, seed=1) != split_randomly(photos, seed=2)


def test_training_photos_are_split_where_there_are_none_for_validation(tmp_path: Path):
    table = tmp_path / "captions.csv"
    rows = [f"{n}.jpg,A dog.,{'test' if n > 9 else 'train'}" for n in range(12)]
    table.write_text("\n".join(["file,caption,split", *rows]))
    given: Any = {"source": str(table), "val": 0.2, "test": 0.5}
    found = prepare_dataset(DatasetOptions(output=str(tmp_path / "out"), **given))
    assert found.photos == {"test": 2, "train": 8, "val": 2}
    table.write_text("file,caption,split\na.jpg,A dog.,test\n")
    found = prepare_dataset(DatasetOptions(output=str(tmp_path / "only"), **given))
    assert found.photos == {"test": 1}


def test_pycocotools_reads_the_files(tmp_path: Path):
    photos = [
        photo("ä.jpg", " One . ", "Two .", split="train"),
        photo("c.jpg", split="val"),
        photo("b.jpg", split="train"),
    ]
    summary = write(photos, tmp_path / "out")
    train, val = (load(tmp_path / "out" / f"captions_{split}.json") for split in ("train", "val"))
    assert summary.files == {s: tmp_path / "out" / f"captions_{s}.json" for s in ("train", "val")}
    assert [image["file_name"] for image in train.loadImgs([1, 2])] == ["ä.jpg", "b.jpg"]
    assert [a["caption"] for a in train.imgToAnns[1]] == ["One .", "Two ."]
    assert set(train.dataset) == {"info", "licenses", "images", "annotations"}
    assert val.getImgIds() == [3]
    assert not set(train.anns) & set(val.anns)
    assert str(summary) == "train: 2 photos, 3 captions\nval: 1 photo, 1 caption"


def test_written_files_can_be_imported_again(tmp_path: Path):
    photos = [photo("a.jpg", "one", "two", image_id=7), photo("b.jpg", "three", image_id=2)]
    write(photos, tmp_path)
    assert import_captions(tmp_path / "captions_all.json", "coco") == photos


def test_ids_are_kept_and_missing_ones_follow_the_largest(tmp_path: Path):
    write(
        [
            photo("a", image_id=0, split="train"),
            photo("b", split="train"),
            photo("c", image_id=8, split="val"),
        ],
        tmp_path,
    )
    assert sorted(load(tmp_path / "captions_train.json").imgs) == [0, 9]
    assert sorted(load(tmp_path / "captions_val.json").imgs) == [8]


@pytest.mark.parametrize("photos", [[photo("a", " ")], []])
def test_photos_without_captions_are_refused(tmp_path: Path, photos: list[Example]):
    with pytest.raises(DataError, match="no photo has a caption"):
        write(photos, tmp_path)
    assert not list(tmp_path.iterdir())


def test_dropped_photos_and_captions_are_counted(tmp_path: Path):
    folder = tmp_path / "images"
    folder.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (6, 4)).save(folder / "0.jpg", exif=exif)
    (folder / "1.jpg").write_text("no picture")
    photos = [photo(f"{number}.jpg", "one", "", "NaN") for number in range(5)]
    photos += [photo("empty.jpg", " "), photo("x", "")]
    summary = write(photos, tmp_path, images=folder)
    (image,) = load(tmp_path / "captions_all.json").dataset["images"]
    assert image == {"id": 1, "file_name": "0.jpg", "width": 4, "height": 6}
    assert (summary.empty_captions, summary.photos_without_captions) == (12, 2)
    assert summary.missing_photos == ["1.jpg", "2.jpg", "3.jpg", "4.jpg"]
    assert str(summary) == (
        "all: 1 photo, 1 caption\n"
        "dropped: 12 empty captions\n"
        "dropped: 2 photos without captions\n"
        "dropped: 4 photos missing or unreadable in the image folder (first: 1.jpg)"
    )


def test_nothing_is_overwritten_without_force(tmp_path: Path):
    (tmp_path / "captions_val.json").write_text("mine")
    photos = [photo("a", split="train"), photo("b", split="val")]
    with pytest.raises(DataError, match=r"captions_val.json already exists; .* --force"):
        write(photos, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["captions_val.json"]
    write(photos, tmp_path, force=True)
    assert len(load(tmp_path / "captions_val.json").imgs) == 1


def test_an_existing_split_may_not_share_photos(tmp_path: Path):
    a, b = photo("a", split="train"), photo("b", split="train")
    write([photo("b", split="test"), photo("c", split="test")], tmp_path)
    before = (tmp_path / "captions_test.json").read_bytes()
    write([a], tmp_path)  # splits may be written one at a time
    with pytest.raises(
        DataError, match=r"captions_test.json .* contains 1 of the imported photos \(first: b\)"
    ):
        write([a, b], tmp_path, force=True)
    assert (tmp_path / "captions_test.json").read_bytes() == before
    assert list(load(tmp_path / "captions_train.json").imgs) == [1]
    (tmp_path / "captions_test.json").write_text("mine")  # not a captions file
    write([a, b], tmp_path, force=True)


def test_names_on_disk_are_written(tmp_path: Path):
    """A table may have them in another Unicode form."""
    names = [f"\u00e9{n}.png" for n in range(3)]
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / unicodedata.normalize("NFD", name))
    summary = write([photo(name) for name in names], tmp_path / "out", images=str(tmp_path))
    written = [read["file_name"] for split in summary.files.values() for read in
               json.loads(split.read_text())["images"]]  # fmt: skip
    assert written == [unicodedata.normalize("NFD", name) for name in names]
