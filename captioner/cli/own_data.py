"""``captioner train --data captions.csv --images photos/``: prepare a data set, then train on it.

The captions are converted to COCO files in the run folder (``data/captions_train.json`` and
``data/captions_val.json``), which the settings of the run then name.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from captioner.cli.main import flag
from captioner.cli.parser import Parser
from captioner.cli.prepare_dataset import add_column_options
from captioner.data.dataset import ImportSummary, prepare_dataset
from captioner.data.importers import Columns, detect_layout, find_source
from captioner.errors import ConfigError, DataError
from captioner.files import atomic_write
from captioner.options import TrainConfig

FOLDER = "data"
"""Folder of the prepared captions in the run folder."""

VALIDATION = 0.1


class OwnData(NamedTuple):
    """Captions to prepare before training."""

    captions: str
    """File or folder."""
    images: str | None
    """Folder with the photos; None: that of the captions."""
    columns: Columns
    validation: float
    """Fraction of the photos, if the captions have no splits."""


def add_own_data_options(parser: Parser) -> None:
    """``--data`` (``--captions`` for the parser), ``--images`` and how to read them."""
    captions: Any = parser.add_argument(
        "--captions",
        metavar="FILE",
        help="your captions, to prepare and train on: a CSV or JSON Lines file with the columns "
        "file and caption, or another source of captioner prepare dataset",
    )
    captions.shown_as = ["--data"]  # as it is documented, in help and suggestions
    parser.add_argument(
        "--images",
        metavar="FOLDER",
        help="folder with the photos of --data (default: the folder that the captions are in)",
    )
    add_column_options(parser)
    parser.add_argument(
        "--val",
        type=float,
        default=VALIDATION,
        help="fraction of the photos of --data for validation, if it has no splits",
    )


def spell_captions(argv: Sequence[str]) -> list[str]:
    """Spell ``--data FILE`` as ``--captions``: the parser has settings named ``--data.*``."""
    return [
        f"--captions{argument.removeprefix('--data')}"
        if argument.partition("=")[0] == "--data"
        else argument
        for argument in argv
    ]


def own_data(own: dict[str, Any]) -> OwnData | None:
    """The command's own options that describe captions, if there are any.

    Raises:
        ConfigError: Options for captions were given without them.
    """
    columns = Columns(own["file_column"], own["caption_column"])
    if own["captions"] is not None:
        return OwnData(own["captions"], own["images"], columns, own["val"])
    given = ("images", "file_column", "caption_column")
    if stray := [name for name in given if own[name] is not None]:
        also = "; for prepared captions, give --data.images" if stray[0] == "images" else ""
        raise ConfigError(f"{flag(stray[0])} needs captions; give --data CAPTIONS{also}")
    return None


def check_config_file(path: str) -> None:
    """Report what a file that is not a config is: missing, captions, or a folder of photos.

    Raises:
        ConfigError: It is not a config file.
    """
    file = Path(path)
    if not file.exists():
        raise ConfigError(f"{path} does not exist; give a YAML config file")
    try:
        detect_layout(find_source(file))
    except DataError as error:
        if file.is_dir():
            raise ConfigError(
                f"{path} is a folder, not a config file; to train on its photos, give their "
                f"captions too: captioner train --data captions.csv --images {path} "
                "--init-from shipped"
            ) from error
        if ": not UTF-8" in str(error):
            raise ConfigError(f"{path} is not a text file; give a YAML config file") from error
        return
    images = "" if file.is_dir() else " --images FOLDER"
    raise ConfigError(
        f"{path} holds captions, not settings; train on it with: captioner train --data {path}"
        f"{images} --init-from shipped (or convert it with captioner prepare dataset)"
    )


@contextmanager
def prepared(
    config: TrainConfig, data: OwnData | None, *, resume: bool, write: bool, quiet: bool
) -> Iterator[TrainConfig]:
    """Prepare captions for the run, and return the config that reads them.

    Args:
        config: Settings of the run.
        data: What to prepare; None: nothing.
        resume: Continue a run; its captions must be the same.
        write: Write into the run folder; otherwise the files exist only within the context.
        quiet: Do not print what was prepared and what was left out.

    Raises:
        CaptionerError: The captions cannot be prepared, or are not those of the resumed run.
    """
    if data is None:
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="captioner-") as folder:
        source = _source(data)
        images = data.images or (source if source.is_dir() else source.parent)
        summary = prepare_dataset(
            source, folder, columns=data.columns, images=images, validation=data.validation
        )
        files = _needed(summary, data)
        if not quiet:
            print(
                "\n".join(f"{data.captions}: {line}" for line in str(summary).splitlines()),
                file=sys.stderr,
            )
        if write:
            files = [_stored(file, Path(config.run_folder, FOLDER), resume) for file in files]
        of_run = replace(
            config.data,
            train_annotations=[str(files[0])],
            val_annotations=[str(files[1])],
            images=[str(images)],
            karpathy_split=None,
        )
        yield replace(config, data=of_run)


def _source(data: OwnData) -> Path:
    if not Path(data.captions).exists():
        raise DataError(f"{data.captions} does not exist; give the file with the captions")
    return find_source(data.captions)


def _needed(summary: ImportSummary, data: OwnData) -> list[Path]:
    """The files of the training and validation captions."""
    for split, what in (("train", "training"), ("val", "validation")):
        if split not in summary.files:
            raise DataError(
                f"{data.captions} has no {what} photos; give --val a fraction of the photos such "
                f"as {VALIDATION}, or a column split with train and val"
            )
    return [summary.files["train"], summary.files["val"]]


def _stored(file: Path, folder: Path, resume: bool) -> Path:
    """Copy a file to the folder, unless that would change the data of a resumed run."""
    target = folder / file.name
    if resume and target.exists() and target.read_bytes() != file.read_bytes():
        raise DataError(
            f"{target} was prepared from other captions or photos; use those to resume, or another "
            "--run-folder"
        )
    atomic_write(target, file.read_bytes())
    return target
