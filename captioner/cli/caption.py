"""``captioner caption``: caption photos and folders of photos."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from captioner.cli.caption_formats import WRITERS, Entry, choose_format, entry
from captioner.cli.caption_journal import Journal, Plan, journal_path, open_journal, unfinished
from captioner.cli.caption_ray import ENGINE, OPTIONS
from captioner.cli.caption_ray import run as run_on_ray
from captioner.cli.caption_sidecars import Store, check_photos, choose_store
from captioner.cli.main import FAILED, OK, flag
from captioner.cli.options import (
    add_model_options,
    add_search_options,
    check_batch_size,
    checked_search,
    output,
    refuse_overwrite,
    warn,
)
from captioner.cli.parser import Parser, new_parser
from captioner.cli.photos import STDIN, add_photo_options, find_photos, missing
from captioner.cli.ray_options import add_ray_options, check_ray_options
from captioner.data.progress import photo_bar
from captioner.errors import ConfigError, DataError
from captioner.options import SearchOptions

Named = tuple[Path, str | int]
"""A photo and its name in the output: the given path, or the image id in COCO results."""


@functools.cache
def parser() -> Parser:
    """Options of ``caption``."""
    new = new_parser(
        "caption",
        "Caption photos, folders of photos, or a photo from standard input (-).",
        "PHOTO|FOLDER|-... [options]",
    )
    add_photo_options(new)
    new.add_argument(
        "--annotations",
        metavar="FILE",
        help="COCO annotations file that maps file names to image ids, for --format coco",
    )
    written = new.add_argument_group("output")
    written.add_argument(
        "-o",
        "--output",
        help="output file; its extension selects the format: .txt, .json, .jsonl, .csv; with "
        "--engine ray a folder (default: standard output, which is also -)",
    )
    written.add_argument(
        "--format",
        choices=[*WRITERS, "parquet"],
        help="output format (default: by the extension, or text; --engine ray: jsonl or parquet)",
    )
    written.add_argument(
        "--min-confidence",
        type=float,
        metavar="P",
        help="mark captions with a confidence below P (0 to 1) as unsure; requires a "
        "calibrated model (the shipped model is)",
    )
    written.add_argument(
        "--resume", action="store_true", help="continue an interrupted run with the same -o FILE"
    )
    written.add_argument("--force", action="store_true", help="overwrite existing output")
    beside = new.add_argument_group("sidecar files and metadata")
    beside.add_argument(
        "--sidecar",
        choices=["txt", "xmp"],
        help="write each caption beside its photo: photo.txt, or the description in photo.xmp",
    )
    beside.add_argument(
        "--embed",
        metavar="FOLDER",
        help="copy the photos (JPEG, PNG) to this folder with the caption as their description "
        "(XMP, IPTC)",
    )
    beside.add_argument(
        "--in-place", action="store_true", help="embed the description in the photos themselves"
    )
    beside.add_argument(
        "--skip-existing", action="store_true", help="skip photos that already have such a caption"
    )
    add_search_options(new)
    add_model_options(new)
    add_ray_options(new, ENGINE, OPTIONS)
    return new


def main(argv: Sequence[str]) -> int:
    """Caption all photos; report those that failed."""
    options = parser().parse(argv)
    if options.engine == "ray":
        return _main_on_ray(options, argv)
    check_ray_options(options, OPTIONS)
    if options.format == "parquet":
        raise ConfigError("--format parquet is for --engine ray; add it, or give another format")
    store = choose_store(options)
    target = _check(options)
    search = checked_search(options)
    _check_count(options, search)
    _check_confidence(options, search)
    if options.resume and _is_complete(target, options):
        warn(f"{target} is complete, there is nothing to resume; --force captions the photos again")
        return OK

    photos = find_photos(options)
    named, failures = _names(photos.paths, options)
    failures += photos.failures
    found = [(photo, name) for photo, name in named if not missing(photo)]
    failures += len(named) - len(found)
    named = found
    if failures and not named:
        photos.report_skipped()
        return FAILED

    run = _Run(options, search, argv)
    with _terminate_as_interrupt():
        if store is not None:
            failures += run.keep(store, [photo for photo, _ in named])
        elif target is not None and _can_resume(target, options):
            failures += run.write(target, named)
        else:
            failed: list[Entry] = []
            with output(target) as file:
                WRITERS[options.format](file, _succeeded(run.entries(named), failed, report=True))
            failures += len(failed)
    photos.report_skipped()
    return FAILED if failures else OK


def _main_on_ray(options: Any, argv: Sequence[str]) -> int:
    search = checked_search(options)
    again = _Run(options, search, argv).command("--resume")
    with _terminate_as_interrupt():
        return run_on_ray(options, search, again)


def _check(options: Any) -> Path | None:
    """Check options that contradict each other; return the output file."""
    target = None if options.output in (None, "-") else Path(options.output)
    if target is not None and (target.is_dir() or str(options.output).endswith("/")):
        raise ConfigError(
            f"--output is {options.output}, a folder; give a file, such as "
            f"{target / 'captions.csv'}"
        )
    options.format = choose_format(options.format, target)
    if options.annotations and options.format != "coco":
        raise ConfigError(f"--annotations is for --format coco, not {options.format}; leave it out")
    check_batch_size(options.batch_size)
    if options.resume and target is None:
        raise ConfigError("--resume continues with an output file; give -o FILE too")
    if options.resume and "-" in options.photos:
        raise ConfigError("--resume cannot read standard input (-) again; give files")
    if target is None:
        return None
    refuse_overwrite(target, options.force or options.resume)  # open_journal checks it then
    kept = 0 if options.resume or options.force else unfinished(target)
    if kept:
        raise ConfigError(
            f"{journal_path(target)} has {kept} photos of an interrupted run; give --resume to "
            "continue it, or --force to start over"
        )
    return target


def _single_captions(options: Any) -> str | None:
    """The option that has room for one caption per photo only, if there is one."""
    beside = [flag(name) for name in ("sidecar", "embed", "in_place") if options[name]]
    return next(iter(beside), "--format coco" if options.format == "coco" else None)


def _check_count(options: Any, search: SearchOptions) -> None:
    """Check that there is one caption where there is room for one only."""
    where = _single_captions(options)
    if where is not None and search.num_captions > 1:
        raise ConfigError(f"{where} has one caption per photo; give --num-captions 1")


def _check_confidence(options: Any, search: SearchOptions) -> None:
    """Check that captions will have a confidence, if it is needed."""
    given = options.min_confidence
    if given is None:
        return
    if not 0 <= given <= 1:
        raise ConfigError(f"--min-confidence is {given:g}; give a number from 0 to 1")
    where = _single_captions(options)
    if where is not None:
        raise ConfigError(
            f"--min-confidence marks captions in text, JSON and CSV, not {where}; leave one out"
        )
    from captioner.inference.confidence import no_confidence, read_calibrator
    from captioner.inference.folder import SHIPPED_MODEL, find_model, read_search

    folders = options.model or [SHIPPED_MODEL]
    if len(folders) > 1:
        raise ConfigError("--min-confidence needs a single --model; an ensemble is not calibrated")
    folder = find_model(folders[0])
    styles = read_search(folder)[1].styles
    if reason := no_confidence(read_calibrator(folder), search, styles):
        raise ConfigError(f"--min-confidence: {reason}")


def _is_complete(target: Path | None, options: Any) -> bool:
    return (
        target is not None
        and target.exists()
        and not journal_path(target).exists()
        and not options.force
    )


def _can_resume(target: Path, options: Any) -> bool:
    """Whether an interrupted run can be continued: not into a pipe or a device, nor from one."""
    return "-" not in options.photos and (target.is_file() or not target.exists())


class _Run:
    """One call of the command: its options, and where its captions go."""

    def __init__(self, options: Any, search: SearchOptions, argv: Sequence[str]) -> None:
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

    def write(self, target: Path, named: Sequence[Named]) -> int:
        """Write an output file; after an interruption, keep what is finished.

        Returns:
            The number of photos that failed.
        """
        options = self.options
        plan = Plan(self._settings(), [p for p, _ in named], options.batch_size, options.force)
        failed: list[Entry] = []
        with (
            open_journal(target, plan, resume=options.resume) as journal,
            self._resume_hint(journal, target),
        ):
            for one in journal.entries():
                _report(one)  # again, so that every run names all that failed
            for one in self.entries(named[journal.finished :], journal.finished):
                _report(one)
                journal.add(one)
            with output(target) as file:
                WRITERS[options.format](file, _succeeded(journal.entries(), failed))
        return len(failed)

    def _settings(self) -> dict[str, Any]:
        """All that the captions depend on, besides the photos; by the name for messages."""
        from captioner.inference.folder import SHIPPED_MODEL, fingerprint
        from captioner.version import __version__

        options = self.options
        return {
            "--format": options.format,
            "--annotations": options.annotations,
            "--min-confidence": options.min_confidence,
            "--model": [fingerprint(folder) for folder in options.model or [SHIPPED_MODEL]],
            **_library(options),
            "--batch-size": options.batch_size,
            **{flag(name): value for name, value in dataclasses.asdict(self.search).items()},
            "captioner's version": __version__,
        }

    @contextmanager
    def _resume_hint(self, journal: Journal, target: Path) -> Iterator[None]:
        """After an interruption or error, print the command that continues."""
        try:
            yield
        except BaseException:
            if journal.saved:
                again = ", with the same names" if self.options.from_file == "-" else ""
                warn(
                    f"{journal.saved} of {journal.total} photos are finished and kept in "
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
        failed: list[Entry] = []
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
            WRITERS[self.options.format](sys.stdout, _succeeded(kept(), failed, report=True))
        except KeyboardInterrupt:
            if written and not self.options.force:
                warn(
                    f"{written} captions are written; to continue, run:\n  "
                    f"{self.command('--skip-existing')}"
                )
            raise
        return len(photos) - len(usable) + len(failed)

    def command(self, option: str) -> str:
        """The command that was run, with one more option."""
        more = [] if option in self.argv else [option]
        return shlex.join(["captioner", "caption", *self.argv, *more])


def _stored(store: Store, photo: Path, one: Entry) -> Entry:
    """Store a photo's caption; return its entry, or one with the error."""
    try:
        store.write(photo, one["captions"][0]["text"])
    except DataError as error:
        return {"image": str(photo), "error": str(error)}
    except OSError as error:
        return {"image": str(photo), "error": f"{store.target(photo)}: {error.strerror or error}"}
    return one


def _report(one: Entry) -> None:
    """Print the error of a photo that failed."""
    if "error" in one:
        warn(one["error"])


def _succeeded(
    entries: Iterable[Entry], failed: list[Entry], *, report: bool = False
) -> Iterator[Entry]:
    """Yield the entries with captions; collect, and on request print, those with an error."""
    for one in entries:
        if "error" not in one:
            yield one
            continue
        failed.append(one)
        if report:
            _report(one)


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


def _names(photos: Iterable[Path], options: Any) -> tuple[list[Named], int]:
    """Return each photo with its name in the output, and the number of photos without one."""
    if options.format != "coco":
        return [(photo, str(photo)) for photo in photos], 0
    find = _image_ids(options.annotations)
    named: list[Named] = []
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
            named.append((photo, image_id))
    return named, unknown


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


def _library(options: Any) -> dict[str, Any]:
    """What the model runs with, by the name for messages; torch only if the model needs it."""
    from captioner.inference.folder import SHIPPED_MODEL, is_exported

    if is_exported((options.model or [SHIPPED_MODEL])[0]):
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
