"""A toy encoder, photos of noise, and their features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from captioner.data.coco import CaptionedImage
from captioner.data.feature_writer import FeaturePlan, FeatureWriter
from captioner.data.features import FeatureCache, feature_fingerprint
from captioner.data.images import open_image
from captioner.model.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(image_size=32)
STATE = {"weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)}
PHOTOS, FLIPPED, BLOCK = 7, 5, 2


def encode(pixels: Tensor) -> Tensor:
    """A grid of 2 x 2 regions of 12 values, which differ for a flipped photo."""
    cells = pixels.float().unflatten(1, (2, 16)).unflatten(3, (2, 16))  # (B, 2, 16, 2, 16, 3)
    grid = torch.stack([cells[:, :, i, :, i] / 3 - i for i in range(4)], dim=-1)
    return grid.flatten(3).flatten(1, 2)


def noise_photos(folder: Path) -> list[CaptionedImage]:
    """Seven photos of noise; the last two are for validation, and therefore not flipped."""
    folder.mkdir()
    noise = np.random.default_rng(0).integers(256, size=(PHOTOS, 36, 40, 3), dtype=np.uint8)
    paths = [folder / f"{number}.png" for number in range(PHOTOS)]
    for path, pixels in zip(paths, noise, strict=True):
        Image.fromarray(pixels).save(path)
    return [CaptionedImage(10 + n, path, ("A dog.",)) for n, path in enumerate(paths)]


Plan = Callable[..., FeaturePlan]


def planner(images: list[CaptionedImage]) -> Plan:
    """``plan(dtype, **changes)``: a plan for these photos."""

    def build(dtype: str = "float32", **changes: Any) -> FeaturePlan:
        fingerprint = feature_fingerprint(
            "toy", STATE, PREPROCESSING, dtype=dtype, precision="fp32"
        )
        return replace(FeaturePlan(images, FLIPPED, (2, 2), 12, fingerprint), **changes)

    return build


def fill(folder: Path, plan: FeaturePlan, encoder: Any = encode, **options: Any) -> FeatureCache:
    for _ in FeatureWriter(folder, plan, **options).fill(encoder, PREPROCESSING, BLOCK):
        pass
    return FeatureCache.open(folder, plan.fingerprint)


def pixels_of(image: CaptionedImage) -> Tensor:
    return torch.from_numpy(PREPROCESSING.pixels(open_image(image.path)).copy())[None]


def rows_of(plan: FeaturePlan) -> list[tuple[int, bool]]:
    ids = [image.image_id for image in plan.images]
    return [(i, False) for i in ids] + [(i, True) for i in ids[: plan.flipped]]


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
