"""The scripts of the recipe: their counts, and a small run of each."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from captioner.cli.main import OK, main
from captioner.cli.train import read
from captioner.inference.export.folder import digest
from captioner.inference.folder import SHIPPED_MODEL, WEIGHTS, load_model, read_config
from captioner.options import TrainConfig

ROOT = Path(__file__).parents[2]


def report(captions: dict[int, str]) -> dict[str, Any]:
    return {"per_image": [{"image_id": i, "caption": text} for i, text in captions.items()]}


def test_biases_are_counted_where_references_agree(script: Any) -> None:
    references = {
        1: ["A woman runs.", "A girl runs.", "Somebody runs."],  # the references agree: a woman
        2: ["A woman and a man.", "A lady."],  # they disagree
        3: ["A boy jumps.", "A kid jumps."],  # they agree: a man
        4: ["Two girls.", "Girls play."],
    }
    captions = {1: "a man runs", 2: "a man runs", 3: "a boy jumps", 4: "a girl and a boy play"}
    found = script("ship_model")._biases(report(captions), references)
    assert found["men"] == 1.0
    assert found["women"] == 0.25
    assert found["people_women"] == pytest.approx(6 / 9)
    assert (found["women_as_men"], found["women_as_men_of"]) == (0.5, 2)  # 1 of photos 1 and 4
    assert (found["men_as_women"], found["men_as_women_of"]) == (0.0, 1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Thirty photos with a dog in the left half, in the layout of the script's three sets."""
    folder = tmp_path / "photos"
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    noise = np.random.default_rng(0).integers(256, size=(30, 32, 40, 3), dtype=np.uint8)
    images = [{"id": i, "file_name": f"{i}.png", "width": 40, "height": 32} for i in range(30)]
    for image, pixels in zip(images, noise, strict=True):
        Image.fromarray(pixels).save(folder / "images" / str(image["file_name"]))
    captions = [{"id": i, "image_id": i, "caption": f"A dog with {i} toys."} for i in range(30)]
    half = [[0, 0, 20, 0, 20, 32, 0, 32]]
    dogs = [
        {"id": i, "image_id": i, "category_id": 18, "iscrowd": 0, "segmentation": half}
        for i in range(30)
    ]
    (folder / "annotations" / "captions.json").write_text(
        json.dumps({"images": images, "annotations": captions})
    )
    kinds = [{"id": 18, "name": "dog"}]
    (folder / "annotations" / "instances.json").write_text(
        json.dumps({"images": images, "annotations": dogs, "categories": kinds})
    )
    return folder


