"""Compare the decoders with NumPy loops, written from the equations in their docstrings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from toy_decoder import random_decoder

from captioner.model.build import build_decoder, start_at_frequencies
from captioner.model.decoder import Decoder
from captioner.options import DecoderConfig
from captioner.text.vocabulary import PAD

B, R, T, L, D, V = 2, 3, 4, 5, 8, 9
E, N, A = 5, 6, 7
SIZES = {"embed_dim": E, "hidden_dim": N, "attention_dim": A}
Array = NDArray[np.float64]
Outputs = tuple[Array, Array, float]
"""Logits, alphas and gate from one step."""

KINDS: dict[str, dict[str, Any]] = {
    "bahdanau": {},
    "luong": {"order": "luong"},
    "luong, not fed": {"order": "luong", "input_feeding": False},
    "plain": {"attention": "fixed_at_start"},
    "bahdanau, norms": {"layer_norm": True},
    "luong, norms": {"order": "luong", "layer_norm": True},
    "plain, norms": {"attention": "fixed_at_start", "layer_norm": True},
}


def build(kind: str, **changes: Any) -> Decoder:
    return random_decoder(D, V, L, **SIZES, **KINDS[kind], **changes).eval()


def untrained(kind: str) -> Decoder:
    return build_decoder(DecoderConfig(**SIZES, **KINDS[kind]), D, V, L)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def decoder(kind: str) -> Decoder:
    return build(kind)


@pytest.fixture
def features() -> Tensor:
    return torch.randn(B, L, D)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(1, V, (B, R, T))


# --- Reference -----------------------------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class Weights:
    """The weights of a decoder, and the equations that all orders share, for a single caption."""

    def __init__(self, decoder: Decoder) -> None:
        self.p = {n: value.detach().double().numpy() for n, value in decoder.named_parameters()}

    def linear(self, name: str, x: Array) -> Array:
        return self.p[f"{name}.weight"] @ x + self.p.get(f"{name}.bias", np.zeros(()))

    def start(self, regions: Array) -> tuple[Array, Array]:
        mean = sum(regions) / len(regions)
        return np.tanh(self.linear("init_hidden", mean)), np.tanh(self.linear("init_cell", mean))

    def attend(self, regions: Array, h: Array) -> tuple[Array, Array]:
        v = self.p["attention.scorer.energy.weight"][0]
        projected_query = self.linear("attention.scorer.query", h)
        e = [v @ np.tanh(self.linear("attention.scorer.key", a) + projected_query) for a in regions]
        alpha = np.exp(e) / np.exp(e).sum()
        return sum(weight * a for weight, a in zip(alpha, regions, strict=True)), alpha

    def norm(self, name: str, x: Array) -> Array:
        """Compute gain (x - mean) / sigma + bias (Ba et al. 2016, eq. 4), or x without norms."""
        if f"{name}.weight" not in self.p:
            return x
        sigma = np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
        return self.p[f"{name}.weight"] * (x - x.mean()) / sigma + self.p[f"{name}.bias"]

    def lstm_cell(self, gates: Array, c: Array) -> tuple[Array, Array]:
        gates_by_kind = enumerate(np.split(gates, 4))
        i, f, g, o = (self.norm(f"gate_norms.{number}", part) for number, part in gates_by_kind)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(self.norm("cell_norm", c)), c


def bahdanau(weights: Weights, regions: Array, words: list[int]) -> list[Outputs]:
    linear, steps = weights.linear, []
    h, c = weights.start(regions)
    for y in words:
        ey = weights.p["embedding.weight"][y]
        z, alpha = weights.attend(regions, h)
        beta = sigmoid(linear("gate", h))
        bz = beta * z
        gates = linear("word_gates", ey) + linear("context_gates", bz) + linear("hidden_gates", h)
        h, c = weights.lstm_cell(gates, c)
        mixed = np.tanh(ey + linear("hidden_output", h) + linear("context_output", bz))
        steps.append((linear("word_output", mixed), alpha, beta[0]))
    return steps


def luong(weights: Weights, regions: Array, words: list[int], input_feeding: bool) -> list[Outputs]:
    linear, steps = weights.linear, []
    h, c = weights.start(regions)
    f = np.zeros(N)  # nothing is fed before the first word
    for y in words:
        gates = linear("word_gates", weights.p["embedding.weight"][y]) + linear("hidden_gates", h)
        if input_feeding:
            gates = gates + linear("fed_gates", f)
        h, c = weights.lstm_cell(gates, c)
        z, alpha = weights.attend(regions, h)
        f = np.tanh(linear("context_output", z) + linear("hidden_output", h))
        steps.append((linear("word_output", f), alpha, 1.0))
    return steps


def plain(weights: Weights, regions: Array, words: list[int]) -> list[Outputs]:
    linear, steps = weights.linear, []
    h, c = weights.start(regions)
    for y in words:
        ey = weights.p["embedding.weight"][y]
        h, c = weights.lstm_cell(linear("word_gates", ey) + linear("hidden_gates", h), c)
        logits = linear("word_output", np.tanh(ey + linear("hidden_output", h)))
        steps.append((logits, np.full(L, 1 / L), 0.0))
    return steps


REFERENCES: dict[str, Callable[[Weights, Array, list[int]], list[Outputs]]] = {
    "bahdanau": bahdanau,
    "luong": lambda weights, regions, words: luong(weights, regions, words, input_feeding=True),
    "luong, not fed": lambda weights, regions, words: luong(
        weights, regions, words, input_feeding=False
    ),
    "plain": plain,
}
REFERENCES |= {f"{kind}, norms": REFERENCES[kind] for kind in ("bahdanau", "luong", "plain")}


def test_teacher_forcing_matches_the_equations(kind, decoder, features, tokens) -> None:
    # Padding in the last caption and the last photo: later words still need those steps.
    tokens[:, -1, 1] = tokens[-1, :, 0] = PAD

    unrolled = decoder(decoder.memory(features), tokens)

    logits = decoder.readout(unrolled.embedded, *unrolled.outputs)
    found, weights = (logits, unrolled.alphas, unrolled.betas), Weights(decoder)
    for photo, caption in np.ndindex(B, R):
        words = tokens[photo, caption].tolist()
        steps = REFERENCES[kind](weights, features[photo].double().numpy(), words)
        for part, expected in zip(found, zip(*steps, strict=True), strict=True):
            of_caption = part[photo, caption].detach().numpy()
            np.testing.assert_allclose(of_caption, np.stack(expected), rtol=1e-4, atol=1e-5)


# --- Dropout and initialization ------------------------------------------------------------------


def test_dropout_is_active_only_in_training(kind, features, tokens) -> None:
    decoder = build(kind, dropout=0.5)
    memory = decoder.memory(features)
    unrolled = decoder(memory, tokens)

    def read() -> Tensor:
        return decoder.readout(unrolled.embedded, *unrolled.outputs)

    assert torch.equal(decoder(memory, tokens).outputs[0], unrolled.outputs[0])
    assert torch.equal(read(), read())
    decoder.train()
    assert not torch.equal(decoder(memory, tokens).embedded, unrolled.embedded)
    assert not torch.equal(decoder(memory, tokens).outputs[0], unrolled.outputs[0])
    assert not torch.equal(read(), read())


def test_initial_weights(kind) -> None:
    decoder = untrained(kind)

    if decoder.gate_norms is not None:  # a norm cancels a constant bias before it
        assert not decoder.word_gates.bias.any()
        bias = [norm.bias.tolist() for norm in decoder.gate_norms]
    else:
        bias = decoder.word_gates.bias.reshape(4, N).tolist()
    assert bias == [[0.0] * N, [1.0] * N, [0.0] * N, [0.0] * N]  # the forget gate starts open
    for gates in decoder.hidden_gates.weight.chunk(4):
        torch.testing.assert_close(gates @ gates.T, torch.eye(N))


def test_initial_output_follows_word_frequencies(kind) -> None:
    decoder = untrained(kind)
    counts = torch.tensor([0.0, 0.0, 40.0, 5.0, 39.0, 2.0, 1.0, 0.0, 9.0])
    nn.init.zeros_(decoder.word_output.weight)

    start_at_frequencies(decoder, counts)

    found = decoder.word_output(torch.zeros(decoder.word_output.in_features)).softmax(-1)
    torch.testing.assert_close(found, (counts + 1) / (96 + V))
