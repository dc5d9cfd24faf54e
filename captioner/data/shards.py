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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from captioner.data.coco import CaptionedImage
from captioner.data.images import open_file
from captioner.errors import ConfigError, DataError, ImageError
from captioner.files import atomic_open, atomic_write, unreadable, write_lock

MANIFEST, UNFINISHED = "shards.json", "unfinished.json"

_RECREATE = "copy it again, or recreate it with captioner prepare shards --force"


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


# --- Reading --------------------------------------------------------------------------------------


class ShardPhoto(NamedTuple):
    """An encoded photo from a shard."""

    image_id: int
    file_name: str
    """As in the captions file that the shards were made from."""
    name: str
    """For messages."""
    data: bytes


def _storage(folder: str | Path) -> tuple[Any, str]:
    """The fsspec file system of a folder or URL, and the path in it.

    Credentials and endpoints come from the environment, as for the cloud's own tools.
    """
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(str(folder), use_listings_cache=False)
    return fs, path.rstrip("/")


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a folder, or of the URL of a copy, and check the shards' sizes.

    Raises:
        DataError: The manifest is missing or damaged, or a shard is missing or has another size.
    """
    where = str(folder).rstrip("/")
    try:
        fs, path = _storage(folder)
        listed = fs.ls(path, detail=True) if fs.isdir(path) else []
        found = {str(one["name"]).rpartition("/")[2]: one["size"] for one in listed}
        content = fs.cat_file(f"{path}/{MANIFEST}") if MANIFEST in found else b""
    except Exception as error:  # each protocol has its own
        raise unreadable(folder, error) from error
    if MANIFEST not in found:
        raise DataError(
            f"{where}/{MANIFEST} does not exist; give a folder that captioner prepare shards has "
            "completed"
        )
    try:
        shards = tuple(Shard(**one) for one in json.loads(content)["shards"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where}/{MANIFEST} is not a list of shards ({error}); {_RECREATE}"
        ) from error
    for shard in shards:
        if (size := found.get(shard.name, 0)) != shard.bytes:
            raise DataError(
                f"{where}/{shard.name} has {size:,} bytes, but {MANIFEST} lists {shard.bytes:,}; "
                f"{_RECREATE}"
            )
    return Manifest(folder, shards)


def read_shard(folder: str | Path, shard: Shard) -> list[ShardPhoto]:
    """Read the photos of a shard, whose files may come in any order.

    A sample without a photo or without JSON is left out.

    Raises:
        DataError: The shard cannot be read, or is damaged.
    """
    path = f"{str(folder).rstrip('/')}/{shard.name}"
    try:
        fs, root = _storage(folder)
        content = fs.cat_file(f"{root}/{shard.name}")
    except Exception as error:
        raise unreadable(path, error) from error
    if hashlib.sha256(content).hexdigest() != shard.sha256:
        raise DataError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; {_RECREATE}")
    samples: dict[str, dict[bool, bytes]] = {}
    photos = []
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                if file := tar.extractfile(member):
                    sample = samples.setdefault(member.name.partition(".")[0], {})
                    sample[member.name.endswith(".json")] = file.read()
        for sample in samples.values():
            if len(sample) == 2:
                about = json.loads(sample[True])
                name = about["file_name"]
                photos.append(ShardPhoto(about["image_id"], name, f"{path}: {name}", sample[False]))
    except (tarfile.TarError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a shard of captioner prepare shards ({error!r}); {_RECREATE}"
        ) from error
    return photos


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
    with (
        atomic_open(path, "wb") as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for photo in photos:
            # Readers would skip a file without extension, and .json is taken by the captions.
            extension = photo.path.suffix
            extension = extension if extension.lower() not in ("", ".json") else ".img"
            try:
                with open_file(photo.path) as opened:
                    data = opened.read()
            except (ImageError, OSError) as error:
                skipped.append(f"{photo.path}: {error}; skipped")
            else:
                _add(tar, f"{photo.image_id:012d}{extension}", data)
                _add(tar, f"{photo.image_id:012d}.json", _fields(photo))
            progress(1)
    content = np.memmap(path, mode="r").data  # may be gigabytes
    sha256 = hashlib.sha256(content).hexdigest()
    return Shard(path.name, len(photos) - len(skipped), content.nbytes, sha256), skipped


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
