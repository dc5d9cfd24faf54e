"""What the commands write: formats of captions, files that are complete or not there, warnings.

``captioner caption -o FILE`` keeps finished captions in a journal, ``FILE.resume``: JSON Lines, the
settings and then each photo, and FILE itself, as "", whenever it was written:

    ["a.jpg", [81234, 1700000000000000000], {"image": "a.jpg", "captions": [...]}]
    ["", [7123, 1700000001000000000], {}]

Sizes (bytes) and modification times (ns) show whether a photo, or FILE, is still the same. A line
that a kill has cut short is dropped. Rows of a FILE that somebody has corrected are kept as they
are, see `cli.kept`; the journal has their captions as {"text": ...}.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from captioner.cli.console import hint, warn
from captioner.cli.kept import read_rows
from captioner.data.cells import SafeWriter
from captioner.errors import ConfigError
from captioner.files import atomic_write, check_same, named_after
from captioner.messages import clock, counted, first_of, printable

if TYPE_CHECKING:
    from captioner.caption import Caption
    from captioner.cli.caption import CaptionOptions

Name = str | int
"""What a photo is called in the output: its path, or its image id in COCO results."""

Entry = dict[str, Any]
"""A photo's name in the output and its captions, or why there are none: ``error``."""


# --- files that are continued --------------------------------------------------------------------


def journal_path(target: Path) -> Path:
    """Where the captions of an output file are kept by photo."""
    return target.with_name(f"{target.name}.resume")


@contextmanager
def continued(
    target: Path,
    names: Mapping[Path, Name],
    captioned: Callable[[Sequence[Path]], Iterator[Entry]],
    settings: Entry,
    options: CaptionOptions,
) -> Iterator[Iterator[Entry]]:
    """The entries of photos for an output file: those of an earlier run, or new ones, in order.

    ``--resume`` keeps finished photos; it is a ConfigError if the settings, by option, differ. A
    file that is not as the earlier run wrote it comes first, row by row, and rows of other photos
    follow. ``--force`` starts over, and overwrites such a file; with neither, finished photos are a
    ConfigError. The journal is removed when the block ends, unless ``--resume`` was given, and
    after an exception if no photo is finished.
    """
    path, settings = journal_path(target), json.loads(json.dumps(settings))
    known, written, corrected = _read(target, settings, options)
    stamps = {photo: _stamp(photo) for photo in names}  # before they are read
    rows = []
    if corrected:
        rows = read_rows(target, choose_format(options.format, target), names.values())
    kept = _unchanged(names, stamps, known, {row["image"]: row["text"] for row in reversed(rows)})
    again = {name for photo, name in names.items() if photo not in kept}
    rows = [row for row in rows if row["image"] not in again]
    in_rows = {row["image"] for row in rows}
    finished = len(kept)

    def append(name: str, stamp: list[int], one: Entry) -> None:
        with named_after(path):
            print(json.dumps([name, stamp, one]), file=file, flush=True)

    def entries() -> Iterator[Entry]:
        nonlocal finished
        yield from rows
        new = captioned([photo for photo in names if photo not in kept])
        for photo, name in names.items():
            if name in in_rows:
                continue
            one = kept.get(photo)
            if one is None:
                one = next(new)
                append(str(photo), stamps[photo], one)
                finished += "captions" in one
            yield one | {"image": name}  # may be another than before, by --annotations
        for _ in new:  # nothing is left, but the progress bar ends only then
            pass

    def progress() -> str:
        done = f"{finished} of {len(names)} photos are finished and kept in {path}"
        return done if finished else ""

    if rows:
        warn(f"{target}: {counted(finished, 'photo')} kept as they are in the file")
    elif known:
        gone = len(known.keys() - set(map(str, names)))
        left = f"; {counted(gone, 'photo')} of an earlier run left out" if gone else ""
        warn(f"{target}: {counted(finished, 'finished photo')} kept{left}")
    state = {"corrected": True} if rows else {}
    lines = [settings, ["", written, state], *([name, *found] for name, found in known.items())]
    atomic_write(path, "".join(json.dumps(line) + "\n" for line in lines))
    with named_after(path), path.open("a", encoding="utf-8") as file:
        try:
            with hint(progress, "with --resume"):
                yield entries()
        except BaseException:
            if not (known or finished):
                path.unlink()
            raise
        append("", _stamp(target), state)
    if not options.resume:
        path.unlink()


def _unchanged(
    names: Mapping[Path, Name],
    stamps: Mapping[Path, list[int]],
    known: dict[str, tuple[list[int], Entry]],
    of_file: Mapping[Name | None, str],
) -> dict[Path, Entry]:
    """Return the photos that are not captioned again, with their entries; update ``known``.

    These are the photos with a row in the file, and the finished photos that have not changed. If a
    photo has changed, its row is kept only if somebody may have written the caption.
    """
    kept: dict[Path, Entry] = {}
    changed = []
    for photo, stamp in stamps.items():
        before, one = known.get(str(photo), ([], {}))
        same = before == stamp
        if (text := of_file.get(names[photo])) is not None:
            captions = one.get("captions")
            if before and not same and captions and text.startswith(captions[0]["text"]):
                continue
            if before and not same:
                changed.append(photo)
            kept[photo] = one
            known[str(photo)] = stamp, one or {"text": text}
        elif "captions" in one and same:  # an error is tried again
            kept[photo] = one
    if changed:
        warn(
            f"{first_of(changed)} changed since its caption, which is kept; remove its row to "
            "caption it again"
        )
    return kept


