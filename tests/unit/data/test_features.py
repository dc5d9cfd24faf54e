"""The feature cache: what was encoded comes back, and nothing else passes for it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from captioner.data.coco import CaptionedImage
from captioner.data.features import (
    CONTENTS,
    DTYPES,
    JOURNAL,
    ROWS,
    FeatureCache,
    FeaturePlan,
    FeatureWriter,
    feature_key,
)
from captioner.data.images import open_image
from captioner.data.preprocessing import Preprocessing
from captioner.errors import ConfigError, DataError

SEEN = Preprocessing(image_size=32)
STATE = {"weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)}
PHOTOS, MIRRORED, BLOCK = 7, 5, 2


def encode(pixels: Tensor) -> Tensor:
    """A grid of 2 x 2 regions of 12 values, not the same for a mirrored photo."""
    cells = pixels.float().unflatten(1, (2, 16)).unflatten(3, (2, 16))  # (B, 2, 16, 2, 16, 3)
    grid = torch.stack([cells[:, :, i, :, i] / 3 - i for i in range(4)], dim=-1)
    return grid.flatten(3).flatten(1, 2)


@pytest.fixture
def images(tmp_path: Path) -> list[CaptionedImage]:
    """Seven photos of noise; the last two are for validation, so never mirrored."""
    (tmp_path / "photos").mkdir()
    noise = np.random.default_rng(0).integers(256, size=(PHOTOS, 36, 40, 3), dtype=np.uint8)
    paths = [tmp_path / "photos" / f"{number}.png" for number in range(PHOTOS)]
    for path, pixels in zip(paths, noise, strict=True):
        Image.fromarray(pixels).save(path)
    return [CaptionedImage(10 + n, path, ("A dog.",)) for n, path in enumerate(paths)]


Plan = Callable[..., FeaturePlan]


@pytest.fixture
def plan(images: list[CaptionedImage]) -> Plan:
    def build(dtype: str = "float32", **changes: Any) -> FeaturePlan:
        key = feature_key("toy", STATE, SEEN, dtype=dtype, precision="fp32")
        return replace(FeaturePlan(images, MIRRORED, (2, 2), 12, key), **changes)

    return build


def fill(folder: Path, plan: FeaturePlan, encoder: Any = encode, **options: Any) -> FeatureCache:
    for _ in FeatureWriter(folder, plan, **options).fill(encoder, SEEN, BLOCK):
        pass
    return FeatureCache.open(folder, plan.key)


def pixels_of(image: CaptionedImage) -> Tensor:
    return torch.from_numpy(SEEN.pixels(open_image(image.path)).copy())[None]


def rows_of(plan: FeaturePlan) -> list[tuple[int, bool]]:
    ids = [image.image_id for image in plan.images]
    return [(i, False) for i in ids] + [(i, True) for i in ids[: plan.mirrored]]


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_cached_is_live(tmp_path, images, plan, dtype) -> None:
    cache = fill(tmp_path / "f", plan(dtype))

    read = cache.read([(image.image_id, False) for image in images])

    live = torch.cat([encode(pixels_of(image)) for image in images])
    assert read.dtype == cache.dtype == DTYPES[dtype]
    assert cache.shape == (PHOTOS + MIRRORED, 4, 12)
    assert cache.grid == (2, 2)
    assert torch.equal(read, live.to(DTYPES[dtype]))


def test_mirrored_rows_are_features_of_mirrored_pixels(tmp_path, images, plan) -> None:
    cache = fill(tmp_path / "f", plan())

    for image in images[:MIRRORED]:
        live = encode(pixels_of(image).flip(2))
        assert torch.equal(cache.read([(image.image_id, True)]), live)
        assert not torch.equal(cache.read([(image.image_id, False)]), live)
    with pytest.raises(DataError, match="mirrored photo 15"):
        cache.read([(15, True)])


def test_rows_come_in_any_order_and_more_than_once(tmp_path, plan) -> None:
    cache = fill(tmp_path / "f", plan())
    asked = [(14, True), (10, False), (14, True), (16, False)]

    together = cache.read(asked)

    assert torch.equal(together, torch.cat([cache.read([one]) for one in asked]))
    together.zero_()  # a copy: the cache is as it was
    assert cache.read(asked).any()


def test_threads_read_the_same(tmp_path, plan) -> None:
    cache = fill(tmp_path / "f", plan())
    asked = rows_of(plan())
    expected = FeatureCache.open(tmp_path / "f", {}).read(asked)

    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(cache.read, [asked] * 16))

    assert all(torch.equal(one, expected) for one in read)


@pytest.mark.skipif(os.name == "nt", reason="no fork")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_read_the_same(tmp_path, plan, start) -> None:
    cache = fill(tmp_path / "f", plan())
    asked = rows_of(plan())
    loader = DataLoader(
        asked,  # type: ignore[arg-type]
        batch_size=4,
        collate_fn=cache.read,
        num_workers=1,
        multiprocessing_context=start,
    )

    assert torch.equal(torch.cat(list(loader)), cache.read(asked))


def test_another_process_maps_the_file_itself(tmp_path, plan) -> None:
    cache = fill(tmp_path / "f", plan())

    pickled = pickle.dumps(cache)

    assert len(pickled) < 2000
    asked = rows_of(plan())
    assert torch.equal(pickle.loads(pickled).read(asked), cache.read(asked))


def test_without_mirrored_photos_there_are_no_mirrored_rows(tmp_path, images, plan) -> None:
    cache = fill(tmp_path / "f", plan(mirrored=0))

    assert cache.mirrored == 0
    cache.check(images)
    with pytest.raises(DataError, match=r"7 of 7 photos have no mirrored row .*horizontal_flip"):
        cache.check(images, mirrored=True)


# --- the key -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"encoder_name": "other"}, "encoder toy, now it is other"),
        ({"state": STATE | {"weight": STATE["weight"] + torch.eye(2, 3)}}, "other weights"),
        ({"state": STATE | {"count": torch.tensor(4)}}, "other weights"),
        ({"state": STATE | {"weight": STATE["weight"].reshape(3, 2)}}, "other weights"),
        ({"state": {"w": STATE["weight"], "count": STATE["count"]}}, "other weights"),
        ({"preprocessing": replace(SEEN, image_size=64)}, "image_size 32, now it is 64"),
        ({"preprocessing": replace(SEEN, resize="squash")}, "resize"),
        ({"preprocessing": replace(SEEN, mean=(0.5, 0.5, 0.5))}, "mean"),
        ({"preprocessing": replace(SEEN, std=(0.5, 0.5, 0.5))}, "std"),
        ({"preprocessing": replace(SEEN, channel_order="BGR")}, "channel_order"),
        ({"dtype": "float16"}, "dtype float32, now it is float16"),
        ({"precision": "bf16"}, "precision fp32, now it is bf16"),
    ],
)
def test_another_key_is_refused_by_what_differs(tmp_path, plan, changes, told) -> None:
    fill(tmp_path / "f", plan())
    asked = {"encoder_name": "toy", "state": STATE, "preprocessing": SEEN, "dtype": "float32"}
    key = feature_key(**(asked | {"precision": "fp32"} | changes))

    with pytest.raises(DataError, match=told) as caught:
        FeatureCache.open(tmp_path / "f", key)

    assert "captioner prepare features" in str(caught.value)
    with pytest.raises(ConfigError, match=told):
        FeatureWriter(tmp_path / "f", plan(key=key))


def test_every_field_of_the_preprocessing_is_in_the_key() -> None:
    key = feature_key("toy", STATE, SEEN)

    assert set(key) == {"encoder", "weights", *vars(SEEN)}


def test_parts_that_the_key_leaves_out_may_be_any(tmp_path, plan) -> None:
    fill(tmp_path / "f", plan("bfloat16"))

    assert FeatureCache.open(tmp_path / "f", feature_key("toy", STATE, SEEN)).dtype == (
        torch.bfloat16
    )


def test_the_layout_of_weights_in_memory_is_not_in_the_key() -> None:
    weights = torch.randn(4, 3, 2, 2)

    keys = [
        feature_key("toy", {"w": laid}, SEEN)
        for laid in (weights, weights.to(memory_format=torch.channels_last))
    ]

    assert keys[0] == keys[1]


# --- what is refused -----------------------------------------------------------------------------


def test_a_flipped_byte_is_refused_by_the_photos_name(tmp_path, images, plan) -> None:
    row = plan().row_bytes
    fill(tmp_path / "f", plan())
    with (tmp_path / "f" / ROWS).open("r+b") as file:
        file.seek(3 * row + 17)
        byte = file.read(1)[0]
        file.seek(3 * row + 17)
        file.write(bytes([byte ^ 1]))
    cache = FeatureCache.open(tmp_path / "f", plan().key)

    cache.read([(12, False), (14, False), (13, True)])
    for _ in range(2):
        with pytest.raises(DataError, match=r"features of 3\.png are damaged.*--force"):
            cache.read([(12, False), (13, False)])


def test_cut_rows_are_refused(tmp_path, plan) -> None:
    fill(tmp_path / "f", plan())
    os.truncate(tmp_path / "f" / ROWS, 1000)
    with pytest.raises(DataError, match=r"1,000 bytes where 2,304 are expected.*--force"):
        FeatureCache.open(tmp_path / "f", plan().key)

    (tmp_path / "f" / ROWS).unlink()
    with pytest.raises(DataError, match="0 bytes"):
        FeatureCache.open(tmp_path / "f", plan().key)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda told: told | {"version": 2}, "another version"),
        (lambda told: told | {"records": told["records"][1:]}, "damaged"),
        (lambda told: {}, "damaged"),
        (lambda told: [], "damaged"),
    ],
)
def test_contents_that_are_not_ours_are_refused(tmp_path, plan, change, told) -> None:
    fill(tmp_path / "f", plan())
    contents = tmp_path / "f" / CONTENTS
    contents.write_text(json.dumps(change(json.loads(contents.read_text()))))

    with pytest.raises(DataError, match=told):
        FeatureCache.open(tmp_path / "f", plan().key)


def test_torn_contents_are_refused_and_can_be_replaced(tmp_path, plan) -> None:
    fill(tmp_path / "f", plan())
    whole = contents_of(tmp_path / "f")
    os.truncate(tmp_path / "f" / CONTENTS, 100)

    with pytest.raises(DataError, match="damaged"):
        FeatureCache.open(tmp_path / "f", plan().key)
    with pytest.raises(ConfigError, match="--force"):
        FeatureWriter(tmp_path / "f", plan())
    fill(tmp_path / "f", plan(), force=True)
    assert contents_of(tmp_path / "f") == whole


def test_nothing_there_names_the_command(tmp_path) -> None:
    with pytest.raises(DataError, match="captioner prepare features"):
        FeatureCache.open(tmp_path / "f", {})


# --- photos that change --------------------------------------------------------------------------


def test_a_changed_photo_is_refused(tmp_path, images, plan) -> None:
    cache = fill(tmp_path / "f", plan())
    cache.check(images)
    Image.new("RGB", (40, 36)).save(images[2].path)

    with pytest.raises(DataError, match=r"1 of 7 photos are no longer.*2\.png.*--force"):
        cache.check(images)
    cache.check(images[:2] + images[3:])


def test_a_photo_changed_within_its_size_is_refused(tmp_path, images, plan) -> None:
    cache = fill(tmp_path / "f", plan())
    data = bytearray(images[2].path.read_bytes())
    data[60] ^= 1
    images[2].path.write_bytes(data)
    os.utime(images[2].path, ns=(0, 0))

    with pytest.raises(DataError, match=r"2\.png"):
        cache.check(images)


def test_a_copied_data_set_is_accepted(tmp_path, images, plan) -> None:
    cache = fill(tmp_path / "f", plan())
    for image in images:
        os.utime(image.path, ns=(1, 1))
    cache.check(images, mirrored=False)

    shutil.copytree(tmp_path / "photos", tmp_path / "copy")
    cache.check([replace(image, path=tmp_path / "copy" / image.path.name) for image in images])


def test_photos_that_are_gone_are_accepted(tmp_path, images, plan) -> None:
    cache = fill(tmp_path / "f", plan())
    shutil.rmtree(tmp_path / "photos")

    cache.check(images)


def test_unknown_photos_are_refused(tmp_path, images, plan) -> None:
    cache = fill(tmp_path / "f", plan())

    for other in (replace(images[0], image_id=99), replace(images[0], path=Path("x/other.png"))):
        with pytest.raises(DataError, match=r"1 of 2 photos are not in .*first: .*png"):
            cache.check([images[1], other])
    assert not cache.has(99)
    with pytest.raises(DataError, match="photo 99"):
        cache.read([(99, False)])


def test_two_photos_of_one_id_are_refused(tmp_path, images, plan) -> None:
    with pytest.raises(ConfigError, match=r"image id 10 is .*0\.png and .*1\.png"):
        FeatureWriter(
            tmp_path / "f", plan(images=[images[0], replace(images[1], image_id=10)], mirrored=0)
        )


@pytest.mark.parametrize("data", [b"", b"no picture", None])
def test_a_photo_that_cannot_be_read_is_left_out(tmp_path, images, plan, data) -> None:
    images[3].path.unlink()
    if data is not None:
        images[3].path.write_bytes(data)
    errors = [
        error
        for _, found in FeatureWriter(tmp_path / "f", plan()).fill(encode, SEEN, BLOCK)
        for error in found
    ]

    cache = FeatureCache.open(tmp_path / "f", plan().key)

    assert [str(images[3].path) in str(error) for error in errors] == [True]
    assert [cache.has(image.image_id) for image in images] == [True] * 3 + [False] + [True] * 3
    cache.check(images)
    assert not cache.read([(13, False), (13, True)]).any()
    for image in images[:3] + images[4:]:
        assert torch.equal(cache.read([(image.image_id, False)]), encode(pixels_of(image)))
    Image.new("RGB", (40, 36)).save(images[3].path)  # mended: now its row is missed
    with pytest.raises(DataError, match=r"3\.png"):
        cache.check(images)


# --- stopping and going on -----------------------------------------------------------------------


class Stop(Exception):  # noqa: N818
    """A run that dies."""


def dying(calls: int) -> Callable[[Tensor], Tensor]:
    """An encoder that works so many times."""
    left = iter(range(calls))

    def encode_or_die(pixels: Tensor) -> Tensor:
        if next(left, None) is None:
            raise Stop
        return encode(pixels)

    return encode_or_die


ENCODINGS = 7
"""Four blocks of photos, the first three of them with mirrored ones."""


@pytest.mark.parametrize("calls", range(ENCODINGS))
@pytest.mark.parametrize("torn", ["", '[[1, 2, "', "\0\0\0"])
def test_interrupted_and_resumed_is_never_interrupted(tmp_path, plan, calls, torn) -> None:
    fill(tmp_path / "whole", plan())
    with pytest.raises(Stop):
        fill(tmp_path / "f", plan(), dying(calls))
    with pytest.raises(DataError, match="is incomplete; go on with: captioner prepare features"):
        FeatureCache.open(tmp_path / "f", plan().key)
    with (tmp_path / "f" / JOURNAL).open("a") as journal:
        journal.write(torn)
    left = FeatureWriter(tmp_path / "f", plan())
    assert len(left.records) == min(PHOTOS, calls // 2 * BLOCK)  # one block is lost at most

    fill(tmp_path / "f", plan(), dying(ENCODINGS - calls // 2 * 2))

    assert contents_of(tmp_path / "f") == contents_of(tmp_path / "whole")
    assert sorted(contents_of(tmp_path / "f")) == [ROWS, CONTENTS]


def test_a_run_that_dies_at_every_block_arrives(tmp_path, plan) -> None:
    fill(tmp_path / "whole", plan())
    for _ in range(2):
        with pytest.raises(Stop):
            fill(tmp_path / "f", plan(), dying(3))

    fill(tmp_path / "f", plan(), dying(3))

    assert contents_of(tmp_path / "f") == contents_of(tmp_path / "whole")


def test_force_goes_on_too_and_replaces_what_is_finished(tmp_path, plan) -> None:
    with pytest.raises(Stop):
        fill(tmp_path / "f", plan(), dying(2), force=True)
    fill(tmp_path / "f", plan(), dying(ENCODINGS - 2), force=True)
    whole = contents_of(tmp_path / "f")

    with pytest.raises(Stop):
        fill(tmp_path / "f", plan(), dying(ENCODINGS - 1), force=True)
    fill(tmp_path / "f", plan(), force=True)

    assert contents_of(tmp_path / "f") == whole


def test_what_is_complete_is_not_encoded_again(tmp_path, plan) -> None:
    fill(tmp_path / "f", plan())

    assert FeatureWriter(tmp_path / "f", plan()).complete
    fill(tmp_path / "f", plan(), dying(0))


def test_rows_that_are_gone_are_made_anew(tmp_path, plan) -> None:
    with pytest.raises(Stop):
        fill(tmp_path / "f", plan(), dying(2))
    (tmp_path / "f" / ROWS).unlink()

    fill(tmp_path / "f", plan(), dying(ENCODINGS))


def test_a_reader_keeps_the_rows_that_it_opened(tmp_path, plan) -> None:
    cache = fill(tmp_path / "f", plan())
    expected = cache.read(rows_of(plan()))

    fill(tmp_path / "f", plan("float16"), force=True)

    assert torch.equal(cache.read(rows_of(plan())), expected)


def test_a_folder_of_other_things_is_refused(tmp_path, images, plan) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"other files \(first: thesis\.tex\).*--force to put"):
        FeatureWriter(tmp_path / "f", plan())

    fill(tmp_path / "f", plan(), force=True)
    assert (tmp_path / "f" / "thesis.tex").exists()
    with pytest.raises(ConfigError, match="holds the features of other photos"):
        FeatureWriter(tmp_path / "f", plan(images=images[:6]))
    with pytest.raises(ConfigError, match="is a file"):
        FeatureWriter(images[0].path, plan())


def test_begun_features_of_another_key_are_refused(tmp_path, plan) -> None:
    with pytest.raises(Stop):
        fill(tmp_path / "f", plan(), dying(3))

    with pytest.raises(ConfigError, match="dtype float32, now it is float16"):
        FeatureWriter(tmp_path / "f", plan("float16"))
    fill(tmp_path / "f", plan("float16"), force=True)


@pytest.mark.skipif(os.name == "nt", reason="no locks")
def test_two_processes_do_not_fill_one_folder(tmp_path, plan) -> None:
    first = FeatureWriter(tmp_path / "f", plan()).fill(encode, SEEN, BLOCK)
    next(first)

    with pytest.raises(DataError, match="another process"):
        fill(tmp_path / "f", plan())
    first.close()
    fill(tmp_path / "f", plan())


def test_features_that_do_not_fit_the_dtype_are_refused(tmp_path, plan) -> None:
    with pytest.raises(DataError, match=r"0\.png: its features do not fit float16.*bfloat16"):
        fill(tmp_path / "f", plan("float16"), lambda pixels: encode(pixels) * 1e6)

    fill(tmp_path / "g", plan("bfloat16"), lambda pixels: encode(pixels) * 1e6)


def test_missing_bytes_shrink_as_rows_are_written(tmp_path, plan) -> None:
    large = plan(mirrored=0, feature_dim=12 * 1024)

    def wide(pixels: Tensor) -> Tensor:
        return encode(pixels).repeat(1, 1, 1024)

    assert FeatureWriter(tmp_path / "f", large).missing_bytes == large.bytes
    filling = FeatureWriter(tmp_path / "f", large).fill(wide, SEEN, BLOCK)
    next(filling)
    filling.close()

    left = FeatureWriter(tmp_path / "f", large).missing_bytes
    assert left == pytest.approx(large.bytes * 5 / 7, rel=0.05)
