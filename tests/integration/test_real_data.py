"""The whole path on real photos; needs ../shared/data beside the checkout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from captioner.cli.main import OK, main
from captioner.evaluation.metrics import score

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
pytestmark = [
    pytest.mark.data,
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there"),
]


@pytest.fixture(scope="module")
def coco_mini(tmp_path_factory) -> Path:
    """coco_mini, split into training and validation."""
    folder = tmp_path_factory.mktemp("coco_mini")
    source = DATA / "coco_mini" / "annotations" / "captions.json"
    assert main(["prepare", "dataset", str(source), "-o", str(folder), "--val", "0.1"]) == OK
    return folder


def _command(run: Path, coco_mini: Path) -> list[str]:
    """The COCO recipe, made small enough for a test."""
    return [
        sys.executable, "-m", "captioner", "train", str(ROOT / "configs" / "coco_resnet101.yaml"),
        "--run", str(run),
        "--data.images", f"[{DATA / 'coco_mini' / 'images'}]",
        "--data.train_annotations", f"[{coco_mini / 'captions_train.json'}]",
        "--data.val_annotations", f"[{coco_mini / 'captions_val.json'}]",
        "--data.karpathy_split", "null", "--data.workers", "1",
        "--encoder.name", "resnet18", "--encoder.weights", "none", "--encoder.image_size", "64",
        "--encoder.finetune_from", "layer4",
        "--decoder.embed_dim", "64", "--decoder.hidden_dim", "64", "--decoder.attention_dim", "64",
        "--training.epochs", "2", "--training.batch_size", "32", "--training.sample_images", "2",
    ]  # fmt: skip


def test_training_on_coco_mini_ends_and_its_resumed_twin_gives_the_same_model(coco_mini, tmp_path):
    whole, twin = tmp_path / "whole", tmp_path / "twin"
    done = subprocess.run(_command(whole, coco_mini), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "best CIDEr" in done.stdout

    stopped = subprocess.Popen(
        [*_command(twin, coco_mini), "--training.save_every", "3"], stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    while not (twin / "state.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(stopped.pid, signal.SIGINT)
    _, said = stopped.communicate(timeout=120)
    assert stopped.returncode == 130
    assert b"--resume auto" in said
    assert not (twin / "best").exists()

    resumed = subprocess.run(
        [*_command(twin, coco_mini), "--resume", "auto"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    weights = "best/model.safetensors"
    assert (whole / weights).read_bytes() == (twin / weights).read_bytes()
    rows = [
        [
            {k: v for k, v in json.loads(line).items() if k != "seconds"}
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in (whole, twin)
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2
    assert yaml.safe_load((whole / "config.yaml").read_text())["encoder"]["name"] == "resnet18"
    assert len(list((whole / "samples").rglob("*.png"))) == 4


def test_scores_equal_pycocoevalcap_with_its_own_java_tokenizer():
    if subprocess.run(["which", "java"], capture_output=True, check=False).returncode:
        pytest.skip("java is not installed")
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    data = json.loads((DATA / "coco128" / "annotations" / "captions.json").read_text())
    references: dict[int, list[str]] = {}
    for entry in data["annotations"]:
        references.setdefault(entry["image_id"], []).append(entry["caption"])
    candidates = {i: texts.pop() for i, texts in references.items() if len(texts) > 1}
    references = {i: references[i] for i in candidates}
    tokenizer = PTBTokenizer()
    truth = tokenizer.tokenize({i: [{"caption": t} for t in ts] for i, ts in references.items()})
    result = tokenizer.tokenize({i: [{"caption": t}] for i, t in candidates.items()})
    expected, _ = Cider().compute_score(truth, result)
    assert score(candidates, references).corpus["CIDEr"] == pytest.approx(expected, abs=1e-9)


def test_the_model_card_holds(tmp_path):
    """The shipped model's validation scores are those that its config states."""
    assert (
        main(["prepare", "dataset", str(DATA / "flickr8k"), "-o", str(tmp_path / "flickr8k")]) == OK
    )
    report = tmp_path / "report.json"
    arguments = ["--annotations", str(tmp_path / "flickr8k" / "captions_val.json")]
    arguments += ["--images", str(DATA / "flickr8k" / "images"), "-o", str(report)]
    assert main(["evaluate", *arguments]) == OK
    measured = json.loads(report.read_text())["metrics"]
    config = json.loads((ROOT / "captioner" / "pretrained" / "config.json").read_text())
    for name, value in config["info"]["scores"]["flickr8k_val"].items():
        # Other hardware rounds otherwise; a few words in a thousand captions then differ.
        assert measured[name] == pytest.approx(value, abs=0.005), name
