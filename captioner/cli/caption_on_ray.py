"""``captioner caption --engine ray``: caption millions of photos on a Ray cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captioner.bulk.options import CaptionRayOptions
from captioner.cli.console import hint, warn
from captioner.cli.main import OK, SOME_FAILED
from captioner.data.reading import photo_bar
from captioner.errors import ConfigError, DataError
from captioner.inference.find_model import find_model
from captioner.messages import counted
from captioner.options import ModelOptions, SearchOptions

_FORMATS = ("jsonl", "parquet")
_FILES = (".jsonl", ".json", ".csv", ".txt", ".parquet")


def caption_on_ray(
    inputs: Sequence[str],
    *,
    folder: str | None,
    kind: str | None,
    model: ModelOptions,
    search: SearchOptions,
    settings: dict[str, Any],
    workers: CaptionRayOptions,
    recursive: bool,
    resume: bool,
    force: bool,
) -> int:
    """Caption all unfinished parts of a job, and print how many photos failed.

    Args:
        inputs: Names of photos, folders, Parquet files and tar files.
        folder: The folder to write, on a disk or in object storage, or None if it is not set.
        kind: Format of the output files, one per part (default: jsonl).
        model: The model, with its name or path on this machine.
        search: Search options.
        settings: All settings that affect the captions, by option.
        workers: Options that set the workers and how they read the inputs.
        recursive: Search subfolders too.
        resume: Continue an earlier job in the folder.
        force: Start over, and delete the captions of an earlier job.

    Returns:
        The exit code.
    """
    folder, kind = folder or "-", kind or "jsonl"
    if folder == "-" or Path(folder).suffix.lower() in _FILES:
        raise ConfigError("--engine ray writes a folder, not a file; use -o FOLDER")
    if kind not in _FORMATS:
        formats = " or ".join(_FORMATS)
        raise ConfigError(f"--engine ray does not support --format {kind}; use --format {formats}")
    _check_names(inputs)

    from captioner.bulk.captions import DONE, Output, WritePart, open_job
    from captioner.bulk.cluster import cluster, run_on_cluster
    from captioner.bulk.inputs import divide
    from captioner.bulk.progress import Log
    from captioner.inference.hub import is_hub_name

    output = Output(folder, kind)
    size = workers.part_photos or 1000
    given = divide(
        inputs,
        size=size,
        recursive=recursive,
        image_column=workers.image_column,
        key_column=workers.key_column,
    )
    # Workers get an absolute path on this machine, or the name on the hub.
    models = [m if is_hub_name(m) else str(find_model(m).absolute()) for m in model.model]
    device = workers.worker_device(model.device)
    loaded = ModelOptions(
        model=models, device=device, precision=model.precision, batch_size=model.batch_size
    )
    settings = settings | {"--format": kind, "--part-photos": size}
    task = WritePart(output, loaded, settings["--model"], search)
    how: Any = {"size": size, "resume": resume, "force": force}
    with open_job(output, given, settings, **how) as parts:
        if (done := output.read(DONE)) is not None:
            warn(f"{folder} is already complete; to caption the photos again, add --force")
            return SOME_FAILED if json.loads(done)["failed"] else OK
        sizes, earlier = [part.photos for part in parts], {*output.parts()}

        def finished() -> str:
            return f"{len(output.parts())} of {len(parts)} output files are finished"

        with (
            cluster(workers),
            photo_bar(
                total=None if None in sizes else sum(filter(None, sizes)),
                shown=sys.stderr.isatty(),  # otherwise, Log reports the progress
            ) as bar,
            hint(finished, "with --resume", DataError),  # DataError: the cluster is lost
            Log(len(parts), len(earlier), warn) as log,
        ):
            for found in run_on_cluster(task, parts, workers):
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
    return SOME_FAILED if failed else OK


def _check_names(inputs: Sequence[str]) -> None:
    """Raise an error if the list of inputs is empty, or if workers cannot read an input."""
    if not inputs:
        raise ConfigError(
            "no photos were passed; pass photos, folders, Parquet files or tar files, or "
            "set --from-file"
        )
    for name in inputs:
        if name == "-":
            raise ConfigError("--engine ray cannot read standard input (-); pass files")
        if name.startswith(("http://", "https://")):
            raise ConfigError(
                f"{name} is a web address, which --engine ray cannot read; download the photo, or "
                "pass an address in object storage (s3://...)"
            )
