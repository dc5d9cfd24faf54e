"""Small decoders with random weights, larger than the initial ones, to make errors visible."""

from __future__ import annotations

from typing import Any

import torch

from captioner.model.build import build_decoder
from captioner.model.decoder import Decoder
from captioner.options import DecoderConfig


def random_decoder(
    features: int, words: int, regions: int, *, std: float = 0.7, **settings: Any
) -> Decoder:
    """In float32 and training mode, without dropout unless it is given."""
    sizes = {"embed_dim": 5, "hidden_dim": 6, "attention_dim": 7, "dropout": 0.0}
    decoder = build_decoder(DecoderConfig(**{**sizes, **settings}), features, words, regions)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=std)
    return decoder.train()
