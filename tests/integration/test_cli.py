"""The commands as a user runs them, with the shipped model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from captioner.cli.main import COMMANDS, FAILED, OK, USAGE, main
from captioner.hardware import EXTRAS
from captioner.inference.folder import GRAPHS, SHIPPED_MODEL, WEIGHTS

ASSETS = Path(__file__).parents[2] / "assets" / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two good photos and several kinds of broken ones."""
    photos = tmp_path / "my photos"
    photos.mkdir()
    good = Image.open(sorted(ASSETS.glob("*.jpg"))[0])
    good.save(photos / "a good one.jpg")
    good.resize((90, 60)).save(photos / "собака.png")
    (photos / "empty.jpg").write_bytes(b"")
    (photos / "text.jpg").write_text("no picture")
    data = (photos / "a good one.jpg").read_bytes()
    (photos / "truncated.jpg").write_bytes(data[: len(data) // 2])
    return photos


def test_good_photos_are_captioned_and_bad_ones_named(folder, capsys):
    assert main(["caption", str(folder), str(folder / "missing.jpg")]) == FAILED
    out, err = capsys.readouterr()
    assert [line.partition(": ")[0] for line in out.splitlines()] == [
        str(folder / "a good one.jpg"),
        str(folder / "собака.png"),
    ]
    for name in ("empty.jpg", "text.jpg", "truncated.jpg", "missing.jpg"):
        assert sum(name in line for line in err.splitlines()) == 1, err
    assert "Traceback" not in err


def test_coco_results_take_ids_from_names_or_annotations(tmp_path, capsys):
    photo = Image.open(sorted(ASSETS.glob("*.jpg"))[0])
    photo.save(tmp_path / "COCO_val2014_000000000042.jpg")
    photo.save(tmp_path / "holiday.jpg")
    arguments = ["caption", str(tmp_path), "--format", "coco"]
    assert main(arguments) == FAILED
    out, err = capsys.readouterr()
    assert [entry["image_id"] for entry in json.loads(out)] == [42]
    assert "holiday.jpg" in err
    images = [
        {"id": 7, "file_name": "holiday.jpg"},
        {"id": 8, "file_name": "COCO_val2014_000000000042.jpg"},
    ]
    captions = [{"id": n, "image_id": i["id"], "caption": "a"} for n, i in enumerate(images)]
    annotations = tmp_path / "captions.json"
    annotations.write_text(json.dumps({"images": images, "annotations": captions}))
    assert main([*arguments, "--annotations", str(annotations)]) == OK
    assert [entry["image_id"] for entry in json.loads(capsys.readouterr().out)] == [8, 7]
    photo.save(tmp_path / "000042.jpg")  # `evaluate --results` refuses two
    assert main(arguments) == USAGE
    assert "both have the image id 42" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "module"),
    [(command, name) for command in sorted(COMMANDS.keys() & EXTRAS) for name in EXTRAS[command]],
)
def test_a_missing_extra_is_named_with_its_pip_command(command, module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed

    assert main([command]) == USAGE

    expected = f"captioner {command} needs {module}; run: pip install 'captioner[{command}]'"
    assert capsys.readouterr().err == f"captioner: {expected}\n"


def test_info_describes_the_model(capsys):
    assert main(["info", "--format", "json"]) == OK
    facts = json.loads(capsys.readouterr().out)
    assert facts["encoder"].startswith("timm/")
    forms = (sum((SHIPPED_MODEL / one).stat().st_size for one in f) for f in ([WEIGHTS], GRAPHS))
    weights, graphs = (size / 1e6 for size in forms)
    assert max(weights, graphs) <= 40
    assert facts["size_mb"] == pytest.approx(weights + graphs, abs=0.1)
    assert main(["info"]) == OK
    summary = capsys.readouterr().out
    assert len(summary.splitlines()) <= 12
    assert "Flickr8k" in summary
    assert main(["info", "--card"]) == OK
    shown = capsys.readouterr().out
    assert shown.startswith(summary)
    assert "# The model that ships" in shown


def test_train_refuses_a_folder_with_other_files(tmp_path, capsys):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "thesis.txt").write_text("mine")
    assert main(["train", "--run-folder", str(tmp_path)]) == USAGE
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "best" / "thesis.txt").read_text() == "mine"


OWN_HANDLER = """
import os, signal, time
from captioner.cli import main

main.GRACE = 0.1
main.main(["--version"]), main.main(["caption"])
signal.signal(signal.SIGTERM, lambda *_: time.sleep(0.1))  # as train and serve do
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.default_int_handler)
time.sleep(0.4)
"""


def test_a_command_that_handles_sigterm_is_not_ended():
    ended = subprocess.run([sys.executable, "-c", OWN_HANDLER], check=False, timeout=60)
    assert ended.returncode == 0
