"""The truth of words against its equation, and the file that it is stored in."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save
from toy_captioner import TOY_TRUTH, toy_calibrator

from captioner.errors import ModelError
from captioner.inference.confidence import read_calibrator
from captioner.inference.names import CONFIDENCE
from captioner.inference.truth import WordTruth
from captioner.options import SearchOptions
from captioner.search.worth import FUNCTION_WORD, UNKNOWN_WORD

TRUTH = WordTruth(
    scale=0.5, log_prob_weight=0.2, bias=-0.3, unknown=-2.0,
    search_scale=0.7, search_bias=0.1, search_unknown=-1.0,
)  # fmt: skip


def sigmoid(value: float) -> float:
    return 1 / (1 + np.exp(-value))


def test_the_truth_of_the_words_of_a_caption() -> None:
    z, log_probs = np.array([3.0, -1.0], np.float32), np.log([0.9, 0.5, 0.1, 0.2])

    found = TRUTH.truths(np.array([FUNCTION_WORD, 1, 0, UNKNOWN_WORD]), log_probs, z)

    assert found.tolist() == pytest.approx(
        [
            np.nan,
            sigmoid(-0.5 + 0.2 * np.log(0.5) - 0.3),
            sigmoid(1.5 + 0.2 * np.log(0.1) - 0.3),
            sigmoid(-1.0 + 0.2 * np.log(0.2) - 0.3),
        ],
        nan_ok=True,
    )


def test_truths_for_the_search_are_indexed_by_rows() -> None:
    found = TRUTH.search_truths(np.array([3.0, -1.0]))

    assert found[:2].tolist() == pytest.approx([sigmoid(2.2), sigmoid(-0.6)])
    assert found[UNKNOWN_WORD] == pytest.approx(sigmoid(-0.6))
    assert np.isnan(found[FUNCTION_WORD])


@pytest.mark.parametrize("kinds", [None, np.arange(4, dtype=np.float32)])
def test_a_calibrator_is_stored(tmp_path, kinds) -> None:
    calibrator = toy_calibrator(SearchOptions(), kinds=kinds)
    (tmp_path / CONFIDENCE).write_bytes(calibrator.to_bytes())

    found = read_calibrator(tmp_path)

    assert found is not None
    assert found.to_bytes() == calibrator.to_bytes()
    assert found.truth == TOY_TRUTH
    assert found.familiarity(np.full(3, 9, np.float32)) == (1 if kinds is None else 0)


def test_files_of_other_releases(tmp_path) -> None:
    """A model calibrated by an earlier release still writes captions, without a confidence."""

    def write(version: int) -> None:
        header = json.dumps({"format_version": version})
        (tmp_path / CONFIDENCE).write_bytes(save({}, metadata={"confidence": header}))

    write(2)
    assert read_calibrator(tmp_path) is None
    write(99)
    with pytest.raises(ModelError, match="format 99"):
        read_calibrator(tmp_path)
    (tmp_path / CONFIDENCE).write_bytes(b"no safetensors")
    with pytest.raises(ModelError, match="damaged"):
        read_calibrator(tmp_path)
