"""``captioner caption``: caption photos, folders of photos, and videos."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from captioner.bulk.cluster import CaptionRayOptions
from captioner.cli.arguments import check_engine, checked_search, command, flag, flags_given, refuse
from captioner.cli.console import hint, warn
from captioner.cli.main import FAILED, OK
from captioner.cli.output_files import new_file
from captioner.cli.outputs import WRITERS, Entry, Name, choose_format, continued, entry
from captioner.cli.photos import STDIN, PhotoOptions, find_photos, read_names
from captioner.cli.sidecars import SidecarOptions, Store, choose_store
from captioner.data.formats import FORMATS, VIDEO
from captioner.data.reading import photo_bar
from captioner.errors import ConfigError, DataError
from captioner.extras import require_extra
from captioner.files import atomic_open
from captioner.inference.folder import find_model, fingerprints
from captioner.messages import counted
from captioner.option_fields import File, Shown, option_fields
from captioner.options import ModelOptions, SearchOptions
from captioner.version import __version__

if TYPE_CHECKING:
    from captioner.inference.captioner import Captioner


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
    if_unsure: Literal["mark", "skip", "hedge"] | None = None
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
def caption(options: CaptionOptions, given: dict[str, Any]) -> int:
    """Caption all photos; report those that failed."""
    if options.if_unsure and options.min_confidence is None:
        options = replace(options, min_confidence=0.5)
    if check_engine(options):
        return _caption_on_ray(options, checked_search(options.model, given))
    store = choose_store(options, force=options.force)
    target = None if options.output in (None, "-") else Path(str(options.output))
    kind = choose_format(options.format, target)
    search = checked_search(options.model, given)
    _check(options, store, target, kind, search)

    photos = find_photos(options, (VIDEO,) if options.every else FORMATS)
    if kind == "vtt" and len(photos.paths) > 1:
        raise ConfigError(f"--format vtt is for one video, not {len(photos.paths)}; give .json")
    names, unnamed = _names(photos.paths, options, kind)
    failures = photos.failures + unnamed
    lasting = "-" not in options.photos and not options.every

    def captioned(needed: Sequence[Path]) -> Iterator[Entry]:
        return _entries({photo: names[photo] for photo in needed}, options, search)

    if names or not failures:
        with ExitStack() as stack:
            if store is not None:
                store.subfolders = photos.subfolders
                if target is None:  # else FILE would lack those that are finished
                    stack.enter_context(hint(store.finished, "with --skip-existing"))
                entries = store.write_all(names, captioned)
            elif target and lasting and (target.is_file() or not target.exists()):
                settings = settings_of(options, search)
                entries = stack.enter_context(
                    continued(target, names, captioned, settings, options)
                )
            else:  # a pipe or a device, or a photo from one, or videos: cannot be continued
                entries = captioned([*names])
            file = sys.stdout if target is None else stack.enter_context(atomic_open(target))
            failed, written = _write(file, kind, entries, options)
            failures += failed
        if target is not None and target.is_file() and store is None:
            warn(f"{counted(written, 'caption')} written to {target}")
    photos.report_skipped()
    return FAILED if failures else OK


def _check(
    options: CaptionOptions,
    store: Store | None,
    target: Path | None,
    kind: str,
    search: SearchOptions,
) -> None:
    """Check that the options go together, and that the output can be written and has room."""
    if options.every:
        _interval(options)
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
    new_file(target, options.force or options.resume)
    beside = flags_given(options, "sidecar", "embed", "in_place")
    for single in [*beside, *[f"--format {kind}"] * (kind in ("coco", "vtt"))]:
        if search.num_captions > 1:
            raise ConfigError(f"{single} has one caption per photo; give --num-captions 1")
        if search.keywords and not beside:
            raise ConfigError(f"{single} has no keywords; leave out --keywords, or give .json")
        if options.min_confidence is not None and options.if_unsure in (None, "mark"):
            raise ConfigError(
                f"--min-confidence marks captions in text, JSON and CSV, not {single}; leave one "
                "out, or give --if-unsure skip or hedge"
            )


# --- captions ------------------------------------------------------------------------------------


def _entries(
    names: Mapping[Path, Name], options: CaptionOptions, search: SearchOptions
) -> Iterator[Entry]:
    """Load the model and yield each photo's captions, or its error, as they are generated."""
    if not names:
        return
    from captioner.inference.captioner import load

    model = load(*options.model, device=options.device, precision=options.precision)
    if options.min_confidence is not None and (why := model.no_confidence(search)):
        raise ConfigError(f"--min-confidence: {why}")
    if options.every:
        yield from _video_entries(model, names, options, search)
        return
    sources = (sys.stdin.buffer if photo == STDIN else photo for photo in names)
    results = model.stream(
        sources, batch_size=options.batch_size, keep_photos=False, **vars(search)
    )
    bar = photo_bar(results, shown=len(names) > 1, total=len(names))
    for name, result in zip(names.values(), bar, strict=True):
        if result.error is not None:
            yield {"error": str(result.error)}
        elif not result.captions[0].words:
            problem = "the model writes no words for it; give --min-length 1, or train it longer"
            yield {"error": f"{name}: {problem}"}
        else:
            yield entry(name, result.captions, options)


