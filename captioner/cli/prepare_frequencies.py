"""``captioner prepare frequencies``: document frequencies of n-grams."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from captioner.cli.main import OK
from captioner.cli.options import Parser, new_parser, refuse_overwrite
from captioner.data.coco import read_captions
from captioner.errors import ConfigError
from captioner.evaluation.frequencies import DocumentFrequencies
from captioner.files import FREQUENCIES


@functools.cache
def parser() -> Parser:
    """Options of the command."""
    new = new_parser(
        "prepare frequencies",
        "Count in how many photos' captions each n-gram (n = 1 to 4) occurs. With these "
        "frequencies, CIDEr-D does not depend on which photos are scored together (captioner "
        "evaluate --frequencies).",
        "CAPTIONS.json... -o FILE.json.gz|MODEL_FOLDER",
    )
    new.add_argument("annotations", nargs="+", help="COCO captions file(s) of the training set")
    new.add_argument(
        "-o", "--output", required=True, help="output file, or model folder to add it to"
    )
    new.add_argument("--force", action="store_true", help="overwrite the output file")
    return new


def run(options: Any) -> int:
    """Count n-grams and write them."""
    target = Path(options.output)
    if target.is_dir():
        target /= FREQUENCIES
    elif options.output.endswith("/"):
        raise ConfigError(
            f"{options.output} does not exist; give an existing model folder, or a file name"
        )
    refuse_overwrite(target, options.force)

    _, references = read_captions(options.annotations, renumber=True)
    counted = DocumentFrequencies.from_references(references)
    counted.save(target)
    print(f"{target}: {len(counted.counts)} n-grams of {counted.documents} photos")
    return OK
