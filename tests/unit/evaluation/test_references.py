"""CIDEr-D compared with pycocoevalcap and with known answers, and document frequencies."""

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
from captioner.evaluation.references import (
    DocumentFrequencies,
    cider_d,
    count_documents,
    ngrams,
    split,
)

Tokens = list[str]

# Few words, so that n-grams coincide; one contains the space at which pycocoevalcap splits.
WORDS = st.sampled_from(["a", "dog", "cat", "runs", "on", "grass", "1\u00a01/2"])
CAPTION = st.lists(WORDS, max_size=7)
TEXTS = st.lists(CAPTION, min_size=1, max_size=3)
TRUTH = st.dictionaries(st.integers(0, 99), TEXTS, min_size=1, max_size=6)
FROZEN = st.dictionaries(st.integers(0, 99), TEXTS, min_size=6, max_size=9)


def has_words(truth: dict[int, list[Tokens]]) -> bool:
    """pycocoevalcap fails without any words."""
    return any(tokens for captions in truth.values() for tokens in captions)


def scored(truth, candidates, frequencies: DocumentFrequencies) -> list[float]:
    """Compute CIDEr-D of one caption per image."""
    return [
        cider_d([ngrams(split(candidates[i]))], [ngrams(split(t)) for t in texts], frequencies)[0]
        for i, texts in truth.items()
    ]


def counted(truth) -> DocumentFrequencies:
    return count_documents([[split(tokens) for tokens in texts] for texts in truth.values()])


@given(truth=TRUTH.filter(has_words), frozen=FROZEN.filter(has_words), data=st.data())
def test_equals_pycocoevalcap_with_frozen_frequencies(truth, frozen, data) -> None:
    from pycocoevalcap.cider.cider_scorer import CiderScorer

    candidates = {i: data.draw(CAPTION) for i in truth}
    counter = CiderScorer()
    for captions in frozen.values():
        counter.cook_append("", [" ".join(tokens) for tokens in captions])
    counter.compute_doc_freq()
    scorer = CiderScorer()
    scorer.document_frequency = counter.document_frequency
    for image_id, captions in truth.items():
        scorer.cook_append(
            " ".join(candidates[image_id]), [" ".join(tokens) for tokens in captions]
        )
    scorer.crefs += [{}] * (len(frozen) - len(truth))  # as many as there are documents

    found = scored(truth, candidates, counted(frozen))

    assert found == pytest.approx(scorer.compute_cider(), abs=1e-9)


@given(truth=TRUTH.filter(has_words), data=st.data())
def test_frequencies_are_those_of_a_counter(truth, data) -> None:
    """N-grams of a single image are left out, which does not change scores."""
    every: Counter[str] = Counter()
    for captions in truth.values():
        texts = [split(tokens) for tokens in captions]
        spans = [(n, i) for n in range(1, 5) for i in range(max(map(len, texts)) - n + 1)]
        every.update({" ".join(t[i : i + n]) for t in texts for n, i in spans if i + n <= len(t)})

    few = counted(truth)

    assert few == DocumentFrequencies(len(truth), {g: n for g, n in every.items() if n > 1})
    candidates = {i: data.draw(CAPTION) for i in truth}
    everything = DocumentFrequencies(len(truth), every)
    assert scored(truth, candidates, everything) == scored(truth, candidates, few)


SAMPLE = DocumentFrequencies(7, {"a": 7, "a dog": 2, "caf\u00e9 \u72ac": 3, "\ud800": 2})


def test_the_file_is_gzipped_json(tmp_path: Path) -> None:
    plain = DocumentFrequencies(3, {"a dog": 2, "a": 3})
    path = tmp_path / "frequencies.json.gz"
    path.write_bytes(SAMPLE.to_bytes())

    assert DocumentFrequencies.load(path) == SAMPLE
    assert json.loads(gzip.decompress(plain.to_bytes())) == {
        "format_version": 1, "documents": 3, "counts": {"a": 3, "a dog": 2},
    }  # fmt: skip


@given(index=st.integers(0, len(SAMPLE.to_bytes()) - 1), mask=st.integers(1, 255))
def test_a_damaged_byte_is_detected_or_harmless(index: int, mask: int) -> None:
    data = bytearray(SAMPLE.to_bytes())
    data[index] ^= mask

    with suppress(DataError):  # else the byte was in gzip's timestamp
        assert DocumentFrequencies.from_bytes(bytes(data)) == SAMPLE


GOOD = {"format_version": 1, "documents": 7, "counts": {"a": 2}}


@pytest.mark.parametrize(
    "data",
    [
        SAMPLE.to_bytes()[:-20],
        b"{}",
        gzip.compress(b"[" * 200_000),
        gzip.compress(json.dumps(GOOD | {"format_version": 2}).encode()),
        *(gzip.compress(json.dumps(GOOD | {"counts": c}).encode()) for c in ({"a": 8}, [2])),
    ],
    ids=["cut off", "not compressed", "deep", "other version", "impossible count", "a list"],
)
def test_invalid_content(data: bytes) -> None:
    with pytest.raises(DataError, match="f is damaged or is not a document"):
        DocumentFrequencies.from_bytes(data, "f")
