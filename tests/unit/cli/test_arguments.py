"""The command line generated from the options: the same values as Python, help, one-line errors."""

from __future__ import annotations

import compileall
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import captioner
from captioner.cli import train
from captioner.cli.arguments import Parser, flag
from captioner.cli.main import COMMANDS, NOT_DONE, main, parser_of
from captioner.options import TrainConfig
from captioner.schema import OptionField, option_fields

EXAMPLES: dict[Any, tuple[str, Any]] = {
    bool: ("true", True), int: ("7", 7), float: ("0.5", 0.5), str: ("text", "text"),
}  # fmt: skip


def typed(name: str, field: OptionField) -> tuple[list[str], Any]:
    """Return the arguments that set an option, and its value in Python."""
    spelled = [] if field.shown.positional else [(field.shown.flags or (flag(name),))[-1]]
    if field.type is bool:
        return spelled, True
    text, value = EXAMPLES.get(field.kind, (None, None))
    if field.choices:
        text = value = field.choices[-1]
    if not field.allows([value] if field.is_list else value):
        text, value = "64", 64
    return [*spelled, str(text)], [value] if field.is_list else value


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_can_be_given(command, monkeypatch) -> None:
    """Parsed one by one, each option gets the typed value, and all other options stay unset."""
    parser: Parser[Any] = parser_of(command)
    monkeypatch.setattr("captioner.cli.arguments.build_options", lambda kind, given: given)
    required = [
        part for name, f in parser.fields.items() if f.required for part in typed(name, f)[0]
    ]
    for name, field in parser.fields.items():
        arguments, value = typed(name, field)
        own, more = parser.parse(required if field.required else [*required, *arguments])
        if not field.required:
            assert (own | more)[name] == value, name
        underscored = [argument.replace("-", "_", 9) for argument in arguments]
        if arguments[0].startswith("--") and not field.required:
            assert parser.parse([*required, f"--{underscored[0][2:]}", *arguments[1:]])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_as_it_is_typed(command, capsys) -> None:
    parser = parser_of(command)
    with pytest.raises(SystemExit) as left:
        parser.parse(["--help"])
    text = capsys.readouterr().out

    assert left.value.code == 0
    assert text.startswith(f"usage: captioner {command} ")
    assert not re.search(r"(?i)default: (None|False|\[|\()", text)
    for name, field in parser.fields.items():
        shown = field.shown.value or name
        spelled = shown if field.shown.positional else (field.shown.flags or (flag(name),))[-1]
        assert spelled in text, name
    for option in re.findall(r"--[\w.-]+", text):
        assert "_" not in option, option


def read(*arguments: str) -> TrainConfig:
    options, given = train.train.parser().parse(arguments)
    return train.read_config(options, train.read_changes(options, given))


@pytest.mark.slow
def test_help_without_the_source_files(tmp_path) -> None:
    """Programs made by PyInstaller have only compiled files, without docstrings under fields."""
    package = Path(captioner.__file__).parent
    shutil.copytree(package, tmp_path / "captioner", ignore=shutil.ignore_patterns("pretrained"))
    compileall.compile_dir(tmp_path / "captioner", quiet=2, legacy=True, optimize=2)
    for source in (tmp_path / "captioner").rglob("*.py"):
        source.unlink()
    script = (
        "from captioner.cli.main import COMMANDS, parser_of\n"
        "print(*(parser_of(command).format_help() for command in COMMANDS))"
    )
    command = [sys.executable, "-OO", "-c", script]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONPATH": str(tmp_path)}).stdout  # fmt: skip

    assert "--beam-size" in shown
    assert "CaptionOptions(" not in shown


def test_settings_are_listed_as_they_are_written(capsys) -> None:
    with pytest.raises(SystemExit):
        read("--settings")
    shown = capsys.readouterr().out

    assert "\n  data.images=[FOLDER, ...]\n" in shown
    for section, fields in option_fields(TrainConfig).items():
        if dataclasses.is_dataclass(fields.type):
            for name in option_fields(fields.type):  # type: ignore[arg-type]
                assert f"\n  {section}.{name}=" in shown


