"""``captioner prepare frequencies``: document frequencies of captions."""

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
        "Count in how many photos' captions each phrase of one to four words occurs, so that "
        "CIDEr-D means the same for one photo as for many (captioner evaluate --frequencies).",
        "CAPTIONS.json... -o FILE.json.gz|MODEL_FOLDER",
    )
    new.add_argument("annotations", nargs="+", help="COCO captions file(s), the training ones")
    new.add_argument(
        "-o", "--output", required=True, help="file to write, or the model folder to keep it in"
    )
    new.add_argument("--force", action="store_true", help="replace the file")
    return new


def run(options: Any) -> int:
    """Count and write."""
    target = Path(options.output)
    if target.is_dir():
        target /= FREQUENCIES
    elif options.output.endswith("/"):
        raise ConfigError(
            f"there is no folder {options.output}; give a model folder that exists, or a file name"
        )
    refuse_overwrite(target, options.force)

    _, references = read_captions(options.annotations)
    counted = DocumentFrequencies.from_references(references)
    counted.save(target)
    print(f"{target}: {len(counted.counts)} phrases of {counted.documents} photos")
    return OK
