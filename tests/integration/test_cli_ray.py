"""``captioner caption --engine ray``: the same captions, each photo once, whatever is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tiny_data import noise_photos

from captioner.cli.main import INTERRUPTED, NOT_DONE, SOME_FAILED, main

pytest.importorskip("ray")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PHOTOS = 23


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny photos, one of them broken. Not to be written to."""
    folder = tmp_path_factory.mktemp("ray") / "photos"
    noise_photos(folder, [f"{number}.png" for number in range(PHOTOS)])
    (folder / "7.png").write_bytes(b"\x89PNG")
    return folder


SAME = ("--batch-size", "4", "--precision", "fp32")
"""Options that the captions depend on."""


def command(model: Path, *arguments: object, workers: int = 1) -> list[str]:
    options = ["--engine", "ray", "--workers", workers, "--model", model, *SAME]
    return ["caption", *map(str, [*arguments, *options])]


@pytest.fixture
def caption(tiny: SimpleNamespace, run: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """``caption("photos", "-o", "out")`` here: exit code, standard output and error."""
    return lambda *arguments: run(*command(tiny.model, *arguments))


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all parts in order, as JSON Lines have them."""
    parts = sorted(folder.glob("part-*"))
    if parts and parts[0].suffix == ".jsonl":
        return [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    for caption in (one for row in rows for one in row["captions"] or ()):
        for name in ("keywords", "truth", "phrases", "left_out"):
            caption.pop(name)  # null without any, which JSON leaves out
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def plain_rows(model: Path, *inputs: object) -> list[dict[str, Any]]:
    """What the plain command writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "captions.jsonl")
        main(["caption", *map(str, inputs), "--model", str(model), "-o", str(out), *SAME])
        return [json.loads(line) for line in out.read_text().splitlines()]


# --- jobs ---


@pytest.mark.slow
def test_captions_equal_the_plain_command_s(photos, tiny, on_ray, tmp_path, monkeypatch) -> None:
    """Two workers, a folder with relative names, and a photo that fails."""
    monkeypatch.chdir(photos.parent)
    out = tmp_path / "out"
    expected = plain_rows(tiny.model, "photos")

    options = ("-o", out, "--part-photos", "8")
    code, printed, err = on_ray(*command(tiny.model, "photos", workers=2), *options)

    rows = read_rows(out)
    assert (code, printed) == (SOME_FAILED, ""), err
    assert f'{out}: 23 photos in 3 parts; 1 failed (rows with "error")' in err
    assert "part-00000.jsonl: photos/7.png: " in err
    assert [row["image"] for row in rows] == [f"photos/{number}.png" for number in range(PHOTOS)]
    assert rows == expected
    assert json.loads((out / "_done.json").read_text()) == {"parts": 3, "photos": 23, "failed": 1}
    assert {path.name for path in out.iterdir()} == {
        "_job.json", "_parts.jsonl.gz", "_done.json",
        *(f"part-0000{number}.jsonl" for number in range(3)),
    }  # fmt: skip


