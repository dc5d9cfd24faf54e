"""``captioner prepare frequencies``: document frequencies of n-grams."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from captioner.cli.main import OK
from captioner.cli.options import refuse_overwrite
from captioner.cli.parser import Parser, new_parser
from captioner.data.coco import read_captions
from captioner.errors import ConfigError
from captioner.evaluation.frequencies import DocumentFrequencies
from captioner.files import FREQUENCIES
from captioner.inference.folder import find_model


@functools.cache
def parser() -> Parser:
    """Options of the command."""
    new = new_parser(
        "prepare frequencies",
        "Count the photos whose captions contain each n-gram of 1 to 4 words. With these document "
        "frequencies (captioner evaluate --frequencies), the CIDEr-D score of a caption does not "
        "depend on the photos that are scored with it.",
        "CAPTIONS.json... -o FILE.json.gz|MODEL_FOLDER",
    )
    new.add_argument("annotations", nargs="+", help="COCO captions file(s) of the training set")
    new.add_argument(
        "-o",
        "--output",
        metavar="FILE|FOLDER",
        required=True,
        help="output file, or model or run folder to add it to",
    )
    new.add_argument("--force", action="store_true", help="overwrite the output file")
    return new


def run(options: Any) -> int:
    """Count n-grams and write them."""
    target = Path(options.output)
    if target.is_dir():
        target = find_model(target) / FREQUENCIES
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
