"""The decoder against a plain loop written from the equations in its module's docstring."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from captioner.config import DecoderConfig
from captioner.models.decoder import AttentionDecoder

B, R, T, L, D, V = 2, 3, 4, 5, 8, 9
N = 6
Array = NDArray[np.float64]


@pytest.fixture
def decoder(tiny_config: DecoderConfig) -> AttentionDecoder:
    new = AttentionDecoder(tiny_config, D, V).eval()
    with torch.no_grad():  # larger than at birth, so that nothing hides in a small number
        for parameter in new.parameters():
            parameter.normal_(std=0.7)
    return new


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(B, L, D)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(V, (B, R, T))


class ByHand(NamedTuple):
    logits: Array
    alphas: Array
    gates: Array
    hidden: Array


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def by_hand(decoder: AttentionDecoder, regions: Array, words: list[int]) -> ByHand:
    """One sentence about one photo, one word and one region at a time."""
    p = {name: value.detach().double().numpy() for name, value in decoder.named_parameters()}

    def linear(name: str, x: Array) -> Array:
        return p[f"{name}.weight"] @ x + p.get(f"{name}.bias", np.zeros(()))

    mean = sum(regions) / len(regions)
    h, c = np.tanh(linear("init_hidden", mean)), np.tanh(linear("init_cell", mean))
    told = []
    for y in words:
        e = [
            float(p["scorer.energy.weight"][0] @ np.tanh(linear("scorer.key", a)
                  + linear("scorer.query", h)))
            for a in regions
        ]  # fmt: skip
        alpha = np.exp(e) / np.exp(e).sum()
        z = sum(weight * a for weight, a in zip(alpha, regions, strict=True))
        beta = sigmoid(linear("gate", h))
        ey, bz = p["embedding.weight"][y], beta * z
        gates = linear("word_gates", ey) + linear("context_gates", bz) + linear("hidden_gates", h)
        i, f, g, o = np.split(gates, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        mixed = np.tanh(ey + linear("hidden_output", h) + linear("context_output", bz))
        told.append((linear("word_output", mixed), alpha, beta, h))
    return ByHand(*(np.stack(part) for part in zip(*told, strict=True)))


def step_by_step(
    decoder: AttentionDecoder, features: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, alphas, gates and hidden states, one call of ``step`` a word."""
    memory = decoder.memory(features)
    state = decoder.start(memory, tokens.shape[1])
    told = []
    for t in range(tokens.shape[2]):
        embedded = decoder.embed(tokens[:, :, t])
        step = decoder.step(decoder.word_gates(embedded), state, memory)
        state = step.state
        logits = decoder.readout(embedded, state.hidden, step.context)
        told.append((logits, step.alphas, step.gate, state.hidden))
    logits, alphas, gates, hidden = (torch.stack(part, dim=2) for part in zip(*told, strict=True))
    return logits, alphas, gates, hidden


