"""Shards: contents, determinism, interrupted runs and the manifest."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_data import contents
from toy_shards import PER_SHARD, PHOTOS

from captioner.data.coco import CaptionedImage
from captioner.data.shards import MANIFEST, Shard, read_manifest, read_shard, write_shards
from captioner.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def webdataset() -> Any:
    with warnings.catch_warnings():  # of its imports
        warnings.simplefilter("ignore")
        return pytest.importorskip("webdataset")


@pytest.mark.parametrize("extension", ["jpg", "png"])  # members are sorted, with .json between them
def test_we_read_the_shards_of_webdataset(
    images: list[CaptionedImage], extension: str, tmp_path: Path, webdataset: Any
) -> None:
    path = tmp_path / "shard-000000.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for image in images:
            about = {"image_id": image.image_id, "file_name": "a.jpg", "captions": ["a dog"]}
            data = image.path.read_bytes()
            writer.write({"__key__": f"{image.image_id:012d}", extension: data, "json": about})
    content = path.read_bytes()
    shard = Shard(path.name, len(images), len(content), hashlib.sha256(content).hexdigest())

    found = [(one.image_id, one.data) for one in read_shard(tmp_path, shard)]

    assert found == [(image.image_id, image.path.read_bytes()) for image in images]


@pytest.mark.parametrize("about", ["{}", "[]", "?"])
def test_a_shard_with_other_json_is_an_error(tmp_path: Path, about: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.jpg").touch()
    (tmp_path / "in/1.json").write_text(about)
    data = Path(shutil.make_archive(str(tmp_path / "a"), "tar", tmp_path / "in")).read_bytes()
    with pytest.raises(DataError, match=r"^\S*a\.tar is not a shard of captioner prepare shards"):
        read_shard(tmp_path, Shard("a.tar", 1, len(data), hashlib.sha256(data).hexdigest()))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # open files
def test_webdataset_reads_our_shards(
    images: list[CaptionedImage], folder: Path, webdataset: Any
) -> None:
    paths = [str(path) for path in sorted(folder.glob("*.tar"))]
    by_id = {one.image_id: one for one in images}

    samples = list(webdataset.WebDataset(paths, shardshuffle=False, empty_check=False))

    order = [int(sample["__key__"]) for sample in samples]
    assert order != sorted(order) == sorted(by_id)  # shuffled
    for sample in samples:
        image = by_id[int(sample["__key__"])]
        assert sample["png"] == image.path.read_bytes()
        assert json.loads(sample["json"])["captions"] == list(image.captions)


class Stopped(BaseException):
    """An interruption, like KeyboardInterrupt."""


@pytest.mark.parametrize("after", [0, 1, 3, 4, 10, PHOTOS])
def test_an_interrupted_run_resumes(
    images: list[CaptionedImage], folder: Path, tmp_path: Path, after: int
):
    done = 0

    def stop(more: int) -> None:
        nonlocal done
        done += more
        if done >= after:
            raise Stopped

    with pytest.raises(Stopped):
        write_shards(images, tmp_path / "out", photos_per_shard=PER_SHARD, progress=stop)
    left = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    assert len(left) == max(0, after - 1) // PER_SHARD  # complete shards only

    reported: list[int] = []
    manifest, _ = write_shards(
        images, tmp_path / "out", photos_per_shard=PER_SHARD, progress=reported.append
    )

    assert contents(tmp_path / "out") == contents(folder)
    assert manifest.photos == sum(reported) == PHOTOS
    assert all(path.stat().st_mtime_ns == time for path, time in left.items())


def test_an_unreadable_photo_is_skipped(images: list[CaptionedImage], tmp_path: Path):
    (tmp_path / "a folder.jpg").mkdir()
    gone = CaptionedImage(1, tmp_path / "gone.jpg", ("a",))
    unreadable = CaptionedImage(2, tmp_path / "a folder.jpg", ("a",))
    given = [gone, unreadable, *images[:6]]

    manifest, skipped = write_shards(given, tmp_path / "out", photos_per_shard=2)

    assert sorted(Path(line.partition(":")[0]).name for line in skipped) == [
        "a folder.jpg", "gone.jpg"
    ]  # fmt: skip
    assert manifest.photos == 6
    assert len(manifest.shards) == 4


def test_complete_shards_are_replaced_only_with_force(
    images: list[CaptionedImage], folder: Path, tmp_path: Path
):
    out = shutil.copytree(folder, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"already holds complete shards.*--force"):
        write_shards(images, out, photos_per_shard=PER_SHARD)
    assert contents(out) == contents(folder)
    (out / "my notes.txt").write_text("mine")

    write_shards(images, out, photos_per_shard=10, force=True)

    assert len(read_manifest(out).shards) == len(list(out.glob("*.tar"))) == 3
    assert (out / "my notes.txt").exists()


@pytest.mark.parametrize("change", ["seed", "size", "fewer", "caption", "photo"])
def test_an_interrupted_run_of_other_content_is_not_resumed(
    images: list[CaptionedImage], tmp_path: Path, change: str
):
    def stop(_: int) -> None:
        raise Stopped

    out, settings = tmp_path / "out", {"photos_per_shard": PER_SHARD}
    with pytest.raises(Stopped):
        write_shards(images, out, **settings, progress=stop)
    larger = tmp_path / images[0].path.name
    larger.write_bytes(images[0].path.read_bytes() + b".")
    given = {
        "fewer": images[:4],
        "photo": [replace(images[0], path=larger), *images[1:]],
        "caption": [replace(one, captions=(*one.captions, "more")) for one in images],
    }.get(change, images)
    settings |= {"seed": {"seed": 1}, "size": {"photos_per_shard": 4}}.get(change, {})
    before = contents(out)

    with pytest.raises(ConfigError, match=r"of other photos or settings.*--force"):
        write_shards(given, out, **settings)

    assert contents(out) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("shards"), "is not a list of shards"),
        (lambda data: data["shards"][0].pop("sha256"), "is not a list of shards"),
        (lambda data: data["shards"][0].update(name="shard-000099.tar"), "has 0 bytes"),
    ],
)
def test_invalid_manifests(folder: Path, tmp_path: Path, change: Any, message: str):
    out = shutil.copytree(folder, tmp_path / "out")
    data = json.loads((out / MANIFEST).read_text())
    change(data)
    (out / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(DataError, match=message):
        read_manifest(out)
