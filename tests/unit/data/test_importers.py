"""Importers: small files of every layout and the photos they contain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from captioner.data.importers import (
    UNSPLIT,
    ImportedPhoto,
    Splits,
    detect_layout,
    find_source,
    import_captions,
)
from captioner.errors import DataError

DATA = Path(__file__).parents[3].parent / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data")


def put(file: Path, content: str | bytes | dict[str, Any]) -> Path:
    if isinstance(content, dict):
        content = json.dumps(content)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def captions_of(splits: Splits, split: str = UNSPLIT) -> dict[str, tuple[str, ...]]:
    return {photo.file_name: photo.captions for photo in splits[split]}


# --- Karpathy ---


def karpathy(*images: dict[str, Any]) -> dict[str, Any]:
    sentence = {"raw": "A dog .", "tokens": ["a", "dog"]}
    return {"dataset": "x", "images": [{"sentences": [sentence], **image} for image in images]}


def test_karpathy_coco(tmp_path: Path):
    file = put(
        tmp_path / "dataset_coco.json",
        karpathy(
            {"filename": "1.jpg", "filepath": "val2014", "split": "test", "cocoid": 9, "imgid": 0},
            {
                "filename": "2.jpg",
                "filepath": "train2014",
                "split": "train",
                "cocoid": 8,
                "imgid": 1,
            },
            {"filename": "3.jpg", "filepath": "val2014", "split": "restval", "cocoid": 7},
        ),
    )
    train = [
        ImportedPhoto("train2014/2.jpg", ("A dog .",), 8),
        ImportedPhoto("val2014/3.jpg", ("A dog .",), 7),
    ]
    test = [ImportedPhoto("val2014/1.jpg", ("A dog .",), 9)]
    assert import_captions(file, "karpathy") == {"test": test, "train": train}


# --- Flickr8k ---

TOKENS = (
    "a.jpg#0\tA dog , and\ta tab .\na.jpg#1\tTwo dogs .\nb.jpg#0\tA # cat .\nc.jpg#0\tA bird .\n"
)


def test_flickr8k_with_split_lists(tmp_path: Path):
    file = put(tmp_path / "Flickr8k.token.txt", TOKENS)
    put(tmp_path / "Flickr_8k.trainImages.txt", "a.jpg\r\n\r\n")
    put(tmp_path / "Flickr_8k.devImages.txt", "b.jpg\nnowhere.jpg\n")
    splits = import_captions(file, "flickr8k")
    assert list(splits) == ["train", "val"]
    assert captions_of(splits, "train") == {"a.jpg": ("A dog , and\ta tab .", "Two dogs .")}
    assert captions_of(splits, "val") == {"b.jpg": ("A # cat .",), "nowhere.jpg": ()}


def test_a_token_file_alone_has_no_splits(tmp_path: Path):
    file = put(tmp_path / "results_20130124.token", TOKENS)
    assert list(captions_of(import_captions(file, "flickr8k"))) == ["a.jpg", "b.jpg", "c.jpg"]


@pytest.mark.parametrize(
    ("own", "expected"), [("", ("copy .",)), ("2258277193_586949ec62.jpg#0\town .\n", ("own .",))]
)
def test_a_duplicate_files_captions_are_used_if_the_photo_has_none(
    tmp_path: Path, own: str, expected: tuple[str, ...]
):
    lines = "2258277193_586949ec62.jpg.1#0\tcopy .\n" + own
    file = put(tmp_path / "Flickr8k.token.txt", lines)
    assert captions_of(import_captions(file, "flickr8k")) == {"2258277193_586949ec62.jpg": expected}
    put(tmp_path / "Flickr_8k.trainImages.txt", "2258277193_586949ec62.jpg.1\n")
    found = captions_of(import_captions(file, "flickr8k"), "train")
    assert found == {"2258277193_586949ec62.jpg": expected}


# --- Tables ---


def test_kaggle_captions_follow_the_first_comma(tmp_path: Path):
    lines = [
        "",
        "image,caption",
        "a.jpg,A dog , a cat , and a bird .",
        'a.jpg,"A dog , ""Rex"" , barks ."',
        'a.jpg,"Stop" says the "sign"',
        'b.jpg,A "big" dog .',
        "b.jpg,",
    ]
    file = put(tmp_path / "captions.txt", "\r\n".join(lines) + "\r\n")
    expected = {
        "a.jpg": (
            "A dog , a cat , and a bird .",
            'A dog , "Rex" , barks .',
            '"Stop" says the "sign"',
        ),
        "b.jpg": ('A "big" dog .', ""),
    }
    assert captions_of(import_captions(file, "kaggle")) == expected


@pytest.mark.parametrize(
    ("separator", "header"),
    [
        (",", ("File_Name", "text")),
        (";", ("image", "Caption")),
        ("\t", ("path", "comment")),
        ("|", ("file", "sentence")),
    ],
)
def test_csv_by_header_and_separator(tmp_path: Path, separator: str, header: tuple[str, str]):
    rows = [("no", *header), ("1", "a.jpg", '"One, a|b;c\td ""x"""'), ("2", "a.jpg", "two")]
    rows = [tuple(c.replace(separator, " ") for c in row) for row in rows]
    file = put(tmp_path / "a.csv", "\n".join(separator.join(row) for row in rows) + "\n\n")
    one = 'One, a|b;c\td "x"'.replace(separator, " ")
    assert captions_of(import_captions(file, "csv")) == {"a.jpg": (one, "two")}


