"""``captioner train --data captions.csv --images photos/``: prepare a data set, then train on it.

The captions are converted to COCO files in the run folder (``data/captions_train.json`` and
``data/captions_val.json``), which the settings of the run then name.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from captioner.cli.arguments import flag
from captioner.data.dataset import prepare_dataset
from captioner.data.importers import Columns, detect_layout, find_source
from captioner.errors import ConfigError, DataError
from captioner.files import atomic_write
from captioner.option_fields import Folder, Shown
from captioner.options import TrainConfig


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """Columns of a CSV or JSON Lines file."""

    file_column: Annotated[str, Shown("NAME")] | None = None
    """Column with the file names, relative to the folder with the photos (default: file, filename,
    file_name, image, image_name or path)."""
    caption_column: Annotated[str, Shown("NAME")] | None = None
    """Column with the captions (default: caption, text, sentence or comment)."""

    @property
    def columns(self) -> Columns:
        """The columns, for importers."""
        return Columns(self.file_column, self.caption_column)


@dataclass(frozen=True, kw_only=True)
class OwnDataOptions(ColumnOptions):
    """Your own captions, to prepare and train on."""

    captions: Annotated[str, Shown("FILE", ("--data",))] | None = None
    """A CSV or JSON Lines file with the columns file and caption, or another source of captioner
    prepare dataset."""
    images: Folder | None = None
    """Folder with the photos of --data (default: the folder that the captions are in)."""
    val: float = 0.1
    """Fraction of the photos of --data for validation, if it has no splits."""

    def __post_init__(self) -> None:
        for name in ("images", "file_column", "caption_column"):
            if self.captions is None and getattr(self, name) is not None:
                also = "; for prepared captions, give --data.images" if name == "images" else ""
                raise ConfigError(f"{flag(name)} needs captions; give --data CAPTIONS{also}")


def check_config_file(path: str) -> None:
    """Raise ConfigError if a file is no config: missing, captions, or a folder of photos."""
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
    config: TrainConfig, data: OwnDataOptions, *, resume: bool, write: bool, quiet: bool
) -> Iterator[TrainConfig]:
    """Prepare captions for the run, and return the config that reads them.

    Args:
        config: Settings of the run.
        data: What to prepare.
        resume: Continue a run; its captions must be the same.
        write: Write into the run folder; otherwise the files exist only within the context.
        quiet: Do not print what was prepared and what was left out.
    """
    if data.captions is None:
        yield config
        return
    if not Path(data.captions).exists():
        raise DataError(f"{data.captions} does not exist; give the file with the captions")
    source = find_source(data.captions)
    images = data.images or (source if source.is_dir() else source.parent)
    with tempfile.TemporaryDirectory(prefix="captioner-") as folder:
        summary = prepare_dataset(
            source, folder, columns=data.columns, images=images, validation=data.val
        )
        for split, what in (("train", "training"), ("val", "validation")):
            if split not in summary.files:
                raise DataError(
                    f"{data.captions} has no {what} photos; give --val a fraction of the photos "
                    "such as 0.1, or a column split with train and val"
                )
        if not quiet:
            for line in str(summary).splitlines():
                print(f"{data.captions}: {line}", file=sys.stderr)
        files = {}
        for split in ("train", "val"):
            made = summary.files[split]
            files[split] = Path(config.run_folder, "data", made.name) if write else made
            if write:
                kept = files[split].read_bytes() if resume and files[split].exists() else None
                if kept not in (None, made.read_bytes()):
                    raise DataError(
                        f"{files[split]} was prepared from other captions or photos; use those to "
                        "resume, or another --run-folder"
                    )
                atomic_write(files[split], made.read_bytes())
        of_run = replace(
            config.data,
            train_annotations=[str(files["train"])],
            val_annotations=[str(files["val"])],
            images=[str(images)],
            karpathy_split=None,
        )
        yield replace(config, data=of_run)
