"""The scripts of the recipe: their counts, and a small run of each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace
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
from captioner.training.data import read_data

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
    ablate = script("ablate")

    def config(row: Any) -> TrainConfig:
        options = f"{ablate.SHORT} {row.encoder} {row.photos} {row.options}".split()
        return read([str(ROOT / ablate.CONFIG), *options])[0]

    base = config(ablate.ROWS[ablate.BASE])
    for name, row in ablate.ROWS.items():
        assert (config(row) == base) == (name == ablate.BASE), name


def test_rows_share_features_only_if_the_encoder_input_is_the_same(
    script: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    ablate = script("ablate")
    given: list[tuple[str, ...]] = []
    monkeypatch.setattr(ablate, "_captioner", lambda *arguments: given.append(arguments))
    folders = ("flickr8k", "coco_mini", "coco128", "data", "work")
    options = Namespace(**{name: tmp_path / "DATA" / name for name in folders})
    kept: dict[Any, set[Any]] = {}
    for name, row in ablate.ROWS.items():
        given.clear()
        ablate.train(row, tmp_path / name, options)
        train = next(arguments for arguments in given if arguments[0] == "train")
        config = read(list(train[1:-1]))[0]
        data = config.data
        for path in (*data.images, *data.train_annotations, *data.val_annotations):
            assert Path(path).is_relative_to(tmp_path / "DATA"), name
        seen = str((config.encoder, config.data.images, config.data.train_annotations))
        kept.setdefault(config.data.features, set()).add(seen)
        assert [a[0] for a in given] == ["prepare"] * (not row.from_photos) + ["train", "evaluate"]
    from_photos = kept.pop(None)
    assert from_photos
    assert all(len(seen) == 1 for seen in kept.values())
    assert len(kept) == len({one for seen in kept.values() for one in seen})


def test_coco_photos_are_added_to_flickr8k_except_those_used_for_evaluation(
    script: Any, tmp_path: Path
) -> None:
    """Their image ids overlap."""
    ablate = script("ablate")
    options = Namespace(**{name: tmp_path / name for name in ("flickr8k", "coco_mini", "work")})
    options.data = options.flickr8k
    options.coco128 = tmp_path

    def write(path: Path, **named: int) -> None:
        images = [{"id": i, "file_name": f"{name}.png"} for name, i in named.items()]
        captions = [{"id": i, "image_id": i, "caption": name} for name, i in named.items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"images": images, "annotations": captions}))

    write(options.data / "captions_train.json", ours=1, others=2)
    write(options.data / "captions_val.json", judging=3)
    write(options.coco_mini / "annotations" / "captions.json", cocos=2, another=3, masked=4)
    write(tmp_path / "annotations" / "instances.json", masked=4)
    for folder, names in (
        (options.flickr8k, ("ours", "others", "judging")),
        (options.coco_mini, ("cocos", "another", "masked")),
    ):
        (folder / "images").mkdir()
        for name in names:
            Image.new("RGB", (2, 2)).save(folder / "images" / f"{name}.png")

    ablate.write_coco(options)

    row = f"{ablate.ROWS['coco'].photos} {ablate.VALIDATION}".split()
    given = [ablate._with_paths(option, options) for option in row]
    train, val = read_data(read([str(ROOT / ablate.CONFIG), *given])[0].data)
    learned = {image.path.stem: image.captions for image in train}
    assert learned == {name: (name,) for name in ("ours", "others", "cocos", "another")}
    assert not {image.image_id for image in train} & {image.image_id for image in val}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("ablate", "--table --work nowhere", "nowhere has no finished row"),
        ("ablate", "nowhere nowhere nowhere", "nowhere/images does not exist"),
        ("choose_search", "--annotations nowhere --images nowhere", "nowhere"),
        (
            "ship_model",
            "nowhere --runs r --flickr8k f --coco m --coco128 c --to t --failures nowhere.md",
            "nowhere.md does not exist",
        ),
        (
            "ship_model",
            "nowhere --runs r --flickr8k f --coco m --coco128 c --to t",
            "the model folder nowhere does not exist",
        ),
    ],
)
def test_a_script_names_a_missing_input_in_one_line(
    tmp_path: Path, name: str, options: str, expected: str
) -> None:
    script = str(ROOT / "scripts" / f"{name}.py")
    done = subprocess.run(
        [sys.executable, script, *options.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {1, 2}
    assert done.stderr.splitlines()[-1].startswith(f"{name}.py: ")
    assert expected in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_ablation_table_has_the_finished_rows(script: Any, tmp_path: Path) -> None:
    for name, cider in (("base", 0.5), ("grid_10", 0.515), ("lite0", 0.6)):
        (tmp_path / name).mkdir()
        best = {"epoch": 1, "CIDEr": cider, "Bleu_4": 0.2}
        last = best | {"epoch": 2, "CIDEr": 0.1}
        lines = "".join(json.dumps(row) + "\n" for row in (best, last))
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    for name, ratio, ends in (("base", 1.5, [1.25, 1.75]), ("grid_10", None, None)):
        measured = {"attention": {"ratio": ratio, "intervals": {"ratio": ends}}}
        (tmp_path / name / "attention.json").write_text(json.dumps(measured))
    # lite0 is being trained: its attention is not measured yet
    head, _, base, grid = script("ablate").table(tmp_path).splitlines()
    assert head.count("|") == base.count("|") == grid.count("|")
    assert base.endswith("|  | 50.0 | +0.0 | 20.0 | 1.50 (1.25 to 1.75) | 1 |")
    assert grid.endswith("| `--encoder.image-size 320` | 51.5 | +1.5 | 20.0 |  | 1 |")


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
