"""``captioner caption``: caption photos, folders of photos, and videos."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from captioner.bulk.options import CaptionRayOptions, on_ray
from captioner.cli.arguments import command
from captioner.cli.caption_formats import CaptionFormat, FormatName, choose_format
from captioner.cli.caption_on_ray import caption_on_ray
from captioner.cli.console import hint, warn
from captioner.cli.image_ids import image_ids
from captioner.cli.journal import continued
from captioner.cli.main import NOT_DONE, OK, SOME_FAILED
from captioner.cli.output_files import new_file
from captioner.cli.photos import STDIN, PhotoOptions, find_photos, read_names
from captioner.cli.rows import Name, Row, Wording, make_row
from captioner.cli.search_options import checked_search
from captioner.cli.sidecars import choose_store
from captioner.cli.videos import read_interval, video_rows
from captioner.data.caption_store import PLACE, SidecarOptions, Store
from captioner.data.formats import FORMATS, VIDEO
from captioner.data.reading import photo_bar
from captioner.errors import ConfigError
from captioner.extras import require_extra
from captioner.files import atomic_open
from captioner.inference.folder import fingerprints
from captioner.messages import counted
from captioner.options import DeviceOptions, ModelOptions, SearchOptions
from captioner.schema import File, Shown, flag, flags_given, marked, option_fields, refuse
from captioner.version import __version__

if TYPE_CHECKING:
    from captioner.inference.captioner import Captioner


class NotFor(enum.Enum):
    """Modes of ``captioner caption``, which mark the options that a mode does not support."""

    RAY = "--engine ray"
    VIDEOS = "--every"


@dataclass(frozen=True, kw_only=True)
class CaptionOptions(CaptionRayOptions, ModelOptions, SidecarOptions, PhotoOptions):
    """Caption photos, folders of photos, a photo from standard input (-), or videos."""

    output: Annotated[str, Shown("FILE", ("-o", "--output"))] | None = None
    """Write captions to this file. Its extension selects the format, such as .csv or .jsonl
    (default: standard output, or -). With --engine ray, write to this folder."""
    format: Literal[FormatName, "parquet"] | None = None
    """Write captions in this format (default: the format that the extension of -o selects,
    otherwise text). With --engine ray, the format is jsonl (default) or parquet."""
    annotations: Annotated[File | None, NotFor.RAY, NotFor.VIDEOS] = None
    """With --format coco: look up the image id of each photo by its file name in this COCO captions
    file."""
    min_confidence: Annotated[float, Interval(ge=0, le=1), Shown("P"), NotFor.RAY] | None = None
    """Treat captions with a confidence below P (0 to 1) as unsure (see --if-unsure). Default: 0.5
    if --if-unsure is set, otherwise off. Needs a calibrated model, such as the shipped model."""
    if_unsure: Annotated[Literal["mark", "skip", "hedge"] | None, NotFor.RAY] = None
    """Choose what happens to unsure captions (see --min-confidence). mark: add a note in text, JSON
    and CSV (default). skip: leave them out. hedge: write "perhaps a dog ..."."""
    sentence_case: Annotated[bool, NotFor.RAY] = False
    """Begin captions with a capital letter and end them with a full stop."""
    every: Annotated[str, Shown("TIME"), NotFor.RAY] | None = None
    """Caption videos instead of photos. A time such as 5s, 0.5s or 2m: caption one frame per
    interval. shot: caption the first frame of each shot. If consecutive captions are identical,
    they become one."""
    resume: Annotated[bool, NotFor.VIDEOS] = False
    """Continue an earlier run: keep the captions in -o FILE, and caption only photos that are new
    or have changed since then."""
    force: bool = False
    """Overwrite existing output."""


@command("caption", "PHOTO|FOLDER|-... [options]", CaptionOptions, SearchOptions)
def caption(options: CaptionOptions, given: dict[str, Any]) -> int:
    """Caption all photos, and report failed photos."""
    if options.if_unsure and options.min_confidence is None:
        options = replace(options, min_confidence=0.5)
    if on_ray(options):
        return _on_ray(options, checked_search(options.model, given))
    store = choose_store(options, force=options.force)
    target = None if options.output in (None, "-") else Path(str(options.output))
    kind = choose_format(options.format, target)
    search = checked_search(options.model, given)
    _check(options, store, target, kind, search)
    wording = Wording(options.min_confidence, options.if_unsure, options.sentence_case)

    photos = find_photos(
        options.photos,
        options.from_file,
        recursive=options.recursive,
        formats=(VIDEO,) if options.every else FORMATS,
        copies=store.folder if store else None,
    )
    if kind.name == "vtt" and len(photos.paths) > 1:
        raise ConfigError(
            f"--format vtt supports one video, not {len(photos.paths)}; use --format json instead"
        )
    names: dict[Path, Name] = {photo: str(photo) for photo in photos.paths}
    if kind.name == "coco":
        names = {**image_ids(photos.paths, options.annotations)}
    if not names:
        photos.report_skipped()
        return NOT_DONE
    failures = photos.failures + len(photos.paths) - len(names)
    lasting = "-" not in options.photos and not options.every

    new = 0

    def captioned(needed: Sequence[Path]) -> Iterator[Row]:
        """Caption these photos, and count the captions."""
        nonlocal new
        some = {photo: names[photo] for photo in needed}
        for row in _rows(some, options, search, wording, options.every):
            new += len(row.get("captions", ()))
            yield row

    with ExitStack() as stack:
        if store is not None:
            store.subfolders = photos.subfolders
            # With -o FILE, the new file would lack the photos that are already finished.
            if target is None:
                stack.enter_context(hint(store.finished, "with --skip-existing"))
            rows = store.write_all(names, captioned)
        elif target and lasting and (target.is_file() or not target.exists()):
            how: Any = {"kind": kind, "resume": options.resume, "force": options.force}
            settings = _settings(options, search, wording)
            rows = stack.enter_context(continued(target, names, captioned, settings, **how))
        else:  # a pipe, a device or a video cannot be continued
            rows = captioned([*names])
        file = sys.stdout if target is None else stack.enter_context(atomic_open(target))
        failed, written = _write(file, kind, rows, options.min_confidence)
        failures += failed
    if target is not None and target.is_file() and store is None:
        added = f", {new:,} of them new" if options.resume else ""
        warn(f"{counted(written, 'caption')} written to {target}{added}")
    photos.report_skipped()
    return SOME_FAILED if failures else OK


# --- checks --------------------------------------------------------------------------------------


def _check(
    options: CaptionOptions,
    store: Store | None,
    target: Path | None,
    kind: CaptionFormat,
    search: SearchOptions,
) -> None:
    """Check that the options fit together, and that the output format can express them."""
    if options.every:
        _check_videos(options)
    if kind.name != "coco":
        refuse(
            options,
            ("annotations",),
            f"is for --format coco, not {kind.name}; leave out --annotations",
        )
    if kind.medium == "videos" and not options.every:
        raise ConfigError(
            f"--format {kind.name} is for videos; add --every 5s, or use --format json"
        )
    if kind.medium == "photos" and options.every:
        raise ConfigError(
            f"--format {kind.name} is for photos; leave out --every, or use --format json"
        )
    if store is not None:
        refuse(options, ("resume",), "needs -o FILE; use --skip-existing instead")
        if "-" in options.photos:
            raise ConfigError(
                "a photo from standard input (-) has no file name, so no caption "
                "can be stored next to it; save the photo as a file and pass its name"
            )
        if store.existing == "skip" and options.output is not None:
            raise ConfigError(
                f"--skip-existing and -o {options.output} cannot be combined, because the file "
                "would not contain the captions of skipped photos; use only one of them"
            )
    if target is None:
        refuse(options, ("resume",), "continues an output file, but -o is not set; add -o FILE")
    _check_output(options, store, target)
    beside = flags_given(options, *marked(CaptionOptions, PLACE))
    for single in [*beside, *[f"--format {kind.name}"] * kind.one_caption]:
        if search.num_captions > 1:
            raise ConfigError(
                f"{single} writes one caption per photo, but --num-captions is "
                f"{search.num_captions}; set --num-captions to 1"
            )
        if search.keywords and not beside:
            raise ConfigError(
                f"{single} cannot store keywords; leave out --keywords, or use --format json"
            )
        if options.min_confidence is not None and options.if_unsure in (None, "mark"):
            raise ConfigError(
                f"{single} cannot mark the unsure captions of --min-confidence; add "
                "--if-unsure skip or --if-unsure hedge"
            )


def _check_output(options: CaptionOptions, store: Store | None, target: Path | None) -> None:
    """Raise an error if the output file cannot be written, or would be overwritten."""
    kept = options.force or options.resume
    if target is not None and target.is_file() and store is None and not (options.every or kept):
        raise ConfigError(
            f"{target} exists; add --resume to keep its captions and to caption only new photos, "
            "or --force to caption all photos again and to lose corrected captions"
        )
    new_file(target, kept)


def _check_videos(options: CaptionOptions) -> None:
    """Raise an error if an option is set that does not support videos."""
    require_extra("video", "--every")
    for_photos = marked(CaptionOptions, PLACE) + marked(CaptionOptions, NotFor.VIDEOS)
    refuse(options, for_photos, "is for photos, but --every is for videos; use only one of them")
    if "-" in options.photos:
        raise ConfigError("videos cannot be read from standard input (-); pass files")
    read_interval(str(options.every))


# --- captions ------------------------------------------------------------------------------------


def _rows(
    names: Mapping[Path, Name],
    options: ModelOptions,
    search: SearchOptions,
    wording: Wording,
    every: str | None,
) -> Iterator[Row]:
    """Load the model, and yield a row for each photo, or for each caption of a video."""
    if not names:
        return
    from captioner.inference.captioner import load

    model = load(*options.model, device=options.device, precision=options.precision)
    if wording.min_confidence is not None and (why := model.no_confidence(search)):
        raise ConfigError(f"--min-confidence needs the confidence of captions, but {why}")
    how: Any = {"batch_size": options.batch_size, "search": search, "wording": wording}
    if every:
        yield from video_rows(model, names, read_interval(every), **how)
    else:
        yield from _photo_rows(model, names, **how)


def _photo_rows(
    model: Captioner,
    names: Mapping[Path, Name],
    *,
    batch_size: int,
    search: SearchOptions,
    wording: Wording,
) -> Iterator[Row]:
    """Caption photos, and yield the captions or error of each photo as soon as it is ready."""
    sources = (sys.stdin.buffer if photo == STDIN else photo for photo in names)
    results = model.stream(sources, batch_size=batch_size, keep_photos=False, **vars(search))
    bar = photo_bar(results, shown=len(names) > 1, total=len(names))
    for name, result in zip(names.values(), bar, strict=True):
        if result.error is not None:
            yield {"image": name, "error": str(result.error)}
        elif not result.captions[0].words:
            problem = (
                "the model wrote an empty caption; add --min-length 1, or train the model longer"
            )
            yield {"image": name, "error": f"{name}: {problem}"}
        else:
            yield make_row(name, result.captions, wording)


def _settings(options: ModelOptions, search: SearchOptions, wording: Wording) -> dict[str, Any]:
    """Return all settings that affect the captions, by option.

    A run can be continued only if all of these settings are unchanged.
    """
    how = {name: getattr(options, name) for name in option_fields(DeviceOptions)}
    given = how | wording._asdict() | dataclasses.asdict(search)
    return {
        "--model": fingerprints(options.model),
        **{flag(name): value for name, value in given.items()},
        "captioner's version": __version__,
    }


def _write(
    file: IO[str],
    kind: CaptionFormat,
    rows: Iterable[Row],
    min_confidence: float | None,
) -> tuple[int, int]:
    """Write captions to the file, and errors to standard error and to formats that have them.

    Returns:
        The number of failed photos, and the number of written captions.
    """
    failed, unsure, written = 0, 0, 0

    def counting() -> Iterator[Row]:
        """Yield the rows to write, and count them."""
        nonlocal failed, unsure, written
        for row in rows:
            if "error" in row:
                failed += 1
                warn(row["error"])
                if kind.has_errors:
                    yield {"image": row["image"], "captions": [], "error": row["error"]}
                continue
            if "kept" in row:  # a row of the earlier file, which a spreadsheet may have emptied
                found = int(bool(row["text"].strip()))
            else:
                found = len(row["captions"])
                unsure += not found
            written += found
            yield row

    kind.write(file, counting())
    if unsure:
        warn(
            f"{counted(unsure, 'caption')} left out, because the confidence is below "
            f"{min_confidence}"
        )
    return failed, written


# --- photos by the million -----------------------------------------------------------------------


def _on_ray(options: CaptionOptions, search: SearchOptions) -> int:
    """Check the options, caption on a cluster, and return the exit code."""
    unsupported = (*option_fields(SidecarOptions), *marked(CaptionOptions, NotFor.RAY))
    refuse(options, unsupported, "cannot be combined with --engine ray; use only one of them")
    listed = [] if options.from_file is None else read_names(options.from_file)
    return caption_on_ray(
        [*options.photos, *(name for _, name in listed)],
        folder=options.output,
        kind=options.format,
        model=options,
        search=search,
        settings=_settings(options, search, Wording()),
        workers=options,
        recursive=options.recursive,
        resume=options.resume,
        force=options.force,
    )
