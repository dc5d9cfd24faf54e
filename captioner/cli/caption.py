"""``captioner caption``: caption photos, folders of photos, and videos."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from annotated_types import Interval

from captioner.bulk.cluster import CaptionRayOptions
from captioner.cli import ray
from captioner.cli.arguments import (
    checked_search,
    command,
    flag,
    flags_given,
    refuse,
    settings_of,
)
from captioner.cli.formats import WRITERS, Entry, IfUnsure, choose_format, entry
from captioner.cli.journal import journal_path, open_journal
from captioner.cli.main import FAILED, OK
from captioner.cli.outputs import hint, output, refuse_overwrite, require_parent, to_continue, warn
from captioner.cli.photos import STDIN, PhotoOptions, find_photos
from captioner.cli.sidecars import SidecarOptions, Store, check_photos, choose_store
from captioner.cli.videos import interval, video_entries
from captioner.data.formats import FORMATS, VIDEO
from captioner.data.progress import photo_bar
from captioner.errors import ConfigError, counted
from captioner.option_fields import File, Shown
from captioner.options import ModelOptions, SearchOptions

Named = tuple[Path, str | int]
"""A photo and its name in the output: the given path, or the image id in COCO results."""


@dataclass(frozen=True, kw_only=True)
class CaptionOptions(CaptionRayOptions, ModelOptions, SidecarOptions, PhotoOptions):
    """Caption photos, folders of photos, a photo from standard input (-), or videos."""

    output: Annotated[str, Shown("FILE", ("-o", "--output"))] | None = None
    """Output file; its extension selects the format: .txt, .json, .jsonl, .csv, or .vtt for a
    video; with --engine ray a folder (default: standard output, which is also -)."""
    format: Literal["text", "json", "jsonl", "csv", "coco", "vtt", "parquet"] | None = None
    """Output format (default: by the extension, or text; --engine ray: jsonl or parquet)."""
    annotations: File | None = None
    """COCO annotations file that maps file names to image ids, for --format coco."""
    min_confidence: Annotated[float, Interval(ge=0, le=1), Shown("P")] | None = None
    """Captions with a confidence below P (0 to 1) are unsure, see if_unsure (default: 0.5 with
    --if-unsure); requires a calibrated model (the shipped model is)."""
    if_unsure: IfUnsure | None = None
    """What to do with unsure captions: mark them in text, JSON and CSV (the default), skip them, or
    hedge: write "perhaps a dog ..."."""
    sentence_case: bool = False
    """Begin captions with a capital letter and end them with a full stop."""
    every: Annotated[str, Shown("TIME")] | None = None
    """Caption videos instead of photos: a frame at this interval (5s, 0.5s, 2m), or the first of
    each shot (shot). Equal captions that follow each other become one."""
    resume: bool = False
    """Keep what an earlier run with the same -o FILE finished, and caption the photos that are new
    or changed since then."""
    force: bool = False
    """Overwrite existing output."""


@command("caption", "PHOTO|FOLDER|-... [options]", CaptionOptions, SearchOptions)
def caption(options: CaptionOptions, given: dict[str, Any], argv: Sequence[str]) -> int:
    """Caption all photos; report those that failed."""
    if options.if_unsure and options.min_confidence is None:
        options = replace(options, min_confidence=0.5)
    if ray.check_engine(options):
        return ray.caption(options, checked_search(options.model, given), argv)
    store = choose_store(options, force=options.force)
    target = None if options.output in (None, "-") else Path(str(options.output))
    kind = choose_format(options.format, target)
    _check(options, store, target, kind)
    search = checked_search(options.model, given)
    _check_search(options, search, kind)

    photos = find_photos(options, (VIDEO,) if options.every else FORMATS)
    if kind == "vtt" and len(photos.paths) > 1:
        raise ConfigError(f"--format vtt is for one video, not {len(photos.paths)}; give .json")
    found, unnamed = _names(photos.paths, options, kind)
    failures = photos.failures + unnamed
    run = _Run(options, search, kind, argv)
    lasting = "-" not in options.photos and not options.every
    if found or not failures:
        if store is not None:
            store = replace(store, subfolders=photos.subfolders)
            failures += run.keep(store, dict(found), target)
        elif target and lasting and (target.is_file() or not target.exists()):
            failures += run.write(target, dict(found))
        else:  # a pipe or a device, or a photo from one, or videos: cannot be continued
            with output(target) as file:
                failures += run.print(file, run.entries(found))
    photos.report_skipped()
    return FAILED if failures else OK


def _check(options: CaptionOptions, store: Store | None, target: Path | None, kind: str) -> None:
    """Check that the options go together, and that the output can be written."""
    if options.every:
        interval(options)
    if kind != "coco":
        refuse(options, ("annotations",), f"is for --format coco, not {kind}; leave it out")
    if kind == "vtt" and not options.every:
        raise ConfigError("--format vtt is for videos; give --every 5s too, or another format")
    if kind == "coco" and options.every:
        raise ConfigError("--format coco is for photos; leave out --every, or give json")
    if store is not None:
        refuse(options, ("resume",), "continues an -o FILE alone; give --skip-existing instead")
        if "-" in options.photos:
            raise ConfigError("standard input (-) has no name to write a caption to; give files")
        if store.existing == "skip" and options.output is not None:
            raise ConfigError(
                "--skip-existing and -o cannot be combined: FILE would lack the photos that have "
                "a caption; leave one of them out"
            )
    if target is None:
        refuse(options, ("resume",), "continues with an output file; give -o FILE too")
    else:
        require_parent(target)
        refuse_overwrite(target, options.force or options.resume)


def _check_search(options: CaptionOptions, search: SearchOptions, kind: str) -> None:
    """Check that there is room for all captions and what belongs to them."""
    beside = flags_given(options, "sidecar", "embed", "in_place")
    single = [*beside, *[f"--format {kind}"] * (kind in ("coco", "vtt"))]
    if not single:
        return
    if search.num_captions > 1:
        raise ConfigError(f"{single[0]} has one caption per photo; give --num-captions 1")
    if search.keywords and not beside:
        raise ConfigError(f"{single[0]} has no keywords; leave out --keywords, or give .json")
    if options.min_confidence is not None and options.if_unsure in (None, "mark"):
        raise ConfigError(
            f"--min-confidence marks captions in text, JSON and CSV, not {single[0]}; leave one "
            "out, or give --if-unsure skip or hedge"
        )


# --- captions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """One call of the command: what to caption with, and where its captions go."""

    options: CaptionOptions
    search: SearchOptions
    kind: str
    """The output format."""
    argv: Sequence[str]

    def entries(self, named: Sequence[Named]) -> Iterator[Entry]:
        """Load the model and yield each photo's captions, or its error, as they are generated."""
        if not named:
            return
        from captioner.inference.captioner import load

        options = self.options
        model = load(*options.model, device=options.device, precision=options.precision)
        if options.min_confidence is not None and (why := model.no_confidence(self.search)):
            spelled = re.sub("[a-z]+(_[a-z]+)+", lambda name: flag(name[0]), why)
            raise ConfigError(f"--min-confidence: {spelled}")
        if options.every:
            yield from video_entries(model, named, options, self.search)
            return
        sources = (sys.stdin.buffer if photo == STDIN else photo for photo, _ in named)
        results = model.stream(sources, batch_size=options.batch_size, **vars(self.search))
        bar = photo_bar(results, shown=len(named) > 1, total=len(named))
        for (_, name), result in zip(named, bar, strict=True):
            if result.error is None:
                yield entry(name, result.captions, options)
            else:
                yield {"image": name, "error": str(result.error)}

    def print(self, file: IO[str], entries: Iterable[Entry]) -> int:
        """Write captions, and errors to standard error; return how many photos failed."""
        failed, unsure = 0, 0

        def succeeded() -> Iterator[Entry]:
            nonlocal failed, unsure
            for one in entries:
                if "error" in one:
                    failed += 1
                    warn(one["error"])
                else:
                    unsure += not one["captions"]
                    yield one

        WRITERS[self.kind](file, succeeded())
        if unsure:
            least = self.options.min_confidence
            warn(f"left out {counted(unsure, 'caption')} with a confidence below {least}")
        return failed

    def write(self, target: Path, names: Mapping[Path, str | int]) -> int:
        """Write a file, or continue it; return how many photos failed."""
        options, start = self.options, time.monotonic()
        text = ("annotations", "min_confidence", "if_unsure", "sentence_case")
        settings = settings_of(options, self.search) | {"--format": self.kind}
        settings |= {flag(name): getattr(options, name) for name in text}
        with open_journal(
            target, [*names], settings, resume=options.resume, force=options.force
        ) as journal:

            def finished() -> str:
                kept = f"{journal.finished} of {len(names)} photos are finished and kept in"
                kept = f"{kept} {journal_path(target)}"
                return to_continue(kept, self.argv, "--resume") if journal.finished else ""

            if journal.summary:
                warn(f"{target}: {journal.summary}")
            new = self.entries([one for one in names.items() if not journal.has(one[0])])
            with (
                hint(finished),
                closing(journal.entries(new, options.batch_size)) as entries,
                output(target) as file,
            ):
                known = zip(names.values(), entries, strict=True)
                # Annotations may give other names than before.
                failed = self.print(file, (one | {"image": name} for name, one in known))
            journal.wrote(target)
        if time.monotonic() - start > 2:
            warn(f"{target}: {counted(len(names) - failed, 'photo')} captioned")
        return failed

    def keep(self, store: Store, names: Mapping[Path, str | int], target: Path | None) -> int:
        """Write captions in or beside the photos, and to a file; return how many photos failed."""
        needed, existing = check_photos(store, list(names))
        written = 0

        def kept() -> Iterator[Entry]:
            nonlocal written
            for photo in existing:
                if problem := store.keep(photo, None):
                    yield {"image": names[photo], "error": problem}
            captioned = self.entries([(photo, names[photo]) for photo in needed])
            for photo, one in zip(needed, captioned, strict=True):
                problem = ""
                if one.get("captions"):
                    best = one["captions"][0]
                    words = [keyword["word"] for keyword in best.get("keywords", ())]
                    problem = store.keep(photo, best["text"], words)
                    written += not problem
                yield {"image": names[photo], "error": problem} if problem else one

        def finished() -> str:
            if not written or store.existing not in (None, "skip") or target is not None:
                return ""
            kept = f"{counted(written, 'caption')} finished"
            return to_continue(kept, self.argv, "--skip-existing")

        with hint(finished), output(target) as file:
            failed = self.print(file, kept())
        return len(names) - len(needed) - len(existing) + failed


# --- image ids -----------------------------------------------------------------------------------


def _names(photos: Iterable[Path], options: CaptionOptions, kind: str) -> tuple[list[Named], int]:
    """Return each photo with its name in the output, and the number of photos without one."""
    if kind != "coco":
        return [(photo, str(photo)) for photo in photos], 0
    known: dict[str, int] = {}
    if options.annotations is not None:
        from captioner.data.coco import read_captions

        names, _ = read_captions([options.annotations])
        known = {Path(name).name: image_id for image_id, name in names.items()}
    owners: dict[int, Path] = {}
    unknown = 0
    for photo in photos:
        image_id = known.get(photo.name)
        digits = re.fullmatch(r"(?:COCO_\w+_)?(\d+)", photo.stem)
        if not known and digits:
            image_id = int(digits[1])
        if image_id is None:
            unknown += 1
            warn(f"{photo}: unknown image id; give --annotations that include it")
        elif image_id in owners:
            raise ConfigError(
                f"{owners[image_id]} and {photo} both have the image id {image_id}, but --format "
                "coco has one caption per id; leave one out"
            )
        else:
            owners[image_id] = photo
    return [(photo, image_id) for image_id, photo in owners.items()], unknown
