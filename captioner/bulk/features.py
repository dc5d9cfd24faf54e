"""Computes features on a Ray cluster; the driver alone writes them.

Workers read photos from their paths, encode them in the batches of a single process, and return the
rows, which the driver writes in order. So the folder is that of ``captioner prepare features``
without Ray at every moment: complete or interrupted, byte for byte.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from captioner.bulk.cluster import run_on_cluster
from captioner.bulk.options import RayOptions
from captioner.data.features import (
    Blocks,
    EncodedPhoto,
    FeatureEncoder,
    FeatureWriter,
    difference,
    encode_photos,
)
from captioner.errors import DataError
from captioner.hardware import Precision
from captioner.options import TrainConfig
from captioner.training.setup import open_feature_encoder

PART_PHOTOS = 256


@dataclass
class EncodePhotos:
    """The task."""

    config: TrainConfig
    fingerprint: dict[str, str]
    device: str
    batch_size: int

    def __call__(self, item: tuple[list[Path], int]) -> list[list[EncodedPhoto]]:
        """Encode photos, and so many of them flipped."""
        paths, flipped = item
        return list(encode_photos(paths, self.encoder, self.batch_size, flipped))

    @cached_property
    def encoder(self) -> FeatureEncoder:
        """The encoder, checked to be the driver's."""
        dtype = self.fingerprint["dtype"]
        encoder = open_feature_encoder(self.config, dtype=dtype, device=self.device)
        if other := difference(encoder.fingerprint, self.fingerprint):
            raise DataError(
                f"{socket.gethostname()} has another encoder than the machine that started the "
                f"job ({other}); install the same captioner and timm, and give weights in a shared "
                "folder"
            )
        return encoder


def ray_blocks(
    writer: FeatureWriter, config: TrainConfig, workers: RayOptions, *, device: str, batch_size: int
) -> Callable[[int], Blocks]:
    """What ``FeatureWriter.write`` takes: the blocks, computed on the connected cluster.

    Workers use the precision of the writer's encoder. The photos that each takes at a time are
    whole batches.
    """
    key = writer.encoder.fingerprint
    training = replace(config.training, precision=cast(Precision, key["precision"]))
    task = EncodePhotos(replace(config, training=training), key, device, batch_size)
    size = -(-(workers.part_photos or PART_PHOTOS) // batch_size) * batch_size
    paths = [image.path for image in writer.images]

    def blocks(start: int) -> Blocks:
        starts = range(start, len(paths), size)
        items = [(paths[n : n + size], max(0, writer.flipped - n)) for n in starts]
        for part in run_on_cluster(task, items, workers, ordered=True):
            yield from part

    return blocks
