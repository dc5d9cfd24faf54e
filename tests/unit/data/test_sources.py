"""Photos and cached features give the same batches, from any start and for any process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from captioner.data.batches import Batch, EncodedImage, EpochSampler, PhotoReader, photo_tensor
from captioner.data.coco import CaptionedImage
from captioner.data.images import open_image
from captioner.data.sources import PhotoSource
from captioner.model.preprocessing import Preprocessing
from captioner.text.vocabulary import PAD

PREPROCESSING = Preprocessing(image_size=32)
PHOTOS = 11


def encode(pixels: Tensor) -> Tensor:
    """(B, 32, 32, 3) to a grid of (B, 4, 768), which differs for a flipped photo."""
    cells = pixels.float().unflatten(1, (2, 16)).unflatten(3, (2, 16))
    return cells.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)


class Cache:
    """Replaces ``FeatureCache``: encodes on reading."""

    def __init__(self, photos: Sequence[EncodedImage]) -> None:
        self.paths = {photo.image.image_id: photo.image.path for photo in photos}

    def read(self, rows: Sequence[tuple[int, bool]]) -> Tensor:
        pixels = [
            photo_tensor(PREPROCESSING, open_image(self.paths[i]), turned) for i, turned in rows
        ]
        return encode(torch.stack(pixels))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[EncodedImage]:
    """Photos of noise with one to four captions of 1 to 9 words."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    made = []
    for number in range(PHOTOS):
        path = folder / f"{number}.png"
        Image.fromarray(random.integers(256, size=(36, 40, 3), dtype=np.uint8)).save(path)
        captions = tuple([4 + number] * random.integers(1, 10) for _ in range(1 + number % 4))
        made.append(EncodedImage(CaptionedImage(100 + number, path, ("",)), captions))
    return made


Make = Callable[..., PhotoSource]


@pytest.fixture
def make(photos: list[EncodedImage]) -> Make:
    def build(
        kind: str, rank: int = 0, world: int = 1, bucket: int = 1, seed: int = 5
    ) -> PhotoSource:
        lengths = [[len(words) for words in photo.tokens] for photo in photos]
        sampler = EpochSampler(lengths, 4, seed, rank, world, bucket=bucket)
        options: dict[str, Any] = {"max_captions": 3, "horizontal_flip": True, "seed": seed}
        reader = PhotoReader(PREPROCESSING, **options)
        cache: Any = Cache(photos) if kind == "features" else None
        return PhotoSource(reader, photos, sampler, cache=cache)

    return build


def assert_same(one: Batch, other: Batch) -> None:
    assert one.image_ids == other.image_ids
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.images, other.images)


each_kind = pytest.mark.parametrize("kind", ["photos", "features"])
any_bucket = pytest.mark.parametrize("bucket", [1, 2])


@any_bucket
def test_features_and_photos_give_the_same_batches(make: Make, bucket: int) -> None:
    live, cached = make("photos", bucket=bucket), make("features", bucket=bucket)
    turned = 0
    for epoch in (0, 1, 2):
        assert live.batches_in(epoch) == cached.batches_in(epoch) == 3
        pairs = list(zip(live.batches(epoch, 0), cached.batches(epoch, 0), strict=True))
        assert len(pairs) == 3
        for photos, features in pairs:
            assert_same(photos._replace(images=encode(photos.images)), features)
        unflipped = make("features", bucket=bucket)
        unflipped.reader.horizontal_flip = False
        turned += sum(
            not torch.equal(a, b)
            for (_, batch), plain in zip(pairs, unflipped.batches(epoch, 0), strict=True)
            for a, b in zip(batch.images, plain.images, strict=True)
        )
    assert 3 * PHOTOS // 4 < turned < 3 * 3 * PHOTOS // 4


@each_kind
@any_bucket
@pytest.mark.parametrize("start", [1, 2, 3])
def test_an_epoch_can_start_at_any_batch(make: Make, kind: str, bucket: int, start: int) -> None:
    whole = list(make(kind, bucket=bucket).batches(1, 0))
    source = make(kind, bucket=bucket)
    next(source.batches(0, 0))  # earlier reads have no effect

    tail = list(source.batches(1, start))

    for one, other in zip(tail, whole[start:], strict=True):
        assert_same(one, other)
    for one, other in zip(source.batches(1, 0), whole, strict=True):  # nor do earlier starts
        assert_same(one, other)


def by_photo(batches: Sequence[Batch]) -> dict[int, tuple[list[list[int]], Tensor]]:
    """Captions and image of each photo."""
    found = {}
    for batch in batches:
        for image, tokens, image_id in zip(*batch, strict=True):
            captions = [[t for t in row if t != PAD] for row in tokens.tolist() if any(row)]
            if captions:  # the others are fillers
                assert image_id not in found
                found[image_id] = (captions, image)
    return found


@each_kind
@any_bucket
@pytest.mark.parametrize("world", [2, 4])
def test_processes_together_equal_one_process(
    make: Make, kind: str, bucket: int, world: int
) -> None:
    """With four processes, one gets a filler in the last batch of three photos."""
    whole = list(make(kind, bucket=bucket).batches(2, 0))
    shares = [list(make(kind, rank, world, bucket).batches(2, 0)) for rank in range(world)]

    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        assert sum(part.words for part in parts) == batch.words
        expected, found = by_photo([batch]), by_photo(parts)
        assert found.keys() == expected.keys()
        for image_id, (captions, image) in expected.items():
            assert found[image_id][0] == captions
            assert torch.equal(found[image_id][1], image)
    assert all(len(share) == len(whole) for share in shares)
    filled = [batch for share in shares for batch in share if not batch.words]
    assert len(filled) == (world == 4)


def test_a_loop_that_ends_early_leaves_no_thread(make: Make) -> None:
    before = threading.active_count()
    batches = make("features").batches(0, 0)
    next(batches)
    assert threading.active_count() == before + 1
    batches.close()
    assert threading.active_count() == before
