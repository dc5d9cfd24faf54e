"""Training photos in shards: tar files that are read sequentially.

A shard is an uncompressed tar file in WebDataset's form (github.com/webdataset/webdataset):
consecutive files that share their name up to the first dot are one sample.

    000000000042.jpg     the photo file's bytes, under its own extension
    000000000042.json    {"image_id": 42, "file_name": "42.jpg", "captions": ["a dog", ...]}

``shards.json`` beside them lists each shard with its number of photos, size and SHA-256. It is
written last: if it exists, the shards are complete. The folder may be a URL of object storage.
`captioner.data.sources` reads them in training.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NamedTuple

from captioner.data.coco import CaptionedImage
from captioner.data.storage import join, open_to_read, sizes
from captioner.errors import ConfigError, DataError
from captioner.files import atomic_open, atomic_write, write_lock

MANIFEST, UNFINISHED = "shards.json", "unfinished.json"

_RECREATE = "copy it again, or recreate it with captioner prepare shards --force"
_BLOCK = 1 << 16  # bytes per read


@dataclass(frozen=True)
class Shard:
    """One tar file, as listed in the manifest."""

    name: str
    photos: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All shards of a folder."""

    folder: str | Path
    """A URL if it is in object storage."""
    shards: tuple[Shard, ...]

    @property
    def photos(self) -> int:
        """Photos in all shards."""
        return sum(shard.photos for shard in self.shards)

    @property
    def digest(self) -> str:
        """Identifies the shards: 12 hexadecimal digits."""
        listed = "".join(f"{shard.name} {shard.sha256}\n" for shard in self.shards)
        return hashlib.sha256(listed.encode()).hexdigest()[:12]


class _HashedFile:
    """A binary file that counts and hashes the bytes read or written; not seekable."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def read(self, size: int) -> bytes:
        return self._count(self.file.read(size))

    def write(self, data: bytes) -> int:
        return self.file.write(self._count(data))

    def tell(self) -> int:
        return self.size

    def _count(self, data: bytes) -> bytes:
        self.size += len(data)
        self.sha256.update(data)
        return data


# --- Reading --------------------------------------------------------------------------------------


class ShardPhoto(NamedTuple):
    """An encoded photo from a shard."""

    image_id: int
    file_name: str
    """As in the captions file that the shards were made from."""
    name: str
    """For messages."""
    data: bytes


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a folder, or of the URL of a copy, and check the shards' sizes.

    Raises:
        DataError: The manifest is missing or damaged, or a shard is missing or has another size.
    """
    path, found = join(folder, MANIFEST), sizes(folder)
    if MANIFEST not in found:
        raise DataError(
            f"{path} does not exist; give a folder that captioner prepare shards has completed"
        )
    try:
        with open_to_read(path) as file:
            shards = tuple(Shard(**one) for one in json.loads(file.read())["shards"])
    except Exception as error:  # that of object storage may be any
        raise DataError(f"{path} is not a list of shards ({error}); {_RECREATE}") from error
    for shard in shards:
        if (size := found.get(shard.name, 0)) != shard.bytes:
            raise DataError(
                f"{join(folder, shard.name)} has {size:,} bytes, but {MANIFEST} lists "
                f"{shard.bytes:,}; {_RECREATE}"
            )
    return Manifest(folder, shards)


def read_shard(folder: str | Path, shard: Shard) -> list[ShardPhoto]:
    """Read the photos of a shard.

    Raises:
        DataError: The shard is damaged.
    """
    path, photos = join(folder, shard.name), []
    try:
        with open_to_read(path) as raw:
            file = _HashedFile(raw)
            for data, sample in _samples(file):
                about = json.loads(sample)
                name = about["file_name"]
                photos.append(ShardPhoto(about["image_id"], name, f"{path}: {name}", data))
            while file.read(_BLOCK):
                pass
    except Exception as error:
        raise DataError(f"{path} is truncated or damaged ({error}); {_RECREATE}") from error
    if file.sha256.hexdigest() != shard.sha256:
        raise DataError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; {_RECREATE}")
    return photos


def _samples(file: _HashedFile) -> Iterator[tuple[bytes, bytes]]:
    """The bytes of each photo, and its JSON, in one pass.

    A sample's files may come in any order; WebDataset's own writer sorts them by extension. A
    sample that lacks one of the two is left out.
    """
    key, sample = "", dict[bool, bytes]()
    with tarfile.open(fileobj=file, mode="r|", bufsize=_BLOCK) as tar:  # type: ignore[call-overload]
        for member in tar:
            content = tar.extractfile(member)
            if (its_key := member.name.partition(".")[0]) != key:
                key, sample = its_key, {}
            sample[member.name.endswith(".json")] = b"" if content is None else content.read()
            if len(sample) == 2:
                yield sample[False], sample[True]
                sample = {}


