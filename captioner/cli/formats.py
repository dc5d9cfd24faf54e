"""Output formats of ``captioner caption``: text, JSON, JSON Lines, CSV, COCO results and WebVTT.

A writer takes photos as JSON data, as `entry` returns them, so that captions can also be written
from a file of finished ones.
"""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from captioner.errors import ConfigError, clock, printable

if TYPE_CHECKING:
    from captioner.caption import Caption
    from captioner.cli.caption import CaptionOptions

Entry = dict[str, Any]
"""A photo's name in the output (path or COCO image id) and its captions."""


IfUnsure = Literal["mark", "skip", "hedge"]


def entry(name: str | int, captions: Sequence[Caption], options: CaptionOptions) -> Entry:
    """Return one photo's captions as JSON data; ``unsure`` only if captions are marked."""
    min_confidence, if_unsure = options.min_confidence, options.if_unsure
    least = min_confidence if if_unsure in (None, "mark") else None
    entries = [caption.as_dict(min_confidence=least) for caption in captions]
    if min_confidence is not None and if_unsure == "hedge":
        entries[0]["text"] = captions[0].hedged(min_confidence)
    if min_confidence is not None and if_unsure == "skip" and captions[0].unsure(min_confidence):
        entries = []
    if options.sentence_case:
        for one in entries:
            one["text"] = as_sentence(one["text"])
    return {"image": name, "captions": entries}


def as_sentence(text: str) -> str:
    """A caption with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + "." * text[-1:].isalnum()


def joined(caption: Entry) -> str:
    """The keywords of a caption as a list with commas; empty if it has none."""
    return ", ".join(keyword["word"] for keyword in caption.get("keywords", ()))


def _write_text(file: IO[str], photos: Iterable[Entry]) -> None:
    for photo in photos:
        for caption in photo["captions"]:
            mark = f" (unsure: {caption['confidence']:.2f})" if caption.get("unsure") else ""
            time = f" {clock(photo['start'])} --> {clock(photo['end'])}" if "start" in photo else ""
            keywords = f" [{joined(caption)}]" if caption.get("keywords") else ""
            line = f"{photo['image']}{time}: {caption['text']}{mark}{keywords}"
            print(printable(line), file=file, flush=True)


def _write_jsonl(file: IO[str], photos: Iterable[Entry]) -> None:
    for photo in photos:
        print(json.dumps(photo, ensure_ascii=False), file=file, flush=True)


def _write_vtt(file: IO[str], photos: Iterable[Entry]) -> None:
    """WebVTT; source: https://www.w3.org/TR/webvtt1/."""
    print("WEBVTT", file=file)
    for photo in photos:
        for caption in photo["captions"]:
            text = html.escape(caption["text"], quote=False)
            print(f"\n{clock(photo['start'])} --> {clock(photo['end'])}\n{text}", file=file)


def _write_csv(file: IO[str], photos: Iterable[Entry]) -> None:
    columns = ["image", "rank", "caption", "log_prob", "confidence"]
    writer = csv.writer(file, lineterminator="\n")
    header = False
    for photo in photos:
        times = {name: f"{photo[name]:.3f}" for name in ("start", "end") if name in photo}
        for rank, caption in enumerate(photo["captions"], 1):
            unsure = {True: "yes", False: "no", None: ""}
            more = {"unsure": unsure[caption["unsure"]]} if "unsure" in caption else {}
            if "keywords" in photo["captions"][0]:  # the others have none
                more["keywords"] = joined(caption)
            if not header:
                writer.writerow([columns[0], *times, *columns[1:], *more])
                header = True
            sure = caption.get("confidence")
            numbers = [f"{caption['log_prob']:.4f}", "" if sure is None else f"{sure:.4f}"]
            name = [photo["image"], *times.values()]
            writer.writerow([*name, rank, caption["text"], *numbers, *more.values()])
    if not header:
        writer.writerow(columns)


def _write_coco(file: IO[str], photos: Iterable[Entry]) -> None:
    _write_list(
        file,
        ({"image_id": p["image"], "caption": c["text"]} for p in photos for c in p["captions"][:1]),
    )


def _write_list(file: IO[str], entries: Iterable[Entry]) -> None:
    """Write a JSON list entry by entry, so that a large folder does not fill the memory."""
    separator = "[\n"
    for one in entries:
        file.write(separator + json.dumps(one, ensure_ascii=False))
        separator = ",\n"
    file.write("\n]\n" if separator == ",\n" else "[]\n")


WRITERS: dict[str, Callable[[IO[str], Iterable[Entry]], None]] = {
    "text": _write_text,
    "json": _write_list,
    "jsonl": _write_jsonl,
    "csv": _write_csv,
    "coco": _write_coco,
    "vtt": _write_vtt,
}

_BY_EXTENSION = {
    ".txt": ("text",),
    ".json": ("json", "coco"),
    ".jsonl": ("jsonl",),
    ".csv": ("csv",),
    ".vtt": ("vtt",),
}
"""Formats that a file with this extension can have, the default first."""


def choose_format(given: str | None, target: Path | None) -> str:
    """The format of ``--format``, or else of the output file's extension, or else text."""
    suffix = "" if target is None else target.suffix.lower()
    possible = _BY_EXTENSION.get(suffix, (given or "text",))
    if given == "parquet":
        raise ConfigError("--format parquet is for --engine ray; add it, or give another format")
    if given is not None and given not in possible:
        raise ConfigError(f"--format {given} contradicts -o {target}; leave out --format")
    if given is None and suffix and suffix not in _BY_EXTENSION:
        raise ConfigError(
            f"-o {target}: unknown extension {suffix}; use {', '.join(_BY_EXTENSION)} or give "
            "--format"
        )
    return given or possible[0]
