"""``captioner prepare shards``: pack training photos into tar files for streaming."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from captioner.cli.main import FAILED, INTERRUPTED, OK
from captioner.cli.options import warn
from captioner.cli.train_options import (
    TrainParser,
    add_settings,
    new_train_parser,
    read_train_config,
)


@functools.cache
def parser() -> TrainParser:
    """Options of the command: every field of ``TrainConfig`` and its own."""
    new = new_train_parser(
        "prepare shards",
        "Pack the training photos of a config and their captions into tar files in WebDataset "
        "format. Training streams them sequentially, which is faster on network storage. After an "
        "interruption, run the same command again to continue.",
        "[CONFIG.yaml] -o FOLDER [options]",
    )
    new.add_argument(
        "-o", "--output", metavar="FOLDER", required=True, help="folder for the tar files"
    )
    new.add_argument(
        "--photos-per-shard",
        type=int,
        default=1000,
        help="photos per tar file; training needs at least one file per worker and process",
    )
    new.add_argument("--force", action="store_true", help="replace existing shards")
    add_settings(new, ["data.images", "data.train_annotations", "training.seed"])
    return new


def run(options: Any) -> int:
    """Write the shards, and print the photos that were skipped."""
    config, own = read_train_config(parser(), options)
    folder, force = Path(own["output"]), own["force"]
    from captioner.data.shard_writer import write_shards
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
