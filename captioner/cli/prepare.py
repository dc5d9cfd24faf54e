"""``captioner prepare``: other layouts into COCO's; document frequencies of captions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from captioner.cli.main import OK
from captioner.cli.options import Parser, new_parser, refuse_overwrite
from captioner.data.coco import read_captions
from captioner.data.dataset_writer import split_randomly, write_coco
from captioner.data.importers import IMPORTERS, UNSPLIT, detect_layout
from captioner.errors import ConfigError, DataError
from captioner.frequencies import FREQUENCIES, DocumentFrequencies


def parser(what: str = "dataset") -> Parser:
    """Options of ``prepare dataset`` or ``prepare frequencies``."""
    return KINDS[what][0]()


def main(argv: Sequence[str]) -> int:
    """Prepare what the first argument names."""
    if argv and argv[0] in ("-h", "--help"):
        for name, (_, _, text) in KINDS.items():
            print(f"captioner prepare {name:<12} {text}; see --help")
        return OK
    if not argv or argv[0] not in KINDS:
        given = repr(argv[0]) if argv else "nothing"
        raise ConfigError(
            f"captioner prepare was given {given}; give: captioner prepare {' or '.join(KINDS)}"
        )
    make_parser, run, _ = KINDS[argv[0]]
    return run(make_parser().parse(argv[1:]))


# --- dataset -------------------------------------------------------------------------------------


def _dataset_parser() -> Parser:
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
    new.add_argument("--force", action="store_true", help="replace files that are there")
    return new


def _dataset(options: Any) -> int:
    """Read, split where needed, write."""
    source = Path(options.source)
    if not source.exists():
        raise DataError(f"{source} does not exist; give the file or folder with the captions")
    layout = detect_layout(source) if options.layout == "auto" else options.layout
    splits = IMPORTERS[layout](source)
    if set(splits) == {UNSPLIT}:
        splits = split_randomly(
            splits[UNSPLIT], validation=options.val, test=options.test, seed=options.seed
        )
    images = Path(options.images) if options.images else None
    summary = write_coco(splits, Path(options.output), images=images, force=options.force)
    print(summary)
    return OK


# --- frequencies ---------------------------------------------------------------------------------


def _frequencies_parser() -> Parser:
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


def _frequencies(options: Any) -> int:
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


KINDS: dict[str, tuple[Callable[[], Parser], Callable[[Any], int], str]] = {
    "dataset": (_dataset_parser, _dataset, "turn captions in another layout into COCO's"),
    "frequencies": (_frequencies_parser, _frequencies, "count phrases once, for CIDEr-D"),
}
