"""Archives of maps."""

from __future__ import annotations

import math

import numpy as np
from cutting import cut
from picture_helpers import make_caption

from captioner.drawing.archive import MapArchive


def test_truth_and_left_out_words_are_padded_apart() -> None:
    whole = make_caption(["a", "dog", "on", "grass"])
    archive = MapArchive()
    archive.add("a.jpg", [cut(whole, 2, [math.nan, 0.9, math.nan, 0.3]), whole], (60, 40))

    arrays = archive.arrays()

    assert arrays["captions"].tolist() == ["a dog", "a dog on grass"]
    assert arrays["lengths"].tolist() == [2, 4]
    assert arrays["left_out_lengths"].tolist() == [2, 0]
    assert arrays["left_out_words"].tolist() == [["on", "grass"], ["", ""]]
    nan = math.nan
    np.testing.assert_array_equal(arrays["truth"], np.float32([[nan, 0.9, nan, nan], [nan] * 4]))
    np.testing.assert_array_equal(arrays["left_out_truth"], np.float32([[nan, 0.3], [nan, nan]]))
    for name in ("alphas", "gates", "log_probs"):
        values = getattr(whole, name)
        np.testing.assert_array_equal(arrays[name][0, :2], values[:2])
        np.testing.assert_array_equal(arrays[f"left_out_{name}"][0], values[2:])
        assert not arrays[name][0, 2:].any()
        assert not arrays[f"left_out_{name}"][1].any()


def test_an_archive_without_left_out_words_has_arrays_without_words() -> None:
    archive = MapArchive()
    archive.add("a.jpg", make_caption(["a", "dog"], (2, 3)), (60, 40))

    assert archive.arrays()["left_out_alphas"].shape == (1, 0, 2, 3)
    assert archive.arrays()["left_out_words"].shape == (1, 0)
    assert archive.encode()
