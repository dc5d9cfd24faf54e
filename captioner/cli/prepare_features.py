"""``captioner prepare features``: cache the features of a frozen encoder on disk."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioner.cli.main import FAILED, INTERRUPTED, OK
from captioner.cli.options import DEVICE_HELP, check_batch_size, warn
from captioner.cli.ray_options import add_ray_options, check_ray_options, chosen_workers
from captioner.cli.train_options import (
    TrainParser,
    add_settings,
    new_train_parser,
    read_train_config,
)
from captioner.errors import counted

if TYPE_CHECKING:
    from captioner.data.feature_writer import FeaturePlan, FeatureWriter, Progress
    from captioner.options import TrainConfig

PART_PHOTOS = 256
ENGINE = (
    "ray: encode on a Ray cluster, or with several processes of this machine; the folder is the "
    "same. Machines read the photos from a shared disk"
)
"""Help of ``--engine``."""
RAY_OPTIONS: dict[str, tuple[Any, str]] = {
    "part_photos": (
        int,
        f"photos per task of a worker, rounded up to whole batches (default: {PART_PHOTOS})",
    ),
}
"""Options for the engine ray only, besides those of `captioner.cli.ray_options`."""


@functools.cache
def parser() -> TrainParser:
    """Options of the command: every field of ``TrainConfig`` and its own."""
    new = new_train_parser(
        "prepare features",
        "Compute the features of a frozen encoder (or of its frozen stages) once, instead of in "
        "every epoch. After an interruption, run the same command again to continue.",
        "[CONFIG.yaml] -o FOLDER [options]",
    )
    new.add_argument(
        "-o", "--output", metavar="FOLDER", required=True, help="folder for the features"
    )
    new.add_argument(
        "--dtype",
        choices=["float16", "bfloat16", "float32"],
        default="float16",
        help="storage type; float32 takes twice the space",
    )
    new.add_argument("--batch-size", type=int, default=32, help="number of photos per batch")
    new.add_argument("--device", default="auto", help=DEVICE_HELP)
    new.add_argument("--force", action="store_true", help="replace existing features")
    add_ray_options(new, ENGINE, RAY_OPTIONS)
    add_settings(
        new,
        [
            "data.images",
            "data.train_annotations",
            "data.val_annotations",
            "data.horizontal_flip",
            "encoder.name",
            "encoder.weights",
            "encoder.image_size",
            "encoder.finetune_from",
        ],
    )
    return new


def run(options: Any) -> int:
    """Encode the photos that are missing."""
    config, own = read_train_config(parser(), options)
    folder, batch_size = Path(own["output"]), own["batch_size"]
    check_batch_size(batch_size)

    check_ray_options(own, RAY_OPTIONS)
    on_ray = own["engine"] == "ray"
    device = own["device"]
    if on_ray and device == "auto" and not own["worker_gpus"]:
        device = "cpu"  # not a GPU of others

    from captioner.data.feature_writer import FeatureWriter
    from captioner.training.cache import check_disk_space, plan_features

    job = plan_features(config, dtype=own["dtype"], device=device)
    writer = FeatureWriter(folder, job.plan, force=own["force"])
    if writer.complete and not own["force"]:
        return _report(folder, job.plan)
    _print_size(folder, job.plan)
    check_disk_space(writer)
    try:
        if on_ray:
            _fill_on_ray(writer, config, own, device)
        else:
            _fill(writer, writer.fill(job.encoder.encode, job.encoder.preprocessing, batch_size))
    except KeyboardInterrupt:
        warn("interrupted; run the same command again to continue")
        return INTERRUPTED
    except OSError as error:  # without a file name when the disk is full
        error.filename = error.filename or str(folder)
        raise
    return _report(folder, job.plan)


def _print_size(folder: Path, plan: FeaturePlan) -> None:
    photos = counted(len(plan.images), "photo")
    flipped = f" and {plan.flipped} flipped" if plan.flipped else ""
    print(
        f"{photos}{flipped}, each {plan.grid[0]} x {plan.grid[1]} regions of "
        f"{plan.feature_dim} {plan.fingerprint['dtype']}: {plan.bytes:,} bytes in {folder}",
        file=sys.stderr,
    )


def _fill_on_ray(
    writer: FeatureWriter, config: TrainConfig, own: dict[str, Any], device: str
) -> None:
    from captioner.bulk.actors import cluster
    from captioner.bulk.features import ray_blocks

    workers = chosen_workers(own)
    blocks = ray_blocks(
        writer,
        config,
        device=device,
        batch_size=own["batch_size"],
        part_photos=own["part_photos"] or PART_PHOTOS,
        workers=workers,
    )
    with cluster(own["ray_address"], workers):
        _fill(writer, writer.write(blocks))


def _fill(writer: FeatureWriter, written: Progress) -> None:
    """Write blocks with a progress bar."""
    from tqdm import tqdm

    bar = tqdm(
        total=len(writer.plan.images),
        initial=len(writer.records),
        desc="encoding",
        unit="photo",
        dynamic_ncols=True,
    )
    with bar:
        for count, errors in written:
            for error in errors:
                warn(f"{error}; skipped")
            bar.update(count)


def _report(folder: Path, plan: FeaturePlan) -> int:
    """Open the folder as training will, and print what it holds."""
    from captioner.data.features import FeatureCache

    cache = FeatureCache.open(folder, plan.fingerprint)
    cache.check(plan.images)
    missing = [image for image in plan.images if not cache.has(image.image_id)]
    skipped = f"; {len(missing)} skipped (first: {missing[0].path})" if missing else ""
    print(f"{folder}: features of {len(plan.images) - len(missing)} photos{skipped}")
    return FAILED if missing else OK
