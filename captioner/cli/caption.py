"""``captioner caption``: photos in, sentences out."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

from captioner.cli.main import FAILED, OK
from captioner.cli.options import (
    Parser,
    add_model_options,
    add_search_options,
    new_parser,
    output,
    refuse_overwrite,
    search_changes,
    warn,
)
from captioner.errors import ConfigError

if TYPE_CHECKING:
    from captioner.caption import Caption

Captioned = tuple[str, list["Caption"]]


def parser() -> Parser:
    """Options of ``caption``."""
    new = new_parser(
        "caption",
        "Caption photos. A folder stands for the photos in it, - for a photo on standard input.",
        "PHOTO|FOLDER|-... [options]",
    )
    new.add_argument("photos", nargs="+", help="files, folders, or - for standard input")
    new.add_argument("--recursive", action="store_true", help="look into folders of folders too")
    new.add_argument(
        "--format", choices=list(WRITERS), default="text", help="form of the output"
    )
    new.add_argument("-o", "--output", help="file to write (default: standard output)")
    new.add_argument("--force", action="store_true", help="replace the output file")
    new.add_argument(
        "--annotations", help="COCO file that gives each file name its image id, for --format coco"
    )
    add_search_options(new)
    add_model_options(new)
    return new


def main(argv: Sequence[str]) -> int:
    """Caption everything; name what failed."""
    options = parser().parse(argv)
    target = Path(options.output) if options.output else None
    if target is not None:
        refuse_overwrite(target, options.force)
    if options.batch_size < 1:
        raise ConfigError(f"batch-size is {options.batch_size}; give 1 or more")
    if options.annotations and options.format != "coco":
        raise ConfigError(f"--annotations goes with --format coco, not {options.format}")
    if options.format == "coco" and (options.num_captions or 1) > 1:
        raise ConfigError("--format coco holds one caption an image; give --num-captions 1")

    from captioner.data.images import find_images

    photos = list(find_images(_arguments(options.photos), recursive=options.recursive))

    from captioner.api import load

    model = load(options.model, device=options.device, precision=options.precision)
    search = model.options(**search_changes(options))
    failures = 0

    def captioned() -> Iterator[Captioned]:
        nonlocal failures
        sources = (sys.stdin.buffer if str(p) == "-" else p for p in photos)
        results = model.stream(sources, search, batch_size=options.batch_size)
        hide = None if len(photos) > 1 else True  # None: hidden unless stderr is a terminal
        bar = tqdm(results, total=len(photos), unit="photo", disable=hide, dynamic_ncols=True)
        for path, result in zip(photos, bar, strict=True):
            if result.error is not None:
                failures += 1
                warn(str(result.error))
            else:
                yield str(path), result.captions

    ids = _image_ids(options.annotations) if options.format == "coco" else None
    with output(target) as file:
        unnamed = WRITERS[options.format](file, captioned(), ids)
    return FAILED if failures or unnamed else OK


def _arguments(given: Iterable[str]) -> Iterator[str]:
    for position, argument in enumerate(given):
        if argument == "-" and "-" in list(given)[:position]:
            raise ConfigError("standard input (-) was given twice; give it once")
        yield argument


def entry(path: str, captions: list[Caption]) -> dict[str, Any]:
    """The JSON form of one photo's captions."""
    return {
        "image": path,
        "captions": [
            {"text": c.text, "words": list(c.words), "log_prob": round(c.log_prob, 4)}
            for c in captions
        ],
    }


def _write_text(file: IO[str], photos: Iterable[Captioned], ids: object) -> int:
    for path, captions in photos:
        for caption in captions:
            print(f"{path}: {caption.text}", file=file, flush=True)
    return 0


def _write_jsonl(file: IO[str], photos: Iterable[Captioned], ids: object) -> int:
    for photo in photos:
        print(json.dumps(entry(*photo), ensure_ascii=False), file=file, flush=True)
    return 0


def _write_json(file: IO[str], photos: Iterable[Captioned], ids: object) -> int:
    _write_list(file, (entry(*photo) for photo in photos))
    return 0


def _write_csv(file: IO[str], photos: Iterable[Captioned], ids: object) -> int:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["image", "caption", "log_prob"])
    for path, captions in photos:
        for caption in captions:
            writer.writerow([path, caption.text, f"{caption.log_prob:.4f}"])
    return 0


def _write_coco(
    file: IO[str], photos: Iterable[Captioned], ids: Callable[[str], int | None] | None
) -> int:
    assert ids is not None
    unnamed = 0

    def results() -> Iterator[dict[str, Any]]:
        nonlocal unnamed
        for path, captions in photos:
            image_id = ids(path)
            if image_id is None:
                unnamed += 1
                warn(f"{path}: no image id is known for it; name it in --annotations")
            else:
                yield {"image_id": image_id, "caption": captions[0].text}

    _write_list(file, results())
    return unnamed


def _write_list(file: IO[str], entries: Iterable[dict[str, Any]]) -> None:
    """A JSON list, written as it comes: a large folder must not fill the memory."""
    separator = "[\n"
    for one in entries:
        file.write(separator + json.dumps(one, ensure_ascii=False))
        separator = ",\n"
    file.write("\n]\n" if separator == ",\n" else "[]\n")


def _image_ids(annotations: str | None) -> Callable[[str], int | None]:
    """Image id of a path: from a COCO file, else from the digits of COCO's file names."""
    if annotations is not None:
        from captioner.data.coco import read_captions

        names, _ = read_captions([annotations])
        known = {Path(name).name: image_id for image_id, name in names.items()}
        return lambda path: known.get(Path(path).name)

    def digits(path: str) -> int | None:
        match = re.fullmatch(r"(?:COCO_\w+_)?(\d+)", Path(path).stem)
        return int(match[1]) if match else None

    return digits


WRITERS: dict[str, Callable[[IO[str], Iterable[Captioned], Any], int]] = {
    "text": _write_text,
    "json": _write_json,
    "jsonl": _write_jsonl,
    "csv": _write_csv,
    "coco": _write_coco,
}
