"""Training on a file of captions and a folder of photos.

The captions are first converted to COCO files in the run folder: ``data/captions_train.json`` and
``data/captions_val.json``. The run then trains on these files like on any other COCO files.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from captioner.data.dataset import prepare_dataset
from captioner.data.importers import find_source, photo_folder
from captioner.data.options import ColumnOptions, DatasetOptions
from captioner.errors import ConfigError, DataError
from captioner.files import atomic_write
from captioner.options import TrainConfig
from captioner.training.options import OwnDataOptions, TrainOptions

IS_MAIN = os.environ.get("RANK", "0") == "0"
"""True in the process that prints and writes. Of several processes, this is torchrun's first one.
"""


def check_replaced(data: OwnDataOptions, given: Mapping[str, Any]) -> None:
    """Check that no data setting is combined with a captions file that replaces it.

    Args:
        data: The options, which may name a captions file.
        given: The settings that the user has set, by section.

    Raises:
        ConfigError: The user has set both a captions file and a data setting that it replaces.
    """
    for name in ("train_annotations", "val_annotations", "images", "karpathy_split"):
        if data.captions is not None and name in given.get("data", {}):
            instead = (
                "use the option images instead" if name == "images" else f"leave out data.{name}"
            )
            raise ConfigError(f"data.{name} cannot be combined with a captions file; {instead}")


@contextmanager
def prepared(config: TrainConfig, data: TrainOptions) -> Iterator[TrainConfig]:
    """Convert the captions file to COCO files, and yield a config that names these files.

    Without a captions file, the config is yielded unchanged. A dry run writes nothing into the run
    folder. Its COCO files are temporary and exist only within the context.

    Raises:
        DataError: The captions or photos cannot be used, or a resumed run has other captions than
            before.
        ConfigError: No photos remain for validation.
    """
    if data.captions is None:
        yield config
        return
    source = find_source(data.captions)
    images = str(photo_folder(source, data.images, data))
    with tempfile.TemporaryDirectory(prefix="captioner-") as folder:
        columns: Any = {name: getattr(data, name) for name in vars(ColumnOptions())}
        how = DatasetOptions(
            source=str(source), output=folder, images=images, val=data.val, **columns
        )
        summary = prepare_dataset(how)
        if "train" not in summary.files:
            raise DataError(
                f"{data.captions} has no training photos; set the split of some photos to train"
            )
        if data.val and "val" not in summary.files and (missing := summary.missing_photos):
            raise DataError(
                f"{data.captions}: no photo for validation can be read ({len(missing)} of the "
                f"photos are missing or unreadable in {images}, first: {missing[0]}); set "
                "--images, or use other photos"
            )
        if "val" not in summary.files:
            raise ConfigError(
                f"{data.captions} has no validation photos; set val to a fraction of the photos "
                "such as 0.1"
            )
        if IS_MAIN:
            for line in str(summary).splitlines():
                tqdm.write(f"{data.captions}: {line}", file=sys.stderr)
        files = [summary.files["train"], summary.files["val"]]
        if IS_MAIN and not data.dry_run:
            own = {Path(config.run_folder, "data", file.name): file for file in files}
            for file, made in own.items():
                if data.resume and file.exists() and file.read_bytes() != made.read_bytes():
                    raise DataError(
                        f"{file} was prepared from other captions or photos, or with a different "
                        "--val; to resume, pass the same captions, photos and --val, or set "
                        "another --run-folder"
                    )
                atomic_write(file, made.read_bytes())
            files = [*own]
        of_run = replace(
            config.data,
            train_annotations=[str(files[0])],
            val_annotations=[str(files[1])],
            images=[images],
            karpathy_split=None,
        )
        yield replace(config, data=of_run)
