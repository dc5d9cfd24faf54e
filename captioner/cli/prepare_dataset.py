"""``captioner prepare dataset``: other layouts into COCO's."""

from __future__ import annotations

import functools
from typing import Any

from captioner.cli.main import OK
from captioner.cli.options import Parser, new_parser
from captioner.prepare.dataset import prepare_dataset
from captioner.prepare.importers import IMPORTERS


@functools.cache
def parser() -> Parser:
    """Options of the command."""
    new = new_parser(
        "prepare dataset",
        "Turn captions in another layout into COCO captions files, one a split: "
        "captions_train.json, captions_val.json, captions_test.json.",
        "SOURCE -o FOLDER [--images FOLDER] [--val 0.1 --test 0.1]",
    )
    new.add_argument("source", help="file or folder with the captions")
    new.add_argument("-o", "--output", required=True, help="folder for the COCO files")
    new.add_argument(
        "--layout",
        choices=["auto", *IMPORTERS],
        default="auto",
        help="layout of the source; auto looks at it",
    )
    new.add_argument(
        "--images", help="folder of the photos: sizes are added, missing photos are left out"
    )
    new.add_argument(
        "--val",
        type=float,
        default=0.1,
        help="share for validation, where the source has no splits",
    )
    new.add_argument(
        "--test", type=float, default=0.0, help="share for testing, where the source has no splits"
    )
    new.add_argument("--seed", type=int, default=0, help="of the random split")
    new.add_argument(
        "--first-id",
        type=int,
        default=1,
        help="photos without ids are numbered from here on; files that are learned from together "
        "must not give one id to two photos",
    )
    new.add_argument("--force", action="store_true", help="replace files that are there")
    return new


def run(options: Any) -> int:
    """Convert and print a summary."""
    summary = prepare_dataset(
        options.source,
        options.output,
        layout=options.layout,
        images=options.images or None,
        validation=options.val,
        test=options.test,
        seed=options.seed,
        first_id=options.first_id,
        force=options.force,
    )
    print(summary)
    return OK
