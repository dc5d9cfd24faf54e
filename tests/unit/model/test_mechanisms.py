"""Test training and search with every attention mechanism and step order."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from mechanisms import MECHANISMS, config_of
from torch import Tensor
from toy_decoder import random_decoder

from captioner.inference.torch_engine import DecoderStepper
from captioner.model.decoder import Decoder, Unrolled
from captioner.model.losses import caption_losses
from captioner.options import SearchOptions, TrainingConfig
from captioner.search.search import Hypothesis, search
from captioner.text.vocabulary import END, PAD, START, UNKNOWN

B, L, D, V = 3, 4, 8, 13
OPTIONS = SearchOptions(beam_size=3, num_captions=2, max_length=4)

CAPTIONS = torch.tensor(
    [
        [[START, 5, 6, 7, END], [START, 4, END, PAD, PAD]],
        [[START, 9, 12, END, PAD], [PAD, PAD, PAD, PAD, PAD]],
        [[START, 10, END, PAD, PAD], [START, 8, 8, 11, END]],
    ]
)
MASK = torch.tensor([[True] * 4, [True, True, True, False], [True, True, False, False]])


each = pytest.mark.parametrize("name", MECHANISMS)


def build(name: str) -> Decoder:
    decoder = random_decoder(D, V, L, std=0.6, **asdict(config_of(name)))
    with torch.no_grad():
        decoder.word_output.bias[END] += 1  # some sentences end, others are truncated
    return decoder


@pytest.fixture
def features() -> Tensor:
    return torch.randn(B, L, D)


# --- Training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, MASK], ids=["unmasked", "masked"])
@each
def test_every_parameter_gets_a_gradient(name: str, mask: Tensor | None, features: Tensor) -> None:
    decoder = build(name).train()

    losses = caption_losses(decoder, decoder.memory(features, mask), CAPTIONS)
    losses.total(TrainingConfig()).backward()

    gradients = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    assert [name for name, grad in gradients.items() if grad is None or not grad.any()] == []
    assert [name for name, grad in gradients.items() if not grad.isfinite().all()] == []


@each
def test_step_by_step_equals_teacher_forcing(name: str, features: Tensor) -> None:
    decoder = build(name).eval()
    memory = decoder.memory(features, MASK)
    inputs = torch.randint(4, V, (B, 2, 3))

    unrolled = decoder(memory, inputs)

    state = decoder.start(memory, 2)
    for t in range(3):
        step = decoder.step(decoder.word_gates(decoder.embed(inputs[:, :, t])), state, memory)
        state = step.state
        for whole, now in zip(unrolled.outputs, step.outputs, strict=True):
            torch.testing.assert_close(whole[:, :, t], now)
        torch.testing.assert_close(unrolled.alphas[:, :, t], step.alphas)
        torch.testing.assert_close(unrolled.betas[:, :, t], step.beta[..., 0])
        if " hard " in name:
            assert torch.equal(unrolled.chosen[:, :, t], step.chosen)
        else:
            assert unrolled.chosen is step.chosen is None


# --- Search --------------------------------------------------------------------------------------


def search_photos(
    decoder: Decoder, features: Tensor, mask: Tensor | None
) -> list[list[Hypothesis]]:
    return search(DecoderStepper(decoder, decoder.memory(features, mask)), OPTIONS)


def log_probs_of(decoder: Decoder, unrolled: Unrolled) -> Tensor:
    return decoder.readout(unrolled.embedded, *unrolled.outputs).log_softmax(-1)


@each
@torch.no_grad()
def test_search_agrees_with_teacher_forcing(name: str, features: Tensor) -> None:
    decoder = build(name).eval()

    for photo, hypotheses in enumerate(search_photos(decoder, features, MASK)):
        assert len(hypotheses) == 2
        memory = decoder.memory(features[photo : photo + 1], MASK[photo : photo + 1])
        for found in hypotheses:
            words = [*found.tokens, END] if found.ended else found.tokens
            unrolled = decoder(memory, torch.tensor([[[START, *words[:-1]]]]))
            table = log_probs_of(decoder, unrolled)[0, 0]
            log_probs = table[torch.arange(len(words)), torch.tensor(words)]
            length = len(found.tokens)
            for array, expected in (
                (found.token_log_probs, log_probs[:length]),
                (found.alphas, unrolled.alphas[0, 0, :length]),
                (found.gates, unrolled.betas[0, 0, :length]),
            ):
                torch.testing.assert_close(torch.from_numpy(array), expected)
            assert found.log_prob == pytest.approx(log_probs.sum().item(), rel=1e-4)
            assert not set(found.tokens) & {PAD, START, UNKNOWN}


@each
def test_searching_a_batch_equals_single_photos(name: str, features: Tensor) -> None:
    decoder = build(name).eval()

    together = search_photos(decoder, features, MASK)

    for photo, mask in enumerate(MASK):
        (alone,) = search_photos(decoder, features[photo, mask].unsqueeze(0), None)
        for one, other in zip(alone, together[photo], strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.alphas, other.alphas[:, mask], rtol=1e-5, atol=1e-6)
            assert one.log_prob == pytest.approx(other.log_prob, rel=1e-4)
