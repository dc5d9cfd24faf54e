"""Batches: what an item holds depends on seed, epoch and photo alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from captioner.data.batches import (
    CaptionDataset,
    EncodedImage,
    EpochSampler,
    collate,
    training_loader,
)
from captioner.data.coco import CaptionedImage
from captioner.data.preprocessing import Preprocessing
from captioner.vocabulary import END, PAD, START


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> list[EncodedImage]:
    """Seven photos, darker on the left; photo n has n % 3 + 1 captions that start with n."""
    folder = tmp_path_factory.mktemp("photos")
    ramp = np.linspace(0, 200, 40).astype(np.uint8)[None, :, None].repeat(32, 0).repeat(3, 2)
    items = []
    for number in range(7):
        Image.fromarray(ramp + np.uint8(number)).save(folder / f"{number}.png")
        tokens = tuple([number + 10, 4 + r, *[5] * r] for r in range(number % 3 + 1))
        image = CaptionedImage(number, folder / f"{number}.png", ("",) * len(tokens))
        items.append(EncodedImage(image, tokens))
    return items


Make = Callable[..., CaptionDataset]


@pytest.fixture
def make(items: list[EncodedImage]) -> Make:
    def build(max_captions: int = 5, flip: bool = False, seed: int = 0) -> CaptionDataset:
        return CaptionDataset(
            items,
            Preprocessing(32),
            max_captions=max_captions,
            horizontal_flip=flip,
            seed=seed,
        )

    return build


def mirrored(pixels: Tensor) -> bool:
    return bool(pixels[0, 0, 0] > pixels[0, -1, 0])


# --- Items ---


def test_an_item_is_a_photo_with_its_captions(make: Make, items: list[EncodedImage]):
    dataset = make()
    assert len(dataset) == 7
    pixels, captions = dataset[0, 5]
    assert (pixels.shape, pixels.dtype) == ((32, 32, 3), torch.uint8)
    assert captions == list(items[5].tokens)
    assert not mirrored(pixels)


def test_captions_beyond_the_most_are_chosen_by_seed_and_epoch(make: Make):
    few = make(max_captions=2)
    chosen = [few[epoch, 2][1] for epoch in range(20)]
    assert all(len(captions) == 2 for captions in chosen)
    assert all(captions[0] != captions[1] for captions in chosen)
    assert {tuple(words) for captions in chosen for words in captions} == {
        (12, 4), (12, 5, 5), (12, 6, 5, 5)
    }  # fmt: skip
    assert [make(max_captions=2)[epoch, 2][1] for epoch in range(20)] == chosen
    assert [make(max_captions=2, seed=1)[epoch, 2][1] for epoch in range(20)] != chosen
    assert few[0, 0][1] == [[10, 4]]  # fewer than the most: all of them


def test_half_of_the_photos_are_mirrored(make: Make):
    def flips(seed: int) -> list[bool]:
        dataset = make(flip=True, seed=seed)
        return [mirrored(dataset[epoch, index][0]) for epoch in range(12) for index in range(7)]

    assert 25 < sum(flips(0)) < 60
    assert flips(0) == flips(0)
    assert flips(0) != flips(1)
    plain, turned = make()[0, 0][0], None
    for epoch in range(12):
        pixels = make(flip=True)[epoch, 0][0]
        turned = pixels if mirrored(pixels) else turned
    assert turned is not None
    assert torch.equal(turned, plain.flip(1))


# --- Batches ---


def test_known_batch():
    pixels = [torch.full((2, 2, 3), n, dtype=torch.uint8) for n in (7, 9)]
    batch = collate([(pixels[0], [[4, 5, 6]]), (pixels[1], [[4], [5, 4], []])])
    nothing = [PAD] * 5
    assert batch.tokens.tolist() == [
        [[START, 4, 5, 6, END], nothing, nothing],
        [[START, 4, END, PAD, PAD], [START, 5, 4, END, PAD], [START, END, PAD, PAD, PAD]],
    ]
    assert batch.tokens.dtype == torch.long
    assert batch.pixels.shape == (2, 2, 2, 3)
    assert batch.pixels.dtype == torch.uint8
    assert batch.pixels[:, 0, 0, 0].tolist() == [7, 9]


def test_captions_that_hold_no_word():
    batch = collate([(torch.zeros(2, 2, 3), [[]])])
    assert batch.tokens.tolist() == [[[START, END]]]


# --- Order ---


def indices(sampler: EpochSampler) -> list[list[int]]:
    batches = list(sampler)
    assert all(epoch == sampler.epoch for batch in batches for epoch, _ in batch)
    return [[index for _, index in batch] for batch in batches]


@pytest.mark.parametrize(("size", "batch_size"), [(10, 4), (8, 4), (3, 5), (1, 1)])
def test_an_epoch_holds_every_photo_once(size: int, batch_size: int):
    sampler = EpochSampler(size, batch_size, seed=0)
    batches = indices(sampler)
    assert len(batches) == len(sampler) == sampler.batches
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert sorted(index for batch in batches for index in batch) == list(range(size))


def test_seed_and_epoch_shuffle():
    orders = []
    for seed in (0, 1):
        for epoch in (0, 1):
            sampler = EpochSampler(50, 8, seed)
            sampler.epoch = epoch
            orders.append(indices(sampler))
            assert indices(sampler) == orders[-1]
    assert all(orders.count(order) == 1 for order in orders)
    assert sum(orders[0], []) != list(range(50))  # noqa: RUF017 - short


@pytest.mark.parametrize("start", [0, 1, 5, 6, 7])
def test_an_epoch_goes_on_where_it_stopped(start: int):
    sampler = EpochSampler(50, 8, seed=3)
    sampler.epoch = 2
    whole = indices(sampler)
    sampler.start = start
    assert indices(sampler) == whole[start:]
    assert len(sampler) == len(whole) - start


@pytest.mark.parametrize("world", [2, 3])
def test_processes_part_every_batch(world: int):
    whole = indices(EpochSampler(52, 8, seed=0))  # the last batch: 4, enough for every process
    shares = [indices(EpochSampler(52, 8, 0, rank, world)) for rank in range(world)]
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        assert sorted(index for part in parts for index in part) == sorted(batch)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_no_process_is_left_without_photos(make: Make):
    """The last batch holds one photo, and there are two processes: both must make a step."""
    for rank in (0, 1):
        loader = training_loader(make(), EpochSampler(7, 3, 0, rank, 2), workers=0)
        batches = list(loader)
        assert len(batches) == 3
        assert all(len(batch.pixels) >= 1 for batch in batches)


# --- Loading ---


def test_batches_do_not_depend_on_the_workers(make: Make):
    def batches(workers: int) -> list[tuple[Tensor, Tensor]]:
        sampler = EpochSampler(7, 3, seed=0)
        sampler.epoch = 1
        torch.manual_seed(workers)  # nor on what was drawn before
        return [tuple(b) for b in training_loader(make(2, True), sampler, workers)]  # type: ignore[misc]

    alone = batches(0)
    assert len(alone) == 3
    for workers in (1, 2):
        others = batches(workers)
        assert len(others) == 3
        for one, other in zip(alone, others, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


def test_loading_draws_no_random_numbers(make: Make):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(training_loader(make(2, True), EpochSampler(7, 3, seed=0), workers=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_photos_meet_their_own_captions(make: Make, items: list[EncodedImage]):
    for pixels, tokens in training_loader(make(), EpochSampler(7, 3, seed=0), workers=0):
        for photo, captions in zip(pixels, tokens, strict=True):
            number = int(captions[0, 1]) - 10
            expected = make().preprocessing.pixels(Image.open(Path(items[number].image.path)))
            assert torch.equal(photo, torch.from_numpy(np.array(expected)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_photo_that_cannot_be_read_is_left_out(
    items: list[EncodedImage], make: Make, tmp_path: Path, workers: int
):
    """With a worker the error used to kill the run, and the process never ended."""
    dataset = make()
    broken = CaptionedImage(99, tmp_path / "gone.jpg", ("a photo",))
    dataset.items = [*items, EncodedImage(broken, ([4],))]
    [batch] = training_loader(dataset, EpochSampler(8, 8, seed=0), workers)
    assert len(batch.pixels) == 8
    captions = (batch.tokens != PAD).any(dim=2).sum(dim=1)
    assert sorted(captions.tolist()) == [0, *sorted(len(item.tokens) for item in items)]
