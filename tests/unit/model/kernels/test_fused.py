"""Compare convolutions fused by oneDNN with plain convolutions, and test the fallback."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from toy_encoder import randomize_norms

from captioner.model.efficientnet_lite import Block, EfficientNetLite, fold_norms
from captioner.model.kernels import accelerate, convolutions
from captioner.model.kernels.convolutions import can_fuse, works

needs_onednn = pytest.mark.skipif(not works(torch.float32), reason="not fused on this processor")


@pytest.fixture
def model() -> EfficientNetLite:
    return folded()


@pytest.fixture
def fast(model) -> EfficientNetLite:
    return accelerated(model)


def folded(dtype: torch.dtype = torch.float32) -> EfficientNetLite:
    torch.manual_seed(0)
    model = EfficientNetLite(0).eval()
    randomize_norms(model)
    fold_norms(model)
    return model.to(dtype, memory_format=torch.channels_last)


def accelerated(model: EfficientNetLite) -> EfficientNetLite:
    model = copy.deepcopy(model)
    accelerate(model)
    return model


def photos(*size: int) -> Tensor:
    images = torch.rand(*size, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return images.to(memory_format=torch.channels_last)


@needs_onednn
@torch.inference_mode()
# Even, odd and mixed sizes at every stride.
@pytest.mark.parametrize("size", [(2, 3, 64, 64), (1, 3, 65, 71), (3, 3, 90, 127)])
def test_it_gives_what_plain_convolutions_give(model, fast, size) -> None:
    images = photos(*size)
    assert can_fuse(images)

    found, plain = fast(images), model(images)

    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, plain)


@pytest.mark.skipif(not works(torch.bfloat16), reason="not fused on this processor")
@torch.inference_mode()
def test_in_bf16_it_is_as_near_to_float32_as_plain_convolutions_are(model) -> None:
    half, images = folded(torch.bfloat16), photos(2, 3, 96, 96)
    expected = model(images)

    errors = [
        float((one(images.bfloat16()).float() - expected).norm())
        for one in (half, accelerated(half))
    ]

    assert errors[1] < 1.1 * errors[0]


@pytest.mark.parametrize(
    ("fit", "expected"), [(0, [1] * 5), (1, [1] * 5), (2, [2, 2, 1]), (9, [5])]
)
def test_wide_features_are_computed_for_a_few_photos_at_a_time(
    fast, fit: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    widest = fast.blocks[1][0]  # six times the 16 channels of 32 x 32
    seen: list[int] = []
    run = Block.run

    def recorded(block: Block, features: Tensor) -> Tensor:
        if block is widest:
            seen.append(len(features))
        return run(block, features)

    images = photos(5, 3, 64, 64)
    with torch.inference_mode():
        whole = fast(images)
        monkeypatch.setattr(Block, "run", recorded)
        monkeypatch.setattr(convolutions, "INNER_BYTES", fit * 6 * 16 * 32 * 32 * 4 + 1)
        torch.testing.assert_close(fast(images), whole, rtol=1e-4, atol=1e-4)
    assert seen == expected
    fast(images).sum().backward()  # here all activations are kept anyway, and nothing is fused
    assert seen == [*expected, 5]


@pytest.mark.parametrize("broken", ["missing", "wrong", "elsewhere"])
def test_without_onednn_the_plain_convolutions_run(model, fast, broken, monkeypatch) -> None:
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
            assert torch.equal(fast(images), model(images))
    finally:
        works.cache_clear()
