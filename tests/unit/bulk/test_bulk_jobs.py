"""Dividing inputs into parts, and the folder that parts are written to; without a cluster."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fsspec")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from cutting import cut  # noqa: E402

from captioner.bulk import progress  # noqa: E402
from captioner.bulk.captions import (  # noqa: E402
    DONE,
    JOB,
    Output,
    decode_rows,
    encode_rows,
    open_job,
)
from captioner.bulk.inputs import divide, read_part  # noqa: E402
from captioner.bulk.progress import Log  # noqa: E402
from captioner.caption_types import Caption, Keyword  # noqa: E402
from captioner.errors import ConfigError, DataError  # noqa: E402


def names(parts: list[Any]) -> list[list[str]]:
    return [[name for name, _ in read_part(part)] for part in parts]


def test_folders_lists_and_patterns(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("p/10.jpg", "p/2.jpg", "p/2.cr2", "p/.hidden.jpg", "p/sub/1.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"x")

    assert names(divide(["p/"], size=5)) == [["p/2.jpg", "p/10.jpg"]]
    assert names(divide(["p"], size=2, recursive=True)) == [
        ["p/2.jpg", "p/10.jpg"],
        ["p/sub/1.png"],
    ]
    assert names(divide(["p/*.jpg", "gone.jpg"], size=9)) == [["p/2.jpg", "p/10.jpg", "gone.jpg"]]
    with pytest.raises(DataError, match="no photos, Parquet files or tar files; add --recursive"):
        divide([str(tmp_path)], size=1)
    with pytest.raises(DataError, match="memory://nobucket/photos/ does not exist; check"):
        divide(["memory://nobucket/photos/"], size=1)


@pytest.mark.parametrize("group", [2, 5, 100])
def test_rows_of_parquet_do_not_depend_on_row_groups(group, tmp_path) -> None:
    path = str(tmp_path / "a.parquet")
    rows = [{"id": n, "photo": b"%d" % n if n != 4 else None} for n in range(11)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)

    parts = divide([path], size=3)
    photos = dict(photo for part in parts for photo in read_part(part))

    assert [part.photos for part in parts] == [3, 3, 3, 2]
    assert list(photos) == [f"{path}/{n}" for n in range(11)]
    with pytest.raises(OSError, match="the row has no photo"):
        photos.pop(f"{path}/4").read()
    assert [photo.read() for photo in photos.values()] == [b"%d" % n for n in range(11) if n != 4]
    keyed = divide([path], size=99, image_column="photo", key_column="id")
    assert names(keyed) == [[str(n) for n in range(11)]]


def test_columns_of_parquet(tmp_path) -> None:
    def write(rows: list[dict[str, Any]]) -> str:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        return str(tmp_path / "a.parquet")

    hugging_face = write([{"image": {"bytes": b"x", "path": "x.jpg"}, "label": 1}])
    assert names(divide([hugging_face], size=9)) == [[f"{hugging_face}/0"]]
    with pytest.raises(
        ConfigError, match="no column label of bytes or text; set --image-column to one of image"
    ):
        divide([hugging_face], size=9, image_column="label")
    paths = write([{"file_name": "x.jpg", "text": "a dog"}])
    assert names(divide([paths], size=9)) == [["x.jpg"]]
    two = write([{"left": b"x", "right": b"y"}])
    with pytest.raises(ConfigError, match="could be left or right; set --image-column"):
        divide([two], size=9)
    with pytest.raises(
        ConfigError, match="no column middle of bytes or text; set --image-column to one of left"
    ):
        divide([two], size=9, image_column="middle")
    Path(two).write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read"):
        divide([two], size=9)


def test_tables_fetch_nothing_that_was_not_asked_for(tmp_path) -> None:
    """They may come from strangers; a list is what the user has made."""
    refused = ["http://127.0.0.1/x.jpg", "https://x.org/x.jpg", "file:///etc/passwd", "../x.jpg"]
    refused += ["simplecache::s3://bucket/x.jpg", "zip://x.jpg::http://x.org/a.zip", "ftp://x/y"]
    table = pa.table({"path": [*refused, "photos/x.jpg"]})
    pq.write_table(table, tmp_path / "a.parquet")

    *photos, good = read_part(divide([str(tmp_path)], size=99)[0])

    assert [name for name, _ in photos] == refused
    for _, photo in photos:
        with pytest.raises(OSError, match=r"path contains '\.\.'|URL is not in object storage"):
            photo.read()
    assert good == ("photos/x.jpg", "photos/x.jpg")


def write_tar(folder: Path, *members: str) -> None:
    """A tar of three bytes under each name, or of links."""
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name in members:
            info = tarfile.TarInfo(name)
            info.size = 3
            if name.startswith("link"):
                info.type, info.linkname, info.size = tarfile.SYMTYPE, "1.jpg", 0
            tar.addfile(info, io.BytesIO(b"abc"))


def test_samples_of_tars(tmp_path) -> None:
    write_tar(tmp_path, "x/1.json", "x/1.jpg", "x/1.seg.png", "2.jpg", "2.txt", "notes", "3.cls")

    [part] = divide([str(tmp_path)], size=1)

    assert part.photos is None
    assert names([part]) == [[f"{tmp_path}/a.tar/x/1.jpg", f"{tmp_path}/a.tar/2.jpg"]]
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[: 7 * 512 + 1])
    [(first, _), (torn, photo)] = read_part(part)
    assert (first, torn) == (f"{tmp_path}/a.tar/x/1.jpg", f"{tmp_path}/a.tar")
    with pytest.raises(OSError, match="the tar file is damaged at this point"):
        photo.read()


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_a_link_or_a_damaged_member_of_a_tar_costs_no_other(tmp_path, damaged: int) -> None:
    write_tar(tmp_path, "link.jpg", "1.jpg", "2.jpg", "3.jpg")
    [part] = divide([str(tmp_path)], size=1)
    assert names([part]) == [[f"{tmp_path}/a.tar/{n}.jpg" for n in (1, 2, 3)]]
    content = bytearray((tmp_path / "a.tar").read_bytes())
    content[512 + (damaged - 1) * 1024 + 150] ^= 1  # of the header's checksum
    (tmp_path / "a.tar").write_bytes(content)

    photos = list(read_part(part))

    left = [f"{tmp_path}/a.tar/{n}.jpg" for n in (1, 2, 3) if n != damaged]
    left.insert(damaged - 1, f"{tmp_path}/a.tar")
    assert [name for name, _ in photos] == left
    with pytest.raises(OSError, match="has 2 damaged blocks before this point"):
        photos[damaged - 1][1].read()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_read_as_written(kind) -> None:
    caption = Caption(
        words=("a", "dog"),
        log_probs=np.array([-1.0, -0.5]),
        alphas=np.full((2, 1, 1), 1.0),
        gates=np.ones(2),
        log_prob=-1.5,
        keywords=(Keyword("dog", 0.5),),
    )
    caption = cut(caption, 1, [np.nan, 0.25]).to_dict()  # a column for every key
    rows = [{"image": "é.jpg", "captions": [caption]}, {"image": "\udcff.jpg", "error": "broken"}]

    read = decode_rows(encode_rows(rows, kind), kind)

    assert read[0]["captions"] == [caption]
    assert [row.get("error") for row in read] == [None, "broken"]
    assert read[0]["image"] == "é.jpg"
    assert read[1]["image"] in ("\udcff.jpg", "\\udcff.jpg")


def test_a_second_driver_and_a_changed_job_are_refused(tmp_path) -> None:
    output = Output(str(tmp_path / "out"), "jsonl")
    parts = divide(["a.jpg", "b.jpg"], size=1)
    same: dict[str, Any] = {"--beam-size": 3}

    def start(resume: bool = True, force: bool = False, parts: Any = parts, **settings: Any) -> Any:
        return open_job(output, parts, same | settings, size=1, resume=resume, force=force)

    with start(resume=False):
        output.write(output.part_name(0), b"{}\n")
        with pytest.raises(DataError, match="another process is writing"), start():
            pass
    with start():
        assert output.parts() == ["part-00000.jsonl"]
    with pytest.raises(ConfigError, match="1 finished part of a job; add --resume"), start(False):
        pass
    with pytest.raises(ConfigError, match="cannot resume"), start(x=4):
        pass
    (tmp_path / "out" / JOB).unlink()  # parts of something else
    with pytest.raises(ConfigError, match="1 finished part of a job"), start():
        pass
    with start(force=True):
        assert output.parts() == []


def test_a_job_whose_inputs_have_grown(tmp_path) -> None:
    """Its parts stay as they are; photos and files that are new follow, each exactly once."""
    output = Output(str(tmp_path / "out"), "jsonl")
    pq.write_table(pa.table({"path": ["x.jpg"] * 5}), tmp_path / "a.parquet")
    table = str(tmp_path / "a.parquet")

    def start(*names: str, resume: bool = True) -> Any:
        return open_job(output, divide(names, size=2), {}, size=2, resume=resume, force=False)

    with start("b.jpg", "d.jpg", "e.jpg", table, resume=False) as first:
        assert [part.names for part in first[:2]] == [("b.jpg", "d.jpg"), ("e.jpg",)]
    output.write(DONE, b"{}")
    with start("b.jpg", "d.jpg", "e.jpg", table) as same:
        assert same == first
        assert output.read(DONE) is not None
    pq.write_table(pa.table({"path": ["y.jpg"]}), tmp_path / "b.parquet")
    everything = [*"abcdef"[::-1], "\udcff"]
    with start(*(f"{name}.jpg" for name in everything), str(tmp_path)) as more:
        assert more[: len(first)] == first
        assert output.read(DONE) is None
    with start("a.jpg") as again:  # what is gone from the inputs stays in the job
        assert again == more
    assert [part.number for part in more] == [*range(len(more))]
    names = [name for part in more if part.kind == "photos" for name in part.names]
    assert sorted(names) == sorted(f"{name}.jpg" for name in everything)
    assert sum(part.photos for part in more if part.kind == "parquet") == 6
    pq.write_table(pa.table({"path": ["x.jpg", "z.jpg"] * 5}), tmp_path / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"a\.parquet had .* bytes when .* and now has .*; restore the file"
    ):
        start(table).__enter__()


def test_progress_lines(monkeypatch) -> None:
    """Parts of an earlier run, which are only read, do not count as speed."""
    now, lines, printed = [100.0], list[str](), Event()

    def say(line: str) -> None:
        lines.append(line)
        printed.set()

    monkeypatch.setattr(progress, "EVERY", 0.001)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Log(parts=10, finished=2, say=say) as log:
        for new in (False, False, True, True):
            log.add(1000, 3, new=new)
        now[0] += 50.0
        for _ in range(2):  # the first may have been under way before
            printed.clear()
            assert printed.wait(60)
    assert lines[-1] == (
        "4 of 10 parts finished, 4,000 photos (40.0 photos/s), 12 failed, time left 0:02:30"
    )


def test_another_model_on_a_worker_stops_the_job(tmp_path) -> None:
    from captioner.bulk.captions import ModelOptions, SearchOptions, WritePart

    output, [part] = Output(str(tmp_path), "jsonl"), divide(["a.jpg"], size=1)
    with pytest.raises(DataError, match="a different model from the machine that started the job"):
        WritePart(output, ModelOptions(), ["other"], SearchOptions())(part)


def test_errors_of_a_task_are_returned_by_its_process(tmp_path) -> None:
    ray = pytest.importorskip("ray")
    from captioner.bulk.cluster import _process

    def task(error: Exception) -> None:
        raise error

    pickled = ray.cloudpickle.dumps(task)
    assert _process(pickled, str(tmp_path / "gone"), DataError("broken")) == (None, "broken")
    _, problem = _process(pickled, str(tmp_path / "gone"), OSError("no space"))
    assert problem.endswith(": no space")


def test_batches_of_a_pipeline(tmp_path) -> None:
    """What ``ray.data.read_binary_files`` gives to ``map_batches``, and a column of its own."""
    pytest.importorskip("ray")
    from captioner.bulk.captions import Captions

    photo = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(photo, "PNG")
    columns: list[list[Any]] = [[photo.getvalue(), b"no photo"], ["a.png", "b.png"], [1, 2]]
    batch = dict(zip(("bytes", "path", "number"), map(np.array, columns), strict=True))
    batch["bytes"] = np.array(columns[0], dtype=object)

    table = Captions(beam_size=1, num_captions=1)(batch)

    assert table.column_names == ["path", "number", "captions", "error", "caption"]
    good, bad = table.to_pylist()
    assert good["caption"] == good["captions"][0]["text"] != ""
    assert good["error"] is None
    assert (bad["path"], bad["number"], bad["captions"], bad["caption"]) == ("b.png", 2, [], None)
    assert bad["error"].startswith("b.png: the file is not a supported image")
