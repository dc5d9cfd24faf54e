"""Test encoder and decoder as one module."""

from __future__ import annotations

import torch
from toy_encoder import PatchEncoder

from captioner.model.caption_model import CaptionModel
from captioner.model.preprocessing import Preprocessing
from captioner.options import DecoderConfig


def test_pixels_and_cached_features_give_the_same_features() -> None:
    config = DecoderConfig(embed_dim=2, hidden_dim=4, attention_dim=5)
    model = CaptionModel(PatchEncoder(3), config, Preprocessing(image_size=32), 8)
    pixels = torch.randint(256, (2, 32, 32, 3), dtype=torch.uint8)
    features = model.encode(pixels)

    assert features.shape == (2, 4, 3)
    assert torch.equal(model.to_features(pixels), features)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        seen = model.to_features(features.to(dtype))
        assert torch.equal(seen, features.to(dtype).float())
        with torch.autocast("cpu", torch.bfloat16):
            assert model.to_features(features.to(dtype)).dtype == torch.bfloat16
