"""Functions that compute the features of photos on a Ray cluster.

Workers read photos from their paths, encode them in the same batches as a single process would, and
return the rows. Only the driver (the process that started the job) writes the rows, in their order.
At any moment, even after an interruption, the folder therefore has exactly the bytes that
``captioner prepare features`` writes without Ray.
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
"""Number of photos in an item of work, by default. It is rounded up to whole batches."""


@dataclass
class EncodePhotos:
    """The task that encodes photos on a worker."""

    config: TrainConfig
    """Configuration of the training run that will use the features."""
    fingerprint: dict[str, str]
    """Fingerprint of the driver's encoder (see ``feature_fingerprint``)."""
    device: str
    """Device of the encoder."""
    batch_size: int
    """Number of photos that are encoded together. Each batch becomes a block."""

    def __call__(self, item: tuple[list[Path], int]) -> list[list[EncodedPhoto]]:
        """Encode the photos of an item, and return them in blocks.

        An item is a pair of the photos' paths and the number of photos, from the first, that are
        also encoded flipped.
        """
        paths, flipped = item
        return list(encode_photos(paths, self.encoder, self.batch_size, flipped))

    @cached_property
    def encoder(self) -> FeatureEncoder:
        """The encoder. It is loaded on first use and compared with the driver's encoder.

        Raises:
            DataError: The encoder on this machine differs from the driver's encoder.
        """
        dtype = self.fingerprint["dtype"]
        encoder = open_feature_encoder(self.config, dtype=dtype, device=self.device)
        if other := difference(encoder.fingerprint, self.fingerprint):
            raise DataError(
                f"{socket.gethostname()} has a different encoder from the machine that started the "
                f"job ({other}); install the same versions of captioner and timm, and put the "
                "weights into a shared folder"
            )
        return encoder


def ray_blocks(
    writer: FeatureWriter, config: TrainConfig, workers: RayOptions, *, device: str, batch_size: int
) -> Callable[[int], Blocks]:
    """Return a function for ``FeatureWriter.write`` that computes blocks on the cluster.

    Args:
        writer: The writer. Workers use the precision of its encoder.
        config: Configuration of the training run that will use the features.
        workers: Number and resources of the workers.
        device: Device of the workers' encoders.
        batch_size: Number of photos in a batch. Each worker encodes whole batches.
    """
    key = writer.encoder.fingerprint
    training = replace(config.training, precision=cast(Precision, key["precision"]))
    task = EncodePhotos(replace(config, training=training), key, device, batch_size)
    size = -(-(workers.part_photos or PART_PHOTOS) // batch_size) * batch_size
    paths = [image.path for image in writer.images]

    def blocks(start: int) -> Blocks:
        """Yield blocks of encoded photos, from the photo at index ``start`` on."""
        starts = range(start, len(paths), size)
        items = [(paths[n : n + size], max(0, writer.flipped - n)) for n in starts]
        for part in run_on_cluster(task, items, workers, ordered=True):
            yield from part

    return blocks
