"""Small captioners with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from captioner.caption_types import Caption
from captioner.inference.captioner import Captioner
from captioner.inference.confidence import (
    FEATURES,
    Calibrator,
    search_key,
)
from captioner.inference.reading import ReadingWords
from captioner.inference.stored_model import StoredModel
from captioner.inference.truth import WordTruth
from captioner.model.caption_model import CaptionModel
from captioner.model.encoder import Encoder
from captioner.model.preprocessing import Preprocessing
from captioner.model.reading import PhotoReading
from captioner.options import DecoderConfig, SearchOptions
from captioner.text.vocabulary import Vocabulary

WORDS = ("a", "dog", "cat", "runs", "sleeps", "on", "grass", "red")
MODEL_SEARCH = SearchOptions(beam_size=3, max_length=6)


def build(resize: str = "crop") -> Captioner:
    return Captioner(stored(resize), device="cpu", precision="fp32")


def ensemble_of(*models: StoredModel) -> Captioner:
    return Captioner(*models, device="cpu", precision="fp32")


def stored(
    resize: str = "crop",
    *,
    size: int = 48,
    seed: int = 80,
    order: str = "RGB",
    words: tuple[str, ...] = WORDS,
    search: SearchOptions = MODEL_SEARCH,
    encoder: str = "timm/test_resnet",
) -> StoredModel:
    torch.manual_seed(seed)
    decoder = DecoderConfig(embed_dim=8, hidden_dim=8, attention_dim=8, dropout=0.5)
    preprocessing = Preprocessing(size, resize, channel_order=order)  # type: ignore[arg-type]
    model = CaptionModel(Encoder(encoder), decoder, preprocessing, len(words) + 4)
    with torch.no_grad():  # large weights, so that captions and attention differ between photos
        for module in (model.decoder.attention.scorer.energy, model.decoder.init_hidden):
            module.weight *= 8
        model.decoder.context_output.weight *= 4
        model.decoder.context_gates.weight *= 12
        model.decoder.word_output.weight *= 3
    return StoredModel(model, decoder, Vocabulary(words), search)


def random_model(
    seed: int,
    decoder: DecoderConfig,
    words: tuple[str, ...],
    styles: tuple[str, ...] = (),
    *,
    factor: float,
    preprocessing: Preprocessing | None = None,
    **search: Any,
) -> StoredModel:
    """Random weights: 64 pixels, a grid of 2 x 2.

    Those of the decoder are multiplied by ``factor``, so that captions differ between photos.
    """
    torch.manual_seed(seed)
    vocabulary = Vocabulary(words, styles)
    seen = preprocessing or Preprocessing(image_size=64)
    encoder = Encoder("timm/test_resnet")
    model = CaptionModel(encoder, decoder, seen, len(vocabulary), len(styles)).eval()
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(factor)
    return StoredModel(model, decoder, vocabulary, SearchOptions(**search))


def add_reading(stored: StoredModel, *stems: str) -> None:
    """Add a random reading of these stems, all of them keywords, that differs between photos."""
    reading = PhotoReading(stored.model.feature_dim, len(stems), hidden=7).eval()
    with torch.no_grad():
        for parameter in reading.parameters():
            parameter.normal_(std=0.3)
    stored.model.reading = reading
    stored.reading = ReadingWords.of(stems, stored.vocabulary, {one: ((one,),) for one in stems})


TOY_TRUTH = WordTruth(0.5, 0.1, 1.0, -2.0, 0.6, 0.9, -1.5)


def toy_calibrator(search: SearchOptions, **more: Any) -> Calibrator:
    """One to which every feature matters."""
    count = len(FEATURES)
    return Calibrator(
        weights=np.linspace(-1, 1, count) + 0.05,
        mean=np.zeros(count),
        scale=np.full(count, 2.0),
        lowest=np.full(count, -50.0),
        highest=np.full(count, 50.0),
        intercepts={"": 0.3, "plain": 0.3, "loud": -0.2},
        truth=TOY_TRUTH,
        familiar=(0.5, 1.5),
        search=search_key(search),
        **more,
    )


def mean_colours(self: CaptionModel, pixels: torch.Tensor) -> torch.Tensor:
    """An encoder that is exported in no time: the mean colours of the four quarters."""
    quarters = pixels.float().reshape(-1, 2, 32, 2, 32, 3).mean(dim=(2, 4)).reshape(-1, 4, 3)
    return (quarters / 127 - 1).repeat(1, 1, 32) * torch.linspace(-4, 4, 96)


def assert_same(one: Caption, two: Caption) -> None:
    assert one.words == two.words
    assert one.crop_box == two.crop_box
    assert one.log_prob == pytest.approx(two.log_prob, abs=1e-4)
    np.testing.assert_allclose(one.alphas, two.alphas, atol=1e-5)
    np.testing.assert_allclose(one.log_probs, two.log_probs, atol=1e-4)
    np.testing.assert_allclose(one.gates, two.gates, atol=1e-5)
