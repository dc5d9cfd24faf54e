"""Computes features on a Ray cluster; the driver alone writes them.

Actors read photos from their paths, encode them in the batches of a single process, and return the
rows, which the driver writes in order. So the folder is that of ``captioner prepare features``
without Ray at every moment: complete or interrupted, byte for byte.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from captioner.bulk.cluster import Found, Worker, Workers, run_on_cluster
from captioner.data.feature_writer import Block, Blocks, FeatureWriter, encode_photos
from captioner.data.features import Record, difference
from captioner.errors import DataError
from captioner.hardware import Precision
from captioner.options import TrainConfig
from captioner.training.cache import FeatureEncoder, open_feature_encoder


def ray_blocks(
    writer: FeatureWriter,
    config: TrainConfig,
    *,
    device: str,
    batch_size: int,
    part_photos: int,
    workers: Workers,
) -> Callable[[int], Blocks]:
    """What ``FeatureWriter.write`` takes: the blocks, computed on the connected cluster.

    Args:
        writer: Writes the blocks.
        config: Of the training run; the workers use the precision of the writer's plan.
        device: Device of each worker.
        batch_size: Photos encoded together.
        part_photos: Photos that a worker takes at a time, rounded up to whole batches.
        workers: How many there are, and what each may use.
    """
    plan = writer.plan
    training = replace(config.training, precision=cast(Precision, plan.fingerprint["precision"]))
    size = -(-part_photos // batch_size) * batch_size
    count = len(plan.images)

    def blocks(start: int) -> Blocks:
        items = [
            json.dumps(
                {
                    "paths": [str(image.path) for image in plan.images[n : n + size]],
                    "flipped": max(0, plan.flipped - n),
                }
            )
            for n in range(start, count, size)
        ]
        results = run_on_cluster(
            _FeatureEncoder,
            items,
            workers,
            arguments={
                "config": replace(config, training=training),
                "fingerprint": dict(plan.fingerprint),
                "device": device,
                "batch_size": batch_size,
            },
            missing=lambda: f"{count - len(writer.records)} of {count} photos are missing",
            again="run the same command again",
            ordered=True,
        )
        for found, data in results:
            records = [Record(*record) for record in found["records"]]
            rows = np.frombuffer(data, np.uint8).reshape(found["rows"], -1 if data else 0)
            yield Block(records, rows, found["errors"])

    return blocks


class _FeatureEncoder(Worker):
    """Encodes lists of photos."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        fingerprint: dict[str, str],
        device: str,
        batch_size: int,
    ) -> None:
        self.config, self.fingerprint = config, fingerprint
        self.device, self.batch_size = device, batch_size
        self.encoder: FeatureEncoder | None = None

    def process(self, item: str) -> Iterator[Found]:
        if self.encoder is None:
            self.encoder = self._open()
        part = json.loads(item)
        for block in encode_photos(
            [Path(path) for path in part["paths"]],
            self.encoder.encode,
            self.encoder.preprocessing,
            batch_size=self.batch_size,
            flipped=part["flipped"],
            dtype=self.fingerprint["dtype"],
        ):
            found = {"records": block.records, "errors": block.errors, "rows": len(block.rows)}
            yield found, block.rows.tobytes()

    def _open(self) -> FeatureEncoder:
        encoder = open_feature_encoder(
            self.config, dtype=self.fingerprint["dtype"], device=self.device
        )
        if other := difference(encoder.fingerprint, self.fingerprint):
            raise DataError(
                f"{socket.gethostname()} has another encoder than the machine that started the "
                f"job ({other}); install the same captioner and timm, and give weights in a shared "
                "folder"
            )
        return encoder