def test_an_interrupted_job_is_continued(photos, tiny, caption, tmp_path, workers_here) -> None:
    """What is there is neither overwritten nor mixed with another job."""
    out = tmp_path / "out"
    same = (photos, "-o", out, "--part-photos", "8")
    expected = plain_rows(tiny.model, photos)
    workers_here.stop_after = 1

    code, _, err = caption(*same)

    assert code == INTERRUPTED
    assert (
        "1 of 3 output files are finished; to continue, run the same command with --resume\n" in err
    )
    started = {"_job.json", "_parts.jsonl.gz", "part-00000.jsonl"}
    assert {path.name for path in out.iterdir()} == started
    first = (out / "part-00000.jsonl").stat().st_mtime_ns
    assert "add --resume to continue the job or --force to start over" in caption(*same)[2]
    for changed, problem in (
        (("--beam-size", "1"), "--beam-size was 2 and is now 1"),
        (("--model", tiny.twin), "--model was"),
    ):
        code, _, err = caption(*changed, *same, "--resume")
        assert (code, problem in err) == (NOT_DONE, True), err

    workers_here.stop_after = None
    assert caption(*same, "--resume")[0] == SOME_FAILED  # one photo is broken
    rows = read_rows(out)
    assert rows == expected
    assert (out / "part-00000.jsonl").stat().st_mtime_ns == first
    code, _, err = caption(*same, "--resume")
    assert (code, err) == (
        SOME_FAILED,
        f"captioner: {out} is already complete; to caption the photos again, add --force\n",
    )
    assert caption(*same, "--resume", "--num-captions", 2)[0] == NOT_DONE
    [new] = noise_photos(tmp_path / "new", ["new.png"])
    code, _, err = caption(new, *same, "--resume")  # the folder and one more
    assert code == SOME_FAILED
    assert f"{out}: 24 photos in 4 parts; 1 failed" in err
    assert read_rows(out) == [*rows, *plain_rows(tiny.model, new)]

    assert caption(*same, "--force", "--format", "parquet")[0] == SOME_FAILED
    assert read_rows(out) == rows
    assert not list(out.glob("*.jsonl"))


@pytest.mark.usefixtures("workers_here")
def test_tables_and_lists(photos, tiny, caption, tmp_path) -> None:
    rows = [{"id": "one", "image": (photos / "1.png").read_bytes()}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "list.txt").write_text(f"{photos / '1.png'}\nmissing.png\n")
    given = (tmp_path / "a.parquet", "--from-file", tmp_path / "list.txt", "--key-column", "id")

    code, _, err = caption(*given, "-o", tmp_path / "out")

    assert code == SOME_FAILED, err
    first, second, third = read_rows(tmp_path / "out")
    assert [row["image"] for row in (first, second)] == ["one", str(photos / "1.png")]
    assert first["captions"] == second["captions"]
    assert (third["image"], "the file does not exist" in third["error"]) == ("missing.png", True)


# --- object storage ---


def test_object_storage(  # noqa: PLR0917
    new_bucket, photos, tiny, caption, workers_here, monkeypatch
) -> None:
    """Photos from S3 to S3; a job that continues."""
    bucket = new_bucket(monkeypatch)
    fsspec = pytest.importorskip("fsspec")
    for photo in (*photos.iterdir(), Path(__file__)):
        with fsspec.open(f"{bucket}/photos/{photo.name}", "wb") as file:
            file.write(photo.read_bytes())
    out = f"{bucket}/captions"
    same = (f"{bucket}/photos", f"{bucket}/gone.jpg", "-o", out, "--part-photos", "10")
    fs, folder = fsspec.core.url_to_fs(out, use_listings_cache=False)

    workers_here.stop_after = 1
    code, _, err = caption(*same)
    assert (code, "1 of 3 output files are finished" in err) == (INTERRUPTED, True)
    first = fs.info(f"{folder}/part-00000.jsonl")["LastModified"]
    workers_here.stop_after = None
    assert caption(*same, "--resume")[0] == SOME_FAILED  # two photos fail

    fs.invalidate_cache()
    parts = sorted(name for name in fs.ls(folder, detail=False) if "/part-" in name)
    rows = [json.loads(line) for part in parts for line in fs.cat_file(part).splitlines()]
    names = [f"{bucket}/photos/{number}.png" for number in range(PHOTOS)] + [f"{bucket}/gone.jpg"]
    assert [row["image"] for row in rows] == names
    expected = [row["captions"] for row in plain_rows(tiny.model, photos)]
    assert [row["captions"] for row in rows] == [*expected, []]
    assert [row["image"] for row in rows if "error" in row] == [names[7], names[-1]]
    assert fs.info(f"{folder}/part-00000.jsonl")["LastModified"] == first


# --- kills ---


# Workers have a file in the folder ``busy`` while they are at a part.
SLOW = """
import os, sys, time
from pathlib import Path
from captioner.bulk import captions, cluster
from captioner.cli.main import main

busy = Path(sys.argv.pop(1))

class Slow(captions.WritePart):
    def __call__(self, part):
        mark = busy / str(os.getpid())
        mark.touch()
        time.sleep(0.2)
        found = super().__call__(part)
        mark.unlink()
        return found

run = cluster.run_on_cluster
cluster.run_on_cluster = lambda task, *a, **k: run(Slow(**vars(task)), *a, **k)
sys.exit(main())
"""


