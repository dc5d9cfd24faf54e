"""Guidance with whole models: blank photos, and that batches and ensembles do not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from captioner.caption import Caption
from captioner.inference.captioner import Captioner
from captioner.inference.folder import StoredModel
from captioner.model.preprocessing import Preprocessing

GUIDED = {"guidance": 3.0, "beam_size": 3, "num_captions": 3, "max_length": 12}


@pytest.fixture
def sharp(stored_model: StoredModel) -> StoredModel:
    """A model whose captions depend on the photo."""
    with torch.no_grad():
        for parameter in stored_model.model.decoder.parameters():
            parameter.mul_(4)
    return stored_model


def photos() -> list[Image.Image]:
    noise = np.random.default_rng(1).integers(256, size=(4, 6, 6, 3), dtype=np.uint8)
    return [Image.fromarray(pixels).resize((64, 64)) for pixels in noise]


def blank(preprocessing: Preprocessing) -> Image.Image:
    pixels: NDArray[np.uint8] = preprocessing.blank()
    return Image.fromarray(pixels)


def texts(captions: list[Caption]) -> list[str]:
    return [caption.text for caption in captions]


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


def test_guided_captions_do_not_depend_on_the_batch(sharp: StoredModel) -> None:
    model = Captioner(sharp, precision="fp32")

    together = model.captions(photos(), **GUIDED)

    alone = [model.captions(photo, **GUIDED) for photo in photos()]
    assert list(map(texts, together)) == list(map(texts, alone))