ERRORS = [
    ("caption a.jpg --beam 3", "--beam is an unknown option; did you mean --beam-"),
    ("info --modle x", "did you mean --model? (see captioner info --help)"),
    ("train --epochs 3", "--epochs is an unknown option; did you mean training.epochs?"),
    ("train --learning-rate 1", "--learning-rate is an unknown option; did you mean training.lr?"),
    ("export -o m.onnx", "-o m.onnx names a file, but an export is a folder"),
    ("caption a.jpg --beam-size 0", "--beam-size is '0'; use an integer >= 1"),
    ("caption a.jpg --beam-size", "--beam-size needs a value"),
    ("caption a.jpg --format xml", "--format is 'xml'; use text, json, jsonl, csv"),
    ("caption a.jpg --num-captions 9", "num_captions is 9, but beam_size is 3; set beam_size to 9"),
    ("caption", "no photos were passed; pass files or folders, - for standard"),
    ("train training.lrr=1", "training.lrr is an unknown setting; did you mean training.lr?"),
    ("train lr=1", "lr is an unknown setting; did you mean training.lr?"),
    ("train training.batch-size=4", "did you mean training.batch_size?"),
    ("train training.lr=fast", "training.lr is 'fast'; use a number > 0"),
    ("train data.images=[a", "data.images is not valid YAML ("),
    ("train data.images=[a] data.images=[b]", "data.images is set twice; set it once"),
    ("train --training.lr 1e-4", "is a setting, not an option; write training.lr=1e-4"),
    ("train --training.batch-size=4", "not an option; write training.batch_size=4"),
    ("prepare features -o x data.imges=a", "did you mean data.images?"),
    ("train a.yaml b.yaml", "'b.yaml' is a second config file; pass one file"),
    ("prepare dataset", "-o/--output is missing"),
    (
        "prepare datset",
        "'prepare datset' is not a command; did you mean captioner prepare dataset?",
    ),
    ("capton a.jpg", "'capton' is not a command; did you mean captioner caption?"),
    ("photo.jpg", "did you mean captioner caption photo.jpg?"),
    ("remove a.jpg", "'remove' is not a command; did you mean captioner apply --remove?"),
    ("caption --remove a.jpg", "unknown option; did you mean captioner apply --remove?"),
    ("caption -r photos", "-r is an unknown option; did you mean --recursive?"),
]


@pytest.mark.parametrize(("line", "expected"), ERRORS)
def test_usage_errors_are_one_line_that_names_the_option(line, expected, capsys) -> None:
    assert main(line.split()) == NOT_DONE
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
    assert err.startswith("captioner: ")
    assert err.count("\n") == 1


def test_photos_and_options_may_be_mixed() -> None:
    line = ["a.jpg", "--force", "b.jpg", "--no-guard-endings", "-o", "x_y.txt", "--", "--beam", "-"]
    options, search = parser_of("caption").parse(line)

    assert options.photos == ["a.jpg", "b.jpg", "--beam", "-"]
    assert (options.force, options.output, search) == (True, "x_y.txt", {"guard_endings": False})


def test_lists_of_settings_replace_those_of_the_file(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("data: {images: [a, b]}\ntraining: {epochs: 3, lr: 5e-4}")
    for given, expected in (
        ([], ["a", "b"]),
        (["data.images=c"], ["c"]),
        (["data.images=[c/d, 'e: f', g=h]"], ["c/d", "e: f", "g=h"]),
        (["data.images=[]"], []),
    ):
        for line in ([str(path), *given], [*given, str(path)], [*given, "--", str(path)]):
            config = read(*line)
            assert config.data.images == expected
            assert (config.training.epochs, config.training.lr) == (3, 5e-4)
    config = read(
        "encoder.finetune_from=null", "search.forced_words=[dog, cat]", "training.lr=1e-4"
    )
    assert (config.encoder.finetune_from, config.search.forced_words) == (None, ("dog", "cat"))
    assert config.training.lr == 1e-4
