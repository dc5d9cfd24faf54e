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
from pycocoevalcap.cider.cider_scorer import CiderScorer

from captioner.errors import DataError
from captioner.evaluation.references import DocumentFrequencies, References

Tokens = list[str]

# Few words, so that n-grams coincide; one contains the space at which pycocoevalcap splits.
WORDS = st.sampled_from(["a", "dog", "cat", "runs", "on", "grass", "1\u00a01/2"])
CAPTION = st.lists(WORDS, max_size=7)
TRUTH = st.dictionaries(
    st.integers(0, 99), st.lists(CAPTION, min_size=1, max_size=3), min_size=1, max_size=6
)


def has_words(truth: dict[int, list[Tokens]]) -> bool:
    """pycocoevalcap fails without any words."""
    return any(tokens for captions in truth.values() for tokens in captions)


# --- score ---------------------------------------------------------------------------------------


@given(truth=TRUTH.filter(has_words), frozen=TRUTH.filter(has_words), data=st.data())
def test_equals_pycocoevalcap_with_frozen_frequencies(truth, frozen, data) -> None:
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
    scorer.crefs = WithDocumentCount(scorer.crefs, len(frozen))

    found = References(truth, References(frozen).frequencies()).score(
        {i: [candidates[i]] for i in truth}
    )

    assert [found[i][0] for i in truth] == pytest.approx(scorer.compute_cider(), abs=1e-9)


class WithDocumentCount(list):
    """References whose ``len``, pycocoevalcap's document count, is a given number."""

    def __init__(self, references: list, documents: int) -> None:
        super().__init__(references)
        self._documents = documents

    def __len__(self) -> int:
        return self._documents


@given(truth=TRUTH.filter(has_words), candidates=st.lists(CAPTION, max_size=4))
def test_scores_do_not_depend_on_other_captions(truth, candidates) -> None:
    """Several captions per image and images in any order score as if alone."""
    scorer = References(truth)
    backwards = References(dict(reversed(truth.items())))

    together = scorer.score(dict.fromkeys(truth, candidates))

    assert backwards.score(dict.fromkeys(truth, candidates)) == together
    for image_id, scores in together.items():
        assert scores == [scorer.score({image_id: [tokens]})[image_id][0] for tokens in candidates]


def test_counts_above_one_byte() -> None:
    scorer = References({1: [["cat"], *[["dog"] * 300] * 299], 2: [["a"]]})

    cat, dogs = scorer.score({1: [["cat"], ["dog"] * 300]})[1]

    assert cat == pytest.approx(10 / 4 / 300, abs=1e-12)
    assert dogs == pytest.approx(10 * 299 / 300, abs=1e-12)


def test_nothing_to_score() -> None:
    scorer = References({1: [["dog"]], 2: [["cat"]]})

    assert scorer.score({}) == {}
    assert scorer.score({2: []}) == {2: []}
    assert scorer.score({2: [[]], 1: [[], []]}) == {2: [0], 1: [0, 0]}


# --- document frequencies ------------------------------------------------------------------------


@given(truth=TRUTH.filter(has_words), end=st.booleans(), data=st.data())
def test_frequencies_are_those_of_a_counter(truth, end, data) -> None:
    """And those of a single image change no score."""
    every: Counter[tuple[str, ...]] = Counter()
    for captions in truth.values():
        texts = [[*" ".join(tokens).split(), *([""] if end else [])] for tokens in captions]
        every.update(
            {tuple(t[i : i + n]) for t in texts for n in range(1, 5) for i in range(len(t) - n + 1)}
        )

    few = References(truth, end=end).frequencies()

    assert few == DocumentFrequencies(len(truth), {g: n for g, n in every.items() if n > 1})
    candidates = {i: [data.draw(CAPTION)] for i in truth}
    everything = DocumentFrequencies(len(truth), every)
    assert References(truth, everything).score(candidates) == (
        References(truth, few).score(candidates)
    )


# --- the file ------------------------------------------------------------------------------------

SAMPLE = DocumentFrequencies(
    7, {("a",): 7, ("a", "dog"): 2, ("caf\u00e9", "\u72ac"): 3, ("\ud800",): 2}
)


def test_the_file_is_gzipped_json(tmp_path: Path) -> None:
    plain = DocumentFrequencies(3, {("a", "dog"): 2, ("a",): 3})
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
        gzip.compress(b"[" * 200_000, mtime=0),
        gzip.compress(json.dumps(GOOD | {"format_version": 2}).encode()),
        gzip.compress(json.dumps(GOOD | {"counts": {"a": 8}}).encode()),
    ],
)
def test_invalid_content(data: bytes) -> None:
    with pytest.raises(DataError, match="f is damaged, or no document"):
        DocumentFrequencies.from_bytes(data, "f")
