"""Importers: small files of every layout and the photos they contain."""

from __future__ import annotations

import gzip
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from captioner.data.example import UNSPLIT, Example
from captioner.data.importers import detect_layout, find_source, import_captions
from captioner.data.options import ColumnOptions
from captioner.errors import ConfigError, DataError

DATA = Path(__file__).parents[3].parent / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data")

Found = dict[str, dict[str, list[str]]]


def put(file: Path, content: Any) -> Path:
    """Write bytes, a text, or anything else as JSON."""
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def read(source: Path, layout: str = "auto") -> Found:
    """Captions by split and file name."""
    found: Found = {}
    for photo in import_captions(source, layout):
        found.setdefault(photo.split, {})[str(photo.path)] = [*photo.captions]
    return found


def karpathy(*images: dict[str, Any]) -> dict[str, Any]:
    sentence = {"raw": "A dog .", "tokens": ["a", "dog"]}
    return {"dataset": "x", "images": [{"sentences": [sentence], **image} for image in images]}


def test_karpathy_coco(tmp_path: Path):
    images = [
        {"filename": "1.jpg", "filepath": "val2014", "split": "test", "cocoid": 9, "imgid": 0},
        {"filename": "2.jpg", "filepath": "train2014", "split": "train", "cocoid": 8, "imgid": 1},
        {"filename": "3.jpg", "filepath": "val2014", "split": "restval", "cocoid": 7},
    ]
    assert import_captions(put(tmp_path / "dataset_coco.json", karpathy(*images))) == [
        Example(9, Path("val2014/1.jpg"), ("A dog .",), split="test"),
        Example(8, Path("train2014/2.jpg"), ("A dog .",), split="train"),
        Example(7, Path("val2014/3.jpg"), ("A dog .",), split="train"),
    ]


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
    assert import_captions(put(tmp_path / "captions.json", coco())) == [
        Example(5, Path("a.jpg"), ("a1",)),
        Example(3, Path("b.jpg"), ("b1", "b2")),
    ]


TOKENS = (
    "a.jpg#0\tA dog , and\ta tab .\na.jpg#1\tTwo dogs .\nb.jpg#0\tA # cat .\nc.jpg.1#0\tA bird .\n"
)


def test_flickr8k_with_split_lists(tmp_path: Path):
    file = put(tmp_path / "Flickr8k.token.txt", TOKENS)
    put(tmp_path / "Flickr_8k.trainImages.txt", "a.jpg\r\n\r\nc.jpg.1\n")
    put(tmp_path / "Flickr_8k.devImages.txt", "b.jpg\nnowhere.jpg\n")
    assert read(tmp_path) == {
        "train": {"a.jpg": ["A dog , and\ta tab .", "Two dogs ."], "c.jpg": ["A bird ."]},
        "val": {"b.jpg": ["A # cat ."], "nowhere.jpg": []},
    }
    assert find_source(tmp_path) == file


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
    first = "a,b,c,d;e;f;g|h|i|j\tk\tl\tm"  # which would give more columns
    rows = [(first, *header), ("1", "a.jpg", '"One, a|b;c\td ""x"""'), ("2", "a.jpg", 'two "x"')]
    rows = [tuple(c.replace(separator, " ") for c in row) for row in rows]
    file = put(tmp_path / "a.csv", "\n".join(separator.join(row) for row in rows) + "\n\n")
    one = 'One, a|b;c\td "x"'.replace(separator, " ")
    assert read(file) == {UNSPLIT: {"a.jpg": [one, 'two "x"']}}
    renamed = put(tmp_path / "b.csv", file.read_text().replace(header[1], "legend"))
    (photo,) = import_captions(renamed, columns=ColumnOptions(caption_column="Legend"))
    assert photo.captions == (one, 'two "x"')


def test_two_spellings_of_a_path_are_one_photo(tmp_path: Path):
    file = put(tmp_path / "a.csv", "file,caption\n./a.jpg,one\na.jpg,two\n b//c.jpg ,three\n")
    assert read(file) == {UNSPLIT: {"a.jpg": ["one", "two"], "b/c.jpg": ["three"]}}


def test_quotes_in_a_table_with_tabs_belong_to_the_text(tmp_path: Path):
    text = 'file\tcaption\na.jpg\t"Stop" sign\nb.jpg\t"Stop sign\nc.jpg\t"a ""b"""\n'
    found = read(put(tmp_path / "a.tsv", text))[UNSPLIT]
    assert [*found.values()] == [['"Stop" sign'], ['"Stop sign'], ['a "b"']]


def test_csv_with_splits(tmp_path: Path):
    text = (
        'Split,file,caption\ntrain,a.jpg,"one, in\ntwo lines"\n'
        "Dev,b.jpg,two\nvalidation,c.jpg,three\ntest,d.jpg,x\n"
    )
    assert read(put(tmp_path / "a.csv", text)) == {
        "train": {"a.jpg": ["one, in\ntwo lines"]},
        "val": {"b.jpg": ["two"], "c.jpg": ["three"]},
        "test": {"d.jpg": ["x"]},
    }


