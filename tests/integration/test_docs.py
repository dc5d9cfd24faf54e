"""Tests of the README and docs/: commands and examples work, and linked files exist."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pages import PAGES, ROOT, commands, examples, read
from tiny_video import shots, write_video
from toy_captioner import add_reading

import captioner
from captioner.caption_types import Caption
from captioner.cli import train
from captioner.cli.main import OK, main, parser_of
from captioner.drawing import figure
from captioner.inference import captioner as api
from captioner.inference.folder import load_model, save_model
from captioner.inference.torch_engine import DecoderStepper
from captioner.model.backbones import ENCODERS
from captioner.model.build import SCORERS, build_decoder
from captioner.model.losses import caption_losses
from captioner.options import DecoderConfig, SearchOptions, TrainingConfig
from captioner.search.search import search
from captioner.text.vocabulary import END, START

ATTENTION, PYTHON, README = map(read, ("docs/attention.md", "docs/python.md", "README.md"))
PHOTO = ROOT / "assets" / "examples" / "photographer.jpg"
GREAT_DANE = ROOT / "assets" / "great_dane.jpg"


INSTALLATION = ("curl", "git", "mkdir", "pip", "python3", "source", "unzip")
"""Programs that download or install the code, packages and data sets."""


def run_example(code: str, page: str, names: dict[str, object] | None = None) -> None:
    exec(compile(code, page, "exec"), {} if names is None else names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|\.\./\.\./actions)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target


# The commands of sharing.md need a hub; test_hub.py runs them.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "sharing.md"], ids=lambda page: page.name
)
def test_commands_are_valid(page, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in commands(*examples(page.read_text("utf-8"), "bash")):
        program, what, *arguments = (word for word in words if not re.match("[A-Z_]+=", word))
        if program == "captioner" and what == "train":
            options, given = train.train.parser().parse(arguments)
            train.read_config(options, train.read_changes(options, given))
        elif program == "captioner":
            kind = [arguments.pop(0)] if what == "prepare" else []
            options, given = parser_of(" ".join([what, *kind])).parse(arguments)
            if kind == ["features"]:
                train.read_config(options, train.read_changes(options, given))
        elif Path(program).name not in INSTALLATION:
            script = ROOT / (what if program == "python" else program)
            assert script.is_file(), script
            assert program == "python" or os.access(script, os.X_OK), script


def test_attention_page_lists_every_mechanism() -> None:
    table = ATTENTION.partition("| `decoder.attention` |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)

    assert sorted(listed) == sorted([*SCORERS, "multi_head", "fixed", "fixed_at_start"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_options_are_those_of_the_schema(page, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from option_tables import with_tables

    text = page.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python scripts/option_tables.py"


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"order": "luong"}, {"selection": "hard"}])
def test_example_scorer_works(changes, precision, monkeypatch) -> None:
    monkeypatch.setattr(SCORERS, "_registered", {})
    [scorer] = examples(ATTENTION, "python")
    run_example(scorer, "docs/attention.md", {"__name__": "my_scorers"})
    config = DecoderConfig(
        embed_dim=5, hidden_dim=6, attention_dim=7, dropout=0.0, attention="cosine", **changes
    )
    decoder = build_decoder(config, feature_dim=8, vocabulary_size=9, regions=4)
    features = torch.randn(2, 4, 8)
    tokens = torch.tensor([[[START, 4, 5, END]], [[START, 6, 7, END]]])

    with torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
        losses = caption_losses(decoder, decoder.memory(features), tokens)
        losses.total(TrainingConfig()).backward()
        memory = decoder.eval().memory(features)
        options = SearchOptions(beam_size=2, max_length=4)
        found = search(DecoderStepper(decoder, memory), options)

    assert all(p.grad is not None and p.grad.any() for p in decoder.attention.parameters())
    assert found[0][0].alphas.dtype == "float32"
    assert found[0][0].alphas.sum(-1) == pytest.approx(1)


# --- the page about Python -----------------------------------------------------------------------


@pytest.mark.slow
def test_python_page_runs(tiny, training_settings, tmp_path, monkeypatch, capfd) -> None:
    """Run all examples in order, with a small model of random weights and four photos."""
    monkeypatch.chdir(tmp_path)
    stored = load_model(tiny.model)
    add_reading(stored, "dog", "grass")
    save_model(tmp_path / "shipped", stored)
    monkeypatch.setattr(api, "SHIPPED_MODEL", tmp_path / "shipped")
    monkeypatch.setattr(ENCODERS, "_registered", {})
    (tmp_path / "holiday").mkdir()
    for name in ("photo.jpg", "holiday/1.jpg", "holiday/2.jpg"):
        shutil.copy(PHOTO, tmp_path / name)
    (tmp_path / "holiday" / "3.jpg").write_text("no photo")
    (tmp_path / "corrected.csv").write_text("image,caption\nphoto.jpg,a dog\n")
    monkeypatch.setattr(figure, "show_figure", lambda figure: None)
    monkeypatch.setattr(api, "_shipped_model", functools.cache(api._shipped_model.__wrapped__))
    (tmp_path / "public").mkdir()
    shutil.copy(PHOTO, tmp_path / "public/photo.jpg")
    (tmp_path / "public/index.html").write_text('<!doctype html><img src="photo.jpg">')
    (tmp_path / "photos").symlink_to(tiny.photos)
    (tmp_path / "captions.json").symlink_to(tiny.captions)
    settings = training_settings | {"training": {"sample_images": 0, "epochs": 1}}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/flickr8k.yaml").write_text(yaml.safe_dump(settings))
    names: dict[str, object] = {"__name__": "__main__"}

    for number, example in enumerate(examples(PYTHON, "python"), 1):
        run_example(example, f"docs/python.md, example {number}", names)

    out = capfd.readouterr().out
    assert "3.jpg: the file is not a supported image" in out
    assert re.search(r"^CIDEr \d+\.\d in epoch [12]: runs/mine/best$", out, flags=re.MULTILINE)
    assert (tmp_path / "runs/patches/best").is_dir()


def test_python_page_names_what_tab_completion_shows(tiny) -> None:
    names = {name for name in dir(captioner.load(tiny.model)) if not name.startswith("_")}
    names |= {f"captioner.{name}" for name in ("load", "train", "evaluate", "register_encoder")}
    names |= {field.name for field in dataclasses.fields(Caption)} - {"crop_box"}
    for name in names:
        assert re.search(rf"\b{re.escape(name)}\b", PYTHON), name


# --- the README ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_first_caption_is_the_one_shown(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    [shown] = [one for one in examples(README, "text") if one.startswith("assets/")]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["caption", "assets/great_dane.jpg"]) == OK
    assert capsys.readouterr().out == shown


def test_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(PHOTO, "photo.jpg")
    [example] = examples(README, "python")
    run_example(example, "README.md")
    assert (tmp_path / "photo_attention.png").is_file()
    assert len(capsys.readouterr().out.splitlines()) == 1


# --- all commands --------------------------------------------------------------------------------

NOT_RUN = {
    r"^(curl|git|mkdir|pip|python3|source|unzip|\.venv/\S+) ": "installs or downloads something",
    r"captioner serve": "runs until it is stopped; test_serve.py starts servers",
    r"--engine ray|s3://": "needs Ray or a bucket; test_cli_ray.py has both",
    r"--web": "downloads ONNX Runtime Web; test_export.py has a copy",
    r"COCO|data/coco|coco_val|instances_val2017": "needs COCO",
    r"(?i)flickr8k(/| -o)|configs/flickr8k|runs/(dot|gru)": "needs Flickr8k",
    r"entities\.json": "needs Flickr30k Entities; test_cli_evaluate.py writes such a file",
    r"configs/(coco|everyday|held_out|finetune)": "trains for minutes to days; "
    "test_finetuning.py and test_cli_train.py run short trainings",
    r"tokenizer=bpe": "trains a model; test_languages.py runs a short training",
    r"captioner calibrate": "needs hundreds of captions; test_cli_calibrate.py makes them",
    r"make_other_kinds": "needs a folder of photos; test_scripts.py runs it",
    r"scripts/(benchmarks|studies|train_shipped|hold_out|fit_reading)": "takes minutes to days, or "
    "needs data sets",
    r"--faithfulness": "takes minutes; test_golden.py runs it with a tiny model",
    r"alt public/ --apply": "the table has to be reviewed first; test_cli_alt.py does both",
    r"--embed copies/": "replaces the command before it; test_cli_caption_outputs.py runs it",
    r"--meteor": "needs Java",
}
"""Regular expressions of commands that the tests do not run, each with the reason."""

RUN_ELSEWHERE = {"finetuning.md": "test_finetuning.py", "sharing.md": "test_hub.py"}
"""Pages with commands that are run by another test file, in order."""


def reason_not_to_run(words: list[str]) -> str | None:
    command = " ".join(words)
    return next((why for part, why in NOT_RUN.items() if re.search(part, command)), None)


def blocks_to_run(language: str) -> Iterator[Any]:
    """Yield each block that has a command to run, from all pages, as a test parameter."""
    for page in PAGES:
        blocks = examples(page.read_text("utf-8"), language)
        for number, block in enumerate(blocks, 1):
            found = [words for words in commands(block) if not reason_not_to_run(words)]
            if found and page.name not in RUN_ELSEWHERE:
                yield pytest.param(found, id=f"{page.name}-{number}")


@pytest.fixture
def workplace(tiny, tmp_path, monkeypatch) -> Path:
    """Create a folder with the repository's assets/ and small files with the names on the pages."""
    monkeypatch.chdir(tmp_path)
    for name in ("photo.jpg", "holiday/1.jpg", "holiday/more/2.jpg", "dataset/1.jpg", "site/a.jpg"):
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(GREAT_DANE, name)
    Path("list.txt").write_text("photo.jpg\nholiday\n")
    Path("public").mkdir()
    shutil.copy(GREAT_DANE, "public/a.jpg")
    Path("public/index.html").write_text('<!doctype html><img src="a.jpg">')
    for name in ("clip.mp4", "clips/1.mp4"):
        Path(name).parent.mkdir(exist_ok=True)
        write_video(Path(name), shots("red"))
    shutil.copytree(tiny.photos, "photos")
    shutil.copytree(tiny.model, "runs/mine")
    for name, source in {
        "captions.json": tiny.captions, "instances.json": tiny.instances,
        "any_system.json": tiny.results, "ours.json": tiny.results, "theirs.json": tiny.others,
    }.items():  # fmt: skip
        shutil.copy(source, name)
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    return tmp_path


