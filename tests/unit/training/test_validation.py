"""Validation: captions as a user gets them, and their scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from captioner.api import Captioner
from captioner.caption import Caption
from captioner.data.coco import CaptionedImage
from captioner.errors import ImageError
from captioner.training.build import Setup, prepare
from captioner.training.validation import Sentence, decode, score_sentences


@pytest.fixture
def setup(configure: Any) -> Setup:
    return prepare(configure())


def test_captions_are_those_a_user_gets(setup: Setup, configure: Any):
    captioner = Captioner(setup.stored, device="cpu", precision="fp32")
    search = configure().search
    sentences = decode(captioner, setup.val, search)
    assert [s.image for s in sentences] == setup.val
    for sentence in sentences:
        alone = captioner.caption(sentence.image.path, beam_size=2, max_length=6)
        assert sentence.caption.words == alone.words


def test_an_unreadable_photo_stops_validation(setup: Setup, configure: Any, tmp_path: Path):
    bad = tmp_path / "bad.jpg"
    bad.write_text("no photo")
    captioner = Captioner(setup.stored, device="cpu", precision="fp32")
    with pytest.raises(ImageError, match=r"bad\.jpg"):
        decode(captioner, [*setup.val, CaptionedImage(99, bad, ("x",))], configure().search)


def test_decoding_leaves_the_random_generator_alone(setup: Setup, configure: Any):
    captioner = Captioner(setup.stored, device="cpu", precision="fp32")
    before = torch.get_rng_state()
    decode(captioner, setup.val, configure().search)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_caption_is_scored_against_its_own_photo():
    def sentence(number: int, text: str, *references: str) -> Sentence:
        nothing = np.zeros(0, np.float32)
        caption = Caption(tuple(text.split()), nothing, nothing.reshape(0, 1, 1), nothing, 0.0)
        return Sentence(CaptionedImage(number, Path(f"{number}.jpg"), references), caption)

    right = [
        sentence(1, "a red square lies here", "A red square lies here."),
        sentence(2, "two blue dogs play outside", "Two blue dogs play outside!", "Dogs."),
    ]
    scores = score_sentences(right)
    assert scores["Bleu_4"] == pytest.approx(1)
    swapped = [
        Sentence(right[0].image, right[1].caption),
        Sentence(right[1].image, right[0].caption),
    ]
    assert score_sentences(swapped)["CIDEr"] < 0.1
