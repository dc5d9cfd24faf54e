"""Compare our EfficientNet-Lite with timm's: names, outputs and gradients are the same."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from timm.data.config import resolve_data_config
from torch import nn
from toy_encoder import randomize_norms

from captioner.model.efficientnet_lite import SCALES, EfficientNetLite
from captioner.model.encoder import Encoder, build_encoder


def timm_model(size: int) -> nn.Module:
    """Return timm's model without pooling and head, with random batch norm statistics."""
    model = timm.create_model(f"tf_efficientnet_lite{size}", num_classes=0, global_pool="")
    randomize_norms(model)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("size", SCALES)
def test_outputs_equal_timms(size) -> None:
    expected = timm_model(size).double()
    model = EfficientNetLite(size).eval().double()
    assert list(model.state_dict()) == list(expected.state_dict())
    model.load_state_dict(expected.state_dict())
    # 65 to 127 pixels give maps of even and odd sizes at every stride.
    for height, width in ((64, 96), (65, 71), (127, 90)):
        images = torch.randn(2, 3, height, width, dtype=torch.float64)
        with torch.no_grad():
            found = model(images)
            torch.testing.assert_close(found, expected.forward_features(images))
        assert found.shape == (2, 1280, math.ceil(height / 32), math.ceil(width / 32))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["conv_stem", "bn1", "blocks.4", "conv_head", "bn2"])
def test_gradients_equal_timms(stage) -> None:
    """Train from any stage on, with earlier stages frozen and their norms folded."""
    expected = timm_model(0).double()
    encoder = Encoder("timm/tf_efficientnet_lite0").double()
    encoder.backbone.load_state_dict(expected.state_dict())
    learning = False
    for name, parameter in encoder.backbone.named_parameters():
        learning = learning or name.startswith(f"{stage}.")
        parameter.requires_grad_(learning)
    images = torch.randn(2, 3, 65, 64, dtype=torch.float64)

    encoder(images)[0].square().mean().backward()
    expected.forward_features(images).square().mean().backward()

    gradients = dict(expected.named_parameters())
    assert learning
    for name, parameter in encoder.backbone.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name].grad, msg=name)
            assert parameter.grad.abs().max() > 0, name


def test_timms_weights_and_preprocessing_are_used(monkeypatch) -> None:
    published = timm_model(0)
    config = resolve_data_config({}, model=published)
    monkeypatch.setattr(timm, "create_model", lambda name, **how: published)
    monkeypatch.setattr("captioner.model.backbones.WEIGHT_PACKAGES", {})  # else the installed ones

    encoder = build_encoder("timm/tf_efficientnet_lite0", "default")

    assert isinstance(encoder.backbone, EfficientNetLite)
    for name, tensor in published.state_dict().items():
        assert torch.equal(encoder.backbone.state_dict()[name], tensor), name
    assert (encoder.mean, encoder.std) == (config["mean"], config["std"])
