"""The README and the pages in docs/: commands and examples work, links exist."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from pages import PAGES, ROOT, commands, examples, read
from tiny_video import shots, write_video
from toy_captioner import add_reading

import captioner
from captioner.caption import Caption
from captioner.cli import train
from captioner.cli.main import OK, main, parser_of
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
        elif program not in ("curl", "mkdir", "pip", "unzip", "python3"):  # downloads, installation
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
    """All examples in their order, with a small model of random weights and four photos."""
    monkeypatch.chdir(tmp_path)
    stored = load_model(tiny.model)
    add_reading(stored, "dog", "grass")
    save_model(tmp_path / "shipped", stored)
    monkeypatch.setattr(api, "SHIPPED_MODEL", tmp_path / "shipped")
    monkeypatch.setattr(ENCODERS, "_registered", {})
    (tmp_path / "holiday").mkdir()
    for name in ("photo.jpg", "holiday/1.jpg", "holiday/2.jpg"):
        shutil.copy(PHOTO, tmp_path / name)
    (tmp_path / "holiday" / "notes.txt").write_text("no photo")
    (tmp_path / "photos").symlink_to(tiny.photos)
    (tmp_path / "captions.json").symlink_to(tiny.captions)
    settings = training_settings | {"training": {"sample_images": 0, "epochs": 1}}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/flickr8k.yaml").write_text(yaml.safe_dump(settings))
    names: dict[str, object] = {"__name__": "__main__"}

    for number, example in enumerate(examples(PYTHON, "python"), 1):
        run_example(example, f"docs/python.md, example {number}", names)

    out = capfd.readouterr().out
    assert "notes.txt: not a supported image" in out
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [w[1:] for w in commands(*examples(README, "bash")) if w[1] in ("caption", "attend")],
    ids=str,
)
def test_captioning_commands_of_the_readme_run(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("photo.jpg", "holiday/1.jpg"):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy(PHOTO, name)
    write_video(Path("clip.mp4"), shots("red"))
    assert main(words) == OK


def test_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(PHOTO, "photo.jpg")
    [example] = examples(README, "python")
    run_example(example, "README.md")
    assert (tmp_path / "photo_attention.png").is_file()
    assert len(capsys.readouterr().out.splitlines()) == 1
