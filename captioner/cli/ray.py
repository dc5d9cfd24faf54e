"""``--engine ray`` of ``captioner caption`` and ``prepare features``: photos by the million."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from captioner.cli.arguments import flag, settings_of
from captioner.cli.main import FAILED, OK
from captioner.cli.outputs import hint, to_continue, warn
from captioner.cli.photos import read_names
from captioner.cli.sidecars import SidecarOptions
from captioner.errors import ConfigError, counted
from captioner.hardware import require_extra
from captioner.option_fields import Shown, option_fields
from captioner.options import Positive, SearchOptions

if TYPE_CHECKING:
    from captioner.bulk.cluster import Workers
    from captioner.cli.caption import CaptionOptions

PART_PHOTOS = 1000
FORMATS = ("jsonl", "parquet")
_NOT_YET = (
    *option_fields(SidecarOptions), "annotations", "min_confidence", "if_unsure", "sentence_case",
    "every",
)  # fmt: skip
"""Options for the plain command only."""

Share = Annotated[float, Interval(ge=0, lt=math.inf)]


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Millions of photos."""

    engine: Literal["plain", "ray"] = "plain"
    """ray: run on a Ray cluster, or with several processes of this machine. Captioning then reads
    photos, folders, Parquet files, WebDataset tars and object storage (s3://...), and writes
    numbered parts to the folder -o; features are those of the plain engine, read from a shared
    disk."""
    part_photos: Positive | None = None
    """Photos per part (default: 1000, of features 256); a tar file is always one part, and parts of
    features are whole batches."""
    workers: Positive | None = None
    """Number of processes (default: as many as fit)."""
    worker_cpus: Share | None = None
    """CPUs per worker (default: 1)."""
    worker_gpus: Share | None = None
    """GPUs per worker; 0.5: two workers share one (default: 0)."""
    ray_address: Annotated[str, Shown("HOST:PORT")] | None = None
    """Cluster to join, or auto (default: RAY_ADDRESS, or this machine)."""


@dataclass(frozen=True, kw_only=True)
class CaptionRayOptions(RayOptions):
    """Parquet files of photos (--engine ray)."""

    image_column: str | None = None
    """Parquet column that contains the photos as bytes, paths or URLs (default: detected)."""
    key_column: str | None = None
    """Parquet column that contains the photos' names for the output (default: the path, or file and
    row number)."""


def check_engine(options: RayOptions) -> bool:
    """Whether the engine is ray; check the options that only it has.

    Raises:
        ConfigError: They were given to the other engine, contradict each other, or Ray is not
            installed.
    """
    if options.engine == "plain":
        for name in option_fields(CaptionRayOptions).keys() - {"engine"}:
            if getattr(options, name, None) is not None:
                raise ConfigError(
                    f"{flag(name)} is for --engine ray; add it, or leave this option out"
                )
        return False
    if options.worker_cpus == 0 and not options.worker_gpus:
        raise ConfigError("--worker-cpus is 0; give 1 or more, or --worker-gpus")
    require_extra("ray", "--engine ray")
    return True


def chosen_workers(options: RayOptions) -> Workers:
    """The workers that the options describe."""
    from captioner.bulk.cluster import Workers

    cpus = options.worker_cpus
    return Workers(options.workers, 1 if cpus is None else cpus, options.worker_gpus or 0)


# --- captions ------------------------------------------------------------------------------------


def caption(options: CaptionOptions, search: SearchOptions, argv: Sequence[str]) -> int:
    """Caption all parts that are missing; print how many photos failed.

    Args:
        options: The command's.
        search: Search options.
        argv: The command's arguments as they were typed.
    """
    kind = _checked_format(options)
    from captioner.bulk.inputs import Columns, divide
    from captioner.bulk.job import DONE, Output, open_job

    output = Output(str(options.output), kind)
    if options.resume and (done := output.read(DONE)) is not None and not options.force:
        warn(f"{options.output} is complete; --force captions the photos again")
        return FAILED if json.loads(done)["failed"] else OK
    size = options.part_photos or PART_PHOTOS
    columns = Columns(options.image_column, options.key_column)
    parts = divide(_inputs(options), size=size, recursive=options.recursive, columns=columns)
    settings = settings_of(options, search) | {"--format": kind, "--part-photos": size}
    with open_job(output, parts, settings, resume=options.resume, force=options.force) as job:

        def finished() -> str:
            kept = f"{len(output.finished())} of {len(parts)} parts are finished"
            return to_continue(kept, argv, "--resume")

        with hint(finished):
            counts = _caption(job, options, search) if job.missing() else {}
        totals = job.finish(counts)
    failed = f'; {totals["failed"]} failed (rows with "error")' if totals["failed"] else ""
    photos, written = counted(totals["photos"], "photo"), counted(totals["parts"], "part")
    warn(f"{output.url}: {photos} in {written}{failed}")
    return FAILED if failed else OK


def _checked_format(options: CaptionOptions) -> str:
    """Check options that contradict each other; return the format."""
    for name in _NOT_YET:
        if getattr(options, name):
            raise ConfigError(f"{flag(name)} cannot be combined with --engine ray")
    if options.output in (None, "-"):
        raise ConfigError("--engine ray writes a folder of parts; give -o FOLDER")
    if Path(str(options.output)).suffix.lower() in (".jsonl", ".json", ".csv", ".txt", ".parquet"):
        raise ConfigError(f"--engine ray writes a folder of parts; -o {options.output} is a file")
    if options.format not in (None, *FORMATS):
        raise ConfigError(f"--engine ray writes {' or '.join(FORMATS)}, not {options.format}")
    return options.format or "jsonl"


def _inputs(options: CaptionOptions) -> list[str]:
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


def _caption(
    job: Any, options: CaptionOptions, search: SearchOptions
) -> dict[int, tuple[int, int]]:
    """Caption the missing parts with a progress bar; return the counts of each."""
    from captioner.bulk.captions import Model, caption_parts
    from captioner.bulk.cluster import cluster
    from captioner.data.progress import photo_bar
    from captioner.inference.folder import find_model
    from captioner.inference.hub import is_hub_name

    workers = chosen_workers(options)
    # For workers: a folder of this machine, or the hub's name.
    models = [m if is_hub_name(m) else str(find_model(m).absolute()) for m in options.model]
    model = Model(tuple(models), options.device, options.precision)
    counts: dict[int, tuple[int, int]] = {}
    sizes = [part.photos for part in job.missing()]
    bar = photo_bar(total=None if None in sizes else sum(sizes))
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