def test_csv_with_splits(tmp_path: Path):
    text = (
        'split,file,caption\ntrain,a.jpg,"one, in\ntwo lines"\n'
        "Dev,b.jpg,two\nvalidation,c.jpg,three\ntest,d.jpg,x\n"
    )
    splits = import_captions(put(tmp_path / "a.csv", text), "csv")
    names = {split: [photo.file_name for photo in photos] for split, photos in splits.items()}
    assert names == {"train": ["a.jpg"], "val": ["b.jpg", "c.jpg"], "test": ["d.jpg"]}
    assert captions_of(splits, "train") == {"a.jpg": ("one, in\ntwo lines",)}


def test_flickr30k_results(tmp_path: Path):
    text = (
        "image_name| comment_number| comment\n"
        '1.jpg| 0| A "big , red" dog .\n'
        "1.jpg| 1| Two dogs .\n"
        "2199200615.jpg| 4   A dog runs across the grass .\n"  # as published: one | is missing
    )
    assert captions_of(import_captions(put(tmp_path / "results.csv", text), "csv")) == {
        "1.jpg": ('A "big , red" dog .', "Two dogs ."),
        "2199200615.jpg": ("A dog runs across the grass .",),
    }


# --- COCO ---


def coco(**changes: Any) -> dict[str, Any]:
    return {
        "images": [{"id": 5, "file_name": "a.jpg"}, {"id": 3, "file_name": "b.jpg"}],
        "annotations": [
            {"id": 1, "image_id": 3, "caption": "b1"},
            {"id": 2, "image_id": 5, "caption": "a1"},
            {"id": 3, "image_id": 3, "caption": "b2"},
        ],
        **changes,
    }


def test_coco(tmp_path: Path):
    assert import_captions(put(tmp_path / "captions.json", coco()), "coco") == {
        UNSPLIT: [ImportedPhoto("a.jpg", ("a1",), 5), ImportedPhoto("b.jpg", ("b1", "b2"), 3)]
    }


# --- Errors ---


@pytest.mark.parametrize(
    ("layout", "content", "expected"),
    [
        ("karpathy", {"images": [7]}, r"images\[0\] is not an entry"),
        (
            "karpathy",
            karpathy({"filename": "a", "split": "/../../evil"}),
            r"unknown split '/../../evil'",
        ),
        (
            "coco",
            coco(annotations=[{"image_id": 9, "caption": "a"}]),
            r"\[0\]: image_id 9 is not in the file",
        ),
        (
            "flickr8k",
            "a.jpg#0\tfine\n\na.jpg no tab\n",
            r"a:3: expected 'name.jpg#0<tab>caption'",
        ),
        (
            "csv",
            "a,b\n1,2\n",
            r"a:1: no column .file. or .caption.; the columns are a, b: .*--file-column",
        ),
        (
            "csv",
            "file,caption\na.jpg,one, two\n",
            r"a:2: 3 fields, but the header has 2; put",
        ),
        (
            "csv",
            "file,caption,split\na.jpg,one,train\na.jpg,two,val\n",
            r"a:3: a.jpg is in two splits, train and val",
        ),
        ("kaggle", "", "a: the file is empty"),
        ("kaggle", b"image,caption\na.jpg,caf\xe9\n", r"a: not UTF-8 .*0xe9.*; save"),
    ],
)
def test_invalid_files(tmp_path: Path, layout: str, content: Any, expected: str):
    with pytest.raises(DataError, match=expected) as caught:
        import_captions(put(tmp_path / "a", content), layout)
    assert "\n" not in str(caught.value)