def run_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run one captioner command in this process with its redirections. Return its exit code."""
    if ">" in words:
        words = words[: words.index(">")]
    if "<" in words:
        place = words.index("<")
        data = io.BytesIO(Path(words[place + 1]).read_bytes())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
        words = words[:place]
    program, *arguments = words
    assert program == "captioner", "add a reason to NOT_RUN, or run it here"
    return main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("block", list(blocks_to_run("bash")))
def test_commands_run(block, workplace, monkeypatch, capfd) -> None:
    """Run each block with the shipped model. Its commands may use each other's files."""
    for words in block:
        code = run_command(words, monkeypatch)
        assert code == OK, (words, capfd.readouterr().err)


def test_every_reason_not_to_run_a_command_is_needed() -> None:
    pages = [page for page in PAGES if page.name not in RUN_ELSEWHERE]
    every = [
        " ".join(words)
        for page in pages
        for words in commands(*examples(page.read_text("utf-8"), "bash"))
    ]
    for part in NOT_RUN:
        assert any(re.search(part, command) for command in every), part


@pytest.mark.slow
@pytest.mark.parametrize("page", ["evaluation.md", "visualization.md"])
def test_python_examples_run(page, workplace, capfd) -> None:
    """Run the examples of pages that have no test file of their own."""
    for example in examples(read(f"docs/{page}"), "python"):
        run_example(example, page)
