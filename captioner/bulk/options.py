"""Options for captioning photos and computing features on a Ray cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from captioner.errors import ConfigError
from captioner.extras import require_extra
from captioner.options import Positive
from captioner.schema import Shown, changed, option_fields

Share = Annotated[float, Interval(ge=0, lt=math.inf)]
"""A number of CPUs or GPUs, which may be a fraction."""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Jobs with millions of photos."""

    engine: Literal["plain", "ray"] = "plain"
    """Choose where the work runs. plain: in this process. ray: on a Ray cluster, or in several
    processes on this machine. With ray, captioner caption also reads Parquet files, WebDataset tar
    files and object storage (s3://...), and it writes numbered files to the folder -o. captioner
    prepare features computes the same features with both engines. With ray, it needs the photos on
    a disk that all machines share."""
    part_photos: Positive | None = None
    """Divide the work into parts of this many photos (default: 1000 for captions, 256 for
    features). A worker process computes one part at a time. A tar file is always one part. For
    features, the number is rounded up to whole batches."""
    workers: Positive | None = None
    """Run this many worker processes (default: as many as fit into the cluster)."""
    worker_cpus: Share = 1.0
    """Reserve this number of CPUs for each worker process."""
    worker_gpus: Share = 0.0
    """Reserve this number of GPUs for each worker process. With 0.5, two processes share a GPU."""
    ray_address: Annotated[str, Shown("HOST:PORT")] | None = None
    """Join the Ray cluster at this address. auto: the running cluster that Ray finds (default: the
    environment variable RAY_ADDRESS if it is set, otherwise a new cluster on this machine)."""

    def worker_device(self, device: str) -> str:
        """Return the device of the workers. ``auto`` is the CPU if no GPU is reserved for them."""
        return "cpu" if device == "auto" and not self.worker_gpus else device


@dataclass(frozen=True, kw_only=True)
class CaptionRayOptions(RayOptions):
    """Parquet files of photos (--engine ray)."""

    image_column: Annotated[str, Shown("NAME")] | None = None
    """Read the photos from this Parquet column, as bytes, paths or URLs (default: detect the
    column)."""
    key_column: Annotated[str, Shown("NAME")] | None = None
    """Read the names of the photos from this Parquet column. The output contains these names
    (default: the photo's path, or the Parquet file and row number)."""


def on_ray(options: RayOptions) -> bool:
    """Return whether the engine is ray.

    Raises:
        ConfigError: Ray is not installed, or no CPU or GPU is reserved for workers. Or an option
            for Ray is set, but the engine is plain.
    """
    if options.engine == "plain":
        of_ray = option_fields(CaptionRayOptions)
        for name in changed(options):
            if name in of_ray:
                raise ConfigError(
                    f"{name} needs the engine 'ray'; set engine to 'ray', or leave out {name}"
                )
        return False
    if not (options.worker_cpus or options.worker_gpus):
        raise ConfigError("worker_cpus and worker_gpus are both 0; set one of them above 0")
    require_extra("ray", "the engine 'ray'")
    return True