# --- Image folders ---


def test_an_image_folder_of_hugging_face(tmp_path: Path):
    put(tmp_path / "metadata.jsonl", '{"file_name": "1.png", "text": ["a", "b"]}\n')
    assert detect_layout(tmp_path) == "imagefolder"
    assert find_source(tmp_path) == tmp_path
    assert import_captions(tmp_path, "imagefolder") == {"all": [ImportedPhoto("1.png", ("a", "b"))]}


def test_an_image_folder_with_splits(tmp_path: Path):
    for name, text in (
        ("train/metadata.csv", "file_name,text\n1.png,a\n"),
        ("validation/metadata.jsonl", '{"file_name": "1.png", "text": "b"}\n\n'),
        ("other/metadata.csv", "not a split"),
    ):
        (tmp_path / name).parent.mkdir()
        put(tmp_path / name, text)
    assert import_captions(tmp_path, "imagefolder") == {
        "train": [ImportedPhoto("train/1.png", ("a",))],
        "val": [ImportedPhoto("validation/1.png", ("b",))],
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "a.jsonl:1: not a JSON object"),
        ('{"file": "1.png", "words": "a"}', "no column .caption.; the columns are file, words: "),
    ],
)
def test_invalid_json_lines(tmp_path: Path, line: str, expected: str):
    with pytest.raises(DataError, match=expected) as caught:
        import_captions(put(tmp_path / "a.jsonl", line), "jsonl")
    assert "\n" not in str(caught.value)


# --- Detection ---


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with byte order mark"])
@pytest.mark.parametrize(
    ("layout", "content"),
    [
        ("karpathy", json.dumps(karpathy({"filename": "a", "split": "val"}))),
        ("coco", json.dumps(coco())),
        ("flickr8k", TOKENS),
        ("kaggle", "image,caption\na.jpg,A dog , a cat .\n"),
        ("csv", "image_name| comment_number| comment\na.jpg| 0| A dog .\n"),
        ("csv", "file\tcaption\na.jpg\tA dog .\n"),
    ],
)
def test_layouts_are_detected(tmp_path: Path, layout: str, content: str, mark: str):
    file = put(tmp_path / "a", mark + content)
    assert detect_layout(file) == layout
    assert sum(len(photos) for photos in import_captions(file, layout).values()) > 0


def test_the_captions_file_of_a_folder(tmp_path: Path):
    with pytest.raises(DataError, match=r"is a folder without captions .* give the file"):
        find_source(tmp_path)
    table = put(tmp_path / "captions.txt", TOKENS)
    assert find_source(tmp_path) == find_source(table) == table
    first = put(tmp_path / "a.token", TOKENS)
    assert find_source(tmp_path) == first
    put(tmp_path / "b.token.txt", TOKENS)
    with pytest.raises(DataError, match=r"with 2 token files .*; give the file"):
        find_source(tmp_path)
    assert find_source(tmp_path, "kaggle") == find_source(tmp_path, "csv") == table
    with pytest.raises(DataError, match=r"give the file with the captions"):
        find_source(tmp_path, "coco")
    published = put(tmp_path / "Flickr8k.token.txt", TOKENS)
    assert find_source(tmp_path) == published


@pytest.mark.parametrize(
    "content",
    [
        "some text",
        '{"images": [1]}',
    ],
)
def test_unknown_layouts(tmp_path: Path, content: str):
    with pytest.raises(DataError, match=r"CSV .* COCO .* Karpathy's .* Flickr8k.* Kaggle's"):
        detect_layout(put(tmp_path / "a", content))


# --- Real data ---


@pytest.mark.data
@real_data
def test_flickr8k_as_published():
    path = find_source(DATA / "flickr8k")
    assert detect_layout(path) == "flickr8k"
    splits = import_captions(path, "flickr8k")
    assert {split: len(photos) for split, photos in splits.items()} == {"train": 6000, "val": 1000}
    assert {len(photo.captions) for photos in splits.values() for photo in photos} == {5}
