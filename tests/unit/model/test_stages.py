"""Test the training of an encoder's last stages: cached inputs and fast gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from toy_encoder import randomize_norms

from captioner.model.efficientnet_lite import Convolution, recompute_blocks
from captioner.model.encoder import Encoder
from captioner.model.kernels import accelerate

STAGES = [f"blocks.{number}" for number in range(7)]


@pytest.fixture(scope="module")
def lite() -> Encoder:
    torch.manual_seed(0)
    encoder = Encoder("timm/tf_efficientnet_lite0")
    randomize_norms(encoder)
    return encoder.requires_grad_(False)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("pixels", [64, 96])
def test_first_and_remaining_stages_compose_to_the_encoder(
    lite: Encoder, stage: str, pixels: int
) -> None:
    photos = torch.randn(2, 3, pixels, pixels)
    rows, grid = lite.run_until(photos, stage)
    assert rows.shape[1] == grid[0] * grid[1]
    assert (rows.shape[2], grid) == lite.measure(pixels, stage)
    features, final = lite.run_from(rows, stage)
    expected, expected_grid = lite(photos)
    assert final == expected_grid
    torch.testing.assert_close(features, expected)


def test_stage_inputs_depend_only_on_earlier_weights(lite: Encoder) -> None:
    photos = torch.randn(1, 3, 64, 64)
    before, _ = lite.run_until(photos, "blocks.4")
    other = copy.deepcopy(lite)
    kept = other.state_until("blocks.4").keys()
    for name, tensor in other.state_dict().items():
        if name not in kept and tensor.is_floating_point():
            tensor.add_(1.0)
    torch.testing.assert_close(other.run_until(photos, "blocks.4")[0], before, rtol=0, atol=0)
    assert any(name.startswith("backbone.blocks.3.") for name in kept)
    assert not any(name.startswith("backbone.blocks.4.") for name in kept)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("size", [7, 8, 9])
def test_depthwise_convolution_gradients_equal_torchs(stride: int, kernel: int, size: int) -> None:
    """Our backward pass replaces torch's on CPUs. In float64, both agree."""
    layer = Convolution(6, 6, kernel, stride=stride, groups=6).double()
    accelerate(layer)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    photos = torch.randn(3, 6, size, size, dtype=torch.float64, requires_grad=True)
    ours = layer.convolve(photos, layer.weight, bias)
    assert "Depthwise" in type(ours.grad_fn).__name__

    widened = layer.weight.new_zeros(6, 6, kernel, kernel)  # the same as a full convolution
    rows = torch.arange(6)
    widened = widened.index_put((rows, rows), layer.weight[:, 0])
    full = Convolution(6, 6, kernel, stride=stride).double()
    theirs = full.convolve(photos, widened, bias)
    torch.testing.assert_close(ours, theirs)

    gradient = torch.randn_like(ours)
    given = (photos, layer.weight, bias)
    for one, other in zip(
        torch.autograd.grad(ours, given, gradient),
        torch.autograd.grad(theirs, given, gradient),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_frozen_depthwise_convolutions_keep_their_norms_frozen_too(lite: Encoder) -> None:
    encoder = copy.deepcopy(lite)
    encoder.finetune_from("blocks.4", 64, freeze_depthwise=True)
    learning = {name for name, p in encoder.named_parameters() if p.requires_grad}
    assert "backbone.blocks.4.0.conv_pw.weight" in learning
    assert "backbone.blocks.4.0.bn1.weight" in learning
    assert "backbone.blocks.4.0.bn3.weight" in learning
    assert "backbone.bn2.weight" in learning  # the head's norm
    assert not any(".conv_dw." in name or ".0.bn2." in name for name in learning)
    encoder.finetune_from("blocks.4", 64)
    assert encoder.backbone.blocks[4][0].conv_dw.weight.requires_grad  # type: ignore[union-attr,index]


def learned_and_kept(encoder: Encoder, photos: Tensor) -> tuple[list[Tensor], int]:
    """Return the gradients of a step, and the bytes kept for its backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = encoder(photos)[0].square().mean()
    learning = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(loss, learning)), sum(kept.values())


@pytest.mark.parametrize("stage", ["conv_stem", "blocks.4"])
def test_recomputed_blocks_keep_less_and_learn_the_same(lite: Encoder, stage) -> None:
    encoder = copy.deepcopy(lite)
    encoder.finetune_from(stage, 64)
    photos = torch.randn(4, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    expected, before = learned_and_kept(encoder, photos)

    recompute_blocks(encoder)
    found, after = learned_and_kept(encoder, photos)

    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert after < 0.6 * before