@pytest.mark.slow
def test_ship_model_writes_scores_and_a_card(
    *, script: Any, photos: Path, make_model: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    best = make_model(tmp_path / "best", 4, ("dog",))  # captions contain "dog"
    run = tmp_path / "one_stage"
    run.mkdir()
    rows = [{"epoch": e, "CIDEr": cider, "seconds": 60.0 * e} for e, cider in ((1, 0.4), (2, 0.3))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shipped = tmp_path / "shipped"
    annotations = photos / "annotations" / "captions.json"
    coco = tmp_path / "coco"
    shutil.copytree(photos / "images", coco / "val")
    shutil.copy(annotations, coco / "captions_val.json")
    sets = ["--flickr8k", photos, "--coco", coco, "--coco128", photos]
    captions = ("--validation", annotations)
    arguments = [best, "--runs", run, *sets, *captions, "--to", shipped, "--beam-size", 2]
    arguments += ["--skip-confidence"]  # thirty photos are too few
    shutil.copytree(photos / "images", coco / "train")
    for folder in (coco, annotations.parent):
        shutil.copy(annotations, folder / "captions_train.json")
    arguments += ["--export"]
    monkeypatch.setattr(sys, "argv", ["ship_model.py", *map(str, arguments)])
    script("ship_model").main()

    exported = read_config(shipped)["exported"]
    assert (exported["precision"], exported["source"]) == ("int8", digest(shipped / WEIGHTS))
    stored = load_model(shipped)
    assert stored.search.beam_size == 2
    [stage] = stored.info["stages"]
    assert stage == {"run": "one_stage", "epochs": 2, "best_epoch": 1, "CIDEr": 0.4, "minutes": 2}
    cider = stored.info["scores"]["coco_val"]["CIDEr"]
    low, high = stored.info["intervals"]["coco_val"]["CIDEr"]
    assert low <= cider <= high
    assert stored.info["attention"]["measured"] == 30
    # The crop has 32 of 40 columns, from the 4th on; the first 16 of them are dog.
    _, columns = stored.model.geometry.placed(64, 4 / 40, 0, 36 / 40, 1)
    left, middle, right = (40 * border for border in columns.borders(2))
    inside = [(min(20, b) - min(20, a)) / (b - a) for a, b in ((left, middle), (middle, right))]
    assert stored.info["attention"]["uniform"] == pytest.approx(sum(inside) / 2, abs=1e-4)
    card = (shipped / "README.md").read_text(encoding="utf-8")
    assert "| flickr8k_val, 30 |" in card
    assert re.search(r"`coco_val`: CIDEr \S+ \(.*\), BLEU-4 \S+ \(.*\), \d+ distinct words\.", card)
    assert " ".join(script("ship_model").VARIED) in card
    assert "This model is not calibrated" in card
    assert "`one_stage`: 2 epochs, 2 minutes of training; best after epoch 1 (CIDEr 40.0 in" in card
    capsys.readouterr()
    assert main(["info", "--model", str(shipped)]) == 0
    printed = capsys.readouterr().out
    assert f"CIDEr {cider:g}" in printed
    assert "{" not in printed
    assert "# The model that ships" in printed


def test_the_card_has_the_shipped_models_confidence_figures(script: Any) -> None:
    table = script("ship_model").confidence_table(load_model(SHIPPED_MODEL).calibrator)

    assert table in (SHIPPED_MODEL / "README.md").read_text(encoding="utf-8")
    assert len(table.splitlines()) == 5


def test_photos_are_held_out_with_all_their_captions(
    script: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Photo n has n % 6 captions; those with five are the only ones held out."""
    annotations = [
        {"image_id": n, "caption": f"Photo {n}, {k}."} for n in range(60) for k in range(n % 6)
    ]
    content = {"images": [{"id": n} for n in range(60)], "annotations": annotations}
    (tmp_path / "captions.json").write_text(json.dumps(content))

    def write(*options: str) -> tuple[dict[str, Any], dict[str, Any]]:
        arguments = [str(tmp_path / "captions.json"), str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", ["hold_out.py", *arguments])
        script("hold_out").main()
        held, train = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("held", "train"))
        return held, train

    held, train = write("--photos", "4", "--train", "30")
    ids = [{image["id"] for image in one["images"]} for one in (held, train)]
    assert [len(one) for one in ids] == [4, 30]
    assert not ids[0] & ids[1]
    assert all(n % 6 == 5 for n in ids[0])
    for one, kept in zip((held, train), ids, strict=True):
        assert one["annotations"] == [a for a in annotations if a["image_id"] in kept]
    assert write("--photos", "4", "--train", "30") == (held, train)
    with pytest.raises(
        SystemExit, match=r"50 photos, 10 of them with 5 or more captions; give a smaller"
    ):
        write("--photos", "11", "--train", "1")


def test_every_row_of_the_ablation_is_a_valid_config(script: Any) -> None:
    ablate = script("studies/ablate")

    def config(row: Any) -> TrainConfig:
        options = f"{ablate.SHORT} {row.encoder} {row.photos} {row.options}".split()
        return read([str(ROOT / ablate.CONFIG), *options])[0]

    base = config(ablate.ROWS[ablate.BASE])
    for name, row in ablate.ROWS.items():
        assert (config(row) == base) == (name == ablate.BASE), name


def test_search_options_are_compared_as_evaluate_scores_them(
    script, tiny, tmp_path, monkeypatch, capsys
) -> None:
    given = ["--annotations", str(tiny.captions), "--images", str(tiny.photos)]
    given += ["--model", str(tiny.model)]
    varied = ["--vary", "beam_size", "1", "3", "--vary", "guidance", "0", "2.5"]
    monkeypatch.setattr(sys, "argv", ["choose_search.py", *given, *varied])

    script("choose_search").main()

    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    assert [row[:2] for row in rows[2:]] == [["1", "0"], ["1", "2.5"], ["3", "0"], ["3", "2.5"]]
    report = tmp_path / "report.json"
    options = ["--beam-size", "3", "--guidance", "2.5", "--precision", "fp32", "-o", str(report)]
    assert main(["evaluate", *given, *options]) == OK
    scores = json.loads(report.read_text())["metrics"]
    assert rows[-1][2:4] == [f"{100 * scores[name]:.1f}" for name in ("CIDEr", "Bleu_4")]
    best = max(rows[2:], key=lambda row: float(row[2]))
    assert lines[-1] == f"highest CIDEr: --beam-size {best[0]} --guidance {best[1]}"


def test_each_stage_of_the_recipe_starts_from_the_previous_one() -> None:
    script = (ROOT / "scripts" / "train_shipped").read_text()
    [line] = [line for line in script.splitlines() if line.startswith("stages=")]
    stages = line.removeprefix("stages=(").removesuffix(")").split()
    before = None
    for stage in stages:
        config = read([str(ROOT / "configs" / f"{stage}.yaml")])[0]
        assert config.run_folder == f"runs/{stage}"
        assert config.init_from == before
        before = f"runs/{stage}/best"
    assert len(stages) == 3
