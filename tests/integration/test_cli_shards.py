"""``captioner prepare shards`` as a user runs it, and streaming its shards."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from captioner.cli import prepare_shards
from captioner.cli.main import FAILED, INTERRUPTED, OK, USAGE, main
from captioner.data.batches import EncodedImage
from captioner.data.shard_stream import ShardStream, shard_loader
from captioner.data.shards import read_manifest
from captioner.model.preprocessing import Preprocessing
from captioner.options import DataConfig
from captioner.training.data import read_data


@pytest.fixture
def config(tiny, tmp_path) -> Path:
    data = {
        "train_annotations": [str(tiny.captions)],
        "val_annotations": [str(tiny.captions)],
        "images": [str(tiny.photos)],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"data": data, "training": {"seed": 3}}))
    return path


def run(*arguments: object) -> int:
    return main(["prepare", "shards", *map(str, arguments)])


def last_line(capsys) -> str:
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err.replace("\r", "\n").strip().splitlines()[-1]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_written_shards_can_be_streamed(tiny, config, tmp_path, capsys):
    out = tmp_path / "shards"
    assert run(config, "-o", out, "--photos-per-shard", 3) == OK
    printed = capsys.readouterr()
    assert printed.out == f"{out}: 4 photos in 2 shards, 0.00 GB\n"
    assert "writing shards: 100%" in printed.err

    images, _ = read_data(
        DataConfig(
            train_annotations=[str(tiny.captions)],
            val_annotations=[str(tiny.captions)],
            images=[str(tiny.photos)],
        )
    )
    items = {one.image_id: EncodedImage(one, ([3 + one.image_id],)) for one in images}
    stream = ShardStream(read_manifest(out), items, Preprocessing(32), batch_size=2, max_captions=5)
    batches = list(shard_loader(stream))
    assert len(batches) == stream.batches == 2
    assert sorted(int(t) for batch in batches for t in batch.tokens[:, 0, 1]) == [4, 5, 6, 7]
    assert batches[0].images.shape == (2, 32, 32, 3)


def test_settings_on_the_command_line_apply(tiny, config, tmp_path, capsys):
    """Also with --config, whose settings they override."""
    assert run(config, "-o", tmp_path / "one") == OK
    assert run("--config", config, "-o", tmp_path / "same", "--training.seed", 3) == OK
    assert run(config, "--training.seed", 4, "-o", tmp_path / "other") == OK
    assert contents(tmp_path / "one") == contents(tmp_path / "same")
    assert contents(tmp_path / "one") != contents(tmp_path / "other")
    capsys.readouterr()
    assert run(config, "--data.images", "[nowhere]", "-o", tmp_path / "none") == FAILED
    assert "the image folder nowhere does not exist" in last_line(capsys)
    assert not (tmp_path / "none").exists()


def test_an_unreadable_photo_is_skipped(tiny, config, tmp_path, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    for path in tiny.photos.iterdir():
        (photos / path.name).write_bytes(path.read_bytes())
    (photos / "2.png").unlink()
    (photos / "2.png").symlink_to(photos / "gone.png")

    out = tmp_path / "shards"
    assert run(config, "--data.images", f"[{photos}]", "-o", out) == FAILED

    printed = capsys.readouterr()
    assert "3 photos in 1 shards" in printed.out
    assert printed.err.count("2.png: cannot be read (No such file or directory); skipped") == 1
    with tarfile.open(out / "shard-000000.tar") as tar:
        assert sorted(name for name in tar.getnames() if name.endswith("png")) == [
            f"{number:012d}.png" for number in (1, 3, 4)
        ]


def test_an_interrupted_run_can_be_continued(config, tmp_path, capsys, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run(config, "-o", whole, "--photos-per-shard", 1) == OK
    real = prepare_shards.tqdm

    class Stopping(real):  # type: ignore[misc, valid-type]
        def update(self, n: float = 1) -> None:
            super().update(n)
            if self.n == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(prepare_shards, "tqdm", Stopping)
    assert run(config, "-o", out, "--photos-per-shard", 1) == INTERRUPTED
    assert "run the same command to continue" in last_line(capsys)
    assert sorted(contents(out)) == ["shard-000000.tar", "shard-000001.tar"]
    monkeypatch.setattr(prepare_shards, "tqdm", real)
    assert run(config, "-o", out, "--photos-per-shard", 1) == OK
    assert contents(out) == contents(whole)


def test_finished_shards_are_replaced_only_with_force(config, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(config, "-o", out) == OK
    before = contents(out)
    capsys.readouterr()
    assert run(config, "-o", out, "--training.seed", 5) == USAGE
    assert last_line(capsys) == (
        f"captioner: {out} already holds complete shards; give --force to replace them, or another"
        " folder"
    )
    assert contents(out) == before
    assert run(config, "-o", out, "--training.seed", 5, "--force") == OK
    assert contents(out) != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "output"),
        (("-o", "x"), "data.val_annotations is empty"),
        (("{config}",), "output"),
        (("{config}", "-o", "x", "--photos-per-shard", "0"), "photos-per-shard is 0; give 1"),
        (("{config}", "-o", "x", "--photos-per-shard", "many"), "give an integer"),
        (
            ("{config}", "-o", "x", "--data.workers", "-1"),
            "data.workers is -1; give an integer >= 0",
        ),
        (("{config}", "-o", "{config}"), "is a file; give a folder"),
        (("missing.yaml", "-o", "x"), "missing.yaml"),
    ],
)
def test_errors_are_one_line(  # noqa: PLR0917
    config, tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert run(*(one.format(config=config) for one in arguments)) == USAGE
    assert message in last_line(capsys)
    assert not (tmp_path / "x").exists()


def test_help_lists_the_settings_without_heavy_imports():
    code = (
        "import sys\n"
        "from captioner.cli.main import main\n"
        "try: main(['prepare', 'shards', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'timm') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert "--photos-per-shard" in done.stdout
    assert "--data.images" in done.stdout
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_manifest_is_plain_json(config, tmp_path):
    assert run(config, "-o", tmp_path / "out") == OK
    manifest = json.loads((tmp_path / "out" / "shards.json").read_text())
    [shard] = manifest["shards"]
    assert manifest["version"] == 1
    assert set(shard) == {"name", "photos", "bytes", "sha256"}
