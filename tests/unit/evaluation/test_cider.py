"""CIDEr-D compared with pycocoevalcap and with known answers."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.cider.cider_scorer import CiderScorer

from captioner.evaluation.cider import CiderD
from captioner.evaluation.frequencies import DocumentFrequencies
from captioner.evaluation.references import References

Tokens = list[str]

# Few words, so that n-grams coincide; one contains the space at which pycocoevalcap splits.
WORDS = st.sampled_from(["a", "dog", "cat", "runs", "on", "grass", "1\u00a01/2"])
CAPTION = st.lists(WORDS, max_size=7)
TRUTH = st.dictionaries(
    st.integers(0, 99), st.lists(CAPTION, min_size=1, max_size=3), min_size=1, max_size=6
)


def oracle(truth: dict[int, list[Tokens]], candidates: dict[int, Tokens]) -> dict[int, float]:
    """pycocoevalcap's score of each image."""
    references = {i: [" ".join(tokens) for tokens in captions] for i, captions in truth.items()}
    _, scores = Cider().compute_score(references, {i: [" ".join(candidates[i])] for i in truth})
    return dict(zip(truth, scores, strict=True))


def has_words(truth: dict[int, list[Tokens]]) -> bool:
    """pycocoevalcap fails without any words."""
    return any(tokens for captions in truth.values() for tokens in captions)


# --- score ---------------------------------------------------------------------------------------


@given(truth=TRUTH.filter(has_words), data=st.data())
def test_equals_pycocoevalcap(truth, data) -> None:
    candidates = {i: data.draw(CAPTION) for i in truth}

    found = CiderD(truth).score({i: [candidates[i]] for i in truth})

    assert {i: score for i, (score,) in found.items()} == pytest.approx(
        oracle(truth, candidates), abs=1e-9
    )


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

    found = CiderD(truth, DocumentFrequencies.from_tokens(frozen)).score(
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


def test_by_hand() -> None:
    # "a" is in both images and has weight 0; all other words have weight ln 2.
    scorer = CiderD({1: [["a", "dog"], ["a", "big", "dog"]], 2: [["a", "cat"]]})

    (found,) = scorer.score({1: [["a", "dog"]]})[1]

    # First reference: unigrams and bigrams match fully, nothing longer exists: 2 of 4 orders.
    # Second: dog of (big, dog): 1 / sqrt 2; no bigram; one word longer: exp(-1 / 72).
    expected = 10 / 4 / 2 * (2 + math.exp(-1 / 72) / math.sqrt(2))
    assert found == pytest.approx(expected, abs=1e-12)


@given(truth=TRUTH.filter(has_words), candidates=st.lists(CAPTION, max_size=4))
def test_scores_do_not_depend_on_other_captions(truth, candidates) -> None:
    """Several captions per image and images in any order score as if alone."""
    scorer = CiderD(truth)
    backwards = CiderD(dict(reversed(truth.items())))

    together = scorer.score(dict.fromkeys(truth, candidates))

    assert backwards.score(dict.fromkeys(truth, candidates)) == together
    for image_id, scores in together.items():
        assert scores == [scorer.score({image_id: [tokens]})[image_id][0] for tokens in candidates]


def test_unknown_words_stay_distinct() -> None:
    """They lengthen the vector: one of them twice adds more than two different ones."""
    scorer = CiderD({1: [["dog"]], 2: [["cat"]]})

    twice, two = scorer.score({1: [["dog", "x", "x"], ["dog", "x", "y"]]})[1]

    penalty = math.exp(-4 / 72)
    assert twice == pytest.approx(10 / 4 * penalty / math.sqrt(5), abs=1e-12)
    assert two == pytest.approx(10 / 4 * penalty / math.sqrt(3), abs=1e-12)


def test_a_very_different_length_scores_0() -> None:
    scorer = CiderD({1: [["dog"]], 2: [["cat"]]})

    assert scorer.score({1: [["dog"] * 1000, ["dog"] * 250, ["dog"]]})[1][0] == 0


def test_counts_above_one_byte() -> None:
    scorer = CiderD({1: [["cat"], *[["dog"] * 300] * 299], 2: [["a"]]})

    cat, dogs = scorer.score({1: [["cat"], ["dog"] * 300]})[1]

    assert cat == pytest.approx(10 / 4 / 300, abs=1e-12)
    assert dogs == pytest.approx(10 * 299 / 300, abs=1e-12)


def test_nothing_to_score() -> None:
    scorer = CiderD({1: [["dog"]], 2: [["cat"]]})

    assert scorer.score({}) == {}
    assert scorer.score({2: []}) == {2: []}
    assert scorer.score({2: [[]], 1: [[], []]}) == {2: [0], 1: [0, 0]}


@given(truth=TRUTH.filter(has_words), end=st.booleans())
def test_frequencies_round_trip(truth, end) -> None:
    parted = {i: [" ".join(t).split() for t in captions] for i, captions in truth.items()}
    ended = {i: [[*t, "zzend"] for t in captions] for i, captions in parted.items()}
    expected = DocumentFrequencies.from_tokens(ended if end else truth)

    found = References(truth, end=end).frequencies()

    assert found.documents == expected.documents
    assert {
        tuple(word or "zzend" for word in gram): n for gram, n in found.counts.items()
    } == expected.counts


@given(truth=TRUTH.filter(has_words), data=st.data())
def test_ngrams_of_a_single_image_do_not_change_scores(truth, data) -> None:
    candidates = {i: [data.draw(CAPTION)] for i in truth}
    every: Counter[tuple[str, ...]] = Counter()
    for captions in truth.values():
        texts = [" ".join(tokens).split() for tokens in captions]
        every.update(
            {tuple(t[i : i + n]) for t in texts for n in range(1, 5) for i in range(len(t) - n + 1)}
        )

    few = DocumentFrequencies.from_tokens(truth)

    assert few.counts == {gram: count for gram, count in every.items() if count > 1}
    everything = DocumentFrequencies(len(truth), every)
    assert CiderD(truth, everything).score(candidates) == CiderD(truth, few).score(candidates)
