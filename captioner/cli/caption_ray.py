"""``captioner caption --engine ray``: photos by the million, on one machine or many."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioner.cli.main import FAILED, OK, flag
from captioner.cli.options import warn
from captioner.cli.photos import read_names
from captioner.cli.ray_options import check_ray_options, chosen_workers
from captioner.errors import ConfigError, counted
from captioner.options import SearchOptions

if TYPE_CHECKING:
    from captioner.bulk.job import Output

PART_PHOTOS = 1000
FORMATS = ("jsonl", "parquet")
ENGINE = (
    "ray: caption on a Ray cluster, or with several processes of this machine. Reads photos, "
    "folders, Parquet files, WebDataset tars and object storage (s3://...), and writes numbered "
    "parts to the folder -o"
)
"""Help of ``--engine``."""
OPTIONS: dict[str, tuple[Any, str]] = {
    "part_photos": (
        int,
        f"photos per part; a tar file is always one part (default: {PART_PHOTOS})",
    ),
    "image_column": (
        str,
        "Parquet column that contains the photos as bytes, paths or URLs (default: detected)",
    ),
    "key_column": (
        str,
        "Parquet column that contains the photos' names for the output (default: the path, or file "
        "and row number)",
    ),
}
"""Options for this engine only, besides those of `captioner.cli.ray_options`."""
_NOT_YET = ("annotations", "sidecar", "embed", "in_place", "skip_existing", "min_confidence")
"""Options for the plain command only."""


def run(options: Any, search: SearchOptions, again: str) -> int:
    """Caption all parts that are missing; print how many photos failed.

    Args:
        options: The command's.
        search: Search options.
        again: The command that continues after an interruption.
    """
    _check(options)
    from captioner.bulk.inputs import Columns, divide
    from captioner.bulk.job import DONE, Output, open_job

    output = Output(options.output, options.format)
    if options.resume and (done := output.read(DONE)) is not None and not options.force:
        warn(f"{options.output} is complete; --force captions the photos again")
        return FAILED if json.loads(done)["failed"] else OK
    size = PART_PHOTOS if options.part_photos is None else options.part_photos
    columns = Columns(options.image_column, options.key_column)
    parts = divide(_inputs(options), size=size, recursive=options.recursive, columns=columns)
    settings = _settings(options, search, size)
    with open_job(output, parts, settings, resume=options.resume, force=options.force) as job:
        try:
            counts = _caption(job, options, search)
        except BaseException:
            if count := len(output.finished()):
                warn(f"{count} of {len(parts)} parts are finished; to continue, run:\n  {again}")
            raise
        totals = job.finish(counts)
    return _report(totals, output)


def _check(options: Any) -> None:
    """Check options that contradict each other; fill in defaults."""
    check_ray_options(options, OPTIONS)
    for name in _NOT_YET:
        if options[name]:
            raise ConfigError(f"{flag(name)} cannot be combined with --engine ray")
    if options.output in (None, "-"):
        raise ConfigError("--engine ray writes a folder of parts; give -o FOLDER")
    if Path(options.output).suffix.lower() in (".jsonl", ".json", ".csv", ".txt", ".parquet"):
        raise ConfigError(f"--engine ray writes a folder of parts; -o {options.output} is a file")
    options.format = options.format or "jsonl"
    if options.format not in FORMATS:
        raise ConfigError(f"--engine ray writes {' or '.join(FORMATS)}, not {options.format}")


def _inputs(options: Any) -> list[str]:
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


def _settings(options: Any, search: SearchOptions, size: int) -> dict[str, Any]:
    """All that the captions depend on, besides the photos; by the name for messages."""
    from captioner.inference.folder import SHIPPED_MODEL, fingerprint
    from captioner.version import __version__

    return {
        "--format": options.format,
        "--part-photos": size,
        "--model": [fingerprint(folder) for folder in options.model or [SHIPPED_MODEL]],
        "--device": options.device,
        "--precision": options.precision,
        "--batch-size": options.batch_size,
        **{flag(name): value for name, value in dataclasses.asdict(search).items()},
        "captioner's version": __version__,
    }


def _caption(job: Any, options: Any, search: SearchOptions) -> dict[int, tuple[int, int]]:
    """Caption the missing parts with a progress bar; return the counts of each."""
    if not job.missing:
        return {}
    from captioner.bulk.actors import cluster
    from captioner.bulk.captions import Model, caption_parts
    from captioner.data.progress import photo_bar

    workers = chosen_workers(options)
    model = Model(tuple(map(_everywhere, options.model)), options.device, options.precision)
    counts: dict[int, tuple[int, int]] = {}
    sizes = [part.photos for part in job.missing]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    bar = photo_bar(total=total)
    with cluster(options.ray_address, workers), bar:
        for found in caption_parts(
            job, model, search, batch_size=options.batch_size, workers=workers
        ):
            counts[found.part] = (found.photos, found.failed)
            bar.update(found.photos)
            if found.failed:
                more = f" (and {found.failed - 1} more)" if found.failed > 1 else ""
                warn(f"{job.output.part_name(found.part)}: {found.error}{more}")
    return counts


def _everywhere(model: str) -> str:
    """A model's name for workers: a folder of this machine, or the hub's name."""
    from captioner.inference.folder import find_model
    from captioner.inference.hub import is_hub_name

    return model if is_hub_name(model) else str(find_model(model).absolute())


def _report(totals: dict[str, int], output: Output) -> int:
    failed = totals["failed"]
    warn(
        f"{output.url}: {counted(totals['photos'], 'photo')} in {counted(totals['parts'], 'part')}"
        + (f'; {failed} failed (rows with "error")' if failed else "")
    )
    return FAILED if failed else OK
