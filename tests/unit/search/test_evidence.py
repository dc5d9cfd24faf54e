"""Evidence for a caption's confidence: entropies, share and overlap."""

from __future__ import annotations

import numpy as np
import pytest
from table_stepper import TableStepper, constant_table, random_table

from captioner.options import SearchOptions
from captioner.search.search import search

pytestmark = pytest.mark.usefixtures("array_library")


def test_entropies_are_of_the_next_word_distributions() -> None:
    table = random_table(3, 5)
    options = SearchOptions(beam_size=3, max_length=5, length_penalty=1.0)

    [[found]] = search(TableStepper([table]), options, evidence=True)

    expected = []
    for length in range(len(found.tokens)):
        log_probs = table(tuple(found.tokens[:length])).astype(np.float64)
        expected.append(-(np.exp(log_probs) * log_probs).sum())
    assert found.evidence is not None
    assert found.evidence.entropies.tolist() == pytest.approx(expected, abs=1e-5)


def test_share_and_overlap_of_two_captions() -> None:
    # One-word captions: "1" with 0.6 and "2" with 0.3 (and 0.1 for the empty caption).
    table = constant_table(0.1, 0.6, 0.3)
    options = SearchOptions(beam_size=2, num_captions=2, max_length=1)

    [[first, second]] = search(TableStepper([table]), options, evidence=True)

    assert [first.tokens, second.tokens] == [[1], [2]]
    assert first.evidence is not None
    assert second.evidence is not None
    assert first.evidence.share == pytest.approx(2 / 3)
    assert second.evidence.share == pytest.approx(1 / 3)
    # The captions have no word in common, so only the caption itself contributes.
    assert first.evidence.overlap == pytest.approx(2 / 3)


def test_evidence_does_not_depend_on_the_other_photos() -> None:
    tables = [random_table(seed, 6) for seed in range(6)]
    options = SearchOptions(beam_size=3, max_length=6)

    together = search(TableStepper(tables), options, evidence=True)

    for table, [one] in zip(tables, together, strict=True):
        [[alone]] = search(TableStepper([table]), options, evidence=True)
        assert one.evidence is not None
        assert alone.evidence is not None
        assert alone.evidence[1:] == pytest.approx(one.evidence[1:])
        np.testing.assert_allclose(alone.evidence.entropies, one.evidence.entropies, rtol=1e-5)