def test_flickr30k_results(tmp_path: Path):
    text = (
        "image_name| comment_number| comment\n"
        '1.jpg| 0| A "big , red" dog .\n'
        "1.jpg| 1| Two dogs .\n"
        "2199200615.jpg| 4   A dog runs across the grass .\n"  # as published: one | is missing
    )
    assert read(put(tmp_path / "results.csv", text)) == {
        UNSPLIT: {
            "1.jpg": ['A "big , red" dog .', "Two dogs ."],
            "2199200615.jpg": ["A dog runs across the grass ."],
        }
    }


def test_an_image_folder_of_hugging_face(tmp_path: Path):
    for name, text in (
        ("train/metadata.csv", "file_name,text\n1.png,a\n"),
        ("validation/metadata.jsonl", '{"file_name": "1.png", "text": "b"}\n\n'),
        ("other/metadata.csv", "not a split"),
    ):
        put(tmp_path / name, text)
    assert read(tmp_path) == {
        "train": {"train/1.png": ["a"]},
        "val": {"validation/1.png": ["b"]},
    }
    put(tmp_path / "metadata.jsonl", '{"file_name": "1.png", "text": ["a", "b"]}\n')
    assert find_source(tmp_path) == tmp_path
    assert read(tmp_path) == {UNSPLIT: {"1.png": ["a", "b"]}}


@pytest.mark.parametrize(
    ("layout", "content", "expected"),
    [
        ("karpathy", {"images": [7]}, r"images\[0\] lacks the fields"),
        (
            "karpathy",
            karpathy({"filename": "a", "split": "/../evil"}),
            r"the split '/../evil' is unknown",
        ),
        (
            "coco",
            coco(annotations=[{"image_id": 9, "caption": "a"}]),
            r"a: a caption refers to image id 9, but no image",
        ),
        (
            "flickr8k",
            "a.jpg#0\tx\n\na.jpg no tab\n",
            r"a:3 is 'a.jpg no tab'; use the form 'name.jpg#0<tab>caption'",
        ),
        (
            "csv",
            "a,b\n1,2\n",
            r"a:2 has no column .file. or .caption. \(found: a, b\); .*--file-column",
        ),
        ("csv", "file,caption\na.jpg,one, two\n", r"a:2 has 3 fields, but the header has 2; put"),
        ("csv", 'file,caption\na.jpg,"one\n', r"a:2 is not valid CSV"),
        pytest.param("csv", "file,caption," + "long" * 50_000, r"a:1 is not valid CSV", id="long"),
        (
            "csv",
            "file,caption,split\na.jpg,one,train\na.jpg,two,val\n",
            r"a:3: a.jpg is in two splits, 'train' and 'val'",
        ),
        ("kaggle", "", "a is empty"),
        ("kaggle", b"image,caption\na.jpg,caf\xe9\n", r"a is not encoded in UTF-8 .*0xe9.*; save"),
        ("jsonl", "{", "a:1 is not a JSON object"),
        ("jsonl", '{"file": "1.png", "words": "a"}', "no column .caption. .found: file"),
        ("json", [{"image": "a.jpg", "caption": 5}], r"a: \[0\]: the caption 5 is not text"),
        ("json", [{"image": 7, "caption": "x"}], r"a: \[0\]: the file name 7 is not text"),
        ("json", ["a.jpg"], r"a: \[0\] is 'a.jpg'; use an object with a file name"),
        ("auto", [{"name": "a.jpg", "text": "x"}], r"a: \[0\] has no column 'file' .found: "),
        ("auto", '[{"image": "a.jpg"', r"a is not valid JSON .*; use a complete"),
        ("imagefolder", "", "a contains neither metadata"),
    ],
)
def test_invalid_files(tmp_path: Path, layout: str, content: Any, expected: str):
    with pytest.raises(DataError, match=expected) as caught:
        import_captions(put(tmp_path / "a", content), layout)
    assert "\n" not in str(caught.value)


def test_columns_of_a_layout_without_columns(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"has no columns, because its layout is coco; leave out --file-column"
    ):
        import_captions(put(tmp_path / "a.json", coco()), columns=ColumnOptions(file_column="name"))


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with byte order mark"])
@pytest.mark.parametrize(
    ("layout", "content"),
    [
        ("karpathy", json.dumps(karpathy({"filename": "a", "split": "val"}))),
        ("coco", json.dumps(coco())),
        ("flickr8k", TOKENS),
        ("csv", 'image,caption\na.jpg,"A dog , a cat ."\n'),  # Kaggle's Flickr8k
        ("csv", "image_name| comment_number| comment\na.jpg| 0| A dog .\n"),
        ("csv", "file\tcaption\na.jpg\tA dog .\n"),
    ],
)
def test_layouts_are_detected(tmp_path: Path, layout: str, content: str, mark: str):
    file = put(tmp_path / "a", mark + content)
    assert detect_layout(file) == layout
    assert {one.split for one in import_captions(file)} <= {UNSPLIT, "val"}


