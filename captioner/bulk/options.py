"""Options of work on a Ray cluster: captioning, and the features of photos."""

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
    worker_cpus: Share = 1.0
    """CPUs per worker."""
    worker_gpus: Share = 0.0
    """GPUs per worker; 0.5: two workers share one."""
    ray_address: Annotated[str, Shown("HOST:PORT")] | None = None
    """Cluster to join, or auto (default: RAY_ADDRESS, or this machine)."""

    def worker_device(self, device: str) -> str:
        """The device of workers: not ``auto`` on a GPU that is for others."""
        return "cpu" if device == "auto" and not self.worker_gpus else device


@dataclass(frozen=True, kw_only=True)
class CaptionRayOptions(RayOptions):
    """Parquet files of photos (--engine ray)."""

    image_column: str | None = None
    """Parquet column that contains the photos as bytes, paths or URLs (default: detected)."""
    key_column: str | None = None
    """Parquet column that contains the photos' names for the output (default: the path, or file and
    row number)."""


def on_ray(options: RayOptions) -> bool:
    """Return whether the engine is ray.

    Raises:
        ConfigError: Ray is not installed, a worker has no processor, or an option of Ray is given
            without it.
    """
    if options.engine == "plain":
        of_ray = option_fields(CaptionRayOptions)
        for name in changed(options):
            if name in of_ray:
                raise ConfigError(f"{name} is for engine ray; add it, or leave this option out")
        return False
    if not (options.worker_cpus or options.worker_gpus):
        raise ConfigError("worker_cpus is 0; give 1 or more, or worker_gpus")
    require_extra("ray", "engine ray")
    return True