def settings_of(options: CaptionOptions, search: SearchOptions) -> dict[str, Any]:
    """All that captions depend on, besides the photos, by option; a resumed run must have it."""
    text = ("device", "precision", "batch_size", "min_confidence", "if_unsure", "sentence_case")
    given = {name: getattr(options, name) for name in text} | dataclasses.asdict(search)
    return {
        "--model": fingerprints(options.model),
        **{flag(name): value for name, value in given.items()},
        "captioner's version": __version__,
    }


def _write(
    file: IO[str], kind: str, entries: Iterable[Entry], options: CaptionOptions
) -> tuple[int, int]:
    """Write captions, and errors to standard error; return how many failed and were written."""
    failed, unsure, written = 0, 0, 0

    def succeeded() -> Iterator[Entry]:
        nonlocal failed, unsure, written
        for one in entries:
            if "error" in one:
                failed += 1
                warn(one["error"])
                continue
            found = len(one.get("captions", [one]))  # a row that is kept as it is
            unsure += not found
            written += found
            yield one

    WRITERS[kind](file, succeeded())
    if unsure:
        least = options.min_confidence
        warn(f"left out {counted(unsure, 'caption')} with a confidence below {least}")
    return failed, written


# --- videos --------------------------------------------------------------------------------------

_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def _interval(options: CaptionOptions) -> float | None:
    """The interval in seconds, None for shots; ConfigError for what videos do not have."""
    require_extra("video", "--every")
    photos = ("sidecar", "embed", "in_place", "resume", "annotations")
    refuse(options, photos, "is for photos; leave it out, or --every")
    if "-" in options.photos:
        raise ConfigError("videos cannot be read from standard input (-); give files")
    if options.every == "shot":
        return None
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(ms|s|m|min|h|)", str(options.every))
    if not found or not float(found[1]):
        raise ConfigError(f"--every is {options.every!r}; give a time such as 5s or 2m, or shot")
    return float(found[1]) * _UNITS[found[2]]


def _video_entries(
    model: Captioner, names: Mapping[Path, Name], options: CaptionOptions, search: SearchOptions
) -> Iterator[Entry]:
    """Caption frames; yield each caption with start and end (seconds), and what cannot be read."""
    from captioner.data.images import reduced_side
    from captioner.data.video import Video

    every, side = _interval(options), reduced_side(model.ensemble.image_size)
    for path, name in names.items():
        video = Video(path, every, side)
        results = model.stream(
            video.frames(), batch_size=options.batch_size, keep_photos=False, **vars(search)
        )
        bar = photo_bar(results, unit="frame", desc=path.name)
        found = (one.photo.info | entry(name, one.captions, options) for one in bar)
        for one in merged(found):
            bar.total = every and int(video.duration / every) + 1
            yield one
        if video.problem:
            yield {"error": video.problem}


