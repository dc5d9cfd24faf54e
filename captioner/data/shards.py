"""Training photos in shards: tar files that are read sequentially.

A shard is an uncompressed tar file in WebDataset's form (github.com/webdataset/webdataset):
consecutive files that share their name up to the first dot are one sample.

    000000000042.jpg     the photo file's bytes, under its own extension
    000000000042.json    {"image_id": 42, "file_name": "42.jpg", "captions": ["a dog", ...]}

``shards.json`` beside them lists each shard with its number of photos, size and SHA-256. It is
written last: if it exists, the shards are complete. The folder may be a URL of object storage.

`captioner.data.shard_writer` writes them, `captioner.data.shard_stream` reads them in training.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from captioner.data.coco import parse_json
from captioner.data.storage import join, open_to_read, sizes
from captioner.errors import DataError

MANIFEST = "shards.json"
VERSION = 1
"""Format version of the manifest."""

SHARD_NAME = re.compile(r"shard-[0-9]{6,}\.tar")
_RECREATE = "copy it again, or recreate it with captioner prepare shards --force"
_BLOCK = 1 << 16  # bytes per read


@dataclass(frozen=True)
class Shard:
    """One tar file, as listed in the manifest."""

    name: str
    photos: int
    size: int
    """Bytes."""
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


class ShardPhoto(NamedTuple):
    """An encoded photo from a shard."""

    image_id: int
    file_name: str
    """As in the captions file that the shards were made from."""
    name: str
    """For messages."""
    data: bytes


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a folder of shards.

    Args:
        folder: Folder that ``captioner prepare shards`` wrote, or the URL of a copy.

    Returns:
        The shards. Their sizes have been checked; `read_shard` verifies their checksums.

    Raises:
        DataError: The manifest is missing, damaged or of another version, or a shard is missing or
            has another size.
    """
    path, found = join(folder, MANIFEST), sizes(folder)
    if MANIFEST not in found:
        raise DataError(
            f"{path} does not exist; give a folder that captioner prepare shards has completed"
        )
    try:
        with open_to_read(path) as file:
            data = parse_json(file.read(), path)
        shards = tuple(
            Shard(str(one["name"]), int(one["photos"]), int(one["bytes"]), str(one["sha256"]))
            for one in data["shards"]
            if data["version"] == VERSION
        )
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a list of shards ({error}); {_RECREATE}") from error
    if not shards or not all(SHARD_NAME.fullmatch(shard.name) for shard in shards):
        raise DataError(f"{path} is not a list of shards; {_RECREATE}")
    for shard in shards:
        _compare(join(folder, shard.name), "bytes", found.get(shard.name, 0), shard.size)
    return Manifest(folder, shards)


def _compare(path: str | Path, unit: str, found: int, expected: int) -> None:
    if found != expected:
        raise DataError(
            f"{path} has {found:,} {unit}, but {MANIFEST} lists {expected:,}; {_RECREATE}"
        )


def read_shard(path: str | Path, shard: Shard) -> Iterator[ShardPhoto]:
    """Read the photos of a shard.

    Raises:
        DataError: The shard is damaged or does not match the manifest; a wrong checksum is only
            known after the last photo.
    """
    photos = 0
    try:
        with open_to_read(path) as raw:
            file = HashedFile(raw)
            for _, data, sample in read_samples(file):
                fields = json.loads(sample)
                photos += 1
                file_name = fields["file_name"]
                yield ShardPhoto(fields["image_id"], file_name, f"{path}: {file_name}", data)
            file.read_all()
    except (tarfile.TarError, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is truncated or damaged ({error}); {_RECREATE}") from error
    _compare(path, "bytes", file.size, shard.size)
    if file.sha256.hexdigest() != shard.sha256:
        raise DataError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; {_RECREATE}")
    _compare(path, "photos", photos, shard.photos)


class HashedFile:
    """A binary file that counts and hashes the bytes read or written; not seekable."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def read(self, size: int) -> bytes:
        """See ``IO.read``."""
        return self._count(self.file.read(size))

    def write(self, data: bytes) -> int:
        """See ``IO.write``."""
        return self.file.write(self._count(data))

    def tell(self) -> int:
        """See ``IO.tell``."""
        return self.size

    def read_all(self) -> None:
        """Hash the rest of the file."""
        while self.read(_BLOCK):
            pass

    def _count(self, data: bytes) -> bytes:
        self.size += len(data)
        self.sha256.update(data)
        return data


def read_samples(file: HashedFile) -> Iterator[tuple[str, bytes, bytes]]:
    """Name and bytes of each photo, and its JSON, in one pass.

    A sample's files may come in any order; WebDataset's own writer sorts them by extension. A
    sample that lacks one of the two is left out.
    """
    key, name = "", ""
    photo = fields = None
    with tarfile.open(fileobj=file, mode="r|", bufsize=_BLOCK) as tar:  # type: ignore[call-overload]
        for member in tar:
            content = tar.extractfile(member)
            data = b"" if content is None else content.read()
            if (its_key := member.name.partition(".")[0]) != key:
                if photo is not None and fields is not None:
                    yield name, photo, fields
                key, photo, fields = its_key, None, None
            if member.name.endswith(".json"):
                fields = data
            else:
                name, photo = member.name, data
    if photo is not None and fields is not None:
        yield name, photo, fields
