"""Plans a cache of features: which photos, and the encoder of a training run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from captioner.config import TrainConfig
from captioner.data.features import feature_fingerprint
from captioner.data.preprocessing import Preprocessing
from captioner.errors import DataError
from captioner.hardware import autocast, pick_device, pick_precision
from captioner.prepare.feature_writer import Encode, FeaturePlan, FeatureWriter
from captioner.training.build import open_encoder
from captioner.training.data import read_data


class FeatureJob(NamedTuple):
    """What to encode, and how."""

    plan: FeaturePlan
    preprocessing: Preprocessing
    encode: Encode


def plan_features(
    config: TrainConfig, *, dtype: str = "float16", device: str = "auto"
) -> FeatureJob:
    """Plan the features that training with a config reads.

    Args:
        config: The training photos come first, then the other validation photos. With
            ``data.horizontal_flip``, training photos are also encoded flipped.
        dtype: Storage type: float16, bfloat16 or float32.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ...

    Raises:
        CaptionerError: The settings, captions or weights cannot be used.
    """
    chosen = pick_device(device)
    train, val = read_data(replace(config.data, shards=None))
    torch.manual_seed(config.training.seed)  # random weights must be those of the run
    encoder, preprocessing = open_encoder(config)
    stage = config.encoder.finetune_from  # training never changes the layers before it
    feature_dim, grid = encoder.measure(preprocessing.image_size, stage)
    precision = pick_precision(config.training.precision, chosen)
    state = encoder.state_dict() if stage is None else encoder.state_until(stage)
    fingerprint = feature_fingerprint(
        encoder.name, state, preprocessing, dtype=dtype, precision=precision, stage=stage
    )
    encoder.to(chosen).to(memory_format=torch.channels_last)

    def encode(pixels: Tensor) -> Tensor:
        with torch.inference_mode(), autocast(precision, chosen):
            images = preprocessing.normalize(pixels.to(chosen))
            found = encoder(images) if stage is None else encoder.run_until(images, stage)
            features: Tensor = found[0]
            return features

    known = {(image.image_id, image.path) for image in train}
    images = [*train, *(image for image in val if (image.image_id, image.path) not in known)]
    flipped = len(train) if config.data.horizontal_flip else 0
    plan = FeaturePlan(images, flipped, grid, feature_dim, fingerprint)
    return FeatureJob(plan, preprocessing, encode)


def check_disk_space(writer: FeatureWriter) -> None:
    """Check that the features fit on the disk.

    Raises:
        DataError: They do not.
    """
    folder = writer.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    needed, free = writer.missing_bytes, shutil.disk_usage(existing).free
    if needed > free:
        raise DataError(
            f"{writer.folder}: {needed:,} bytes are needed, but {free:,} are free; free some "
            "space, or give a folder on another disk or a smaller --dtype"
        )
