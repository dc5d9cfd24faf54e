"""The parser shared by all commands: spelling, suggestions, list options and help."""

from __future__ import annotations

import re

import pytest
import yaml

from captioner.cli import attend, caption, evaluate, info, serve, train
from captioner.cli.parser import Parser, similar_names
from captioner.cli.prepare import KINDS
from captioner.cli.prepare import parser as prepare_parser
from captioner.errors import ConfigError
from captioner.options import TrainConfig

PARSERS = {
    "attend": attend.parser,
    "caption": caption.parser,
    "evaluate": evaluate.parser,
    "info": info.parser,
    "serve": serve.parser,
    "train": train.parser,
    **{f"prepare {kind}": lambda kind=kind: prepare_parser(kind) for kind in KINDS},
}


def config_of(*arguments: str) -> TrainConfig:
    return train.read(arguments)[0]


def error_of(parser: Parser, *arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parser.parse(arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(f"(see {parser.prog} --help)")
    return message


def help_of(parser: Parser, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        parser.parse(arguments)
    assert left.value.code == 0
    return capsys.readouterr().out


# --- spelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        ["--training.batch-size", "3"],
        ["--training.batch_size", "3"],
        ["--training.batch-size=3"],
        ["--training.batch_size=3"],
    ],
)
def test_nested_options_accept_dashes_and_underscores(spelling) -> None:
    assert config_of(*spelling).training.batch_size == 3


def test_dashes_and_underscores_in_the_name_of_a_section() -> None:
    for name in ("--self-critical.max-length", "--self_critical.max_length"):
        assert config_of(name, "7").self_critical.max_length == 7


def test_flags_and_short_options_accept_both_spellings() -> None:
    options = caption.parser().parse(
        ["a.jpg", "--no_guard_endings", "--beam_size", "4", "-o", "out_a.txt", "--length_penalty=1"]
    )

    assert options.guard_endings is False
    assert (options.beam_size, options.length_penalty) == (4, 1.0)
    assert (options.photos, options.output) == (["a.jpg"], "out_a.txt")


def test_values_are_never_respelled() -> None:
    options = caption.parser().parse(["my_photo.jpg", "--model", "my_model", "--style=my_style"])

    assert options.photos == ["my_photo.jpg"]
    assert (options.model, options.style) == (["my_model"], "my_style")


def test_arguments_after_two_dashes_are_photos() -> None:
    assert caption.parser().parse(["--force", "--", "--beam", "-"]).photos == ["--beam", "-"]


def test_negative_numbers_are_values() -> None:
    assert caption.parser().parse(["a.jpg", "--length-penalty", "-1"]).length_penalty == -1


# --- suggestions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "typed", "expected"),
    [
        ("train", "--epochs", "Did you mean --training.epochs?"),
        ("train", "--training.epoch", "Did you mean --training.epochs?"),
        ("train", "--train.epochs", "Did you mean --training.epochs?"),
        ("train", "--train_annotations", "Did you mean --data.train-annotations?"),
        ("train", "--image_size=64", "Did you mean --encoder.image-size?"),
        ("train", "--lr", "Did you mean --training.lr?"),
        ("train", "--batch", "Did you mean --training.batch-size?"),
        ("train", "--max-length", "--self-critical.max-length or --search.max-length?"),
        ("train", "--dryrun", "Did you mean --dry-run?"),
        ("caption", "--beam", "Did you mean --beam-size or --beam-groups?"),
        ("caption", "--num-beams", "Did you mean --beam-size?"),
        ("caption", "--overwrite", "Did you mean --force?"),
        ("train", "--learning_rate", "Did you mean --training.lr?"),
        ("attend", "--resume", "Did you mean --skip-existing?"),
        ("caption", "--recursiv", "Did you mean --recursive?"),
        ("caption", "--guard-ending", "Did you mean --guard-endings?"),
        ("attend", "--colourmap", "Did you mean --colormap?"),
        ("evaluate", "--annotation", "Did you mean --annotations?"),
        ("serve", "--prot", "Did you mean --port?"),
        ("info", "--formt", "Did you mean --format?"),
        ("prepare features", "--images", "Did you mean --data.images?"),
        ("prepare dataset", "--seeds", "Did you mean --seed?"),
        ("prepare frequencies", "--forced", "Did you mean --force?"),
        ("prepare shards", "--photos_per_shards", "Did you mean --photos-per-shard?"),
    ],
)
def test_an_unknown_option_gets_a_suggestion(command, typed, expected) -> None:
    line = error_of(PARSERS[command](), typed, "3")

    assert line.startswith(f"Unknown option {typed.partition('=')[0]}. Did you mean --")
    assert expected in line