# --- Writing --------------------------------------------------------------------------------------


def write_shards(
    images: Sequence[CaptionedImage],
    folder: str | Path,
    *,
    photos_per_shard: int = 1000,
    seed: int = 0,
    force: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> tuple[Manifest, list[str]]:
    """Write photos and captions to shards; the same photos and settings give the same bytes.

    Each shard is written completely or not at all. The same call resumes an interrupted one and
    keeps its complete shards.

    Args:
        images: Photos with their captions.
        folder: Created if missing.
        photos_per_shard: The last shard, and shards with skipped photos, have fewer.
        seed: Seed of the photos' order, which is shuffled once.
        force: Remove existing shards first.
        progress: Called with the number of photos done since the last call.

    Returns:
        The manifest, and a message for each photo that could not be read.

    Raises:
        ConfigError: The folder holds complete shards, or shards of other photos or settings.
        DataError: None of the photos can be read, or another process writes to the folder.
        OSError: A shard cannot be written (disk full, no permission).
    """
    folder, order = Path(folder), list(images)
    random.Random(f"{seed} shards").shuffle(order)
    digest = hashlib.sha256("".join(map(_identity, order)).encode())
    settings = {"photos": digest.hexdigest(), "photos_per_shard": photos_per_shard}
    folder.mkdir(parents=True, exist_ok=True)
    with write_lock(folder):
        unfinished = folder / UNFINISHED
        if force:
            for path in (folder / MANIFEST, *folder.glob("shard-*.tar"), unfinished):
                path.unlink(missing_ok=True)
        held, done = json.loads(unfinished.read_text()) if unfinished.exists() else (None, [])
        if held != settings and (held is not None or any(folder.glob("shard*"))):
            complete = (folder / MANIFEST).exists()
            problem = "complete shards" if complete else "shards of other photos or settings"
            raise ConfigError(
                f"{folder} already holds {problem}; give --force to replace them, or another folder"
            )
        for number, start in enumerate(range(0, len(order), photos_per_shard)):
            photos = order[start : start + photos_per_shard]
            if number < len(done):
                progress(len(photos))
                continue
            atomic_write(unfinished, json.dumps([settings, done]))
            shard, skipped = _write_shard(folder / f"shard-{number:06d}.tar", photos, progress)
            done.append([asdict(shard), skipped])
        shards = tuple(Shard(**shard) for shard, _ in done)
        problems = [problem for _, skipped in done for problem in skipped]
        if not any(shard.photos for shard in shards):
            first = f" (first: {problems[0]})" if problems else ""
            raise DataError(f"none of {len(order)} photos can be read{first}; check data.images")
        content = {"version": 1, "shards": [asdict(shard) for shard in shards]}
        atomic_write(folder / MANIFEST, json.dumps(content, indent=1) + "\n")
        unfinished.unlink()
    return Manifest(folder, shards), problems


def _write_shard(
    path: Path, photos: Sequence[CaptionedImage], progress: Callable[[int], object]
) -> tuple[Shard, list[str]]:
    skipped = []
    with atomic_open(path, "wb") as raw:
        file = _HashedFile(raw)
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:  # type: ignore[call-overload]
            for photo in photos:
                # Readers would skip a file without extension, and .json is taken by the captions.
                extension = photo.path.suffix
                extension = extension if extension.lower() not in ("", ".json") else ".img"
                try:
                    if photo.path.is_fifo():
                        raise OSError("not a regular file")
                    data = photo.path.read_bytes()
                except OSError as error:
                    reason = error.strerror or error
                    skipped.append(f"{photo.path}: cannot be read ({reason}); skipped")
                else:
                    _add(tar, f"{photo.image_id:012d}{extension}", data)
                    _add(tar, f"{photo.image_id:012d}.json", _fields(photo))
                progress(1)
    size, sha256 = file.size, file.sha256.hexdigest()
    return Shard(path.name, len(photos) - len(skipped), size, sha256), skipped


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file without owner and time, so that every machine writes the same bytes."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _identity(photo: CaptionedImage) -> str:
    """What a shard says of a photo, and the size of its file, which tells a changed photo."""
    size = photo.path.stat().st_size if photo.path.is_file() else None
    return f"{photo.path.name} {size} {_fields(photo)!r}"


def _fields(photo: CaptionedImage) -> bytes:
    fields = {
        "image_id": photo.image_id,
        "file_name": photo.path.name,
        "captions": list(photo.captions),
    }
    return json.dumps(fields).encode()
