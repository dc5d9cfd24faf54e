"""Every kernel against the plain formula beside it, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_decoder import random_decoder

from captioner.hardware import autocast
from captioner.model.decoder import Decoder
from captioner.model.kernels import WordGates, enabled, plain_formulas
from captioner.model.losses import caption_losses
from captioner.options import Precision, TrainingConfig
from captioner.text.vocabulary import END, PAD, START

L, D, V = 5, 8, 9
KINDS: dict[str, dict[str, Any]] = {
    "additive": {},
    "projected": {"projection_dim": 7},
    "concat": {"attention": "concat"},
    "multi-head": {"attention": "multi_head", "heads": 2},
    "mean": {"query": "mean"},
    "luong": {"order": "luong"},
    "luong, not fed": {"order": "luong", "input_feeding": False},
    "plain": {"attention": "fixed_at_start"},
}
LENGTHS = [[1, 4, 0], [0, 0, 0], [5, 2, 3], [0, 0, 2]]
"""Words: unsorted; one photo without captions and one caption of a single word."""


def captions() -> Tensor:
    """(B, R, T + 1)."""
    tokens = torch.full((len(LENGTHS), len(LENGTHS[0]), 7), PAD)
    for photo, lengths in enumerate(LENGTHS):
        for caption, words in enumerate(lengths):
            if words:
                content = torch.randint(4, V, (words,)).tolist()
                tokens[photo, caption, : words + 2] = torch.tensor([START, *content, END])
    return tokens


def build(kind: str) -> Decoder:
    sizes = {"embed_dim": 4, "attention_dim": 4}
    return random_decoder(D, V, L, std=0.6, **{**sizes, **KINDS[kind]})


def losses_and_gradients(
    decoder: Decoder, features: Tensor, tokens: Tensor, precision: Precision = "fp32"
) -> list[Tensor]:
    given = features.clone().requires_grad_()
    with autocast(precision, torch.device("cpu")):
        losses = caption_losses(decoder, decoder.memory(given), tokens)
    loss = losses.total(TrainingConfig(attention_penalty=0.5))
    return [*losses, *torch.autograd.grad(loss, [given, *decoder.parameters()])]


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_give_the_losses_and_gradients_of_the_plain_formulas(kind: str) -> None:
    decoder, features, tokens = build(kind).double(), torch.randn(4, L, D).double(), captions()

    found = losses_and_gradients(decoder, features, tokens)
    with plain_formulas():
        assert not enabled()
        expected = losses_and_gradients(decoder, features, tokens)

    assert enabled()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["additive", "projected", "luong"])
def test_kernels_in_half_precision_are_close_to_the_plain_formulas(kind: str) -> None:
    decoder, features, tokens = build(kind), torch.randn(4, L, D), captions()

    found = losses_and_gradients(decoder, features, tokens, "bf16")
    with plain_formulas():
        expected = losses_and_gradients(decoder, features, tokens, "bf16")

    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).double().norm() <= 0.05 * other.double().norm() + 1e-6


# --- the table of gate inputs ---------------------------------------------------------------------


@pytest.fixture
def cached() -> WordGates:
    """Of two blocks and a half, in a layer whose values are all different."""
    torch.manual_seed(0)
    words = 2 * WordGates.BLOCK + WordGates.BLOCK // 2
    return WordGates(nn.Embedding(words, 6), nn.Linear(6, 8))


def test_looked_up_gates_are_the_layers_own(cached) -> None:
    last = len(cached.table) - 1
    tokens = torch.tensor([[[3, WordGates.BLOCK], [last, 3]]])

    with torch.inference_mode():
        found = cached.look_up(tokens)

    torch.testing.assert_close(found, cached.layer(cached.embedding(tokens)).detach())
    assert not cached.missing


def test_gates_cached_in_inference_mode_are_completed_outside_of_it() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        cached = WordGates(nn.Embedding(130, 6), nn.Linear(6, 8))
        cached.look_up(torch.tensor([0]))
    assert torch.isfinite(cached.look_up(torch.tensor([129]))).all()
