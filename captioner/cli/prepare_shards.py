"""``captioner prepare shards``: training photos in tar files, to be streamed."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from captioner.cli.main import FAILED, INTERRUPTED, OK
from captioner.cli.options import Parser, warn
from captioner.cli.train_options import new_train_parser, read_train_config
from captioner.config import TrainConfig


@functools.cache
def parser() -> Parser:
    """Every setting of ``TrainConfig``, as in ``captioner train``, and the command's own."""
    new = new_train_parser(
        "prepare shards",
        "Write the training photos of a config and their captions into tar files in WebDataset's "
        "form, which training streams: for data that is best read from the first byte to the "
        "last, as over a network. A run that was stopped goes on when the command is given again.",
        "CONFIG.yaml [--data.images FOLDER ...] -o FOLDER",
    )
    new.add_argument("-o", "--output", required=True, help="folder to write to")
    new.add_argument(
        "--photos-per-shard",
        type=int,
        default=1000,
        help="photos in one tar file; training needs a file for every worker of every process",
    )
    new.add_argument("--force", action="store_true", help="remove the shards there; start over")
    new.add_class_arguments(TrainConfig)
    return new


def run(options: Any) -> int:
    """Write the shards, and print the photos that were skipped."""
    config, own = read_train_config(parser(), options)
    folder, force = Path(own["output"]), own["force"]
    from captioner.prepare.shards import write_shards
    from captioner.training.data import read_data

    images, _ = read_data(replace(config.data, shards=None))
    bar = tqdm(
        total=len(images), desc="writing shards", unit="photo", smoothing=0.05, dynamic_ncols=True
    )
    try:
        with bar:
            written = write_shards(
                images,
                folder,
                photos_per_shard=own["photos_per_shard"],
                seed=config.training.seed,
                force=force,
                progress=bar.update,
            )
    except KeyboardInterrupt:
        again = "the same command without --force" if force else "the same command"
        warn(f"interrupted, complete shards are kept; run {again} to continue")
        return INTERRUPTED
    for problem in written.skipped:
        warn(problem)
    manifest = written.manifest
    gigabytes = sum(shard.size for shard in manifest.shards) / 1e9
    print(
        f"{folder}: {manifest.photos} photos in {len(manifest.shards)} shards, {gigabytes:.2f} GB"
    )
    return FAILED if written.skipped else OK