def test_the_captions_file_of_a_folder(tmp_path: Path):
    with pytest.raises(DataError, match=r"contains no captions in a known layout; pass the file"):
        find_source(tmp_path)
    table = put(tmp_path / "captions.txt", TOKENS)
    assert find_source(tmp_path) == find_source(table) == table
    first = put(tmp_path / "a.token", TOKENS)
    assert find_source(tmp_path) == first
    put(tmp_path / "b.token.txt", TOKENS)
    with pytest.raises(DataError, match=r"contains 2 files with captions; pass one"):
        find_source(tmp_path)
    assert find_source(tmp_path, "kaggle") == find_source(tmp_path, "csv") == table
    with pytest.raises(DataError, match=r"pass the file with the captions"):
        find_source(tmp_path, "coco")
    published = put(tmp_path / "Flickr8k.token.txt", TOKENS)
    assert find_source(tmp_path) == published


LISTED = [{"image": "a.jpg", "caption": "A dog."}, {"image": "a.jpg", "caption": ["A cat.", None]}]


@pytest.mark.parametrize(
    ("name", "content", "layout"),
    [
        ("a.json", LISTED, "json"),  # BLIP, LAVIS, ALBEF
        ("a.json", {"a.jpg": ["A dog.", "A cat.", None]}, "json"),
        ("a.json", "\n".join(map(json.dumps, LISTED)), "jsonl"),
        ("a.ndjson", "\n".join(map(json.dumps, LISTED)), "jsonl"),
        ("a.csv", "sep=;\r\nfile;caption\r\na.jpg;A dog.\r\na.jpg;A cat.\r\na.jpg;\r\n", "csv"),
        ("a.txt", '"sep=,"\nfile,caption\na.jpg,A dog.\na.jpg,A cat.\na.jpg,\n', "csv"),
    ],
)
def test_captions_as_other_programs_write_them(
    tmp_path: Path, name: str, content: Any, layout: str
):
    file = put(tmp_path / name, content)
    assert detect_layout(file) == layout
    assert read(file) == {UNSPLIT: {"a.jpg": ["A dog.", "A cat.", ""]}}


def test_photos_with_text_files(tmp_path: Path):
    """As ``--sidecar txt`` and programs that train diffusion models have them."""
    put(tmp_path / "10.JPG", b"")
    put(tmp_path / "10.txt", "a dog\n")
    put(tmp_path / "sub" / "2.png", b"")
    put(tmp_path / "sub" / "2.txt", "\ufeffa cat\n\n two cats \n")
    put(tmp_path / "none.jpg", b"")
    put(tmp_path / "empty.webp", b"")
    put(tmp_path / "empty.txt", b"\n")
    put(tmp_path / "notes.txt", "nothing")
    assert find_source(tmp_path) == tmp_path
    assert read(tmp_path) == {
        UNSPLIT: {
            "10.JPG": ["a dog"], "empty.webp": [], "none.jpg": [],
            "sub/2.png": ["a cat", " two cats "],
        }
    }  # fmt: skip
    with pytest.raises(ConfigError, match="has no columns"):
        import_captions(tmp_path, columns=ColumnOptions(file_column="name"))


def test_files_that_are_no_text_are_named(tmp_path: Path):
    put(tmp_path / "1.jpg", b"\xff\xd8")
    put(tmp_path / "1.txt", "a dog")
    kinds = {
        "wds.tar": "a tar file, such as WebDataset's; unpack it",
        "a.zip": "a zip file; unpack",
    }
    with tarfile.open(tmp_path / "wds.tar", "w") as tar:
        tar.add(tmp_path / "1.txt", "1.txt")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr("captions.csv", "file,caption\n")
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as packed:
        packed.writestr("xl/workbook.xml", "<workbook/>")
    put(tmp_path / "a.parquet", b"PAR1\x15\x04PAR1")
    put(tmp_path / "a.csv.gz", gzip.compress(b"file,caption\n"))
    kinds |= {"a.xlsx": "an Excel workbook; save it as CSV", "a.parquet": "a Parquet file; save"}
    kinds |= {"a.csv.gz": "compressed with gzip; unpack"}
    for name, kind in kinds.items():
        with pytest.raises(DataError, match=kind):
            import_captions(tmp_path / name)
    (tmp_path / "shards").mkdir()
    (tmp_path / "wds.tar").rename(tmp_path / "shards" / "0.tar")
    with pytest.raises(DataError, match=r"0\.tar is a tar file, such as WebDataset's; unpack it"):
        import_captions(tmp_path / "shards")


@pytest.mark.parametrize("content", ["some text", "long " * 50_000, '{"images": [1]}'], ids=len)
def test_unknown_layouts(tmp_path: Path, content: str):
    with pytest.raises(DataError, match=r"unknown layout; use a CSV or JSON file"):
        detect_layout(put(tmp_path / "a", content))


@pytest.mark.data
@real_data
def test_flickr8k_as_published():
    found = read(DATA / "flickr8k")
    assert {split: len(photos) for split, photos in found.items()} == {"train": 6000, "val": 1000}
    assert {len(texts) for photos in found.values() for texts in photos.values()} == {5}
