"""Batches of prepared photos, cached features, and what inference does with the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from toy_captioner import (
    assert_same,
    stored,
)  # fmt: skip

from captioner.data.images import open_image
from captioner.hardware import autocast
from captioner.inference.captioner import Captioner
from captioner.inference.folder import StoredModel


def test_explain_batch_equals_explaining_single_photos(captioner: Captioner, photos: list[Path]):
    texts = ["a", "a dog runs on grass", "red cat"]
    prepared = [captioner.prepare(open_image(photo)) for photo in photos[:3]]

    explained = captioner.explain_batch(prepared, [captioner.known_words(text) for text in texts])

    for photo, text, caption in zip(photos, texts, explained, strict=False):
        assert_same(caption, captioner.explain(photo, text))


def with_norms() -> StoredModel:
    """A model whose encoder folds norms, with random batch norm statistics."""
    model = stored(encoder="timm/tf_efficientnet_lite0", size=64)
    for module in model.model.encoder.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
            module.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-5), ("bf16", 0.1)])
@torch.inference_mode()
def test_folded_norms_give_the_same_features(precision, allowed, photos: list[Path]):
    model = with_norms()
    captioner = Captioner(model, device="cpu", precision=precision)
    pixels = np.stack([captioner.prepare(open_image(photo)).pixels[0] for photo in photos])
    expected = model.model.encode(torch.from_numpy(pixels))

    with autocast(precision, captioner.device):
        found = captioner.model.encode(torch.from_numpy(pixels)).float()

    assert (found - expected).norm() <= allowed * expected.norm()
    assert expected.std(dim=0).mean() > 0.01  # photos differ


def test_inference_leaves_the_stored_weights_as_they_are(photos: list[Path]):
    model = with_norms()
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    learning = [parameter.requires_grad for parameter in model.model.parameters()]
    for precision in ("fp32", "bf16"):
        Captioner(model, device="cpu", precision=precision).caption(photos[0])  # type: ignore[arg-type]
    after = model.model.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
        assert tensor.dtype == after[name].dtype
    assert learning == [parameter.requires_grad for parameter in model.model.parameters()]


@pytest.mark.parametrize("strategy", [{}, {"beam_size": 1}, {"num_captions": 3}], ids=str)
def test_captions_of_features_equal_those_of_photos(
    captioner: Captioner,
    photos: list[Path],
    strategy: dict[str, int],
):
    prepared = [captioner.prepare(open_image(photo)) for photo in photos]
    pixels = torch.from_numpy(np.stack([photo.pixels[0] for photo in prepared]))
    with torch.no_grad():
        features = captioner.model.encode(pixels)
    regions = [photo.crop_box for photo in prepared]
    options = captioner.options(**strategy)
    found = captioner.caption_features(features, regions, options)
    for ours, expected in zip(found, captioner.caption_batch(prepared, options), strict=True):
        for one, two in zip(ours, expected, strict=True):
            assert_same(one, two)
    halves = captioner.caption_features(features.half(), regions, options)  # as in a feature cache
    assert halves[0][0].log_prob == pytest.approx(found[0][0].log_prob, abs=0.05)
