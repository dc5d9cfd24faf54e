"""``captioner caption --engine ray``: photos by the million."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from captioner.bulk.cluster import CaptionRayOptions, RayOptions
from captioner.cli.arguments import refuse, settings_of
from captioner.cli.main import FAILED, OK
from captioner.cli.outputs import hint, to_continue, warn
from captioner.cli.photos import read_names
from captioner.cli.sidecars import SidecarOptions
from captioner.errors import ConfigError, DataError, counted
from captioner.hardware import require_extra
from captioner.option_fields import option_fields
from captioner.options import ModelOptions, SearchOptions

if TYPE_CHECKING:
    from captioner.cli.caption import CaptionOptions

PART_PHOTOS = 1000
FORMATS = ("jsonl", "parquet")
_FILES = (".jsonl", ".json", ".csv", ".txt", ".parquet")
_PLAIN = (
    *option_fields(SidecarOptions), "annotations", "min_confidence", "if_unsure", "sentence_case",
    "every",
)  # fmt: skip
"""Options for the plain command only."""


def check_engine(options: RayOptions) -> bool:
    """Whether the engine is ray; check that it is installed, or that its options are not given."""
    if options.engine == "plain":
        why = "is for --engine ray; add it, or leave this option out"
        refuse(options, option_fields(CaptionRayOptions), why)
        return False
    if not (options.worker_cpus or options.worker_gpus):
        raise ConfigError("--worker-cpus is 0; give 1 or more, or --worker-gpus")
    require_extra("ray", "--engine ray")
    return True


def caption(options: CaptionOptions, search: SearchOptions, argv: Sequence[str]) -> int:
    """Caption all parts that are missing; print how many photos failed."""
    refuse(options, _PLAIN, "cannot be combined with --engine ray")
    folder, kind = options.output or "-", options.format or "jsonl"
    if folder == "-" or Path(folder).suffix.lower() in _FILES:
        raise ConfigError("--engine ray writes a folder of parts; give -o FOLDER, no file name")
    if kind not in FORMATS:
        raise ConfigError(f"--engine ray writes {' or '.join(FORMATS)}, not {kind}")

    from captioner.bulk.captions import WritePart, fingerprints
    from captioner.bulk.cluster import cluster, run_on_cluster
    from captioner.bulk.inputs import divide
    from captioner.bulk.job import DONE, Output, open_job
    from captioner.data.progress import photo_bar
    from captioner.inference.folder import find_model
    from captioner.inference.hub import is_hub_name

    output = Output(folder, kind)
    if options.resume and not options.force and (done := output.read(DONE)) is not None:
        warn(f"{folder} is complete; --force captions the photos again")
        return FAILED if json.loads(done)["failed"] else OK
    size = options.part_photos or PART_PHOTOS
    parts = divide(
        _inputs(options),
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
    task = WritePart(output, model, fingerprints(models), search)
    settings = settings_of(options, search) | {"--format": kind, "--part-photos": size}
    sizes = [part.photos for part in parts]
    bar = photo_bar(total=None if None in sizes else sum(filter(None, sizes)))
    photos = failed = 0

    def finished() -> str:
        kept = f"{len(output.parts())} of {len(parts)} parts are finished"
        return to_continue(kept, argv, "--resume")

    with (
        open_job(output, parts, settings, resume=options.resume, force=options.force),
        cluster(options),
        bar,
        hint(finished, DataError),
    ):
        for found in run_on_cluster(task, parts, options):
            photos, failed = photos + found.photos, failed + found.failed
            bar.update(found.photos)
            if found.failed:
                more = f" (and {found.failed - 1} more)" if found.failed > 1 else ""
                warn(f"{output.part_name(found.part)}: {found.error}{more}")
        totals = {"parts": len(parts), "photos": photos, "failed": failed}
        output.write(DONE, json.dumps(totals).encode() + b"\n")
    failures = f'; {failed} failed (rows with "error")' if failed else ""
    warn(f"{folder}: {counted(photos, 'photo')} in {counted(len(parts), 'part')}{failures}")
    return FAILED if failed else OK


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
