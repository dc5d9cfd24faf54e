"""Training photos in shards: tar files that are read from the first byte to the last.

A shard is a plain tar file in WebDataset's form (github.com/webdataset/webdataset): files that
follow each other and share their name up to the first dot are one sample.

    000000000042.jpg     the photo's bytes as they are on disk, under their own extension
    000000000042.json    {"image_id": 42, "file_name": "42.jpg", "captions": ["a dog", ...]}

``shards.json`` beside them tells of every shard how many photos and bytes it has and its SHA-256.
It is written last: where it is, the shards are complete.

In training the shards of an epoch, in an order drawn from seed and epoch, are dealt out:

    stream p of S = processes x workers:  shards p, p + S, p + 2 S, ...
    one stream:                           shards -> shuffle buffer -> batches

with p = rank + processes x worker. The order of the photos therefore depends on how many processes
and workers there are, and never on timing.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from captioner.data.batches import (
    Batch,
    EncodedImage,
    Item,
    choose,
    collate,
    leave_signals_to_parent,
    photo_tensor,
    warn_of,
)
from captioner.data.coco import CaptionedImage, read_json
from captioner.data.images import open_image
from captioner.data.preprocessing import Preprocessing
from captioner.errors import ConfigError, DataError, ImageError
from captioner.files import atomic_write

MANIFEST = "shards.json"
VERSION = 1
"""Of the manifest's form."""

_SHARD_NAME = re.compile(r"shard-[0-9]{6,}\.tar")
_AGAIN = "copy it again, or make it again with captioner prepare shards --force"
_BLOCK = 1 << 16  # bytes read at a time


@dataclass(frozen=True)
class Shard:
    """One tar file, as the manifest tells of it."""

    name: str
    photos: int
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All shards of a folder."""

    folder: Path
    shards: tuple[Shard, ...]

    @property
    def photos(self) -> int:
        """Photos in all shards."""
        return sum(shard.photos for shard in self.shards)


class WrittenShards(NamedTuple):
    """What `write_shards` did."""

    manifest: Manifest
    left_out: list[str]
    """One line for every photo that could not be read from disk."""


# --- Writing ---


def write_shards(
    images: Sequence[CaptionedImage],
    folder: str | Path,
    *,
    photos_per_shard: int = 1000,
    seed: int = 0,
    force: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> WrittenShards:
    """Write photos and captions as shards; the same photos and settings give the same bytes.

    Every shard is written whole or not at all. Those that a stopped run left complete are kept, so
    that the same call goes on where it stopped. A folder wants one writer at a time.

    Args:
        images: Photos with their captions.
        folder: Where the shards go; made when missing.
        photos_per_shard: The last shard, and those with photos that are left out, have fewer.
        seed: Of the photos' order, which is shuffled once.
        force: Remove the shards that are there and start over.
        progress: Is told of every so many photos that are done.

    Returns:
        The manifest, and the photos that were left out.

    Raises:
        ConfigError: The folder holds shards that are finished, or are of other photos or settings.
        DataError: Not one photo can be read.
        OSError: A shard cannot be written (a full disk, no permission).
    """
    if photos_per_shard < 1:
        raise ConfigError(f"photos-per-shard is {photos_per_shard}; give 1 or more")
    folder, order = Path(folder), list(images)
    random.Random(f"{seed} shards").shuffle(order)
    parts = [order[n : n + photos_per_shard] for n in range(0, len(order), photos_per_shard)]
    paths = [folder / f"shard-{number:06d}.tar" for number in range(len(parts))]
    _make_room(folder, paths, force)
    shards: list[Shard] = []
    left_out: list[str] = []
    for path, photos in zip(paths, parts, strict=True):
        one = _keep(path, photos, progress) or _write_shard(path, photos, progress)
        shards.append(one[0])
        left_out += one[1]
    if not any(shard.photos for shard in shards):
        first = f" (first: {left_out[0]})" if left_out else ""
        raise DataError(f"none of {len(order)} photos can be read{first}; check data.images")
    manifest = Manifest(folder, tuple(shards))
    atomic_write(folder / MANIFEST, _to_json(manifest))
    return WrittenShards(manifest, left_out)


def _make_room(folder: Path, paths: list[Path], force: bool) -> None:
    """Refuse a folder of other shards, or empty it of them."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give a folder for the shards")
    folder.mkdir(parents=True, exist_ok=True)
    again = "give --force to replace them, or another folder"
    found = [path for path in sorted(folder.iterdir()) if _SHARD_NAME.fullmatch(path.name)]
    if force:
        (folder / MANIFEST).unlink(missing_ok=True)  # first: it vouches for the others
        for path in found:
            path.unlink()
    elif (folder / MANIFEST).exists():
        raise ConfigError(f"{folder} holds finished shards; {again}")
    elif others := [path.name for path in found if path not in paths]:
        raise ConfigError(
            f"{folder} holds shards of other photos or settings ({others[0]}); {again}"
        )
    for path in folder.glob("shard-*.tar.part"):  # of a run that was killed
        path.unlink()


