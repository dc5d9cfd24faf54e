"""``captioner prepare dataset``: convert captions from other formats to COCO."""

from __future__ import annotations

import functools
from typing import Any

from captioner.cli.main import OK
from captioner.cli.parser import Parser, new_parser
from captioner.data.dataset import prepare_dataset
from captioner.data.importers import IMPORTERS, Columns


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
    new.add_argument(
        "-o", "--output", metavar="FOLDER", required=True, help="folder for the COCO files"
    )
    new.add_argument(
        "--layout",
        choices=["auto", *IMPORTERS],
        default="auto",
        help="format of the source; auto detects it",
    )
    add_column_options(new)
    new.add_argument(
        "--images",
        metavar="FOLDER",
        help="folder with the photos, to leave out captions of missing photos and to record the "
        "sizes of the others",
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


def add_column_options(parser: Parser) -> None:
    """``--file-column`` and ``--caption-column``."""
    parser.add_argument(
        "--file-column",
        help="column with the file names, relative to the folder with the photos (default: file, "
        "filename, file_name, image, image_name or path)",
    )
    parser.add_argument(
        "--caption-column",
        help="column with the captions (default: caption, text, sentence or comment)",
    )


def run(options: Any) -> int:
    """Convert and print a summary."""
    summary = prepare_dataset(
        options.source,
        options.output,
        layout=options.layout,
        columns=Columns(options.file_column, options.caption_column),
        images=options.images or None,
        validation=options.val,
        test=options.test,
        seed=options.seed,
        first_id=options.first_id,
        force=options.force,
    )
    print(summary)
    return OK
