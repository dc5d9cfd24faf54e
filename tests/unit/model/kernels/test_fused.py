"""Convolutions fused by oneDNN: what the plain ones give, and without them the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from toy_encoder import randomize_norms

from captioner.model import efficientnet_lite
from captioner.model.efficientnet_lite import Block, EfficientNetLite, fold_norms
from captioner.model.kernels import can_fuse, convolutions, plain_formulas
from captioner.model.kernels.convolutions import works

needs_onednn = pytest.mark.skipif(not works(torch.float32), reason="not fused on this processor")


@pytest.fixture
def model() -> EfficientNetLite:
    return folded()


def folded(dtype: torch.dtype = torch.float32) -> EfficientNetLite:
    torch.manual_seed(0)
    model = EfficientNetLite(0).eval()
    randomize_norms(model)
    fold_norms(model)
    return model.to(dtype, memory_format=torch.channels_last)


def photos(*size: int) -> Tensor:
    images = torch.rand(*size, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return images.to(memory_format=torch.channels_last)


def plain(model: nn.Module, images: Tensor) -> Tensor:
    with plain_formulas():
        assert not can_fuse(images)
        return model(images)


@needs_onednn
@torch.inference_mode()
# Even, odd and mixed sizes at every stride.
@pytest.mark.parametrize("size", [(2, 3, 64, 64), (1, 3, 65, 71), (3, 3, 90, 127)])
def test_it_gives_what_plain_convolutions_give(model, size) -> None:
    images = photos(*size)
    assert can_fuse(images)

    found = model(images)

    torch.testing.assert_close(found, plain(model, images), rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, plain(model, images))


@pytest.mark.skipif(not works(torch.bfloat16), reason="not fused on this processor")
@torch.inference_mode()
def test_in_bf16_it_is_as_near_to_float32_as_plain_convolutions_are(model) -> None:
    half, images = folded(torch.bfloat16), photos(2, 3, 96, 96)
    expected = plain(model, images)

    errors = [
        float((found.float() - expected).norm())
        for found in (plain(half, images.bfloat16()), half(images.bfloat16()))
    ]

    assert errors[1] < 1.1 * errors[0]


@pytest.mark.parametrize(
    ("fit", "expected"), [(0, [1] * 5), (1, [1] * 5), (2, [2, 2, 1]), (9, [5])]
)
def test_wide_features_are_computed_for_a_few_photos_at_a_time(
    model, fit: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    widest = model.blocks[1][0]  # six times the 16 channels of 32 x 32
    seen: list[int] = []
    run = Block._run

    def recorded(block: Block, features: Tensor) -> Tensor:
        if block is widest:
            seen.append(len(features))
        return run(block, features)

    images = photos(5, 3, 64, 64)
    with torch.inference_mode():
        whole = model(images)
        monkeypatch.setattr(Block, "_run", recorded)
        monkeypatch.setattr(efficientnet_lite, "INNER_BYTES", fit * 6 * 16 * 32 * 32 * 4 + 1)
        torch.testing.assert_close(model(images), whole, rtol=1e-4, atol=1e-4)
    assert seen == expected
    model(images).sum().backward()  # here all activations are kept anyway, and nothing is fused
    assert seen == [*expected, 5]


@pytest.mark.parametrize("broken", ["missing", "wrong", "elsewhere"])
def test_without_onednn_the_plain_convolutions_run(model, broken, monkeypatch) -> None:
    def missing(*given: object, **options: object) -> Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute ...")

    if broken == "elsewhere":
        monkeypatch.setattr(convolutions.platform, "machine", lambda: "arm64")
    else:
        wrong = lambda features, *given, **options: features  # noqa: E731
        monkeypatch.setattr(
            convolutions, "fused_convolution", missing if broken == "missing" else wrong
        )
    images = photos(1, 3, 64, 64)
    works.cache_clear()
    try:
        with torch.inference_mode():
            assert torch.equal(model(images), plain(model, images))
    finally:
        works.cache_clear()