def _write_shard(
    path: Path, photos: Sequence[CaptionedImage], progress: Callable[[int], object]
) -> tuple[Shard, list[str]]:
    """Write one shard beside its place, then rename it."""
    part, left_out = path.with_name(f"{path.name}.part"), []
    try:
        with part.open("wb") as raw:
            file = _Hashed(raw)
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:  # type: ignore[call-overload]
                for photo in photos:
                    data, problem = _read(photo)
                    if problem:
                        left_out.append(problem)
                    else:
                        _add(tar, _photo_name(photo), data)
                        _add(tar, _about_name(photo), _about(photo))
                    progress(1)
            raw.flush()
            os.fsync(raw.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    written = len(photos) - len(left_out)
    return Shard(path.name, written, file.size, file.sha256.hexdigest()), left_out


def _keep(
    path: Path, photos: Sequence[CaptionedImage], progress: Callable[[int], object]
) -> tuple[Shard, list[str]] | None:
    """A shard of a run that was stopped, or None; refuses one that would be written otherwise.

    The photos' sizes and captions are compared, their bytes are not: that would be as slow as
    writing them.
    """
    if not path.exists():
        return None
    try:
        with path.open("rb") as raw:
            file = _Hashed(raw)
            held = [(name, len(data), about) for name, data, about in _samples(file)]
            file.read_all()
    except tarfile.TarError:
        held = [("", 0, b"")]  # no shard of ours: those are never cut
    names = {name for name, _, _ in held}
    expected, left_out = [], []
    for photo in photos:
        name = _photo_name(photo)
        problem = "" if name in names else _read(photo)[1]
        if problem:
            left_out.append(problem)
        else:
            expected.append((name, photo.path.stat().st_size, _about(photo)))
    if held != expected:
        raise ConfigError(
            f"{path} holds other photos or settings, or is broken; give --force to replace all "
            "shards, or another folder"
        )
    progress(len(photos))
    return Shard(path.name, len(held), file.size, file.sha256.hexdigest()), left_out


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file of whom and when nothing is told: the same bytes on every machine."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _photo_name(photo: CaptionedImage) -> str:
    extension = photo.path.suffix
    # Without one, readers would pass over it; .json stands beside it.
    return f"{photo.image_id:012d}{extension if extension.lower() not in ('', '.json') else '.img'}"


def _about_name(photo: CaptionedImage) -> str:
    return f"{photo.image_id:012d}.json"


def _about(photo: CaptionedImage) -> bytes:
    about = {
        "image_id": photo.image_id,
        "file_name": photo.path.name,
        "captions": list(photo.captions),
    }
    return json.dumps(about).encode()


def _read(photo: CaptionedImage) -> tuple[bytes, str]:
    """A photo's bytes, and why there are none."""
    try:
        return photo.path.read_bytes(), ""
    except OSError as error:
        return b"", f"{photo.path}: cannot be read ({error.strerror or error}); left out"


def _to_json(manifest: Manifest) -> str:
    shards = [
        {"name": one.name, "photos": one.photos, "bytes": one.size, "sha256": one.sha256}
        for one in manifest.shards
    ]
    return json.dumps({"version": VERSION, "shards": shards}, indent=1) + "\n"


# --- Reading ---


def read_manifest(folder: str | Path) -> Manifest:
    """Read what a folder of shards holds, and see that it is all there.

    Args:
        folder: The folder that ``captioner prepare shards`` wrote.

    Returns:
        Its shards; their sizes are checked here, their checksums when they are read.

    Raises:
        DataError: The manifest is missing, broken or of another version; a shard is missing or has
            another size.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(
            f"{path} does not exist; give a folder that captioner prepare shards has finished"
        )
    data = read_json(path)
    if data.get("version") != VERSION:
        raise DataError(
            f"{path} is of version {data.get('version')!r}, this captioner reads {VERSION}; "
            "make the shards again with captioner prepare shards --force"
        )
    try:
        shards = tuple(
            Shard(str(one["name"]), int(one["photos"]), int(one["bytes"]), str(one["sha256"]))
            for one in data["shards"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no list of shards ({error}); {_AGAIN}") from error
    if not shards:
        raise DataError(f"{path} tells of no shard; {_AGAIN}")
    for shard in shards:
        _check_size(folder, shard)
    return Manifest(folder, shards)


def _check_size(folder: Path, shard: Shard) -> None:
    if not _SHARD_NAME.fullmatch(shard.name):
        raise DataError(f"{folder / MANIFEST} names {shard.name!r}, which is no shard; {_AGAIN}")
    path = folder / shard.name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} is missing ({error.strerror}); {_AGAIN}") from error
    if size != shard.size:
        raise DataError(f"{path} has {size:,} bytes, {MANIFEST} says {shard.size:,}; {_AGAIN}")


class _Hashed:
    """A file whose bytes are counted and hashed on their way; it cannot go back."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def read(self, size: int) -> bytes:
        return self._count(self.file.read(size))

    def write(self, data: bytes) -> int:
        return self.file.write(self._count(data))

    def tell(self) -> int:
        return self.size

    def read_all(self) -> None:
        """Hash what is left."""
        while self.read(_BLOCK):
            pass

    def _count(self, data: bytes) -> bytes:
        self.size += len(data)
        self.sha256.update(data)
        return data


def _samples(file: _Hashed) -> Iterator[tuple[str, bytes, bytes]]:
    """Name and bytes of every photo, and its JSON, in one pass."""
    name, photo = "", b""
    with tarfile.open(fileobj=file, mode="r|", bufsize=_BLOCK) as tar:  # type: ignore[call-overload]
        for member in tar:
            content = tar.extractfile(member)
            data = b"" if content is None else content.read()
            if member.name.endswith(".json"):
                yield name, photo, data
            else:
                name, photo = member.name, data


class _Photo(NamedTuple):
    """A photo on its way through the buffer, not yet decoded."""

    image_id: int
    name: str
    """For messages."""
    data: bytes


def _read_shard(path: Path, shard: Shard) -> Iterator[_Photo]:
    """Every photo of a shard.

    Raises:
        DataError: The shard is cut, or is another than the manifest's; known when it has been read.
    """
    photos = 0
    try:
        with path.open("rb") as raw:
            file = _Hashed(raw)
            for _, data, about in _samples(file):
                told = json.loads(about)
                photos += 1
                yield _Photo(told["image_id"], f"{path}: {told['file_name']}", data)
            file.read_all()
    except (tarfile.TarError, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is cut or broken ({error}); {_AGAIN}") from error
    if file.size != shard.size:
        raise DataError(f"{path} has {file.size:,} bytes, {MANIFEST} says {shard.size:,}; {_AGAIN}")
    if file.sha256.hexdigest() != shard.sha256:
        raise DataError(f"{path} is broken: its SHA-256 is not the one in {MANIFEST}; {_AGAIN}")
    if photos != shard.photos:
        raise DataError(f"{path} has {photos} photos, {MANIFEST} says {shard.photos}; {_AGAIN}")


# --- Streaming ---


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
                f"batch-size is {batch_size} for {world} processes; give {world} or more"
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

    def _photos(self, worker: int) -> Iterator[_Photo]:
        for shard in self._part(self._order(self.epoch), self.rank, worker):
            yield from _read_shard(self.manifest.folder / shard.name, shard)

    def _item(self, photo: _Photo) -> Item:
        """What a photo brings in this epoch."""
        if photo.image_id not in self.items:
            raise DataError(
                f"{photo.name} has image id {photo.image_id}, which the training captions do not "
                "know; give the captions that the shards were made with"
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
        return Item(photo.image_id, photo_tensor(self.preprocessing, image, mirrored), captions)

    def _nothing(self) -> Item:
        """A photo without captions, which only fills a place."""
        black = Image.new("RGB", (32, 32))
        return Item(-1, photo_tensor(self.preprocessing, black, False), [])


def shard_loader(stream: ShardStream) -> Iterator[Batch]:
    """What is left of the stream's epoch, read ahead by its workers.

    Raises:
        DataError: A shard is cut or broken.
    """
    loader: DataLoader[Batch | DataError] = DataLoader(
        _Told(stream),  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=_collate,
        num_workers=stream.workers,
        worker_init_fn=leave_signals_to_parent,
        generator=torch.Generator().manual_seed(0),  # the loader draws nothing from the global one
        pin_memory=torch.cuda.is_available(),
    )
    for batch in loader:
        if isinstance(batch, DataError):
            raise batch
        yield batch


class _Told(IterableDataset[list[Item] | DataError]):
    """A stream whose error is its last item.

    Raised in a worker, an error would come as a whole traceback that keeps the loader alive, and
    with it workers that no signal ends: the program would never exit.
    """

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


def _shuffled(photos: Iterator[_Photo], buffer: int, chance: random.Random) -> Iterator[_Photo]:
    """Each next one drawn from so many; memory: their files' bytes."""
    held: list[_Photo] = []
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
