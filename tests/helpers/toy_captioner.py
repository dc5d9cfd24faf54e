"""Small captioners with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from captioner.caption import Caption
from captioner.inference.captioner import Captioner
from captioner.inference.confidence import (
    FEATURES,
    Calibrator,
    PhotoSpace,
    PhraseTable,
    WordReading,
    search_key,
)
from captioner.inference.folder import StoredModel
from captioner.inference.reading import ReadingWords
from captioner.model.captioner import CaptionModel
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


def toy_calibrator(search: SearchOptions, size: int, *words: str, **more: Any) -> Calibrator:
    """One to which every feature matters, for photos with vectors of ``size`` numbers.

    It reads ``words`` from a photo, and has counted the first and the last one.
    """
    count = len(FEATURES)
    readings = np.linspace(-3, 3, len(words) * size, dtype=np.float32) / size
    first, last = words[0], words[-1]
    return Calibrator(
        weights=np.linspace(-1, 1, count) + 0.05,
        mean=np.zeros(count),
        scale=np.full(count, 2.0),
        lowest=np.full(count, -50.0),
        highest=np.full(count, 50.0),
        intercepts={"": 0.3, "plain": 0.3, "loud": -0.2},
        familiar=(0.5, 1.5),
        space=PhotoSpace(np.full(size, 0.1, np.float32), np.eye(4, size, dtype=np.float32)),
        phrases=PhraseTable.count(50, {first: 20, last: 3, f"{first} {last} {last}": 2}),
        reading=WordReading(
            words,
            readings.reshape(len(words), size),
            np.linspace(0.5, -0.5, len(words), dtype=np.float32),
        ),
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
