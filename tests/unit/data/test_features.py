"""The feature cache: cached features equal live ones, stale or damaged caches are refused, and
interrupted runs resume and give the same bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_data import contents
from torch import Tensor, nn

from captioner.data.example import Example
from captioner.data.features import (
    DTYPES,
    HEADER,
    INDEX,
    ROWS,
    FeatureCache,
    FeatureEncoder,
    FeatureWriter,
    feature_fingerprint,
)
from captioner.data.images import open_image
from captioner.errors import ConfigError, DataError
from captioner.model.encoder import Encoder
from captioner.model.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(image_size=32)
STATE = {"weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)}
PHOTOS, FLIPPED, BLOCK = 7, 5, 2


def encode(pixels: Tensor) -> Tensor:
    """A grid of 2 x 2 regions of 12 values, which differ for a flipped photo."""
    cells = pixels.float().unflatten(1, (2, 16)).unflatten(3, (2, 16))  # (B, 2, 16, 2, 16, 3)
    grid = torch.stack([cells[:, :, i, :, i] / 3 - i for i in range(4)], dim=-1)
    return grid.flatten(3).flatten(1, 2)


@pytest.fixture
def images(tmp_path: Path) -> list[Example]:
    """Seven photos of noise; the last two are for validation, and therefore not flipped."""
    (tmp_path / "photos").mkdir()
    noise = np.random.default_rng(0).integers(256, size=(PHOTOS, 36, 40, 3), dtype=np.uint8)
    paths = [tmp_path / "photos" / f"{number}.png" for number in range(PHOTOS)]
    for path, pixels in zip(paths, noise, strict=True):
        Image.fromarray(pixels).save(path)
    return [Example(10 + n, path, ("A dog.",)) for n, path in enumerate(paths)]


class ToyEncoder(Encoder):
    """A name and weights."""

    def __init__(self, state: dict[str, Tensor], name: str = "toy") -> None:
        nn.Module.__init__(self)
        self.name, self.state = name, state

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return self.state


@pytest.fixture
def make(tmp_path: Path, images: list[Example]) -> Callable[..., FeatureWriter]:
    """``make("f", dtype, encode, photos, force=, **fingerprint)``: a writer of a subfolder."""

    def build(
        name: str, dtype: str = "float32", encode: Any = encode, photos: Any = images, **more: Any
    ) -> FeatureWriter:
        force = more.pop("force", False)
        toy = ToyEncoder(more.pop("state", STATE), more.pop("encoder_name", "toy"))
        about = {"preprocessing": PREPROCESSING, "dtype": dtype, "precision": "fp32"} | more
        fingerprint = feature_fingerprint(toy, **about)
        encoder = FeatureEncoder(encode, PREPROCESSING, (2, 2), 12, fingerprint)
        return FeatureWriter(tmp_path / name, encoder, photos, FLIPPED, force=force)

    return build


def fill(writer: FeatureWriter) -> FeatureCache:
    for _ in writer.fill(BLOCK):
        pass
    return opened(writer)


def opened(writer: FeatureWriter) -> FeatureCache:
    return FeatureCache(writer.folder, writer.encoder.fingerprint)


def pixels_of(image: Example) -> Tensor:
    return torch.from_numpy(PREPROCESSING.pixels(open_image(image.path)).copy())[None]


def all_rows(cache: FeatureCache) -> Tensor:
    ids = range(10, 10 + PHOTOS)
    return cache.read([*((i, False) for i in ids), *((i, True) for i in ids[:FLIPPED])])


@pytest.mark.parametrize("dtype", DTYPES)
def test_cached_features_equal_live_ones(images, make, dtype) -> None:
    cache = fill(make("f", dtype))

    live = [encode(pixels_of(image)) for image in images]
    live += [encode(pixels_of(image).flip(2)) for image in images[:FLIPPED]]
    assert cache.dtype == DTYPES[dtype]
    assert cache.shape == (PHOTOS + FLIPPED, 4, 12)
    assert cache.grid == (2, 2)
    assert torch.equal(all_rows(cache), torch.cat(live).to(DTYPES[dtype]))
    assert not torch.equal(live[0], live[PHOTOS])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_name": "other"}, "encoder toy, not other"),
        (
            {"state": STATE | {"weight": STATE["weight"] + torch.eye(2, 3)}},
            "different encoder weights",
        ),
        ({"preprocessing": replace(PREPROCESSING, image_size=64)}, "image_size 32, not 64"),
        ({"preprocessing": replace(PREPROCESSING, channel_order="BGR")}, "channel_order"),
        ({"dtype": "float16"}, "dtype float32, not float16"),
        ({"precision": "bf16"}, "precision fp32, not bf16"),
    ],
)
def test_another_fingerprint_is_refused(make, changes, message) -> None:
    fill(make("f"))

    with pytest.raises(DataError, match=rf"{message}.*captioner prepare features"):
        opened(make("f", **changes, force=True))
    with pytest.raises(ConfigError, match=message):
        make("f", **changes)


def test_the_sign_of_a_zero_does_not_change_the_fingerprint() -> None:
    """A running average of weights that never change turns -0.0 into 0.0."""
    one, same, other = (
        feature_fingerprint(ToyEncoder({"w": torch.tensor([zero, least])}), PREPROCESSING)
        for zero, least in ((0.0, 0.0), (-0.0, 0.0), (0.0, 1e-30))
    )
    assert one == same != other


def test_a_changed_byte_is_reported_with_the_photos_name(tmp_path, make) -> None:
    row = make("f").encoder.row_bytes
    fill(make("f"))
    with (tmp_path / "f" / ROWS).open("r+b") as file:
        file.seek(3 * row + 17)
        byte = file.read(1)[0]
        file.seek(3 * row + 17)
        file.write(bytes([byte ^ 1]))
    cache = opened(make("f"))

    cache.read([(12, False), (14, False), (13, True)])
    for _ in range(2):
        with pytest.raises(DataError, match=r"features of 3\.png are damaged.*--force"):
            cache.read([(12, False), (13, False)])


def test_a_changed_photo_is_refused(tmp_path, images, make) -> None:
    cache = fill(make("f"))
    shutil.copytree(tmp_path / "photos", tmp_path / "copy")
    copies = [replace(image, path=tmp_path / "copy" / image.path.name) for image in images]
    for image in images, copies:
        cache.check(image)
    Image.new("RGB", (40, 36)).save(copies[2].path)

    with pytest.raises(DataError, match=r"1 of 7 photos have changed.*2\.png.*--force"):
        cache.check(copies)
    cache.check(copies[:2] + copies[3:])


def test_unknown_photos_are_refused(images, make) -> None:
    cache = fill(make("f"))

    for other in (replace(images[0], image_id=99), replace(images[0], path=Path("x/other.png"))):
        with pytest.raises(DataError, match=r"1 of 2 photos are not in .*first: .*png"):
            cache.check([images[1], other])
    assert not cache.has(99)


@pytest.mark.parametrize("data", [b"", b"no picture", None])
def test_an_unreadable_photo_is_skipped(images, make, data) -> None:
    images[3].path.unlink()
    if data is not None:
        images[3].path.write_bytes(data)
    errors = [error for _, found in make("f").fill(BLOCK) for error in found]

    cache = opened(make("f"))

    assert [str(images[3].path) in str(error) for error in errors] == [True]
    assert [cache.has(image.image_id) for image in images] == [True] * 3 + [False] + [True] * 3
    cache.check(images)
    assert not cache.read([(13, False), (13, True)]).any()
    for image in images[:3] + images[4:]:
        assert torch.equal(cache.read([(image.image_id, False)]), encode(pixels_of(image)))
    Image.new("RGB", (40, 36)).save(images[3].path)  # readable again, but its row is missing
    with pytest.raises(DataError, match=r"3\.png"):
        cache.check(images)


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
@pytest.mark.parametrize("part_of_a_record", [b"", b"\1\2"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, make, calls, part_of_a_record) -> None:
    fill(make("whole"))
    with pytest.raises(Stop):
        fill(make("f", encode=failing(calls)))
    with pytest.raises(DataError, match="is incomplete; continue with: captioner prepare features"):
        opened(make("f"))
    with (tmp_path / "f" / INDEX).open("ab") as index:
        index.write(part_of_a_record)
    assert make("f").done == min(PHOTOS, calls // 2 * BLOCK)  # at most one block is lost

    fill(make("f", encode=failing(ENCODINGS - calls // 2 * 2)))

    assert contents(tmp_path / "f") == contents(tmp_path / "whole")
    assert contents(tmp_path / "f").keys() == {ROWS, INDEX, HEADER}
    assert make("f").complete
    fill(make("f", encode=failing(0)))  # nothing is encoded again


def test_force_resumes_and_replaces_complete_features(tmp_path, make) -> None:
    with pytest.raises(Stop):
        fill(make("f", encode=failing(2), force=True))
    fill(make("f", encode=failing(ENCODINGS - 2), force=True))
    whole = contents(tmp_path / "f")

    with pytest.raises(Stop):
        fill(make("f", encode=failing(ENCODINGS - 1), force=True))
    fill(make("f", force=True))

    assert contents(tmp_path / "f") == whole


def test_a_reader_keeps_its_open_rows(make) -> None:
    cache = fill(make("f"))
    expected = all_rows(cache)

    fill(make("f", "float16", force=True))

    assert torch.equal(all_rows(cache), expected)


def test_a_folder_with_other_files_is_refused(tmp_path, images, make) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"unrelated files \(first: thesis\.tex\).*--force"):
        make("f")

    fill(make("f", force=True))
    assert (tmp_path / "f" / "thesis.tex").exists()
    with pytest.raises(ConfigError, match="contains features of different photos"):
        make("f", photos=images[:6])
    with pytest.raises(ConfigError, match="is a file"):
        make(images[0].path)


def test_two_processes_cannot_fill_the_same_folder(make) -> None:
    first = make("f").fill(BLOCK)
    next(first)

    with pytest.raises(DataError, match="another process"):
        fill(make("f"))
    first.close()
    fill(make("f"))


def test_features_that_overflow_the_dtype_are_refused(make) -> None:
    with pytest.raises(DataError, match=r"0\.png: the features overflow float16.*bfloat16"):
        fill(make("f", "float16", encode=lambda pixels: encode(pixels) * 1e6))

    fill(make("g", "bfloat16", encode=lambda pixels: encode(pixels) * 1e6))
