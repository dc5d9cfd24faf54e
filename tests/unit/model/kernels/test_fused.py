"""Convolutions fused by oneDNN: what the plain ones give, and without them the plain ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from captioner.model.efficientnet_lite import Block, Convolution, EfficientNetLite
from captioner.model.kernels import fused
from captioner.model.kernels.fused import can_fuse

needs_onednn = pytest.mark.skipif(not can_fuse(torch.float32), reason="not fused on this processor")


def both(dtype: torch.dtype = torch.float32) -> tuple[EfficientNetLite, EfficientNetLite]:
    """An encoder as it is and fused, with the same weights."""
    torch.manual_seed(0)
    plain = EfficientNetLite(0).eval()
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    plain.fold_norms()
    plain = plain.to(dtype, memory_format=torch.channels_last)
    faster = copy.deepcopy(plain)
    faster.optimize_for_cpu()
    return plain, faster


def is_fused(model: nn.Module) -> bool:
    return any(module.fused for module in model.modules() if isinstance(module, Convolution))


def photos(*size: int) -> Tensor:
    images = torch.rand(*size, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return images.to(memory_format=torch.channels_last)


@needs_onednn
@torch.inference_mode()
# Even, odd and mixed sizes at every stride.
@pytest.mark.parametrize("size", [(2, 3, 64, 64), (1, 3, 65, 71), (3, 3, 90, 127)])
def test_it_gives_what_plain_convolutions_give(size) -> None:
    plain, faster = both()
    assert is_fused(faster)
    assert not is_fused(plain)
    images = photos(*size)

    torch.testing.assert_close(faster(images), plain(images), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not can_fuse(torch.bfloat16), reason="not fused on this processor")
@torch.inference_mode()
def test_in_bf16_it_is_as_near_to_float32_as_plain_convolutions_are() -> None:
    exact, _ = both()
    plain, faster = both(torch.bfloat16)
    images = photos(2, 3, 96, 96)
    expected = exact(images)
    images = images.bfloat16()

    errors = [float((model(images).float() - expected).norm()) for model in (plain, faster)]

    assert errors[1] < 1.1 * errors[0]


@needs_onednn
def test_a_photo_has_the_same_features_in_any_batch() -> None:
    _, faster = both()
    images = photos(4, 3, 64, 64)
    with torch.inference_mode():
        together, apart = faster(images), [faster(images[n : n + 1]) for n in range(4)]
    torch.testing.assert_close(together, torch.cat(apart))


@pytest.mark.parametrize(
    ("fit", "expected"), [(0, [1] * 5), (1, [1] * 5), (2, [2, 2, 1]), (9, [5])]
)
def test_wide_features_are_computed_for_a_few_photos_at_a_time(
    fit: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, faster = both()
    widest = faster.blocks[1][0]  # six times the 16 channels of 32 x 32
    seen: list[int] = []
    run = Block._run

    def recorded(block: Block, features: Tensor) -> Tensor:
        if block is widest:
            seen.append(len(features))
        return run(block, features)

    monkeypatch.setattr(Block, "_run", recorded)
    for module in faster.modules():
        if isinstance(module, Block):
            module.inner_bytes = fit * 6 * 16 * 32 * 32 * 4 + 1
    images = photos(5, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(faster(images), plain(images), rtol=1e-4, atol=1e-4)
    assert seen == expected
    faster(images)  # with gradients all activations are kept anyway
    assert seen == [*expected, 5]


def test_gradients_are_those_of_plain_convolutions() -> None:
    plain, faster = both()
    images = photos(1, 3, 64, 64)
    found = []
    for model in (plain, faster):
        given = images.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(given).sum(), given)
        found.append(gradient)
    assert torch.equal(*found)


@pytest.mark.parametrize("broken", ["missing", "wrong", "elsewhere"])
def test_without_onednn_the_plain_convolutions_run(broken, monkeypatch) -> None:
    def missing(*given: object, **options: object) -> Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute ...")

    if broken == "elsewhere":
        monkeypatch.setattr(fused.platform, "machine", lambda: "arm64")
    else:
        wrong = lambda features, *given, **options: features  # noqa: E731
        monkeypatch.setattr(fused, "fused_convolution", missing if broken == "missing" else wrong)
    fused.can_fuse.cache_clear()
    try:
        plain, faster = both()
    finally:
        fused.can_fuse.cache_clear()
    assert not is_fused(faster)
    images = photos(1, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(faster(images), plain(images))
