"""Test validation: the captions are the same as for a user, and scores are right."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from captioner.caption_types import Caption
from captioner.data.batches import pad_captions
from captioner.data.example import Example
from captioner.data.images import open_image
from captioner.errors import ImageError
from captioner.inference.captioner import Captioner
from captioner.model.losses import caption_losses
from captioner.text.tokenizer import tokenize
from captioner.text.vocabulary import END
from captioner.training.setup import Setup, prepare
from captioner.training.validation import Sentence, decode, score_sentences


@pytest.fixture
def setup(configure: Any) -> Setup:
    return prepare(configure())


def test_captions_equal_those_of_the_captioner(setup: Setup, configure: Any):
    captioner = Captioner(setup.stored, device="cpu", precision="fp32")
    for changes in ({"beam_size": 2}, {"beam_size": 1, "temperature": 2.0}):
        sentences = decode(captioner, setup.val, configure().search.changed(**changes))
        assert [s.photo for s in sentences] == setup.val
        for sentence in sentences:
            alone = captioner.caption(sentence.photo.path, max_length=6, **changes)
            assert sentence.caption.words == alone.words


def test_cached_features_of_another_type_than_that_of_autocast(setup: Setup, configure: Any):
    """``prepare features`` writes float16 by default, and many processors compute in bf16."""
    captioner = Captioner(setup.stored, device="cpu", precision="bf16")
    model = setup.stored.model.eval()
    pixels = {i.image_id: model.preprocessing.pixels(open_image(i.path)) for i in setup.val}
    with torch.no_grad():
        rows = {i: model.encode(torch.tensor(p)[None]).half() for i, p in pixels.items()}
    cache: Any = SimpleNamespace(read=lambda photos: rows[photos[0][0]])
    for sentence in decode(captioner, setup.val, configure().search, cache):
        assert sentence.caption.words == captioner.caption(sentence.photo.path, max_length=6).words


def test_an_unreadable_photo_stops_validation(setup: Setup, configure: Any, tmp_path: Path):
    bad = tmp_path / "bad.jpg"
    bad.write_text("no photo")
    captioner = Captioner(setup.stored, device="cpu", precision="fp32")
    with pytest.raises(ImageError, match=r"bad\.jpg"):
        decode(captioner, [*setup.val, Example(99, bad, ("x",))], configure().search)


def test_loss_is_over_reference_captions(setup: Setup, configure: Any):
    """It equals the training loss in eval mode, although training orders batches by length."""
    photos = [
        replace(image, captions=(*image.captions, f"an unknown {'very ' * n} long caption"))
        for n, image in enumerate(setup.val)
    ]
    captioner = Captioner(setup.stored, device="cpu", precision="fp32")
    sentences = decode(captioner, photos, configure().search)
    vocabulary, model = setup.stored.vocabulary, setup.stored.model.eval()
    for image, sentence in zip(photos, sentences, strict=True):
        captions = [[*vocabulary.encode(tokenize(text)), END] for text in image.captions]
        pixels = model.preprocessing.pixels(open_image(image.path))
        with torch.no_grad():
            memory = model.decoder.memory(model.to_features(torch.tensor(pixels)[None]))
            losses = caption_losses(model.decoder, memory, pad_captions([captions]))
        assert sentence.words == sum(map(len, captions))
        assert sentence.nats == pytest.approx(float(losses.cross_entropy), rel=1e-5)
    scores = score_sentences(sentences)
    expected = sum(s.nats for s in sentences) / sum(s.words for s in sentences)
    assert scores["val_loss"] == pytest.approx(expected)
    assert scores["perplexity"] == pytest.approx(math.exp(expected))


def sentence(photo: Example, text: str, nats: float = 0.0) -> Sentence:
    """Return a sentence with three words in its references."""
    nothing = np.zeros(0, np.float32)
    caption = Caption(tuple(text.split()), nothing, nothing.reshape(0, 1, 1), nothing, 0.0)
    return Sentence(photo, caption, nats, 3)


def test_each_style_has_its_own_loss():
    scores = score_sentences(
        [
            sentence(Example(1, Path("x.jpg"), ("a dog",), "coco"), "a", 3.0),
            sentence(Example(2, Path("x.jpg"), ("a dog",), "flickr8k"), "a", 9.0),
        ]
    )
    assert (scores["val_loss/coco"], scores["val_loss/flickr8k"], scores["val_loss"]) == (1, 3, 2)
    assert scores["perplexity/flickr8k"] == pytest.approx(math.e**3)
    assert scores["perplexity"] == pytest.approx(math.e**2)


def test_every_caption_is_scored_against_its_own_photo():
    one = Example(1, Path("1.jpg"), ("A red square lies here.",))
    two = Example(2, Path("2.jpg"), ("Two blue dogs play outside!", "Dogs."))
    square, dogs = "a red square lies here", "two blue dogs play outside"
    assert score_sentences([sentence(one, square), sentence(two, dogs)])["Bleu_4"] == pytest.approx(
        1
    )
    assert score_sentences([sentence(one, dogs), sentence(two, square)])["CIDEr"] < 0.1
