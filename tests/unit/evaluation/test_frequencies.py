"""Document frequencies: known answers, round trips and invalid files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.errors import DataError
from captioner.evaluation.frequencies import DocumentFrequencies

CAPTIONS = st.lists(st.sampled_from(["a dog", "A dog runs.", "Die Straße 犬", "", "..."]))
SAMPLE = DocumentFrequencies(
    7, {("a",): 7, ("a", "dog"): 2, ("caf\u00e9", "\u72ac"): 3, ("\ud800",): 2}
)

# --- counting ------------------------------------------------------------------------------------


def test_frequencies_by_hand() -> None:
    found = DocumentFrequencies.from_references(
        {1: ["A dog runs.", "The dog!"], 2: ["a cat", "a cat"], 3: ["a dog"], 4: []}
    )

    # Images are counted, not captions: "cat" and "the" are in one image only.
    assert found == DocumentFrequencies(3, {("a",): 3, ("dog",): 2, ("a", "dog"): 2})


@given(
    references=st.dictionaries(
        st.integers(0, 9),
        st.lists(st.lists(st.sampled_from("abc"), max_size=6), min_size=1, max_size=3),
        min_size=1,
    )
)
def test_frequencies_are_those_of_a_counter(references: dict[int, list[list[str]]]) -> None:
    expected: Counter[tuple[str, ...]] = Counter()
    for captions in references.values():
        expected.update(
            {
                tuple(t[i : i + n])
                for t in captions
                for n in range(1, 5)
                for i in range(len(t) - n + 1)
            }
        )

    found = DocumentFrequencies.from_tokens(references)

    assert found.documents == len(references)
    assert found.counts == {gram: count for gram, count in expected.items() if count > 1}


@given(
    references=st.dictionaries(st.integers(0, 9), CAPTIONS, min_size=1).filter(
        lambda r: any(r.values())
    )
)
def test_ids_and_order_do_not_matter(references: dict[int, list[str]]) -> None:
    turned = {100 - i: texts[::-1] for i, texts in reversed(references.items())}

    one, other = map(DocumentFrequencies.from_references, (references, turned))

    assert one == other
    assert one.to_bytes() == other.to_bytes()
    assert all(2 <= count <= one.documents for count in one.counts.values())


# --- the file ------------------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "frequencies.json.gz"

    SAMPLE.save(path)

    assert DocumentFrequencies.load(path) == DocumentFrequencies.load(str(path)) == SAMPLE
    assert [file.name for file in path.parent.iterdir()] == ["frequencies.json.gz"]


def test_the_file_is_gzipped_json() -> None:
    plain = DocumentFrequencies(3, {("a", "dog"): 2, ("a",): 3})

    assert json.loads(gzip.decompress(plain.to_bytes())) == {
        "format_version": 1, "documents": 3, "counts": {"a": 3, "a dog": 2},
    }  # fmt: skip


def written(path: Path, content: object) -> Path:
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def test_missing_and_invalid_files(tmp_path: Path) -> None:
    whole, cut, text, deep = (tmp_path / name for name in ("whole", "cut", "text", "deep"))
    SAMPLE.save(whole)
    cut.write_bytes(whole.read_bytes()[:-20])
    text.write_text("{}")
    deep.write_bytes(gzip.compress(b"[" * 200_000))
    for path, message in [
        (tmp_path / "none", "none does not exist; give a document"),
        (tmp_path, "is a folder; give a document"),
        (whole / "inside", "whole/inside cannot be read: Not a directory"),
        (cut, "cut is truncated or damaged; count"),
        (text, "text is not a document frequencies file; give"),
        (deep, "deep is not a document frequencies file; give"),
        (written(tmp_path / "list", [1]), "list is not a document frequencies file; give"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            DocumentFrequencies.load(path)
        assert "\n" not in str(caught.value)


@given(index=st.integers(0, len(SAMPLE.to_bytes()) - 1), mask=st.integers(1, 255))
def test_a_damaged_byte_is_detected_or_harmless(index: int, mask: int) -> None:
    data = bytearray(SAMPLE.to_bytes())
    data[index] ^= mask

    with suppress(DataError):
        assert (
            DocumentFrequencies.from_bytes(bytes(data)) == SAMPLE
        )  # the byte was in gzip's timestamp


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "has format_version 2; this release reads 1"),
        ({"format_version": None}, "has format_version None"),
        ({"documents": 0}, "is not a document frequencies file"),
        ({"documents": "7"}, "is not a document frequencies file"),
        ({"documents": True}, "is not a document frequencies file"),
        ({"counts": [1]}, "is not a document frequencies file"),
        ({"counts": {"a": 8}}, "invalid count 8 for 'a', must be 1 to 7"),
        ({"counts": {"a": 0}}, "invalid count 0 for 'a', must be 1 to 7"),
        ({"counts": {"a": 1.5}}, "invalid count 1.5 for 'a', must be 1 to 7"),
    ],
)
def test_invalid_content(tmp_path: Path, change, message) -> None:
    content = {"format_version": 1, "documents": 7, "counts": {"a": 2}}
    assert DocumentFrequencies.load(written(tmp_path / "good", content)).documents == 7

    with pytest.raises(DataError, match=message):
        DocumentFrequencies.load(written(tmp_path / "bad", content | change))
