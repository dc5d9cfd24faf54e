"""``captioner caption --engine ray``: caption photos by the million."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captioner.bulk.options import CaptionRayOptions
from captioner.cli.console import hint, warn
from captioner.cli.main import FAILED, OK
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
    """Caption all parts that are missing; print how many photos failed.

    Args:
        inputs: Names of photos, folders, Parquet and tar files.
        folder: The folder to write, on a disk or in object storage; see ``bulk.captions``.
        kind: Format of the parts (default: jsonl).
        model: The model, as named on this machine.
        search: Search options.
        settings: All that captions depend on besides the photos, by option.
        workers: The workers, and how they read the inputs.
        recursive: Search subfolders too.
        resume: Continue a job.
        force: Start over.

    Returns:
        The exit code.
    """
    folder, kind = folder or "-", kind or "jsonl"
    if folder == "-" or Path(folder).suffix.lower() in _FILES:
        raise ConfigError("--engine ray writes a folder of parts; give -o FOLDER, no file name")
    if kind not in _FORMATS:
        raise ConfigError(f"--engine ray writes {' or '.join(_FORMATS)}, not {kind}")
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
    # For workers: a folder of this machine, or the hub's name.
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
            warn(f"{folder} is complete; --force captions the photos again")
            return FAILED if json.loads(done)["failed"] else OK
        sizes, earlier = [part.photos for part in parts], {*output.parts()}

        def finished() -> str:
            return f"{len(output.parts())} of {len(parts)} parts are finished"

        with (
            cluster(workers),
            photo_bar(total=None if None in sizes else sum(filter(None, sizes))) as bar,
            hint(finished, "with --resume", DataError),  # the cluster is lost
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
    return FAILED if failed else OK


def _check_names(inputs: Sequence[str]) -> None:
    """Raise ConfigError without inputs, or for an input that workers cannot read."""
    if not inputs:
        raise ConfigError("no photos; give files, folders, Parquet or tar files, or --from-file")
    for name in inputs:
        if name == "-":
            raise ConfigError("--engine ray cannot read standard input (-); give files")
        if name.startswith(("http://", "https://")):
            raise ConfigError(f"{name} is a web address; give files or object storage (s3://...)")