def test_a_step_is_its_equations(decoder, features, tokens) -> None:
    logits, alphas, gates, hidden = (
        part.detach().numpy() for part in step_by_step(decoder, features, tokens)
    )
    for photo in range(B):
        for caption in range(R):
            words = tokens[photo, caption].tolist()
            expected = by_hand(decoder, features[photo].double().numpy(), words)
            at = (photo, caption)
            np.testing.assert_allclose(alphas[at], expected.alphas, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(gates[at], expected.gates, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(hidden[at], expected.hidden, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(logits[at], expected.logits, rtol=1e-4, atol=1e-4)


def test_the_recurrence_is_torchs_lstm_cell(decoder, features) -> None:
    cell = nn.LSTMCell(decoder.embedding.embedding_dim + D, N)
    with torch.no_grad():
        cell.weight_ih.copy_(
            torch.cat([decoder.word_gates.weight, decoder.context_gates.weight], dim=1)
        )
        cell.weight_hh.copy_(decoder.hidden_gates.weight)
        cell.bias_ih.copy_(decoder.word_gates.bias)
        cell.bias_hh.zero_()
    memory = decoder.memory(features)
    state = decoder.start(memory)
    embedded = decoder.embed(torch.tensor([[3], [5]]))

    step = decoder.step(decoder.word_gates(embedded), state, memory)
    word_and_context = torch.cat([embedded, step.context], dim=-1).squeeze(1)
    hidden, memory_cell = cell(word_and_context, (state.hidden[:, 0], state.cell[:, 0]))

    torch.testing.assert_close(step.state.hidden[:, 0], hidden)
    torch.testing.assert_close(step.state.cell[:, 0], memory_cell)


def test_teacher_forcing_is_step_by_step(decoder, features, tokens) -> None:
    embedded, hidden, context, alphas = decoder(features, tokens)
    logits, expected_alphas, _, expected_hidden = step_by_step(decoder, features, tokens)

    torch.testing.assert_close(decoder.readout(embedded, hidden, context), logits)
    torch.testing.assert_close(alphas, expected_alphas)
    torch.testing.assert_close(hidden, expected_hidden)


def test_captions_that_share_a_photo_are_the_photo_repeated(decoder, features, tokens) -> None:
    shared = decoder(features, tokens)
    copies = decoder(features.repeat_interleave(R, dim=0), tokens.reshape(B * R, 1, T))

    for one, other in zip(shared, copies, strict=True):
        torch.testing.assert_close(one, other.reshape(one.shape))


def test_a_word_depends_on_no_later_word(decoder, features, tokens) -> None:
    changed = tokens.clone()
    changed[..., 2:] = (changed[..., 2:] + 1) % V

    _, hidden, _, alphas = decoder(features, tokens)
    _, other_hidden, _, other_alphas = decoder(features, changed)

    torch.testing.assert_close(hidden[:, :, :2], other_hidden[:, :, :2])
    torch.testing.assert_close(alphas[:, :, :3], other_alphas[:, :, :3])
    assert not torch.allclose(hidden[:, :, 2], other_hidden[:, :, 2], atol=1e-3)


def test_alphas_sum_to_one_and_move_from_word_to_word(decoder, features, tokens) -> None:
    _, _, _, alphas = decoder(features, tokens)

    torch.testing.assert_close(alphas.sum(-1), torch.ones(B, R, T))
    moved = (alphas[:, :, 1:] - alphas[:, :, :-1]).abs().amax(dim=-1)
    assert moved.min() > 1e-3
    # From the same start, other words lead to other places.
    _, _, _, others = decoder(features, (tokens + 1) % V)
    torch.testing.assert_close(alphas[:, :, 0], others[:, :, 0])
    assert (alphas[:, :, -1] - others[:, :, -1]).abs().amax(dim=-1).min() > 1e-3


def test_the_features_are_projected_once_a_photo(decoder, features, tokens) -> None:
    shapes = []
    decoder.scorer.key.register_forward_hook(lambda _, args, out: shapes.append(out.shape))

    decoder(features, tokens)

    assert shapes == [(B, L, 7)]


def test_dropout_is_off_in_use_and_on_in_training(features, tokens) -> None:
    config = DecoderConfig(embed_dim=5, hidden_dim=N, attention_dim=7, dropout=0.5)
    decoder = AttentionDecoder(config, D, V).eval()
    inputs = torch.randn(3, 5), torch.randn(3, N), torch.randn(3, D)

    assert torch.equal(decoder(features, tokens)[1], decoder(features, tokens)[1])
    assert torch.equal(decoder.readout(*inputs), decoder.readout(*inputs))
    decoder.train()
    assert not torch.equal(decoder(features, tokens)[1], decoder(features, tokens)[1])
    assert not torch.equal(decoder.readout(*inputs), decoder.readout(*inputs))


def test_the_forget_gate_starts_open(tiny_config) -> None:
    bias = AttentionDecoder(tiny_config, D, V).word_gates.bias

    assert bias.reshape(4, N).tolist() == [[0.0] * N, [1.0] * N, [0.0] * N, [0.0] * N]