def _read(
    target: Path, settings: Entry, options: CaptionOptions
) -> tuple[dict[str, tuple[list[int], Entry]], list[int], bool]:
    """Read what an earlier run knew.

    Returns:
        The entries by photo, the stamp of the file that the run wrote, and whether to keep the rows
        of the file, which was written without ``--resume`` or has changed since.
    """
    path, before = journal_path(target), None
    known: dict[str, tuple[list[int], Entry]] = {}
    with suppress(FileNotFoundError, ValueError, TypeError), path.open(encoding="utf-8") as file:
        before = json.loads(next(file, ""))
        for line in file:
            name, stamp, one = json.loads(line)
            known[name] = stamp, one
    written, state = known.pop("", ([], {}))
    done = sum("captions" in one or "text" in one for _, one in known.values())
    if not done or (options.force and not (options.resume and before == settings)):
        known, written, state = {}, [], {}
    elif not options.resume:
        raise ConfigError(
            f"{path} has {counted(done, 'photo')} of an earlier run; give --resume to keep them, "
            "or --force to start over"
        )
    else:
        check_same(path, before or {}, settings)
    changed = target.exists() and (_stamp(target) != written or "corrected" in state)
    return known, written, changed and not options.force


def _stamp(path: Path) -> list[int]:
    """What changes when a file does; empty if there is none."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


# --- formats -------------------------------------------------------------------------------------


def entry(name: Name, captions: Sequence[Caption], options: CaptionOptions) -> Entry:
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
    """Write a line per caption, with its confidence for people, who read it on a terminal."""
    for photo in photos:
        if "kept" in photo:
            print(photo["kept"], file=file)
            continue
        for caption in photo["captions"]:
            sure, mark = caption.get("confidence"), ""
            if caption.get("unsure"):
                mark = f" (unsure: {sure:.2f})"
            elif sure is not None and file.isatty():
                mark = f" ({sure:.0%} likely to be right)"
            time = f" {clock(photo['start'])} --> {clock(photo['end'])}" if "start" in photo else ""
            keywords = f" [{joined(caption)}]" if caption.get("keywords") else ""
            line = f"{photo['image']}{time}: {caption['text']}{mark}{keywords}"
            print(printable(line), file=file, flush=True)


def _write_jsonl(file: IO[str], photos: Iterable[Entry]) -> None:
    for photo in photos:
        print(json.dumps(photo.get("kept", photo), ensure_ascii=False), file=file, flush=True)


def _write_vtt(file: IO[str], photos: Iterable[Entry]) -> None:
    """WebVTT; source: https://www.w3.org/TR/webvtt1/."""
    print("WEBVTT", file=file)
    for photo in photos:
        for caption in photo["captions"]:
            text = html.escape(caption["text"], quote=False)
            print(f"\n{clock(photo['start'])} --> {clock(photo['end'])}\n{text}", file=file)


def _write_csv(file: IO[str], photos: Iterable[Entry]) -> None:
    writer = None
    for photo in photos:
        if "kept" in photo:
            writer = writer or SafeWriter(file, photo["kept"], photo["delimiter"])
            writer.write_cells(photo["kept"])
            continue
        times: Entry = {name: f"{photo[name]:.3f}" for name in ("start", "end") if name in photo}
        for rank, caption in enumerate(photo["captions"], 1):
            row: Entry = {"image": photo["image"], **times, "rank": rank}
            row["caption"] = caption["text"]
            row["log_prob"] = f"{caption['log_prob']:.4f}"
            sure = caption.get("confidence")
            row["confidence"] = "" if sure is None else f"{sure:.4f}"
            if "unsure" in caption:
                row["unsure"] = {True: "yes", False: "no", None: ""}[caption["unsure"]]
            if "keywords" in photo["captions"][0]:  # the others have none
                row["keywords"] = joined(caption)
            writer = writer or SafeWriter(file, row)
            writer.write_row(row)
    if writer is None:
        print("image,rank,caption,log_prob,confidence", file=file)


def _write_coco(file: IO[str], photos: Iterable[Entry]) -> None:
    def rows(photo: Entry) -> list[Entry]:
        if "kept" in photo:
            return [photo]
        return [{"image_id": photo["image"], "caption": one["text"]} for one in photo["captions"]]

    _write_list(file, (row for photo in photos for row in rows(photo)[:1]))


def _write_list(file: IO[str], entries: Iterable[Entry]) -> None:
    """Write a JSON list entry by entry, so that a large folder does not fill the memory."""
    separator = "[\n"
    for one in entries:
        file.write(separator + json.dumps(one.get("kept", one), ensure_ascii=False))
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