@pytest.mark.parametrize("typed", ["--xyzzy", "-m"])
def test_dissimilar_names_get_no_suggestion(typed) -> None:
    assert error_of(caption.parser(), "a.jpg", typed, "3").startswith(
        f"Unknown option {typed} (see"
    )


def test_only_the_most_similar_names_are_suggested() -> None:
    assert similar_names("--lr", ["--training.lr", "--training.encoder-lr"]) == ["--training.lr"]
    assert similar_names("--a", []) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training: {epoch: 3}", "Unknown setting training.epoch. Did you mean training.epochs?"),
        ("epochs: 3", "Unknown setting epochs. Did you mean training.epochs?"),
        ("training: {batch-size: 3}", "Did you mean training.batch_size?"),
        ("data: {images: photos}", "data.images is photos; give a list: [photos]"),
        ("training: {compile: perhaps}", "training.compile is perhaps; give true or false"),
    ],
)
def test_an_error_in_a_config_file_is_named(text, expected, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(text)

    with pytest.raises(ConfigError, match=re.escape(expected)):
        config_of(str(tmp_path / "config.yaml"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--training.batch-size"], "--training.batch-size needs a value"),
        (["--training.batch-size", "--force"], "--training.batch-size needs a value"),
        (["--training.schedule", "x"], "training.schedule is x; give cosine or plateau"),
        (["--data.repeats", "x"], "data.repeats is x; give an integer"),
        (["a.yaml", "b.yaml"], "Unexpected argument b.yaml; give one config file"),
        (["--data.images", "a", "b", "c"], "repeat an option to give it several values"),
        (["--resume=yes"], "--resume is yes; give auto"),
    ],
)
def test_other_errors_are_one_line(arguments, expected) -> None:
    assert expected in error_of(train.parser(), *arguments)


def test_missing_arguments_are_named_as_typed() -> None:
    assert error_of(PARSERS["prepare dataset"]()).startswith("Missing source and --output (see")


# --- lists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["photos"], ["photos"]),
        (["[photos]"], ["photos"]),
        (["[a, b]"], ["a", "b"]),
        (["a", "b"], ["a", "b"]),
        (["[a, b]", "c"], ["a", "b", "c"]),
        (["2020"], ["2020"]),
        (["no"], ["no"]),
        (["a: b, 'c' # [d]"], ["a: b, 'c' # [d]"]),
        (["фото 📷"], ["фото 📷"]),
        (["[]"], []),
    ],
)
def test_list_options_accept_one_value_or_several(arguments, expected) -> None:
    options = [part for value in arguments for part in ("--data.images", value)]

    assert config_of(*options).data.images == expected


def test_every_list_option_accepts_one_value() -> None:
    config = config_of(
        "--data.train-annotations", "a.json", "--data.repeats", "2", "--data.styles", "coco",
        "--data.val-annotations", "b.json", "--data.val-styles", "coco",
        "--training.trackers", "wandb", "--search.forced-words", "dog, ball",
        *(part for _ in "RGB" for part in ("--encoder.mean", "0.5")),
    )  # fmt: skip

    assert config.data.train_annotations == ["a.json"]
    assert config.data.repeats == [2]
    assert config.data.val_styles == ["coco"]
    assert config.training.trackers == ["wandb"]
    assert config.search.forced_words == ("dog", "ball")
    assert config.encoder.mean == [0.5, 0.5, 0.5]
    assert config_of("--encoder.mean", "null").encoder.mean is None


