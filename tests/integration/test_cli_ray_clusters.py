"""``captioner caption --engine ray`` with object storage, pipelines and workers that die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from captioner.cli.main import FAILED, INTERRUPTED, OK, USAGE, main

ray = pytest.importorskip("ray")
fsspec = pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clusters") / "photos"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(256, size=(9, 12, 16, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def put(url: str, photos: Path) -> None:
    for photo in photos.iterdir():
        with fsspec.open(f"{url}/{photo.name}", "wb") as file:
            file.write(photo.read_bytes())


def rows(url: str) -> list[dict[str, object]]:
    fs, folder = fsspec.core.url_to_fs(url, use_listings_cache=False)
    fs.invalidate_cache()
    parts = sorted(name for name in fs.ls(folder, detail=False) if "/part-" in name)
    return [json.loads(line) for part in parts for line in fs.cat_file(part).splitlines()]


@pytest.mark.slow
def test_object_storage(*, bucket, photos, tiny, workers_here, on_ray, capsys) -> None:
    """Photos from S3 to S3; a job that continues, and one that another driver has just started."""
    put(f"{bucket}/photos", photos)
    with fsspec.open(f"{bucket}/photos/notes.txt", "wb") as file:
        file.write(b"no photo")
    out = f"{bucket}/captions"
    same = ["--model", str(tiny.model), "--precision", "fp32"]
    command = [
        "caption", f"{bucket}/photos", f"{bucket}/gone.jpg", "--engine", "ray", "--workers", "1",
        "-o", out, "--part-photos", "4", *same,
    ]  # fmt: skip
    fs, folder = fsspec.core.url_to_fs(out, use_listings_cache=False)

    workers_here.stop_after = 1
    assert main(command) == INTERRUPTED
    assert "1 of 3 parts are finished" in capsys.readouterr().err
    first = fs.info(f"{folder}/part-00000.jsonl")["LastModified"]
    code, _, err = on_ray(*command, "--resume")
    assert code == FAILED, err

    found = rows(out)
    names = [f"{bucket}/photos/{number}.png" for number in range(9)] + [f"{bucket}/gone.jpg"]
    assert [row["image"] for row in found] == names
    assert [row["image"] for row in found if "error" in row] == [f"{bucket}/gone.jpg"]
    assert main(["caption", str(photos), "--format", "jsonl", *same]) == OK
    plain = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    texts = [[one["text"] for one in row["captions"]] for row in plain]
    assert [[one["text"] for one in row["captions"]] for row in found[:-1]] == texts  # type: ignore[attr-defined]
    fs.invalidate_cache()
    assert fs.info(f"{folder}/part-00000.jsonl")["LastModified"] == first


def test_only_one_driver_starts_a_job_in_object_storage(
    bucket, photos, tiny, workers_here, *, monkeypatch, capsys
) -> None:
    """Both find no job there, and only one can create ``job.json``."""
    from captioner.bulk.job import Output

    command = ["caption", str(photos), "--engine", "ray", "--model", str(tiny.model)]
    command += ["-o", f"{bucket}/captions"]
    workers_here.stop_after = 0
    assert main(command) == INTERRUPTED
    monkeypatch.setattr(Output, "read", lambda *_: None)
    capsys.readouterr()

    assert main(command) == USAGE
    assert "another process has just started a job there" in capsys.readouterr().err


PIPELINE = """
import sys
import ray, ray.data, captioner.bulk.captions
folder, model = sys.argv[1:]
ray.init(logging_level="ERROR")
photos = ray.data.read_binary_files(folder, include_paths=True)
photos = photos.union(ray.data.from_items([{"bytes": b"no photo", "path": "broken"}]))
done = photos.map_batches(
    captioner.bulk.captions.Captions,
    fn_constructor_args=(model,),
    batch_size=4,
    compute=ray.data.ActorPoolStrategy(size=1),
)
for row in sorted(done.take_all(), key=lambda row: row["path"]):
    print(sorted(row), row["path"].rpartition("/")[2], row["caption"] is None, row["error"])
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A script as a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "RAY_worker_niceness": "0"},
    )


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_callable_class_in_a_pipeline(photos, tiny) -> None:
    """`captioner.bulk.captions.Captions` in ``map_batches``, with a photo that fails."""
    done = run(PIPELINE, photos, tiny.model)

    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    columns = "['caption', 'captions', 'error', 'path']"
    assert lines[:-1] == [f"{columns} {number}.png False None" for number in range(9)]
    assert lines[-1].startswith(f"{columns} broken True broken: not a supported image")


FATAL_PHOTO = """
import os, sys
import captioner.bulk.cluster, captioner.bulk.captions
from captioner.cli.main import main

class Dies(captioner.bulk.captions.WritePart):
    def __call__(self, part):
        if part.number == 1:
            os._exit(1)
        return super().__call__(part)

captioner.bulk.cluster.RETRIES = 1
run = captioner.bulk.captions.run_on_cluster
captioner.bulk.captions.run_on_cluster = lambda task, *a, **k: run(Dies(**vars(task)), *a, **k)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_a_photo_that_kills_every_worker_ends_the_job(photos, tiny, tmp_path) -> None:
    """As a crash in a decoder would; otherwise the part would be tried without end."""
    options = ["--engine", "ray", "--workers", "1", "--part-photos", "5"]
    given = ["caption", photos, *options, "--model", tiny.model, "-o", tmp_path / "out"]
    done = run(FATAL_PHOTO, *given)

    assert done.returncode == FAILED, done.stderr
    assert "a worker died again and again; the limit per part is 1" in done.stderr
    # Part 0 may be given to a worker after part 1.
    missing = [n for n in (0, 1) if not (tmp_path / "out" / f"part-0000{n}.jsonl").exists()]
    assert 1 in missing
    message = {
        1: "; 1 part is missing: part-00001.jsonl)",
        2: "; 2 parts are missing, first part-00000.jsonl)",
    }
    assert message[len(missing)] in done.stderr
