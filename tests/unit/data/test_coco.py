"""COCO captions joined with the photos on disk."""

from __future__ import annotations

import math
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from test_importers import put

from captioner.data.coco import locate_photos, read_dataset
from captioner.data.example import Example
from captioner.errors import DataError

IMAGES = [{"id": 9, "file_name": "nine.jpg"}, {"id": 2, "file_name": "two.jpg"}]
CAPTIONS = [
    {"id": 1, "image_id": 2, "caption": " A dog. "},
    {"id": 2, "image_id": 9, "caption": "A cat."},
    {"id": 3, "image_id": 2, "caption": "Two dogs?"},
]


def coco(**changes: Any) -> dict[str, Any]:
    return {"images": IMAGES, "annotations": CAPTIONS, **changes}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("nine.jpg", "two.jpg"):
        put(tmp_path / "photos" / name, "")
    return tmp_path / "photos"


def assert_refused(expected: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(DataError, match=expected) as caught:
        read_dataset(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_photos_are_sorted_by_id_and_have_all_captions(tmp_path: Path, photos: Path):
    found = read_dataset([put(tmp_path / "a.json", coco())], [photos])
    assert found == [
        Example(2, photos / "two.jpg", ("A dog.", "Two dogs?")),
        Example(9, photos / "nine.jpg", ("A cat.",)),
    ]


def test_photos_without_captions_are_skipped(tmp_path: Path, photos: Path):
    file = put(tmp_path / "a.json", coco(annotations=CAPTIONS[1:2]))
    assert [image.image_id for image in read_dataset([file], [photos])] == [9]
    (photos / "two.jpg").unlink()  # it need not exist
    assert [image.image_id for image in read_dataset([file], [photos])] == [9]


def test_several_files_form_one_dataset(tmp_path: Path, photos: Path):
    put(photos / "three.jpg", "")
    other = {
        "images": [IMAGES[1], {"id": 3, "file_name": "three.jpg"}],
        "annotations": [
            {"id": 1, "image_id": 3, "caption": "A bird."},
            {"id": 2, "image_id": 2, "caption": "More dogs."},
        ],
    }
    files = [put(tmp_path / "a.json", coco()), put(tmp_path / "b.json", other)]
    found = {image.image_id: image.captions for image in read_dataset(files, [photos])}
    assert found == {2: ("A dog.", "Two dogs?", "More dogs."), 3: ("A bird.",), 9: ("A cat.",)}


def test_clashing_ids_are_renumbered_if_no_split_needs_them(tmp_path: Path, photos: Path):
    put(photos / "three.jpg", "")
    other = {
        "images": [{"id": 2, "file_name": "three.jpg"}, IMAGES[0]],
        "annotations": [{"id": 1, "image_id": 2, "caption": "A bird."}],
    }
    files = [put(tmp_path / "a.json", coco()), put(tmp_path / "b.json", other)]
    assert_refused(
        "image id 2 belongs to three.jpg here, but to .*two.jpg .* --first-id", files, [photos]
    )
    found = read_dataset(files, [photos], renumber=True)
    assert [(image.image_id, image.path.name, image.captions, image.source) for image in found] == [
        (2, "two.jpg", ("A dog.", "Two dogs?"), 0),
        (9, "nine.jpg", ("A cat.",), 0),
        (10, "three.jpg", ("A bird.",), 1),
    ]
    assert read_dataset([*files, files[0]], [photos], renumber=True) == found


def test_folders_are_searched_in_order(tmp_path: Path, photos: Path):
    first = put(tmp_path / "first" / "two.jpg", "").parent
    file = put(tmp_path / "a.json", coco())
    found = [image.path for image in read_dataset([file], [str(first), photos])]
    assert found == [first / "two.jpg", photos / "nine.jpg"]
    found = [image.path for image in read_dataset([file], [photos, first])]
    assert found == [photos / "two.jpg", photos / "nine.jpg"]


def test_missing_files_and_folders(tmp_path: Path, photos: Path):
    file = put(tmp_path / "a.json", coco())
    assert_refused(r"none\.json does not exist; use", [tmp_path / "none.json"], [photos])
    assert_refused(r"the image folder .*nowhere cannot be read", [file], [tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"images": [', r"a\.json is not valid JSON .*; use a complete JSON file"),
        ([], r"a\.json contains a JSON list, not an object"),
        (coco(images=[]), r"has no list 'images'"),
        (coco(images=[7]), r"images\[0\] has no field 'id'; use"),
        (coco(annotations=[{"id": 1, "image_id": 2}]), r"\[0\] has no field 'caption'"),
        (
            coco(images=[{"id": "two", "file_name": "a"}]),
            r"the id of .*images.0. is 'two'; use a whole number",
        ),
        (
            coco(images=[{"id": True, "file_name": "a"}]),
            r"the id of .*images.0. is True; use a whole number",
        ),
        (
            coco(images=[{"id": 1, "file_name": None}]),
            r"the file_name of .*images.0. is None; use text",
        ),
        (
            {"images": [{"imgid": 0, "filename": "a.jpg", "split": "test", "sentences": []}]},
            r"Karpathy's .*captioner prepare dataset",
        ),
        (
            coco(annotations=[{"id": 5, "image_id": 77, "caption": "x"}]),
            r"a caption refers to image id 77, but no image has this id; remove",
        ),
    ],
)
def test_files_that_are_not_captions(tmp_path: Path, photos: Path, content: Any, expected: str):
    assert_refused(expected, [put(tmp_path / "a.json", content)], [photos])


def test_ids_as_pandas_and_others_write_them(tmp_path: Path, photos: Path):
    """As text, as 1.0; and captions that are null or NaN are left out as empty ones are."""
    images = [{"id": "2", "file_name": "two.jpg"}, {"id": 9.0, "file_name": "nine.jpg"}]
    captions = [(2.0, "A dog."), (" 2 ", None), ("9", math.nan), ("09", "A cat.")]
    annotations = [{"id": n, "image_id": i, "caption": c} for n, (i, c) in enumerate(captions)]
    file = put(tmp_path / "a.json", {"images": images, "annotations": annotations})
    found = read_dataset([file], [photos])
    assert [(image.image_id, image.captions) for image in found] == [
        (2, ("A dog.",)),
        (9, ("A cat.",)),
    ]


def test_missing_photos_are_counted_and_named(tmp_path: Path, photos: Path):
    file = put(tmp_path / "a.json", coco())
    (photos / "two.jpg").unlink()
    assert_refused(
        r"1 of 2 photos from a\.json are missing from .*photos \(first: two\.jpg\)",
        [file],
        [photos],
    )


def test_names_in_another_unicode_form_are_found(tmp_path: Path):
    """Macs write NFD, most tables NFC."""
    name = "\u00e9t\u00e9.jpg"
    (tmp_path / unicodedata.normalize("NFD", name)).touch()
    (found,) = locate_photos([Example(1, Path(name), ("a",))], [tmp_path], "x.json")
    assert found.path == tmp_path / unicodedata.normalize("NFD", name)
