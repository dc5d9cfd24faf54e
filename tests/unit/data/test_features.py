"""The feature cache: cached features equal live ones, stale or damaged caches are refused, and
interrupted runs resume and give the same bytes."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from toy_features import (
    BLOCK,
    FLIPPED,
    PHOTOS,
    PREPROCESSING,
    STATE,
    Plan,
    contents_of,
    encode,
    fill,
    noise_photos,
    pixels_of,
    planner,
    rows_of,
)

from captioner.data.coco import CaptionedImage
from captioner.data.feature_writer import FeatureWriter
from captioner.data.features import (
    CONTENTS,
    DTYPES,
    JOURNAL,
    ROWS,
    FeatureCache,
    feature_fingerprint,
)
from captioner.errors import ConfigError, DataError


@pytest.fixture
def images(tmp_path: Path) -> list[CaptionedImage]:
    return noise_photos(tmp_path / "photos")


@pytest.fixture
def plan(images: list[CaptionedImage]) -> Plan:
    return planner(images)


# --- Reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_cached_features_equal_live_ones(tmp_path, images, plan, dtype) -> None:
    cache = fill(tmp_path / "f", plan(dtype))

    read = cache.read([(image.image_id, False) for image in images])

    live = torch.cat([encode(pixels_of(image)) for image in images])
    assert read.dtype == cache.dtype == DTYPES[dtype]
    assert cache.shape == (PHOTOS + FLIPPED, 4, 12)
    assert cache.grid == (2, 2)
    assert torch.equal(read, live.to(DTYPES[dtype]))


def test_flipped_rows_are_features_of_flipped_pixels(tmp_path, images, plan) -> None:
    cache = fill(tmp_path / "f", plan())

    for image in images[:FLIPPED]:
        live = encode(pixels_of(image).flip(2))
        assert torch.equal(cache.read([(image.image_id, True)]), live)
        assert not torch.equal(cache.read([(image.image_id, False)]), live)


def test_cache_can_be_used_in_another_process(tmp_path, plan) -> None:
    cache = fill(tmp_path / "f", plan())

    pickled = pickle.dumps(cache)

    assert len(pickled) < 2000
    rows = rows_of(plan())
    assert torch.equal(pickle.loads(pickled).read(rows), cache.read(rows))


# --- the fingerprint -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_name": "other"}, "encoder toy, not other"),
        ({"state": STATE | {"weight": STATE["weight"] + torch.eye(2, 3)}}, "other encoder weights"),
        ({"preprocessing": replace(PREPROCESSING, image_size=64)}, "image_size 32, not 64"),
        ({"preprocessing": replace(PREPROCESSING, channel_order="BGR")}, "channel_order"),
        ({"dtype": "float16"}, "dtype float32, not float16"),
        ({"precision": "bf16"}, "precision fp32, not bf16"),
    ],
)
def test_another_fingerprint_is_refused(tmp_path, plan, changes, message) -> None:
    fill(tmp_path / "f", plan())
    arguments = {
        "encoder_name": "toy",
        "state": STATE,
        "preprocessing": PREPROCESSING,
        "dtype": "float32",
    }
    fingerprint = feature_fingerprint(**(arguments | {"precision": "fp32"} | changes))

    with pytest.raises(DataError, match=message) as caught:
        FeatureCache.open(tmp_path / "f", fingerprint)

    assert "captioner prepare features" in str(caught.value)
    with pytest.raises(ConfigError, match=message):
        FeatureWriter(tmp_path / "f", plan(fingerprint=fingerprint))


def test_the_sign_of_a_zero_does_not_change_the_fingerprint() -> None:
    """A running average of weights that never change turns -0.0 into 0.0."""
    one, other = (
        feature_fingerprint("toy", {"w": torch.tensor([zero, 1.0])}, PREPROCESSING)
        for zero in (0.0, -0.0)
    )
    assert one == other
    assert one != feature_fingerprint("toy", {"w": torch.tensor([1e-30, 1.0])}, PREPROCESSING)


# --- errors --------------------------------------------------------------------------------------


def test_a_changed_byte_is_reported_with_the_photos_name(tmp_path, images, plan) -> None:
    row = plan().row_bytes
    fill(tmp_path / "f", plan())
    with (tmp_path / "f" / ROWS).open("r+b") as file:
        file.seek(3 * row + 17)
        byte = file.read(1)[0]
        file.seek(3 * row + 17)
        file.write(bytes([byte ^ 1]))
    cache = FeatureCache.open(tmp_path / "f", plan().fingerprint)

    cache.read([(12, False), (14, False), (13, True)])
    for _ in range(2):
        with pytest.raises(DataError, match=r"features of 3\.png are damaged.*--force"):
            cache.read([(12, False), (13, False)])


# --- photos that change --------------------------------------------------------------------------


def test_a_changed_photo_is_refused(tmp_path, images, plan) -> None:
    cache = fill(tmp_path / "f", plan())
    cache.check(images)
    Image.new("RGB", (40, 36)).save(images[2].path)

    with pytest.raises(DataError, match=r"1 of 7 photos have changed.*2\.png.*--force"):
        cache.check(images)
    cache.check(images[:2] + images[3:])


def test_a_copied_data_set_is_accepted(tmp_path, images, plan) -> None:
    cache = fill(tmp_path / "f", plan())
    for image in images:
        os.utime(image.path, ns=(1, 1))
    cache.check(images, flipped=False)

    shutil.copytree(tmp_path / "photos", tmp_path / "copy")
    copies = [replace(image, path=tmp_path / "copy" / image.path.name) for image in images]
    cache.check(copies)
    copies[3].path.write_bytes(copies[2].path.read_bytes())
    with pytest.raises(DataError, match=r"1 of 7 photos have changed.*3\.png"):
        cache.check(copies)


def test_unknown_photos_are_refused(tmp_path, images, plan) -> None:
    cache = fill(tmp_path / "f", plan())

    for other in (replace(images[0], image_id=99), replace(images[0], path=Path("x/other.png"))):
        with pytest.raises(DataError, match=r"1 of 2 photos are not in .*first: .*png"):
            cache.check([images[1], other])
    assert not cache.has(99)


@pytest.mark.parametrize("data", [b"", b"no picture", None])
def test_an_unreadable_photo_is_skipped(tmp_path, images, plan, data) -> None:
    images[3].path.unlink()
    if data is not None:
        images[3].path.write_bytes(data)
    errors = [
        error
        for _, found in FeatureWriter(tmp_path / "f", plan()).fill(encode, PREPROCESSING, BLOCK)
        for error in found
    ]

    cache = FeatureCache.open(tmp_path / "f", plan().fingerprint)

    assert [str(images[3].path) in str(error) for error in errors] == [True]
    assert [cache.has(image.image_id) for image in images] == [True] * 3 + [False] + [True] * 3
    cache.check(images)
    assert not cache.read([(13, False), (13, True)]).any()
    for image in images[:3] + images[4:]:
        assert torch.equal(cache.read([(image.image_id, False)]), encode(pixels_of(image)))
    Image.new("RGB", (40, 36)).save(images[3].path)  # readable again, but its row is missing
    with pytest.raises(DataError, match=r"3\.png"):
        cache.check(images)


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
@pytest.mark.parametrize("partial_line", ["", '[[1, 2, "'])
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


# --- errors of writing ----------------------------------------------------------------------------


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
