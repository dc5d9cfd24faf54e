"""Guidance with whole models: a blank photo."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from captioner.inference.captioner import Captioner
from captioner.inference.folder import StoredModel
from captioner.model.preprocessing import Preprocessing


@pytest.fixture
def sharp(stored_model: StoredModel) -> StoredModel:
    """A model whose captions depend on the photo."""
    with torch.no_grad():
        for parameter in stored_model.model.decoder.parameters():
            parameter.mul_(4)
    return stored_model


def blank(preprocessing: Preprocessing) -> Image.Image:
    pixels: NDArray[np.uint8] = preprocessing.blank()
    return Image.fromarray(pixels)


def test_a_blank_photo_is_normalized_to_zero() -> None:
    preprocessing = Preprocessing(image_size=8)

    pixels = torch.from_numpy(preprocessing.blank())[None]

    assert pixels.shape == (1, 8, 8, 3)
    assert preprocessing.normalize(pixels).abs().max() < 0.01  # half of 1 / 255 / 0.225


def test_guidance_does_not_change_the_captions_of_a_blank_photo(sharp: StoredModel) -> None:
    """(1 + G) log p - G log p = log p."""
    model = Captioner(sharp, precision="fp32")
    image = blank(sharp.model.preprocessing)

    guided, plain = (model.caption(image, beam_size=1, guidance=g) for g in (3.0, 0.0))

    assert guided.text == plain.text
    assert guided.log_prob == pytest.approx(plain.log_prob, abs=1e-5)
