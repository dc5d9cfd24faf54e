"""The scripts: what they count and compare, and a small run of those that are not benchmarks."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from tiny_data import noise_photos, write_captions, write_dogs

from captioner import evaluate
from captioner.cli.main import OK, SOME_FAILED, main
from captioner.inference.config_file import read_config
from captioner.inference.export import digest
from captioner.inference.folder import load_model
from captioner.inference.names import WEIGHTS
from captioner.options import SearchOptions
from captioner.training.config import build_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "assets" / "examples"


@pytest.fixture
def run(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``run("hold_out", "captions.json")``: run a script in this process; returns its module."""

    def run_it(name: str, *arguments: object, **changes: object) -> ModuleType:
        module = script(name)
        for attribute, value in changes.items():
            monkeypatch.setattr(module, attribute, value)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        module.main()
        return module

    return run_it


# --- the shipped model ---------------------------------------------------------------------------


def test_biases_are_counted_where_references_agree(script: Any) -> None:
    references = {
        1: ["A woman runs.", "A girl runs.", "Somebody runs."],  # the references agree: a woman
        2: ["A woman and a man.", "A lady."],  # they disagree
        3: ["A boy jumps.", "A kid jumps."],  # they agree: a man
        4: ["Two girls.", "Girls play."],
    }
    captions = {1: "a man runs", 2: "a man runs", 3: "a boy jumps", 4: "a girl and a boy play"}
    report = {"per_image": [{"image_id": i, "caption": text} for i, text in captions.items()]}
    found = script("ship_model").count_groups(report, references)
    assert found["men"] == 1.0
    assert found["women"] == 0.25
    assert found["people_women"] == pytest.approx(6 / 9)
    assert (found["women_as_men"], found["women_as_men_of"]) == (0.5, 2)  # 1 of photos 1 and 4
    assert (found["men_as_women"], found["men_as_women_of"]) == (0.0, 1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Thirty photos with a dog in the left half, in the layout of the script's three sets."""
    folder, names = tmp_path / "photos", [f"{number}.png" for number in range(30)]
    (folder / "annotations").mkdir(parents=True)
    noise_photos(folder / "images", names, (40, 32))
    # Some photos do not mention a dog.
    captions = {
        name: [f"A {'dog' if n < 24 else 'cat'} with {5 * n + k} toys." for k in range(5)]
        for n, name in enumerate(names)
    }
    for part in ("train", "val"):
        (folder / part).symlink_to(folder / "images")
        write_captions(folder / f"captions_{part}.json", captions)
    write_dogs(folder / "annotations" / "instances.json", names, len(names))
    return folder


@pytest.mark.slow
def test_ship_model_writes_scores_and_a_card(
    run: Any, photos: Path, make_model: Any, tmp_path: Path
) -> None:
    best = make_model(tmp_path / "best", 4, ("dog",))  # captions contain "dog"
    stage = tmp_path / "one_stage"
    stage.mkdir()
    rows = [{"epoch": e, "CIDEr": cider, "seconds": 60.0 * e} for e, cider in ((1, 0.4), (2, 0.3))]
    (stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shipped = tmp_path / "shipped"
    sets = ["--flickr8k", photos, "--coco", photos, "--coco128", photos]
    sets += ["--held", photos / "captions_val.json"]
    commands: list[str] = []
    run("ship_model", best, "--runs", stage, *sets, "--to", shipped,
        VALIDATION=photos / "captions_val.json",
        SEARCH=SearchOptions(beam_size=2, block_ngrams=1, min_length=1),  # one dog
        VARIED={"temperature": 0.85, "candidates": 4},
        # Thirty photos are too few for a confidence.
        _run=lambda *command: commands.append(" ".join(map(str, command))))  # fmt: skip

    exported = read_config(shipped)["exported"]
    assert (exported["precision"], exported["source"]) == ("int8", digest(shipped / WEIGHTS))
    stored = load_model(shipped)
    assert stored.search.beam_size == 2
    [stage] = stored.info["stages"]
    assert stage == {"run": "one_stage", "epochs": 2, "best_epoch": 1, "CIDEr": 0.4, "minutes": 2}
    low, high = stored.info["intervals"]["coco_val"]["CIDEr"]
    assert low <= stored.info["scores"]["coco_val"]["CIDEr"] <= high
    assert stored.info["attention"]["measured"] == 30
    card = (shipped / "README.md").read_text(encoding="utf-8")
    assert "| flickr8k_val, 30 |" in card
    assert re.search(
        r"`coco_val` with \d+ distinct words:\n\n\| photos \| CIDEr \| Bleu_4 \|", card
    )
    assert "This model is not calibrated" in card
    # Once to know the truth of words, once with the search that ships.
    assert ["calibrate" in command for command in commands] == [True, True]
    assert "`one_stage`: 2 epochs in 2 minutes. Epoch 1 is best (CIDEr 0.400 in" in card


def test_each_stage_of_the_recipe_starts_from_the_previous_one() -> None:
    script = (ROOT / "scripts" / "train_shipped").read_text()
    [line] = [line for line in script.splitlines() if line.startswith("stages=")]
    before = None
    for stage in line.removeprefix("stages=(").removesuffix(")").split():
        config = build_config(ROOT / "configs" / f"{stage}.yaml")
        assert config.run_folder == f"runs/{stage}"
        assert config.init_from == before
        before = f"runs/{stage}/best"
    assert before


# --- choices and studies -------------------------------------------------------------------------


def test_held_out_photos_have_five_captions_and_are_not_trained_on(
    run: Any, tmp_path: Path
) -> None:
    annotations = [
        {"id": 10 * n + k, "image_id": n, "caption": "."} for n in range(60) for k in range(n % 6)
    ]
    content = {"images": [{"id": n} for n in range(60)], "annotations": annotations}
    (tmp_path / "captions.json").write_text(json.dumps(content))

    run("hold_out", tmp_path / "captions.json", tmp_path, "--photos", 4, "--train", 30)

    held, train = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("held", "train"))
    ids = [{image["id"] for image in one["images"]} for one in (held, train)]
    assert [len(one) for one in ids] == [4, 30]
    assert not ids[0] & ids[1]
    assert all(n % 6 == 5 for n in ids[0])
    for one, kept in zip((held, train), ids, strict=True):
        assert one["annotations"] == [a for a in annotations if a["image_id"] in kept]


def times(word: str, captions: Sequence[Sequence[str]]) -> float:
    """How often captions say a word, per caption."""
    return sum(words.count(word) for words in map(list, captions)) / len(captions)


def test_models_of_the_hub_are_scored_on_the_same_photos(
    run: Any, tiny: Any, tmp_path: Path, capsys: Any
) -> None:
    """With functions in place of the models; a photo that cannot be read costs no other."""
    shutil.copytree(tiny.photos, tmp_path / "photos")
    (tmp_path / "photos" / "4.png").write_bytes(b"no photo")
    given = ["--annotations", tiny.captions, "--images", tmp_path / "photos", "--out", tmp_path]
    loaded = []

    def write(name: str | None) -> Callable[..., list[str]]:
        loaded.append(name)
        return lambda photos: ["A dog runs on grass."] * len(photos)

    for _ in range(2):  # the second time, from the results files
        run(
            "studies/hub_captioners", *given, "--model", "user/one", BATCH=2, ours=write, peer=write
        )

    out, err = capsys.readouterr()
    assert loaded == [None, "user/one"]
    assert "4.png" in err
    results = json.loads((tmp_path / "user--one.json").read_text())
    assert results == [{"image_id": n, "caption": "A dog runs on grass."} for n in (1, 2, 3)]
    expected = evaluate(annotations=tiny.captions, results=results)["metrics"]["Bleu_1"]
    assert out.count(f"| user/one, 3 | {100 * expected:.1f} |") == 2


@pytest.mark.slow
def test_the_text_study_runs(run: Any, tmp_path: Path, capsys: Any) -> None:
    run("studies/text_attention", "--out", tmp_path, "--steps", 3, TESTS=40)
    assert re.search(r"^fixed: \d+ of 40 are correct", capsys.readouterr().out, re.MULTILINE)
    assert (tmp_path / "text_alignment.png").is_file()


@pytest.fixture
def tiny_data(tmp_path: Path) -> Path:
    """Six photos and captions in the layout of ``prepare dataset``."""
    colours = ("red", "blue", "white", "green", "gray", "pink")
    for colour in colours:
        Image.new("RGB", (40, 32), colour).save(tmp_path / f"{colour}.png")
    captions = {f"{colour}.png": [f"A {colour} square."] * 5 for colour in colours}
    for part in ("train", "val"):
        write_captions(tmp_path / f"captions_{part}.json", captions)
    return tmp_path


@pytest.mark.slow
def test_the_comparison_of_mechanisms_runs(
    run: Any, script: Any, tiny_data: Path, tmp_path: Path
) -> None:
    names = ["additive", "dot_mean", "fixed"]

    def call(*arguments: str) -> None:  # two epochs are too few for nonzero scores
        assert main(list(arguments)) in ((OK, SOME_FAILED) if arguments[0] == "train" else (OK,))

    rows: list[dict[str, Any]] = []
    small = {"encoder.name": "timm/test_resnet", "encoder.weights": "none"}
    small |= {f"decoder.{name}_dim": 16 for name in ("embed", "hidden", "attention", "projection")}
    run(
        "studies/compare_attention", "--data", tiny_data, "--images", tiny_data,
        "--work", tmp_path / "work", "--out", tmp_path / "out", "--epochs", 2, "--only", *names,
        SHARED=script("studies/compare_attention").SHARED | small, WORDS="A red square.",
        run_captioner=call, table=lambda found: rows.extend(found) or "",
    )  # fmt: skip

    assert [row["name"] for row in rows] == names
    for row in rows:
        depends_on_state = row["name"] == "additive"
        assert (row["movement"] > 1e-6) == depends_on_state, row["name"]
        assert 0 <= row["entropy"] <= row["even_entropy"] + 1e-6
    assert rows[2]["entropy"] == pytest.approx(rows[2]["even_entropy"], abs=1e-5)
    with Image.open(tmp_path / "out" / "attention_compared.jpg") as picture:
        assert picture.width > 200


# --- benchmarks ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_step_is_measured(run: Any, capsys: Any) -> None:
    small = ("--sizes", 6, 8, 5, 40, "--photos", 4, "--captions", 2, "--rounds", 1)
    run("benchmarks/training_step", *small, "--precision", "fp32")
    assert re.search(r"^\| fp32 \| [\d.,]+ \| [\d,]+ \|", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_the_shipped_model_is_measured_in_both_forms(run: Any, capsys: Any) -> None:
    few = ("--photos", EXAMPLES, "--count", 2, "--rounds", 1, "--patience", 0)
    run("benchmarks/alternatives", *few, "--only", "captioner")
    rows = re.findall(
        r"^\| captioner, (\w+) \| [\d.]+ \| [\d,.]+ \| [\d.]+ \| [\d,.]+ \| [\d.]+ \|$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert rows == ["int8", "float32"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-GPT2", "GIT-base", "BLIP-base", "Florence-2-base"])
def test_models_of_transformers_do_not_end_early(script: Any, tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    models = script("benchmarks/alternative_models")
    models.build(name, tmp_path / name, tiny=True)
    for form in ("float32", "int8"):
        caption, megabytes = models.load_peer(tmp_path / name, form)
        assert caption(EXAMPLES / "chelsea.jpg") == models.WORDS
        assert 0.1 < megabytes < 10


# --- what a person has to go through -------------------------------------------------------------


def test_hand_kept_lists_of_options_are_found(script: Any, tmp_path: Path) -> None:
    (tmp_path / "options.py").write_text(
        "class Base:\n"
        "    beam: int\n"
        "class SearchOptions(Base):\n"
        "    seed: int\n"
        "    top: float = 1.0\n"
        "    kind: Literal['beam', 'seed', 'top'] = 'top'\n"
        "ALL = ('beam', *('seed', 'top'))\n"
        "LIMITS = {'beam': 1, 'seed': 2, **{'top': 3, 'other': 4}}\n"
        "OTHER = ['beam', 'seed'], {'a', 'b', 'c', 'beam', 'seed', 'top'}\n"
    )

    assert script("journeys").lists(tmp_path) == (
        2, "2 of search options: options.py:7, options.py:8; 0 of other options: "
    )  # fmt: skip


@pytest.mark.slow
def test_every_journey_is_measured(run: Callable[..., Any], capfd: Any) -> None:
    run("journeys")

    figures = dict(line.split()[:2] for line in capfd.readouterr().out.splitlines())
    assert list(figures) == ["calls", "words", "options", "unused", "lists"]
    assert int(figures["calls"]) > 500
    assert int(figures["words"]) > 2000
    assert int(figures["options"]) > 50
