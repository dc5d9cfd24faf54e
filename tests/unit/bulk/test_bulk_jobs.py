"""Dividing inputs into parts, and the folder that parts are written to; without a cluster."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fsspec")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from captioner.bulk.inputs import Columns, digest, divide, read_part  # noqa: E402
from captioner.bulk.job import Job, Output, decode_rows, encode_rows, open_job  # noqa: E402
from captioner.caption import Caption, Keyword  # noqa: E402
from captioner.errors import ConfigError, DataError  # noqa: E402


def names(parts: list[Any]) -> list[list[str]]:
    return [[photo.name for photo in read_part(part)] for part in parts]


def test_folders_lists_and_patterns(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("p/10.jpg", "p/2.jpg", "p/notes.txt", "p/.hidden.jpg", "p/sub/1.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"x")

    assert names(divide(["p/"], size=5)) == [["p/2.jpg", "p/10.jpg"]]
    assert names(divide(["p"], size=2, recursive=True)) == [
        ["p/2.jpg", "p/10.jpg"],
        ["p/sub/1.png"],
    ]
    assert names(divide(["p/*.jpg", "gone.jpg"], size=9)) == [["p/2.jpg", "p/10.jpg", "gone.jpg"]]
    with pytest.raises(DataError, match="no photos, Parquet or tar files; subfolders are not"):
        divide([str(tmp_path)], size=1)
    with pytest.raises(DataError, match="memory://nobucket/photos/: no such file or folder; check"):
        divide(["memory://nobucket/photos/"], size=1)


def test_the_same_inputs_give_the_same_parts(tmp_path) -> None:
    parts = divide([f"{number}.jpg" for number in range(7)], size=3)

    assert [part.photos for part in parts] == [3, 3, 1]
    assert digest(parts) == digest(divide([f"{number}.jpg" for number in range(7)], size=3))
    assert digest(parts) != digest(divide([f"{number}.jpg" for number in range(7)], size=4))


@pytest.mark.parametrize("group", [2, 5, 100])
def test_rows_of_parquet_do_not_depend_on_row_groups(group, tmp_path) -> None:
    path = str(tmp_path / "a.parquet")
    rows = [{"id": n, "photo": b"%d" % n if n != 4 else None} for n in range(11)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)

    parts = divide([path], size=3)
    photos = [photo for part in parts for photo in read_part(part)]

    assert [part.photos for part in parts] == [3, 3, 3, 2]
    assert [photo.name for photo in photos] == [f"{path}/{n}" for n in range(11)]
    assert [photo.source.read() for photo in photos if not photo.name.endswith("/4")] == [
        b"%d" % n for n in range(11) if n != 4
    ]
    with pytest.raises(OSError, match="no image in this row"):
        photos[4].source.read()
    keyed = divide([path], size=99, columns=Columns("photo", "id"))
    assert names(keyed) == [[str(n) for n in range(11)]]


def test_columns_of_parquet(tmp_path) -> None:
    def write(rows: list[dict[str, Any]]) -> str:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        return str(tmp_path / "a.parquet")

    hugging_face = write([{"image": {"bytes": b"x", "path": "x.jpg"}, "label": 1}])
    assert names(divide([hugging_face], size=9)) == [[f"{hugging_face}/0"]]
    paths = write([{"file_name": "x.jpg", "text": "a dog"}])
    assert names(divide([paths], size=9)) == [["x.jpg"]]
    two = write([{"left": b"x", "right": b"y"}])
    with pytest.raises(ConfigError, match="could be left or right; give --image-column"):
        divide([two], size=9)
    with pytest.raises(ConfigError, match="no column middle; it has left, right"):
        divide([two], size=9, columns=Columns("middle"))
    Path(two).write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read"):
        divide([two], size=9)


def test_tables_fetch_nothing_that_was_not_asked_for(tmp_path) -> None:
    """They may come from strangers; a list is what the user has made."""
    refused = ["http://127.0.0.1/x.jpg", "https://x.org/x.jpg", "file:///etc/passwd", "../x.jpg"]
    refused += [
        "simplecache::s3://bucket/x.jpg",
        "zip://x.jpg::http://x.org/a.zip",
        "ftp://x/y.jpg",
    ]
    table = pa.table({"path": [*refused, "photos/x.jpg"]})
    pq.write_table(table, tmp_path / "a.parquet")

    *photos, good = read_part(divide([str(tmp_path)], size=99)[0])

    assert [photo.name for photo in photos] == refused
    for photo in photos:
        with pytest.raises(OSError, match=r"a (path in a )?table may .*; give --from-file a list"):
            photo.source.read()
    assert good.source == "photos/x.jpg"


def test_samples_of_tars(tmp_path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("x/1.json", "x/1.jpg", "x/1.seg.png", "2.jpg", "2.txt", "notes", "3.cls"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))

    [part] = divide([str(tmp_path)], size=1)

    assert part.photos is None
    assert names([part]) == [[f"{tmp_path}/a.tar/x/1.jpg", f"{tmp_path}/a.tar/2.jpg"]]


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_a_link_or_a_damaged_member_of_a_tar_costs_no_other(tmp_path, damaged: int) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("link.jpg", "1.jpg", "2.jpg", "3.jpg"):
            info = tarfile.TarInfo(name)
            if name == "link.jpg":
                info.type, info.linkname = tarfile.SYMTYPE, "1.jpg"
            info.size = 0 if info.issym() else 3
            tar.addfile(info, io.BytesIO(b"abc"))
    [part] = divide([str(tmp_path)], size=1)
    assert names([part]) == [[f"{tmp_path}/a.tar/{n}.jpg" for n in (1, 2, 3)]]
    content = bytearray((tmp_path / "a.tar").read_bytes())
    content[512 + (damaged - 1) * 1024 + 150] ^= 1  # of the header's checksum
    (tmp_path / "a.tar").write_bytes(content)

    photos = list(read_part(part))

    left = [f"{tmp_path}/a.tar/{n}.jpg" for n in (1, 2, 3) if n != damaged]
    left.insert(damaged - 1, f"{tmp_path}/a.tar")
    assert [photo.name for photo in photos] == left
    with pytest.raises(OSError, match="damaged before here: 2 blocks skipped"):
        photos[damaged - 1].source.read()


# --- the folder ---


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_read_as_written(kind) -> None:
    caption = Caption(
        words=("a", "dog"),
        log_probs=np.array([-1.0, -0.5]),
        alphas=np.full((2, 1, 1), 1.0),
        gates=np.ones(2),
        log_prob=-1.5,
        keywords=(Keyword("dog", 0.5),),
    ).as_dict()  # a column for every key
    rows = [{"image": "é.jpg", "captions": [caption]}, {"image": "\udcff.jpg", "error": "broken"}]

    read = decode_rows(encode_rows(rows, kind), kind)

    assert read[0]["captions"] == [caption]
    assert [row.get("error") for row in read] == [None, "broken"]
    assert read[0]["image"] == "é.jpg"
    assert read[1]["image"] in ("\udcff.jpg", "\\udcff.jpg")


def test_a_second_driver_and_a_changed_job_are_refused(tmp_path) -> None:
    output = Output(str(tmp_path / "out"), "jsonl")
    parts = divide(["a.jpg", "b.jpg"], size=1)
    settings = {"--beam-size": 3}

    with open_job(output, parts, settings, resume=False, force=False) as job:
        output.write(output.part_name(0), b"{}\n")
        with (
            pytest.raises(DataError, match="another process is writing"),
            open_job(output, parts, settings, resume=True, force=False),
        ):
            pass
        with pytest.raises(DataError, match=r"missing: part-00001\.jsonl; give --resume"):
            job.finish({})
    with open_job(output, parts, settings, resume=True, force=False) as again:
        assert again.id == job.id
        assert [part.number for part in again.missing()] == [1]
    for other, changed in ((parts, {"--beam-size": 4}), (parts[:1], settings)):
        with (
            pytest.raises(ConfigError, match="cannot resume"),
            open_job(output, other, changed, resume=True, force=False),
        ):
            pass
    with open_job(output, parts, settings, resume=True, force=True) as new:
        assert new.id != job.id
        assert output.finished() == set()


def test_parts_without_a_job_are_not_mixed_with_new_ones(tmp_path) -> None:
    (tmp_path / "part-00000.jsonl").write_text("{}\n")
    with (
        pytest.raises(ConfigError, match=r"1 part but no _job\.json"),
        open_job(
            Output(str(tmp_path), "jsonl"), divide(["a.jpg"], size=1), {}, resume=True, force=False
        ),
    ):
        pass


def test_a_worker_left_from_a_job_that_was_started_over_writes_nothing(tmp_path) -> None:
    pytest.importorskip("ray")
    from captioner.bulk.captions import Finished, Model, WritePart

    output = Output(str(tmp_path), "jsonl")
    parts = divide(["missing.jpg"], size=1)
    with open_job(output, parts, {}, resume=False, force=False) as old:
        pass
    with open_job(output, parts, {}, resume=False, force=True) as new:
        pass

    def write(job: Job) -> Finished:
        return WritePart(output, job.id, Model(), Model().fingerprints(), {})(parts[0])

    with pytest.raises(DataError, match="another process has started over with --force"):
        write(old)
    assert output.finished() == set()
    assert write(new)[:3] == (0, 1, 1)
    assert output.finished() == {0}


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
    assert (bad["path"], bad["number"], bad["captions"], bad["caption"]) == ("b.png", 2, None, None)
    assert bad["error"].startswith("b.png: not a supported image")
