"""``captioner export``, and the commands that run an exported folder without torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from pages import ROOT, examples, read
from PIL import Image

from captioner.cli.main import NOT_DONE, OK, main
from captioner.inference.captioner import load
from captioner.model.preprocessing import Preprocessing
from captioner.serving.site.onnxruntime_web import FILES

DATA = ROOT.parent / "shared" / "data" / "coco_val"

# Runs the command line where torch cannot be imported.
_WITHOUT_TORCH = """
import sys
class NotInstalled:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "torchvision", "timm"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NotInstalled())
from captioner.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def exported(tiny: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "tiny"
    assert main(["export", str(tiny.model), "-o", str(folder)]) == OK
    return folder


def run_without_torch(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _WITHOUT_TORCH, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def without_torch(*arguments: Any) -> subprocess.CompletedProcess[str]:
    done = run_without_torch(*arguments)
    assert done.returncode == OK, done.stderr
    return done


def with_torch(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main([*map(str, arguments)]) == OK
    return capsys.readouterr().out


def test_caption_writes_what_the_model_does(tiny, exported, capsys) -> None:
    photos = sorted(tiny.photos.iterdir())
    options = ("--num-captions", "2", "--format", "json")

    done = without_torch("caption", *photos, "--model", exported, *options)

    out = with_torch(capsys, "caption", *photos, "--model", tiny.model, *options)
    one, other = json.loads(done.stdout), json.loads(out)
    assert [[c["text"] for c in e["captions"]] for e in one] == [
        [c["text"] for c in e["captions"]] for e in other
    ]


def test_what_needs_torch_is_one_line_where_it_is_missing(tiny, exported) -> None:
    photo = tiny.photos / "1.png"

    for arguments, problem in (
        (("caption", photo, "--model", tiny.model), "needs torch, torchvision; run: pip install"),
        (
            ("evaluate", "--images", tiny.photos, "--model", exported, "--faithfulness"),
            "use the model folder",
        ),
    ):
        done = run_without_torch(*arguments)

        assert done.returncode == NOT_DONE, done.stderr
        assert problem in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


def test_every_command_runs_the_folder(tiny, exported, tmp_path) -> None:
    for name, command in {
        "x.svg": ("attend", tiny.photos / "1.png"),
        "report.json": ("evaluate", "--images", tiny.photos, "--instances", tiny.instances),
    }.items():
        without_torch(*command, "--model", exported, "-o", tmp_path / name)
        assert (tmp_path / name).is_file()


def test_info_describes_an_exported_folder(exported) -> None:
    facts = json.loads(without_torch("info", "--model", exported, "--format", "json").stdout)

    assert facts["exported"] == {"opset": 18, "precision": "fp32"}
    assert (facts["encoder"], facts["grid"]) == ("timm/test_resnet", [2, 2])
    assert facts["size_mb"] > 0


@pytest.mark.slow
def test_serve_answers_without_torch(tiny, exported) -> None:
    command = [sys.executable, "-c", _WITHOUT_TORCH, "serve", "--port", "0", "--model", exported]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        found = None
        while found is None:
            line = server.stderr.readline()
            assert line, "the server ended"
            found = re.search(r"http://\S+", line)
        photo = (tiny.photos / "1.png").read_bytes()
        answer = httpx.post(f"{found[0]}/v1/captions", files={"image": photo}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["captions"][0]["text"]
    finally:
        os.kill(server.pid, signal.SIGINT)
        server.communicate(timeout=60)


@pytest.mark.slow
def test_an_8_bit_folder_captions(tiny, tmp_path, capsys) -> None:
    folder = tmp_path / "int8"

    out = with_torch(
        capsys, "export", tiny.model, "-o", folder, "--int8", "--calibration", tiny.photos
    )

    assert re.search(r"int8: the same caption as float32 for \d of 4 calibration photos", out)
    done = without_torch("caption", tiny.photos / "1.png", "--model", folder)
    assert done.stdout
    assert load(folder).precision == "int8"
    facts = json.loads(without_torch("info", "--model", folder, "--format", "json").stdout)
    assert facts["exported"]["precision"] == "int8"


@pytest.mark.parametrize("resize", ["crop", "squash"])
def test_the_program_of_the_page_captions(resize, exported, tmp_path, monkeypatch, capsys) -> None:
    """The caption equals that of ``captioner caption --beam-size 1``, with ONNX Runtime alone."""
    noise = np.random.default_rng(2).integers(256, size=(50, 90, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "photo.jpg")
    folder = shutil.copytree(exported, tmp_path / "exported")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["preprocessing"]["resize"] = resize
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    monkeypatch.chdir(tmp_path)
    (program,) = examples(read("docs/export.md"), "python")
    names: dict[str, Any] = {}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # json.load(open(...))
        exec(program, names)

    expected = Preprocessing.from_dict(config["preprocessing"])
    assert np.array_equal(names["pixels"], expected.pixels(Image.open("photo.jpg").convert("RGB")))
    assert (
        tuple(capsys.readouterr().out.split())
        == load(folder).caption("photo.jpg", beam_size=1).words
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "is an exported model without weights; use the model folder"),
        (
            ["--web", "--int8", "--calibration", "x"],
            "is already exported; pass the original model folder",
        ),
    ],
)
def test_an_exported_folder_is_not_exported_again(exported, tmp_path, capsys, options, problem):
    assert main(["export", str(exported), "-o", str(tmp_path / "new"), *options]) == NOT_DONE
    assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_a_site_is_made_from_a_model_or_an_exported_folder(
    tiny, exported, tmp_path, monkeypatch, capsys
) -> None:
    runtime = {name: name.encode() for name in FILES}
    monkeypatch.setattr(
        "captioner.serving.site.onnxruntime_web.runtime_files", lambda source: runtime
    )

    out = with_torch(capsys, "export", exported, "-o", tmp_path / "one", "--web")
    both = with_torch(capsys, "export", tiny.model, "-o", tmp_path / "two", "--web")

    assert re.search(r"one  \d+ files; the first visit loads \d\.\d MB\n", out)
    assert both.startswith("float32: log-probabilities differ from torch's by at most")
    for folder in ("one", "two"):
        config = json.loads((tmp_path / folder / "model" / "config.json").read_text())
        assert config["search"]["beam_size"] == 2
        assert (tmp_path / folder / "index.html").is_file()


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data/coco_val is not there")
def test_the_shipped_model_captions_coco_val_as_with_torch(tmp_path) -> None:
    assert main(["export", "-o", str(tmp_path / "shipped")]) == OK
    photos = sorted((DATA / "images").rglob("*.jpg"))[::30]
    models = load(precision="fp32"), load(tmp_path / "shipped")

    for one, other in zip(*(model.stream(photos, batch_size=16) for model in models), strict=True):
        (left,), (right,) = one.captions, other.captions
        assert left.text == right.text, one.photo
        assert abs(left.log_probs - right.log_probs).max() < 1e-4, one.photo
        assert abs(left.alphas - right.alphas).max() < 1e-4, one.photo
