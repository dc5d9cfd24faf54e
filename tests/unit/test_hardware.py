"""Device and precision selection."""

from __future__ import annotations

import pytest
import torch

from captioner.errors import ConfigError
from captioner.hardware import autocast, pick_device, pick_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A machine whose CPU has native bf16 or not, and the first number of its GPU's capability."""
    cpu, gpu = request.param

    def on_gpu(including_emulation: bool = True) -> bool:
        return gpu >= 8 or including_emulation  # torch emulates it on every GPU

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": cpu}, raising=False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (gpu, 0))


@pytest.mark.parametrize(
    ("machine", "device", "precision", "expected"),
    [
        ((False, 6), CPU, "auto", "fp32"),
        ((True, 6), CPU, "auto", "bf16"),
        ((False, 8), CPU, "auto", "fp32"),
        ((False, 8), GPU, "auto", "bf16"),
        ((True, 6), GPU, "auto", "fp32"),
        ((True, 7), GPU, "auto", "fp16"),  # tensor cores without bf16
        ((True, 8), CPU, "fp32", "fp32"),
        ((True, 8), GPU, "fp32", "fp32"),
        ((False, 6), CPU, "bf16", "bf16"),
        ((False, 6), GPU, "bf16", "bf16"),
        ((True, 8), torch.device("mps"), "auto", "fp32"),
        ((False, 6), CPU, "fp16", "fp16"),
        ((False, 8), GPU, "tf32", "tf32"),
        ((True, 8), CPU, "tf32", "fp32"),
    ],
    indirect=["machine"],
)
@pytest.mark.usefixtures("machine")
def test_precision(device: torch.device, precision: str, expected: str):
    assert pick_precision(precision, device) == expected  # type: ignore[arg-type]


def test_unknown_precision():
    with pytest.raises(ConfigError, match=r"^precision is 'half'; use auto, fp32, tf32, bf16 or"):
        pick_precision("half", CPU)


def float32_settings() -> tuple[str, bool]:
    """Of products and of convolutions."""
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("tf32", ("high", True)),
        # torch's own default for convolutions is TF32.
        ("fp32", ("highest", False)),
    ],
)
def test_precision_of_float32_on_a_gpu_applies_within_the_context_only(
    precision: str, settings: tuple[str, bool]
):
    before = float32_settings()
    with autocast(precision, GPU):
        assert float32_settings() == settings
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert float32_settings() == before
    with autocast(precision, CPU):  # elsewhere both are fp32
        assert float32_settings() == before


def test_autocast_uses_the_precision():
    left = torch.ones(2, 2)
    with autocast("bf16", CPU):
        assert (left @ left).dtype == torch.bfloat16
    with autocast("fp16", CPU):
        assert (left @ left).dtype == torch.float16
    with autocast("fp32", CPU):
        assert (left @ left).dtype == torch.float32


@pytest.mark.parametrize(
    ("gpu", "apple", "expected"),
    [(True, False, "cuda"), (True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_prefers_the_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, apple: bool, expected: str
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: apple)
    assert pick_device("auto").type == expected
    assert pick_device("cpu") == CPU


@pytest.mark.parametrize("name", ["", "gpu", "cuda:x", "cuda:99", "tpu"])
def test_unavailable_device(name: str):
    with pytest.raises(ConfigError, match=rf"{name!r} is not available; use auto") as caught:
        pick_device(name)
    assert "\n" not in str(caught.value)
