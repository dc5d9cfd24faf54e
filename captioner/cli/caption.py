"""``captioner caption``: caption photos and folders of photos."""

from __future__ import annotations

import dataclasses
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval

from captioner.cli import ray
from captioner.cli.arguments import Parser, checked_search, flag, model_folders
from captioner.cli.formats import WRITERS, Entry, choose_format, entry
from captioner.cli.journal import Journal, journal_path, open_journal, unfinished
from captioner.cli.main import FAILED, OK
from captioner.cli.outputs import output, refuse_overwrite, warn
from captioner.cli.photos import STDIN, PhotoOptions, find_photos, missing
from captioner.cli.sidecars import SidecarOptions, Store, check_photos, choose_store
from captioner.data.progress import photo_bar
from captioner.errors import ConfigError, DataError
from captioner.option_fields import File, Shown
from captioner.options import ModelOptions, SearchOptions

Named = tuple[Path, str | int]
"""A photo and its name in the output: the given path, or the image id in COCO results."""


@dataclass(frozen=True, kw_only=True)
class CaptionOptions(ray.CaptionRayOptions, ModelOptions, SidecarOptions, PhotoOptions):
    """Caption photos, folders of photos, or a photo from standard input (-)."""

    output: Annotated[str, Shown("FILE", ("-o", "--output"))] | None = None
    """Output file; its extension selects the format: .txt, .json, .jsonl, .csv; with --engine ray a
    folder (default: standard output, which is also -)."""
    format: Literal["text", "json", "jsonl", "csv", "coco", "parquet"] | None = None
    """Output format (default: by the extension, or text; --engine ray: jsonl or parquet)."""
    annotations: File | None = None
    """COCO annotations file that maps file names to image ids, for --format coco."""
    min_confidence: Annotated[float, Interval(ge=0, le=1), Shown("P")] | None = None
    """Mark captions with a confidence below P (0 to 1) as unsure; requires a calibrated model (the
    shipped model is)."""
    resume: bool = False
    """Continue an interrupted run with the same -o FILE."""
    force: bool = False
    """Overwrite existing output."""


def caption_parser() -> Parser[CaptionOptions]:
    """Options of ``caption``."""
    return Parser("caption", "PHOTO|FOLDER|-... [options]", CaptionOptions, SearchOptions)


def caption(argv: Sequence[str]) -> int:
    """Caption all photos; report those that failed."""
    options, given = caption_parser().parse(argv)
    on_ray = ray.check_engine(options)
    store = None if on_ray else choose_store(options)
    if not on_ray:
        options = _checked(options)
    search = checked_search(options.model, given)
    run = _Run(options, search, argv)
    with _terminate_as_interrupt():
        if on_ray:
            return ray.caption(options, search, run.command("--resume"))
        _check_search(options, search)
        return _caption(run, options, store)


def _caption(run: _Run, options: CaptionOptions, store: Store | None) -> int:
    target = None if options.output is None else Path(options.output)
    resumed = options.resume and not options.force
    if resumed and target and target.exists() and not journal_path(target).exists():
        warn(f"{target} is complete, there is nothing to resume; --force captions the photos again")
        return OK
    photos = find_photos(options)
    named, unnamed = _names(photos.paths, options)
    found = [(photo, name) for photo, name in named if not missing(photo)]
    failures = photos.failures + unnamed + len(named) - len(found)
    if found or not failures:
        if store is not None:
            failures += run.keep(store, [photo for photo, _ in found])
        elif target and "-" not in options.photos and (target.is_file() or not target.exists()):
            failures += run.write(target, found)
        else:  # a pipe or a device, or a photo from one: cannot be continued
            with output(target) as file:
                failures += run.print(file, run.entries(found))
    photos.report_skipped()
    return FAILED if failures else OK


# --- checks of options ---------------------------------------------------------------------------


