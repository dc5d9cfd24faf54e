"""Plans a cache of features: which photos, and the encoder of a training run."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from captioner.data.feature_writer import Encode, FeaturePlan
from captioner.hardware import autocast, pick_device, pick_precision
from captioner.model.preprocessing import Preprocessing
from captioner.options import TrainConfig
from captioner.training.data import features_key, read_data
from captioner.training.setup import open_encoder


class FeatureEncoder(NamedTuple):
    """The encoder of a training run, and what its features look like; see `FeaturePlan`."""

    preprocessing: Preprocessing
    encode: Encode
    grid: tuple[int, int]
    feature_dim: int
    fingerprint: dict[str, str]


def open_feature_encoder(config: TrainConfig, *, dtype: str, device: str) -> FeatureEncoder:
    """Open the encoder that training with a config uses; ``dtype`` is the storage type."""
    chosen = pick_device(device)
    torch.manual_seed(config.training.seed)  # random weights must be those of the run
    encoder, preprocessing = open_encoder(config)
    stage = config.encoder.finetune_from  # training never changes the layers before it
    feature_dim, grid = encoder.measure(preprocessing.image_size, stage)
    precision = pick_precision(config.training.precision, chosen)
    key = features_key(encoder, preprocessing, stage, dtype=dtype, precision=precision)
    encoder.to(chosen).to(memory_format=torch.channels_last)

    def encode(pixels: Tensor) -> Tensor:
        with torch.inference_mode(), autocast(precision, chosen):
            images = preprocessing.normalize(pixels.to(chosen))
            found = encoder(images) if stage is None else encoder.run_until(images, stage)
            features: Tensor = found[0]
            return features

    return FeatureEncoder(preprocessing, encode, grid, feature_dim, key)


def plan_features(
    config: TrainConfig, *, dtype: str = "float16", device: str = "auto"
) -> tuple[FeaturePlan, FeatureEncoder]:
    """Plan the features that training with a config reads.

    The training photos come first, then the other validation photos. With ``data.horizontal_flip``,
    training photos are also encoded flipped.
    """
    pick_device(device)  # an error before the captions are read
    train, val = read_data(replace(config.data, shards=None))
    encoder = open_feature_encoder(config, dtype=dtype, device=device)
    known = {(image.image_id, image.path) for image in train}
    images = [*train, *(image for image in val if (image.image_id, image.path) not in known)]
    flipped = len(train) if config.data.horizontal_flip else 0
    plan = FeaturePlan(images, flipped, encoder.grid, encoder.feature_dim, encoder.fingerprint)
    return plan, encoder
