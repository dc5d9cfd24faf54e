"""``captioner prepare dataset``: convert captions from other formats to COCO."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from captioner.cli.main import OK
from captioner.cli.options import Parser, new_parser
from captioner.data.dataset_writer import split_randomly, write_coco
from captioner.data.importers import IMPORTERS, UNSPLIT, detect_layout, find_source
from captioner.errors import DataError


@functools.cache
def parser() -> Parser:
    """Options of the command."""
    new = new_parser(
        "prepare dataset",
        "Convert captions from another format to COCO captions files, one per split: "
        "captions_train.json, captions_val.json, captions_test.json.",
        "SOURCE -o FOLDER [--images FOLDER] [--val 0.1 --test 0.1]",
    )
    new.add_argument("source", help="file or folder with the captions")
    new.add_argument("-o", "--output", required=True, help="folder for the COCO files")
    new.add_argument(
        "--layout",
        choices=["auto", *IMPORTERS],
        default="auto",
        help="format of the source; auto detects it",
    )
    new.add_argument(
        "--images", help="folder with the photos: adds their sizes and skips missing photos"
    )
    new.add_argument(
        "--val",
        type=float,
        default=0.1,
        help="fraction of photos for validation, if the source has no splits",
    )
    new.add_argument(
        "--test",
        type=float,
        default=0.0,
        help="fraction of photos for testing, if the source has no splits",
    )
    new.add_argument("--seed", type=int, default=0, help="random seed of the split")
    new.add_argument(
        "--first-id",
        type=int,
        default=1,
        help="first image id for photos without ids; files that are trained on together must not "
        "share ids",
    )
    new.add_argument("--force", action="store_true", help="overwrite existing files")
    return new


def run(options: Any) -> int:
    """Convert the source."""
    source = Path(options.source)
    if not source.exists():
        raise DataError(f"{source} does not exist; give the file or folder with the captions")
    source = find_source(source, options.layout)
    layout = detect_layout(source) if options.layout == "auto" else options.layout
    splits = IMPORTERS[layout](source)
    if set(splits) == {UNSPLIT}:
        splits = split_randomly(
            splits[UNSPLIT], validation=options.val, test=options.test, seed=options.seed
        )
    images = Path(options.images) if options.images else None
    summary = write_coco(
        splits,
        Path(options.output),
        images=images,
        force=options.force,
        first_id=options.first_id,
    )
    print(summary)
    return OK