def _checked(options: CaptionOptions) -> CaptionOptions:
    """Check options that contradict each other; fill in the format."""
    if options.format == "parquet":
        raise ConfigError("--format parquet is for --engine ray; add it, or give another format")
    target = None if options.output in (None, "-") else Path(options.output)
    if target is not None and (target.is_dir() or str(options.output).endswith("/")):
        raise ConfigError(
            f"--output is {options.output}, a folder; give a file, such as "
            f"{target / 'captions.csv'}"
        )
    kind: Any = choose_format(options.format, target)
    if options.annotations and kind != "coco":
        raise ConfigError(f"--annotations is for --format coco, not {kind}; leave it out")
    if options.resume and target is None:
        raise ConfigError("--resume continues with an output file; give -o FILE too")
    if options.resume and "-" in options.photos:
        raise ConfigError("--resume cannot read standard input (-) again; give files")
    if target is not None:
        refuse_overwrite(target, options.force or options.resume)  # open_journal checks it then
        kept = 0 if options.resume or options.force else unfinished(target)
        if kept:
            raise ConfigError(
                f"{journal_path(target)} has {kept} photos of an interrupted run; give --resume to "
                "continue it, or --force to start over"
            )
    return replace(options, format=kind, output=None if target is None else options.output)


def _check_search(options: CaptionOptions, search: SearchOptions) -> None:
    """Check that there is room for all captions, and that they have a confidence if needed."""
    beside = [flag(name) for name in ("sidecar", "embed", "in_place") if getattr(options, name)]
    beside += ["--format coco"] if options.format == "coco" else []
    if beside and search.num_captions > 1:
        raise ConfigError(f"{beside[0]} has one caption per photo; give --num-captions 1")
    if options.min_confidence is None:
        return
    if beside:
        raise ConfigError(
            f"--min-confidence marks captions in text, JSON and CSV, not {beside[0]}; leave one out"
        )
    from captioner.inference.confidence import no_confidence, read_calibrator
    from captioner.inference.folder import find_model, read_search

    if len(options.model) > 1:
        raise ConfigError("--min-confidence needs a single --model; an ensemble is not calibrated")
    folder = find_model(model_folders(options.model)[0])
    styles = read_search(folder)[1].styles
    if reason := no_confidence(read_calibrator(folder), search, styles):
        raise ConfigError(f"--min-confidence: {reason}")


# --- captions ------------------------------------------------------------------------------------


