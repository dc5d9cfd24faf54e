"""``captioner caption``: caption photos and folders of photos."""

from __future__ import annotations

import csv
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

from captioner.cli.main import FAILED, OK
from captioner.cli.options import (
    add_model_options,
    add_search_options,
    output,
    refuse_overwrite,
    search_changes,
    warn,
)
from captioner.cli.parser import Parser, new_parser
from captioner.cli.photos import STDIN, add_photo_options, find_photos, missing
from captioner.errors import ConfigError, DataError

if TYPE_CHECKING:
    from captioner.caption import Caption

Captioned = tuple[str | int, Sequence["Caption"]]
"""A photo's path (or image id in COCO results) and its captions."""


@functools.cache
def parser() -> Parser:
    """Options of ``caption``."""
    new = new_parser(
        "caption",
        "Caption photos, folders of photos, or a photo from standard input (-).",
        "PHOTO|FOLDER|-... [options]",
    )
    add_photo_options(new)
    new.add_argument("--format", choices=list(WRITERS), default="text", help="output format")
    new.add_argument("-o", "--output", help="output file (default: standard output)")
    new.add_argument("--force", action="store_true", help="overwrite the output file")
    new.add_argument("--annotations", help="COCO file with the image ids, for --format coco")
    add_search_options(new)
    add_model_options(new)
    return new


def main(argv: Sequence[str]) -> int:
    """Caption all photos; report those that failed."""
    options = parser().parse(argv)
    target = _check(options)

    photos = find_photos(options)
    named, failures = _names(photos.paths, options)
    failures += photos.failures
    found = [(photo, name) for photo, name in named if not missing(photo)]
    failures += len(named) - len(found)
    named = found
    if failures and not named:
        photos.report_skipped()
        return FAILED

    from captioner.api import load

    model = load(*options.model, device=options.device, precision=options.precision)
    sources = (sys.stdin.buffer if photo == STDIN else photo for photo, _ in named)
    results = model.stream(sources, batch_size=options.batch_size, **search_changes(options))

    def captioned() -> Iterator[Captioned]:
        """Yield captions as they are generated; report and count unreadable photos."""
        nonlocal failures
        hide = None if len(named) > 1 else True  # None: hidden unless stderr is a terminal
        bar = tqdm(results, total=len(named), unit="photo", disable=hide, dynamic_ncols=True)
        for (_, name), result in zip(named, bar, strict=True):
            if result.error is None:
                yield name, result.captions
            else:
                failures += 1
                warn(str(result.error))

    with output(target) as file:
        WRITERS[options.format](file, captioned())
    photos.report_skipped()
    return FAILED if failures else OK


def _check(options: Any) -> Path | None:
    """Check options that contradict each other; return the output file."""
    if options.annotations and options.format != "coco":
        raise ConfigError(f"--annotations is for --format coco, not {options.format}; leave it out")
    if options.format == "coco" and (options.num_captions or 1) > 1:
        raise ConfigError("--format coco has one caption per image; give --num-captions 1")
    if options.output is None:
        return None
    target = Path(options.output)
    refuse_overwrite(target, options.force)
    return target


def _names(photos: Iterable[Path], options: Any) -> tuple[list[tuple[Path, str | int]], int]:
    """Return each photo with its name in the output, and the number of photos without one.

    The name is the given path, or the image id in COCO results.
    """
    if options.format != "coco":
        return [(photo, str(photo)) for photo in photos], 0
    find = _image_ids(options.annotations)
    named: list[tuple[Path, str | int]] = []
    unknown = 0
    for photo in photos:
        image_id = find(photo)
        if image_id is None:
            unknown += 1
            warn(f"{photo}: unknown image id; give --annotations that include it")
        else:
            named.append((photo, image_id))
    return named, unknown


def entry(path: str | int, captions: Sequence[Caption]) -> dict[str, Any]:
    """Return one photo's captions as JSON data."""
    return {"image": path, "captions": [caption.as_dict() for caption in captions]}


def _write_text(file: IO[str], photos: Iterable[Captioned]) -> None:
    for path, captions in photos:
        for caption in captions:
            print(f"{path}: {caption.text}", file=file, flush=True)


def _write_jsonl(file: IO[str], photos: Iterable[Captioned]) -> None:
    for photo in photos:
        print(json.dumps(entry(*photo), ensure_ascii=False), file=file, flush=True)


def _write_json(file: IO[str], photos: Iterable[Captioned]) -> None:
    _write_list(file, (entry(*photo) for photo in photos))


def _write_csv(file: IO[str], photos: Iterable[Captioned]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["image", "caption", "log_prob"])
    for path, captions in photos:
        for caption in captions:
            writer.writerow([path, caption.text, f"{caption.log_prob:.4f}"])


def _write_coco(file: IO[str], photos: Iterable[Captioned]) -> None:
    _write_list(file, ({"image_id": i, "caption": c[0].text} for i, c in photos))


def _write_list(file: IO[str], entries: Iterable[dict[str, Any]]) -> None:
    """Write a JSON list entry by entry, so that a large folder does not fill the memory."""
    separator = "[\n"
    for one in entries:
        file.write(separator + json.dumps(one, ensure_ascii=False))
        separator = ",\n"
    file.write("\n]\n" if separator == ",\n" else "[]\n")


def _image_ids(annotations: str | None) -> Callable[[Path], int | None]:
    """Return a function that looks up image ids in a COCO file, or else in COCO file names."""
    if annotations is not None:
        from captioner.data.coco import read_captions

        names, _ = read_captions([annotations])
        known = {Path(name).name: image_id for image_id, name in names.items()}
        if len(known) < len(names):
            raise DataError(
                f"{annotations} has two photos of the same name; image ids are ambiguous"
            )
        return lambda photo: known.get(photo.name)

    def digits(photo: Path) -> int | None:
        match = re.fullmatch(r"(?:COCO_\w+_)?(\d+)", photo.stem)
        return int(match[1]) if match else None

    return digits


WRITERS: dict[str, Callable[[IO[str], Iterable[Captioned]], None]] = {
    "text": _write_text,
    "json": _write_json,
    "jsonl": _write_jsonl,
    "csv": _write_csv,
    "coco": _write_coco,
}