def test_options_replace_lists_of_the_config_file_in_any_order(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("data: {images: [a, b]}\ntraining: {epochs: 3}")

    for arguments in ([str(path), "--data.images", "c"], ["--data.images", "c", str(path)]):
        config = config_of(*arguments)
        assert config.data.images == ["c"]
        assert config.training.epochs == 3


# --- resume --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", [["--resume"], ["--resume", "auto"], ["--resume=auto"]])
def test_resume_needs_no_value(spelling, tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("training: {epochs: 3}")

    for arguments in ([*spelling, str(path)], [str(path), *spelling], [*spelling, "--force"]):
        assert train.read(arguments)[1].resume
    assert train.read([*spelling, str(path)])[0].training.epochs == 3
    assert not train.read([str(path)])[1].resume


# --- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", PARSERS)
def test_help_shows_options_as_typed(command, capsys) -> None:
    arguments = ["--help"]
    if command in ("train", "prepare features", "prepare shards"):
        arguments.append("all")

    text = help_of(PARSERS[command](), *arguments, capsys=capsys)

    assert text.startswith(f"usage: captioner {command} ")
    assert "==" not in text
    assert "[ITEM" not in text
    for option in re.findall(r"--[\w.-]+", text):
        assert "_" not in option, option
    for option in PARSERS[command]().visible():
        shown = "data" if option == "captions" else option  # `--data` is parsed as --captions
        assert f"--{shown.replace('_', '-')}" in text, option


@pytest.mark.parametrize("command", ["train", "prepare features", "prepare shards"])
def test_help_of_training_options_is_short(command, capsys) -> None:
    parser = PARSERS[command]()

    text = help_of(parser, "--help", capsys=capsys)

    assert len(re.findall(r"^  -", text, re.MULTILINE)) <= 24
    assert len(text.splitlines()) <= 70
    assert "--data.images FOLDER" in text
    for section in ("data", "encoder", "decoder", "training", "self-critical", "search", "all"):
        assert re.search(rf"^  {section}  ", text, re.MULTILINE), section
        of_section = help_of(parser, "--help", section, capsys=capsys)
        assert of_section == help_of(parser, f"--help={section}", capsys=capsys)
        assert section == "all" or f"--{section}." in of_section
        assert section == "all" or "usage" not in of_section


def test_help_of_train_lists_the_main_options(capsys) -> None:
    text = help_of(train.parser(), "-h", capsys=capsys)

    for option in (
        "--config", "--data.images", "--training.epochs", "--init-from", "--run-folder", "--resume",
        "--dry-run", "--force",
    ):  # fmt: skip
        assert f"\n  {option} " in text, option
    assert "--training.clip-norm" not in text
    assert text == help_of(train.parser(), "--help", "--data.images", "photos", capsys=capsys)


def test_print_config_merges_file_and_options(tmp_path, capsys) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("training: {epochs: 3}")
    arguments = [str(path), "--training.lr", "1", "--print-config"]

    printed = help_of(train.parser(), *arguments, capsys=capsys)

    assert yaml.safe_load(printed)["training"]["epochs"] == 3
    assert yaml.safe_load(printed)["training"]["lr"] == 1.0


def test_documented_spelling_of_own_captions(capsys) -> None:
    text = help_of(train.parser(), "--help", capsys=capsys)

    assert "--data FILE" in text
    assert "--captions" not in text
    assert error_of(train.parser(), "--dat", "a.csv").startswith(
        "Unknown option --dat. Did you mean --data"
    )


def test_help_of_an_unknown_section_lists_the_sections() -> None:
    line = error_of(train.parser(), "--help", "optimizer")

    assert "No help for 'optimizer'; give data, encoder, decoder, training, self-critical" in line


def test_help_texts_spell_options_as_typed(capsys) -> None:
    text = " ".join(help_of(train.parser(), "--help", "data", capsys=capsys).split())

    assert "for each file in --data.train-annotations" in text
    assert "train_annotations" not in text


def test_help_shows_defaults_except_off(capsys) -> None:
    text = " ".join(help_of(train.parser(), "--help", "all", capsys=capsys).split())

    assert re.search(r"--self-critical.bleu X .*?\(default: 0.0\)", text)
    assert re.search(r"--decoder.input-feeding \S+ .*?\(default: true\)", text)
    assert not re.search(r"default: (False|None|null|\[)", text)
