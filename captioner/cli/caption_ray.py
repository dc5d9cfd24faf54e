"""``captioner caption --engine ray``: photos by the million, on one machine or many."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioner.cli.main import FAILED, OK, flag
from captioner.cli.options import warn
from captioner.cli.parser import Parser
from captioner.cli.photos import read_names
from captioner.config import SearchOptions
from captioner.errors import ConfigError
from captioner.extras import require_extra

if TYPE_CHECKING:
    from captioner.bulk.job import Output

PART_PHOTOS = 1000
FORMATS = ("jsonl", "parquet")
_OWN = (
    "workers", "worker_cpus", "worker_gpus", "part_photos", "image_column", "key_column",
    "ray_address",
)  # fmt: skip
"""Options for this engine only."""
_NOT_YET = ("annotations", "sidecar", "embed", "in_place", "skip_existing", "min_confidence")
"""Options for the plain command only."""


def add_ray_options(parser: Parser) -> None:
    """``--engine`` and the options of the engine ray."""
    group = parser.add_argument_group("millions of photos")
    group.add_argument(
        "--engine",
        choices=["plain", "ray"],
        default="plain",
        help="ray: caption on a Ray cluster, or with several processes of this machine. Reads "
        "photos, folders, Parquet files, WebDataset tars and object storage (s3://...), and writes "
        "numbered parts to the folder -o",
    )
    group.add_argument(
        "--workers", type=int | None, help="number of processes (default: as many as there is room)"
    )
    group.add_argument("--worker-cpus", type=float | None, help="CPUs per worker (default: 1)")
    group.add_argument(
        "--worker-gpus",
        type=float | None,
        help="GPUs per worker; 0.5: two workers share one (default: 0)",
    )
    group.add_argument(
        "--part-photos",
        type=int | None,
        help=f"photos per part; a tar file is always one part (default: {PART_PHOTOS})",
    )
    group.add_argument(
        "--image-column",
        help="column of Parquet files with the photos: bytes, paths or URLs (default: detected)",
    )
    group.add_argument(
        "--key-column",
        help="column of Parquet files with the photos' names in the output (default: the path, or "
        "file and row number)",
    )
    group.add_argument(
        "--ray-address",
        help="cluster to join: auto, or HOST:PORT (default: RAY_ADDRESS, or this machine)",
    )


def refuse_ray_options(options: Any) -> None:
    """Check that the plain engine was given no options of the other.

    Raises:
        ConfigError: It was.
    """
    for name in _OWN:
        if options[name] is not None:
            raise ConfigError(f"{flag(name)} is for --engine ray; add it, or leave this option out")
    if options.format == "parquet":
        raise ConfigError("--format parquet is for --engine ray; add it, or give another format")


def run(options: Any, search: SearchOptions, again: str) -> int:
    """Caption all parts that are missing; print how many photos failed.

    Args:
        options: The command's.
        search: Search options.
        again: The command that continues after an interruption.
    """
    _check(options)
    require_extra("ray", "--engine ray")
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
    for name in ("workers", "part_photos"):
        if options[name] is not None and options[name] < 1:
            raise ConfigError(f"{flag(name)} is {options[name]}; give 1 or more")
    for name in ("worker_cpus", "worker_gpus"):
        if options[name] is not None and not 0 <= options[name] < float("inf"):
            raise ConfigError(f"{flag(name)} is {options[name]}; give 0 or more")
    if options.worker_cpus == 0 and not options.worker_gpus:
        raise ConfigError("--worker-cpus is 0; give 1 or more, or --worker-gpus")


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
    from captioner import __version__
    from captioner.model_config import SHIPPED_MODEL, fingerprint

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
    from tqdm import tqdm

    from captioner.ray import Model, Workers, caption_parts, cluster

    workers = Workers(
        options.workers,
        1 if options.worker_cpus is None else options.worker_cpus,
        options.worker_gpus or 0,
    )
    folders = tuple(str(Path(folder).absolute()) for folder in options.model)
    model = Model(folders, options.device, options.precision)
    counts: dict[int, tuple[int, int]] = {}
    sizes = [part.photos for part in job.missing]
    bar = tqdm(
        total=None if None in sizes else sum(size for size in sizes if size is not None),
        unit="photo",
        disable=None,
        dynamic_ncols=True,
    )
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


def _report(totals: dict[str, int], output: Output) -> int:
    failed = totals["failed"]
    warn(
        f"{output.url}: {totals['photos']} photos in {totals['parts']} parts"
        + (f"; {failed} failed, their rows have an error" if failed else "")
    )
    return FAILED if failed else OK