class _Run:
    """One call of the command: its options, and where its captions go."""

    def __init__(self, options: CaptionOptions, search: SearchOptions, argv: Sequence[str]) -> None:
        self.options, self.search, self.argv = options, search, argv

    def entries(self, named: Sequence[Named], finished: int = 0) -> Iterator[Entry]:
        """Load the model and yield each photo's captions, or its error, as they are generated.

        Args:
            named: The photos.
            finished: Number of photos before these that an interrupted run has captioned.
        """
        if not named:
            return
        from captioner.inference.captioner import load

        options = self.options
        model = load(*options.model, device=options.device, precision=options.precision)
        sources = (sys.stdin.buffer if photo == STDIN else photo for photo, _ in named)
        results = model.stream(sources, batch_size=options.batch_size, **vars(self.search))
        total = finished + len(named)
        bar = photo_bar(results, shown=total > 1, total=total, initial=finished)
        for (_, name), result in zip(named, bar, strict=True):
            if result.error is None:
                yield entry(name, result.captions, options.min_confidence)
            else:
                yield {"image": name, "error": str(result.error)}

    def print(self, file: Any, entries: Iterable[Entry], *, report: bool = True) -> int:
        """Write the captions in the chosen format, and the errors to standard error.

        Returns:
            The number of photos that failed.
        """
        failed = 0

        def succeeded() -> Iterator[Entry]:
            nonlocal failed
            for one in entries:
                if "error" in one:
                    failed += 1
                    if report:
                        warn(one["error"])
                else:
                    yield one

        WRITERS[str(self.options.format)](file, succeeded())
        return failed

    def write(self, target: Path, named: Sequence[Named]) -> int:
        """Write an output file; after an interruption, keep what is finished.

        Returns:
            The number of photos that failed.
        """
        options, photos = self.options, [photo for photo, _ in named]
        with (
            open_journal(
                target, self._settings(), photos, resume=options.resume, force=options.force
            ) as journal,
            self._resume_hint(journal, target, len(named)),
        ):
            for one in journal.entries():  # again, so that every run names all that failed
                if "error" in one:
                    warn(one["error"])
            for one in self.entries(named[journal.finished :], journal.finished):
                if "error" in one:
                    warn(one["error"])
                journal.add(one)
            with output(target) as file:
                return self.print(file, journal.entries(), report=False)

    def _settings(self) -> dict[str, Any]:
        """All that the captions depend on, besides the photos; by the name for messages."""
        from captioner.inference.folder import fingerprint
        from captioner.version import __version__

        options = self.options
        given = dataclasses.asdict(self.search)
        given |= {name: getattr(options, name) for name in _SETTINGS}
        return {
            **{flag(name): value for name, value in given.items()},
            "--model": [fingerprint(folder) for folder in model_folders(options.model)],
            **_library(options),
            "captioner's version": __version__,
        }

    @contextmanager
    def _resume_hint(self, journal: Journal, target: Path, total: int) -> Iterator[None]:
        """After an interruption or error, print the command that continues."""
        try:
            yield
        except BaseException:
            if journal.saved:
                again = ", with the same names" if self.options.from_file == "-" else ""
                warn(
                    f"{journal.saved} of {total} photos are finished and kept in "
                    f"{journal_path(target)}; to continue{again}, run:\n  "
                    f"{self.command('--resume')}"
                )
            raise

    def keep(self, store: Store, photos: Sequence[Path]) -> int:
        """Write captions in or beside the photos, and print them.

        A batch is captioned if any of its photos needs a caption, and is the same in every run:
        captions may depend on the others in the batch in the last digits (bf16).

        Returns:
            The number of photos that failed.
        """
        usable, existing = check_photos(store, photos, self.options)
        size = self.options.batch_size
        batches = [usable[start : start + size] for start in range(0, len(usable), size)]
        needed = [photo for b in batches if not existing.issuperset(b) for photo in b]
        if existing:
            warn(f"{len(existing)} of {len(usable)} photos already have a caption; skipped")
        written = 0

        def kept() -> Iterator[Entry]:
            nonlocal written
            captioned = self.entries([(photo, str(photo)) for photo in needed])
            for photo, one in zip(needed, captioned, strict=True):
                if photo in existing:
                    continue
                stored = one if "error" in one else _stored(store, photo, one)
                written += "error" not in stored
                yield stored

        try:
            failed = self.print(sys.stdout, kept())
        except KeyboardInterrupt:
            if written and not self.options.force:
                warn(
                    f"{written} captions are written; to continue, run:\n  "
                    f"{self.command('--skip-existing')}"
                )
            raise
        return len(photos) - len(usable) + failed

    def command(self, option: str) -> str:
        """The command that was run, with one more option."""
        more = [] if option in self.argv else [option]
        return shlex.join(["captioner", "caption", *self.argv, *more])


_SETTINGS = ("format", "annotations", "min_confidence", "batch_size")


def _stored(store: Store, photo: Path, one: Entry) -> Entry:
    """Store a photo's caption; return its entry, or one with the error."""
    try:
        store.write(photo, one["captions"][0]["text"])
    except DataError as error:
        return {"image": str(photo), "error": str(error)}
    except OSError as error:
        return {"image": str(photo), "error": f"{store.target(photo)}: {error.strerror or error}"}
    return one


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM (kill, a shutdown, a batch system) interrupt as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        old = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, where signals cannot be handled
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _library(options: CaptionOptions) -> dict[str, Any]:
    """What the model runs with, by the name for messages; torch only if the model needs it."""
    from captioner.inference.folder import is_exported

    if is_exported(model_folders(options.model)[0]):
        from importlib.metadata import version

        given = {"--device": options.device, "--precision": options.precision}
        return {**given, "onnxruntime's version": version("onnxruntime")}
    import torch

    from captioner.hardware import pick_device, pick_precision

    device = pick_device(options.device)
    return {
        "--device": device.type,
        "--precision": pick_precision(options.precision, device),
        "torch's version": torch.__version__,
    }


# --- image ids -----------------------------------------------------------------------------------


def _names(photos: Iterable[Path], options: CaptionOptions) -> tuple[list[Named], int]:
    """Return each photo with its name in the output, and the number of photos without one."""
    if options.format != "coco":
        return [(photo, str(photo)) for photo in photos], 0
    find = _image_ids(options.annotations)
    owners: dict[int, Path] = {}
    unknown = 0
    for photo in photos:
        image_id = find(photo)
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