def merged(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries; of neighbours with equal captions, the most confident, from first to last."""
    for _, group in groupby(entries, lambda one: [c["text"] for c in one["captions"]]):
        same = list(group)
        best = max(same, key=lambda one: [c["confidence"] or 0.0 for c in one["captions"]])
        span = {"start": same[0]["start"], "end": same[-1]["end"]}
        yield {"image": best["image"], **span, "captions": best["captions"]}


# --- photos by the million -----------------------------------------------------------------------

_RAY_FORMATS = ("jsonl", "parquet")
_FILES = (".jsonl", ".json", ".csv", ".txt", ".parquet")
_NOT_ON_RAY = (
    *option_fields(SidecarOptions), "annotations", "min_confidence", "if_unsure", "sentence_case",
    "every",
)  # fmt: skip


def _caption_on_ray(options: CaptionOptions, search: SearchOptions) -> int:
    """Caption all parts that are missing; print how many photos failed."""
    refuse(options, _NOT_ON_RAY, "cannot be combined with --engine ray")
    folder, kind = options.output or "-", options.format or "jsonl"
    if folder == "-" or Path(folder).suffix.lower() in _FILES:
        raise ConfigError("--engine ray writes a folder of parts; give -o FOLDER, no file name")
    if kind not in _RAY_FORMATS:
        raise ConfigError(f"--engine ray writes {' or '.join(_RAY_FORMATS)}, not {kind}")

    from captioner.bulk.captions import DONE, Output, WritePart, open_job
    from captioner.bulk.cluster import cluster, run_on_cluster
    from captioner.bulk.inputs import divide
    from captioner.bulk.progress import Log
    from captioner.inference.hub import is_hub_name

    output = Output(folder, kind)
    size = options.part_photos or 1000
    given = divide(
        _ray_inputs(options),
        size=size,
        recursive=options.recursive,
        image_column=options.image_column,
        key_column=options.key_column,
    )
    # For workers: a folder of this machine, or the hub's name.
    models = [m if is_hub_name(m) else str(find_model(m).absolute()) for m in options.model]
    device, precision = options.worker_device(options.device), options.precision
    model = ModelOptions(
        model=models, device=device, precision=precision, batch_size=options.batch_size
    )
    settings = settings_of(options, search) | {"--format": kind, "--part-photos": size}
    task = WritePart(output, model, settings["--model"], search)
    how: Any = {"size": size, "resume": options.resume, "force": options.force}
    with open_job(output, given, settings, **how) as parts:
        if (done := output.read(DONE)) is not None:
            warn(f"{folder} is complete; --force captions the photos again")
            return FAILED if json.loads(done)["failed"] else OK
        sizes, earlier = [part.photos for part in parts], {*output.parts()}

        def finished() -> str:
            return f"{len(output.parts())} of {len(parts)} parts are finished"

        with (
            cluster(options),
            photo_bar(total=None if None in sizes else sum(filter(None, sizes))) as bar,
            hint(finished, "with --resume", DataError),  # the cluster is lost
            Log(len(parts), len(earlier), warn) as log,
        ):
            for found in run_on_cluster(task, parts, options):
                new = output.part_name(found.part) not in earlier
                log.add(found.photos, found.failed, new=new)
                bar.update(found.photos)
                if found.failed:
                    more = f" (and {found.failed - 1} more)" if found.failed > 1 else ""
                    warn(f"{output.part_name(found.part)}: {found.error}{more}")
        photos, failed = log.photos, log.failed
        totals = {"parts": len(parts), "photos": photos, "failed": failed}
        output.write(DONE, json.dumps(totals).encode() + b"\n")
    failures = f'; {failed} failed (rows with "error")' if failed else ""
    warn(f"{folder}: {counted(photos, 'photo')} in {counted(len(parts), 'part')}{failures}")
    return FAILED if failed else OK


def _ray_inputs(options: CaptionOptions) -> list[str]:
    listed = [] if options.from_file is None else read_names(options.from_file)
    given = [*options.photos, *(name for _, name in listed)]
    if not given:
        raise ConfigError("no photos; give files, folders, Parquet or tar files, or --from-file")
    for name in given:
        if name == "-":
            raise ConfigError("--engine ray cannot read standard input (-); give files")
        if name.startswith(("http://", "https://")):
            raise ConfigError(f"{name} is a web address; give files or object storage (s3://...)")
    return given


# --- image ids -----------------------------------------------------------------------------------


def _names(
    photos: Iterable[Path], options: CaptionOptions, kind: str
) -> tuple[dict[Path, Name], int]:
    """Return each photo with its name in the output, and the number of photos without one."""
    if kind != "coco":
        return {photo: str(photo) for photo in photos}, 0
    known: dict[str, int] = {}
    if options.annotations is not None:
        from captioner.data.coco import read_photos

        listed = read_photos([options.annotations]).values()
        known = {one.path.name: one.image_id for one in listed}
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
    return {photo: image_id for image_id, photo in owners.items()}, unknown
