"""Training photos in shards: tar files that are read from the first byte to the last.

A shard is a plain tar file in WebDataset's form (github.com/webdataset/webdataset): files that
follow each other and share their name up to the first dot are one sample.

    000000000042.jpg     the photo's bytes as they are on disk, under their own extension
    000000000042.json    {"image_id": 42, "file_name": "42.jpg", "captions": ["a dog", ...]}

``shards.json`` beside them tells of every shard how many photos and bytes it has and its SHA-256.
It is written last: where it is, the shards are complete.

`captioner.data.shard_stream` reads them in training.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from captioner.data.coco import CaptionedImage, read_json
from captioner.errors import ConfigError, DataError
from captioner.files import atomic_open, atomic_write

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

    @property
    def digest(self) -> str:
        """Tells these shards from others: 12 signs."""
        listed = "".join(f"{shard.name} {shard.sha256}\n" for shard in self.shards)
        return hashlib.sha256(listed.encode()).hexdigest()[:12]


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
    for path in folder.glob(".shard-*.tar.tmp-*"):  # of a run that was killed
        path.unlink()


def _write_shard(
    path: Path, photos: Sequence[CaptionedImage], progress: Callable[[int], object]
) -> tuple[Shard, list[str]]:
    """Write one shard, whole or not at all."""
    left_out = []
    with atomic_open(path, "wb") as raw:
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

    def __init__(self, file: IO[bytes]) -> None:
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


class ShardPhoto(NamedTuple):
    """A photo on its way through the buffer, not yet decoded."""

    image_id: int
    file_name: str
    """As the captions file had it when the shards were made."""
    name: str
    """For messages."""
    data: bytes


def read_shard(path: Path, shard: Shard) -> Iterator[ShardPhoto]:
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
                called = told["file_name"]
                yield ShardPhoto(told["image_id"], called, f"{path}: {called}", data)
            file.read_all()
    except (tarfile.TarError, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is cut or broken ({error}); {_AGAIN}") from error
    if file.size != shard.size:
        raise DataError(f"{path} has {file.size:,} bytes, {MANIFEST} says {shard.size:,}; {_AGAIN}")
    if file.sha256.hexdigest() != shard.sha256:
        raise DataError(f"{path} is broken: its SHA-256 is not the one in {MANIFEST}; {_AGAIN}")
    if photos != shard.photos:
        raise DataError(f"{path} has {photos} photos, {MANIFEST} says {shard.photos}; {_AGAIN}")
