"""Writes training photos to shards, which `captioner.data.shards` describes and reads."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from captioner.data.coco import CaptionedImage
from captioner.data.shards import (
    MANIFEST,
    SHARD_NAME,
    VERSION,
    HashedFile,
    Manifest,
    Shard,
    read_samples,
)
from captioner.errors import ConfigError, DataError
from captioner.files import atomic_open, atomic_write


class WrittenShards(NamedTuple):
    """Result of `write_shards`."""

    manifest: Manifest
    skipped: list[str]
    """One message per photo that could not be read."""


def write_shards(
    images: Sequence[CaptionedImage],
    folder: str | Path,
    *,
    photos_per_shard: int = 1000,
    seed: int = 0,
    force: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> WrittenShards:
    """Write photos and captions to shards; the same photos and settings give the same bytes.

    Each shard is written completely or not at all. The same call resumes an interrupted one and
    keeps its complete shards. Only one process may write to a folder at a time.

    Args:
        images: Photos with their captions.
        folder: Output folder; created if missing.
        photos_per_shard: The last shard, and shards with skipped photos, have fewer.
        seed: Seed of the photos' order, which is shuffled once.
        force: Remove existing shards first.
        progress: Called with the number of photos done since the last call.

    Returns:
        The manifest, and the photos that were skipped.

    Raises:
        ConfigError: The folder holds complete shards, or shards of other photos or settings.
        DataError: None of the photos can be read.
        OSError: A shard cannot be written (disk full, no permission).
    """
    if photos_per_shard < 1:
        raise ConfigError(f"photos-per-shard is {photos_per_shard}; give 1 or more")
    folder, order = Path(folder), list(images)
    random.Random(f"{seed} shards").shuffle(order)
    parts = [order[n : n + photos_per_shard] for n in range(0, len(order), photos_per_shard)]
    paths = [folder / f"shard-{number:06d}.tar" for number in range(len(parts))]
    _clear(folder, paths, force)
    shards: list[Shard] = []
    skipped: list[str] = []
    for path, photos in zip(paths, parts, strict=True):
        shard, problems = _keep(path, photos, progress) or _write_shard(path, photos, progress)
        shards.append(shard)
        skipped += problems
    if not any(shard.photos for shard in shards):
        first = f" (first: {skipped[0]})" if skipped else ""
        raise DataError(f"none of {len(order)} photos can be read{first}; check data.images")
    manifest = Manifest(folder, tuple(shards))
    atomic_write(folder / MANIFEST, _to_json(manifest))
    return WrittenShards(manifest, skipped)


def _clear(folder: Path, paths: list[Path], force: bool) -> None:
    """Refuse a folder with other shards, or remove them."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give a folder for the shards")
    folder.mkdir(parents=True, exist_ok=True)
    hint = "give --force to replace them, or another folder"
    found = [path for path in sorted(folder.iterdir()) if SHARD_NAME.fullmatch(path.name)]
    if force:
        (folder / MANIFEST).unlink(missing_ok=True)  # first: it marks the shards as complete
        for path in found:
            path.unlink()
    elif (folder / MANIFEST).exists():
        raise ConfigError(f"{folder} already holds complete shards; {hint}")
    elif others := [path.name for path in found if path not in paths]:
        raise ConfigError(
            f"{folder} holds shards of other photos or settings ({others[0]}); {hint}"
        )
    for path in folder.glob(".shard-*.tar.tmp*"):  # left by a killed run
        path.unlink()


def _write_shard(
    path: Path, photos: Sequence[CaptionedImage], progress: Callable[[int], object]
) -> tuple[Shard, list[str]]:
    skipped = []
    with atomic_open(path, "wb") as raw:
        file = HashedFile(raw)
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:  # type: ignore[call-overload]
            for photo in photos:
                data, problem = _read(photo)
                if problem:
                    skipped.append(problem)
                else:
                    _add(tar, _member_name(photo), data)
                    _add(tar, f"{photo.image_id:012d}.json", _fields(photo))
                progress(1)
    return _shard(path, len(photos) - len(skipped), file), skipped


def _keep(
    path: Path, photos: Sequence[CaptionedImage], progress: Callable[[int], object]
) -> tuple[Shard, list[str]] | None:
    """A shard that an interrupted run completed, or None; refuses one with other content.

    Compares the photos' sizes and captions, not their bytes: reading those is as slow as writing
    the shard.
    """
    if not path.exists():
        return None
    try:
        with path.open("rb") as raw:
            file = HashedFile(raw)
            held = [(name, len(data), fields) for name, data, fields in read_samples(file)]
            file.read_all()
    except tarfile.TarError:
        held = [("", 0, b"")]  # not one of ours, which are never truncated
    names = {name for name, _, _ in held}
    expected, skipped = [], []
    for photo in photos:
        name = _member_name(photo)
        problem = "" if name in names else _read(photo)[1]
        if problem:
            skipped.append(problem)
        else:
            expected.append((name, photo.path.stat().st_size, _fields(photo)))
    if held != expected:
        raise ConfigError(
            f"{path} holds other photos or settings, or is damaged; give --force to replace all "
            "shards, or another folder"
        )
    progress(len(photos))
    return _shard(path, len(held), file), skipped


def _shard(path: Path, photos: int, file: HashedFile) -> Shard:
    return Shard(path.name, photos, file.size, file.sha256.hexdigest())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file without owner and time, so that every machine writes the same bytes."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _member_name(photo: CaptionedImage) -> str:
    # Readers would skip a file without extension, and .json is taken by the captions.
    extension = photo.path.suffix
    extension = extension if extension.lower() not in ("", ".json") else ".img"
    return f"{photo.image_id:012d}{extension}"


def _fields(photo: CaptionedImage) -> bytes:
    fields = {
        "image_id": photo.image_id,
        "file_name": photo.path.name,
        "captions": list(photo.captions),
    }
    return json.dumps(fields).encode()


def _read(photo: CaptionedImage) -> tuple[bytes, str]:
    """A photo's bytes, or why it cannot be read."""
    try:
        return photo.path.read_bytes(), ""
    except OSError as error:
        return b"", f"{photo.path}: cannot be read ({error.strerror or error}); skipped"


def _to_json(manifest: Manifest) -> str:
    shards = [
        {"name": one.name, "photos": one.photos, "bytes": one.size, "sha256": one.sha256}
        for one in manifest.shards
    ]
    return json.dumps({"version": VERSION, "shards": shards}, indent=1) + "\n"