@pytest.mark.slow
def test_kills_lose_and_repeat_nothing(photos, tiny, tmp_path) -> None:
    """A driver is killed, and then a worker of the next one, each in the middle of a part."""
    out, busy = tmp_path / "out", tmp_path / "busy"
    busy.mkdir()
    arguments = command(tiny.model, photos, "-o", out, "--part-photos", "1", "--resume")

    def start() -> subprocess.Popen[str]:
        words = [sys.executable, "-c", SLOW, str(busy), *arguments]
        return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)

    def worker_at_a_part(parts: int) -> psutil.Process:
        """Wait until this number of parts is finished and a worker is at the next one."""
        until = time.monotonic() + 200
        while driver.poll() is None and time.monotonic() < until:
            if len(list(out.glob("part-*"))) >= parts:
                for process in processes():
                    if (busy / str(process.pid)).exists():
                        return process
            time.sleep(0.01)
        raise AssertionError("the job was done before the kill")

    def processes() -> list[psutil.Process]:
        return psutil.Process(driver.pid).children(recursive=True)

    driver, left = start(), []
    try:
        worker_at_a_part(3)
        left += processes()  # they still run when the next driver starts
        driver.kill()
        driver.communicate()
        driver = start()
        worker = worker_at_a_part(8)
        left += processes()
        worker.kill()
        err = driver.communicate(timeout=200)[1]
    finally:
        driver.kill()
        for process in left:  # without a driver, some of Ray's end only after a minute
            with suppress(psutil.NoSuchProcess):
                process.kill()

    assert driver.returncode == SOME_FAILED, err  # one photo is broken
    rows = read_rows(out)
    assert Counter(row["image"] for row in rows) == Counter(str(one) for one in photos.iterdir())
    assert texts(rows) == texts(plain_rows(tiny.model, photos))
    assert sum("error" in row for row in rows) == 1
    assert json.loads((out / "_done.json").read_text())["photos"] == len(rows)


def texts(rows: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    return {row["image"]: [caption["text"] for caption in row["captions"]] for row in rows}


FATAL_PHOTO = """
import os
from captioner.bulk import captions, cluster

class Dies(captions.WritePart):
    def __call__(self, part):
        if part.number == 1:
            os._exit(1)
        return super().__call__(part)

cluster.RETRIES = 1
run = cluster.run_on_cluster
cluster.run_on_cluster = lambda task, *a, **k: run(Dies(**vars(task)), *a, **k)
"""


@pytest.mark.slow
def test_a_photo_that_kills_every_worker_ends_the_job(photos, tiny, on_ray, tmp_path) -> None:
    """As a crash in a decoder would; otherwise the part would be tried without end."""
    out = tmp_path / "out"
    options = ("-o", out, "--part-photos", "12")
    code, _, err = on_ray(*command(tiny.model, photos), *options, before=FATAL_PHOTO)

    assert code == NOT_DONE, err
    assert "workers died more than 1 times on the same photos" in err
    assert "of 2 output files are finished; to continue, run the same command" in err
    assert not (out / "part-00001.jsonl").exists()


LISTENING = """
import psutil
from captioner.bulk.cluster import cluster, run_on_cluster
from captioner.bulk.options import RayOptions

workers = RayOptions(workers=1)
with cluster(workers):
    assert list(run_on_cluster(len, ["abc"], workers)) == [3]
    for process in psutil.Process().children(recursive=True):
        for one in process.net_connections("inet"):
            if one.status == "LISTEN":
                print(one.laddr.ip.removeprefix("::ffff:"))
"""


@pytest.mark.slow
def test_only_this_machine_can_reach_the_ray_that_we_start() -> None:
    """It has no authentication: whoever reaches it can run code."""
    command = [sys.executable, "-c", LISTENING]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == {"127.0.0.1"}, done.stderr
