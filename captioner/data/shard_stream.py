"""Shards as training reads them: dealt out, shuffled, in batches.

The shards of an epoch, in an order drawn from seed and epoch, are dealt out:

    stream p of S = processes x workers:  shards p, p + S, p + 2 S, ...
    one stream:                           shards -> shuffle buffer -> batches

with p = rank + processes x worker. The order of the photos therefore depends on how many processes
and workers there are, and never on timing.
"""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from PIL import Image
from torch.utils.data import IterableDataset, get_worker_info

from captioner.data.augmentation import Augmentation
from captioner.data.batches import (
    AS_THEY_ARE,
    Batch,
    EncodedImage,
    Item,
    choose,
    collate,
    load_ahead,
    photo_tensor,
    warn_of,
)
from captioner.data.images import open_image
from captioner.data.preprocessing import Preprocessing
from captioner.data.shards import Manifest, Shard, ShardPhoto, read_shard
from captioner.errors import ConfigError, DataError, ImageError


class ShardStream(IterableDataset[list[Item]]):
    """Batches of this process's photos in one epoch, read from shards.

    ``epoch`` says which epoch, ``start`` how many of its batches are done already: those are passed
    over without decoding a photo. All processes make equally many batches; one that runs out makes
    batches of a single black photo without captions, which adds nothing to the loss.

    A photo that cannot be decoded is named in a warning and has no captions.
    """

    def __init__(
        self,
        manifest: Manifest,
        items: Mapping[int, EncodedImage],
        preprocessing: Preprocessing,
        *,
        batch_size: int,
        max_captions: int,
        horizontal_flip: bool = False,
        augmentation: Augmentation = AS_THEY_ARE,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        buffer: int = 1000,
    ) -> None:
        """Check that there are shards for everyone.

        Args:
            manifest: From `read_manifest`.
            items: Captions as numbers by image id; those inside the shards are not used.
            preprocessing: The model's.
            batch_size: Photos in one step, over all processes.
            max_captions: Captions of one photo in one step; of more, some are drawn.
            horizontal_flip: Mirror half of the photos.
            augmentation: How else they vary.
            seed: Of every choice.
            rank: Number of this process.
            world: Processes that train together.
            workers: Processes that read for this one, as the loader has them; 0: it reads itself.
            buffer: Photos that each worker holds (undecoded) to draw the next one from.

        Raises:
            ConfigError: There are fewer shards than workers, or a batch is too small.
            DataError: There are photos in the shards that ``items`` does not know.
        """
        streams = world * max(1, workers)
        if len(manifest.shards) < streams:
            raise ConfigError(_too_few_shards(manifest, world, workers))
        if batch_size < world:
            raise ConfigError(
                f"training.batch_size is {batch_size} for {world} processes; give {world} or more"
            )
        if buffer < 1:
            raise ConfigError(f"the shuffle buffer holds {buffer} photos; give 1 or more")
        if manifest.photos > len(items):
            raise DataError(
                f"the shards in {manifest.folder} hold {manifest.photos} photos, the training "
                f"captions {len(items)}; give the captions that the shards were made with"
            )
        self.manifest, self.items, self.preprocessing = manifest, items, preprocessing
        self.max_captions, self.horizontal_flip, self.seed = max_captions, horizontal_flip, seed
        self.augmentation = augmentation
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.workers, self.buffer = workers, buffer
        self.epoch, self.start = 0, 0

    @property
    def batches(self) -> int:
        """Batches in the whole epoch, the same for all processes."""
        return self.batches_in(self.epoch)

    def batches_in(self, epoch: int) -> int:
        """Batches in an epoch; where shards are of unequal size, epochs can differ a little."""
        order = self._order(epoch)
        return max(sum(self._counts(order, rank)) for rank in range(self.world))

    def __iter__(self) -> Iterator[list[Item]]:
        counts = self._counts(self._order(self.epoch), self.rank)
        counts[0] += self.batches - sum(counts)
        turns = list(_turns(counts))
        done = Counter(turns[: self.start])
        left = turns[self.start :]
        order = list(dict.fromkeys(left))  # whose turn it is now is the first
        info = get_worker_info()
        if info is None:
            streams = {
                worker: self._batches(worker, counts[worker], done[worker]) for worker in order
            }
            for worker in left:
                yield next(streams[worker])
        elif info.num_workers != self.workers:
            raise ConfigError(
                f"the stream was made for {self.workers} workers, the loader has "
                f"{info.num_workers}; give both the same number"
            )
        elif info.id < len(order):
            worker = order[info.id]
            yield from self._batches(worker, counts[worker], done[worker])

    def _order(self, epoch: int) -> list[Shard]:
        """All shards, as they follow each other in an epoch."""
        order = list(self.manifest.shards)
        random.Random(f"{self.seed} {epoch} shards").shuffle(order)
        return order

    def _part(self, order: list[Shard], rank: int, worker: int) -> list[Shard]:
        """What one worker of a process reads of them."""
        return order[rank + self.world * worker :: self.world * max(1, self.workers)]

    def _counts(self, order: list[Shard], rank: int) -> list[int]:
        """Batches that each worker of a process makes of them."""
        share = self._share(rank)
        return [
            -(-sum(shard.photos for shard in self._part(order, rank, worker)) // share)
            for worker in range(max(1, self.workers))
        ]

    def _share(self, rank: int) -> int:
        """A process's photos in one batch."""
        return len(range(rank, self.batch_size, self.world))

    def _batches(self, worker: int, total: int, skip: int) -> Iterator[list[Item]]:
        """One worker's batches, without the first ``skip``."""
        position = self.rank + self.world * worker
        chance = random.Random(f"{self.seed} {self.epoch} {position}")
        photos = _shuffled(self._photos(worker), self.buffer, chance)
        made = 0
        while batch := list(islice(photos, self._share(self.rank))):
            made += 1
            if made > skip:
                yield [self._item(photo) for photo in batch]
        for _ in range(max(made, skip), total):  # others have more
            yield [self._nothing()]

    def _photos(self, worker: int) -> Iterator[ShardPhoto]:
        for shard in self._part(self._order(self.epoch), self.rank, worker):
            yield from read_shard(self.manifest.folder / shard.name, shard)

    def _item(self, photo: ShardPhoto) -> Item:
        """What a photo brings in this epoch."""
        known = self.items.get(photo.image_id)
        if known is None or known.image.path.name != Path(photo.file_name).name:
            called = "do not know" if known is None else f"know as {known.image.path.name}"
            raise DataError(
                f"{photo.name} has image id {photo.image_id}, which the training captions "
                f"{called}; give the captions that the shards were made with"
            )
        captions, mirrored = choose(
            self.items[photo.image_id],
            self.epoch,
            self.seed,
            max_captions=self.max_captions,
            horizontal_flip=self.horizontal_flip,
        )
        try:
            image = open_image(io.BytesIO(photo.data), name=photo.name)
        except ImageError as error:
            warn_of(error)
            return self._nothing()
        place = {"seed": self.seed, "epoch": self.epoch, "image_id": photo.image_id}
        image = self.augmentation.augmented(image, **place)
        pixels = photo_tensor(self.preprocessing, image, mirrored)
        return Item(photo.image_id, pixels, captions, known.start)

    def _nothing(self) -> Item:
        """A photo without captions, which only fills a place."""
        black = Image.new("RGB", (32, 32))
        return Item(-1, photo_tensor(self.preprocessing, black, False), [])


def shard_loader(stream: ShardStream) -> Iterator[Batch]:
    """What is left of the stream's epoch, read ahead by its workers.

    Raises:
        DataError: A shard is cut or broken.
    """
    return load_ahead(_Told(stream), stream.workers, batch_size=None, collate_fn=_collate)


class _Told(IterableDataset[list[Item] | DataError]):
    """A stream whose error is its last item: raised in a worker, it would be a whole traceback."""

    def __init__(self, stream: ShardStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[list[Item] | DataError]:
        try:
            yield from self.stream
        except DataError as error:
            yield DataError(str(error))


def _collate(batch: list[Item] | DataError) -> Batch | DataError:
    return batch if isinstance(batch, DataError) else collate(batch)


def _turns(counts: Sequence[int]) -> Iterator[int]:
    """Whose batch comes when: a loader asks its workers in turn and passes over who has no more."""
    for turn in range(max(counts)):
        yield from (worker for worker, count in enumerate(counts) if turn < count)


def _shuffled(
    photos: Iterator[ShardPhoto], buffer: int, chance: random.Random
) -> Iterator[ShardPhoto]:
    """Each next one drawn from so many; memory: their files' bytes."""
    held: list[ShardPhoto] = []
    for photo in photos:
        if len(held) < buffer:
            held.append(photo)
            continue
        place = chance.randrange(buffer)
        drawn, held[place] = held[place], photo
        yield drawn
    chance.shuffle(held)
    yield from held


def _too_few_shards(manifest: Manifest, world: int, workers: int) -> str:
    shards, streams = len(manifest.shards), world * max(1, workers)
    fewer = f"give data.workers {shards // world}, or " if shards >= world and workers > 1 else ""
    return (
        f"{manifest.folder} holds {shards} shards, but {world} processes with {max(1, workers)} "
        f"workers each need {streams}; {fewer}make smaller shards with captioner prepare shards "
        f"--photos-per-shard {max(1, manifest.photos // streams)}"
    )
