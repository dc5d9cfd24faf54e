"""Writing features: interrupted runs resume and give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toy_features import (
    BLOCK,
    PHOTOS,
    PREPROCESSING,
    Plan,
    contents_of,
    encode,
    fill,
    noise_photos,
    planner,
    rows_of,
)

from captioner.data.coco import CaptionedImage
from captioner.data.feature_writer import FeatureWriter
from captioner.data.features import CONTENTS, JOURNAL, ROWS, FeatureCache
from captioner.errors import ConfigError, DataError


@pytest.fixture
def images(tmp_path: Path) -> list[CaptionedImage]:
    return noise_photos(tmp_path / "photos")


@pytest.fixture
def plan(images: list[CaptionedImage]) -> Plan:
    return planner(images)


# --- Interruptions -------------------------------------------------------------------------------


class Stop(Exception):  # noqa: N818
    """Interrupts a run."""


def failing(calls: int) -> Callable[[Tensor], Tensor]:
    """An encoder that fails after that many calls."""
    left = iter(range(calls))

    def encode_or_stop(pixels: Tensor) -> Tensor:
        if next(left, None) is None:
            raise Stop
        return encode(pixels)

    return encode_or_stop


ENCODINGS = 7
"""Four blocks of photos, the first three of them with flipped ones."""


@pytest.mark.parametrize("calls", range(ENCODINGS))
@pytest.mark.parametrize("partial_line", ["", '[[1, 2, "', "\0\0\0"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, plan, calls, partial_line) -> None:
    fill(tmp_path / "whole", plan())
    with pytest.raises(Stop):
        fill(tmp_path / "f", plan(), failing(calls))
    with pytest.raises(DataError, match="is incomplete; continue with: captioner prepare features"):
        FeatureCache.open(tmp_path / "f", plan().fingerprint)
    with (tmp_path / "f" / JOURNAL).open("a") as journal:
        journal.write(partial_line)
    left = FeatureWriter(tmp_path / "f", plan())
    assert len(left.records) == min(PHOTOS, calls // 2 * BLOCK)  # at most one block is lost

    fill(tmp_path / "f", plan(), failing(ENCODINGS - calls // 2 * 2))

    assert contents_of(tmp_path / "f") == contents_of(tmp_path / "whole")
    assert sorted(contents_of(tmp_path / "f")) == [ROWS, CONTENTS]


def test_force_resumes_and_replaces_complete_features(tmp_path, plan) -> None:
    with pytest.raises(Stop):
        fill(tmp_path / "f", plan(), failing(2), force=True)
    fill(tmp_path / "f", plan(), failing(ENCODINGS - 2), force=True)
    whole = contents_of(tmp_path / "f")

    with pytest.raises(Stop):
        fill(tmp_path / "f", plan(), failing(ENCODINGS - 1), force=True)
    fill(tmp_path / "f", plan(), force=True)

    assert contents_of(tmp_path / "f") == whole


def test_complete_features_are_not_encoded_again(tmp_path, plan) -> None:
    fill(tmp_path / "f", plan())

    assert FeatureWriter(tmp_path / "f", plan()).complete
    fill(tmp_path / "f", plan(), failing(0))


def test_a_reader_keeps_its_open_rows(tmp_path, plan) -> None:
    cache = fill(tmp_path / "f", plan())
    expected = cache.read(rows_of(plan()))

    fill(tmp_path / "f", plan("float16"), force=True)

    assert torch.equal(cache.read(rows_of(plan())), expected)


# --- errors --------------------------------------------------------------------------------------


def test_a_folder_with_other_files_is_refused(tmp_path, images, plan) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"other files \(first: thesis\.tex\).*--force"):
        FeatureWriter(tmp_path / "f", plan())

    fill(tmp_path / "f", plan(), force=True)
    assert (tmp_path / "f" / "thesis.tex").exists()
    with pytest.raises(ConfigError, match="holds features of other photos"):
        FeatureWriter(tmp_path / "f", plan(images=images[:6]))
    with pytest.raises(ConfigError, match="is a file"):
        FeatureWriter(images[0].path, plan())


def test_two_processes_cannot_fill_the_same_folder(tmp_path, plan) -> None:
    first = FeatureWriter(tmp_path / "f", plan()).fill(encode, PREPROCESSING, BLOCK)
    next(first)

    with pytest.raises(DataError, match="another process"):
        fill(tmp_path / "f", plan())
    first.close()
    fill(tmp_path / "f", plan())


def test_features_that_overflow_the_dtype_are_refused(tmp_path, plan) -> None:
    with pytest.raises(DataError, match=r"0\.png: features overflow float16.*bfloat16"):
        fill(tmp_path / "f", plan("float16"), lambda pixels: encode(pixels) * 1e6)

    fill(tmp_path / "g", plan("bfloat16"), lambda pixels: encode(pixels) * 1e6)
