"""Attention over text: the text encoder's annotations with the caption decoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from captioner.inference.stepper import DecoderStepper
from captioner.model.text import TextEncoder, TextModel
from captioner.options import DecoderConfig, SearchOptions, TrainingConfig
from captioner.search.search import search
from captioner.text.vocabulary import END, PAD, START

S, V, E, H, L = 9, 8, 5, 3, 6  # source and target words, sizes, longest source
SOURCE = torch.tensor([[4, 5, 6, 7, 8, 4], [7, 4, 5, PAD, PAD, PAD], [6, PAD, PAD, PAD, PAD, PAD]])
TARGET = torch.tensor(
    [[START, 4, 5, 6, END], [START, 7, END, PAD, PAD], [START, 5, 5, END, PAD]]
).unsqueeze(1)


def encoder() -> TextEncoder:
    return TextEncoder(S, E, H)


def model(**changes: str) -> TextModel:
    config = DecoderConfig(
        embed_dim=4, hidden_dim=6, attention_dim=4, dropout=0.0, heads=2, **changes
    )
    return TextModel(encoder(), config, V, max_words=L)


def one_direction(lstm: nn.LSTM, suffix: str) -> nn.LSTM:
    single = nn.LSTM(E, H, batch_first=True)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    single.load_state_dict({name: getattr(lstm, name + suffix) for name in names})
    return single


def test_annotations_are_forward_and_backward_lstm_states() -> None:
    new = encoder()
    forward, backward = one_direction(new.lstm, ""), one_direction(new.lstm, "_reverse")

    text = new(SOURCE)

    for row, length in enumerate((6, 3, 1)):
        embedded = new.embedding(SOURCE[row : row + 1, :length])
        there, _ = forward(embedded)
        back, _ = backward(embedded.flip(1))
        expected = torch.cat([there, back.flip(1)], dim=-1)[0]
        torch.testing.assert_close(text.features[row, :length], expected)
        ends = torch.cat([there[0, -1], back[0, -1]])
        torch.testing.assert_close(text.summary[row, 0], ends)


def test_padding_is_masked_and_zero() -> None:
    text = encoder()(SOURCE)

    assert text.mask.sum(dim=1).tolist() == [6, 3, 1]
    assert torch.equal(text.mask, SOURCE != PAD)
    assert not text.features[~text.mask].any()


MECHANISMS = [
    "additive", "concat", "general", "dot", "scaled_dot", "multi_head", "location", "fixed",
    "fixed_at_start",
]  # fmt: skip


@pytest.mark.parametrize("order", ["bahdanau", "luong"])
@pytest.mark.parametrize("attention", MECHANISMS)
def test_every_mechanism_has_gradients_and_ignores_padding(attention, order) -> None:
    new = model(attention=attention, order=order)

    losses = new(SOURCE, TARGET)
    losses.objective(TrainingConfig()).backward()

    assert losses.words == 4 + 2 + 3
    still = [n for n, p in new.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []
    alphas = new.decoder(new.memory(SOURCE), TARGET[..., :-1]).alphas
    padding = (SOURCE == PAD)[:, None, None].expand_as(alphas)
    assert not alphas[padding].any()
    real = TARGET[..., :-1] != PAD
    torch.testing.assert_close(alphas.sum(-1)[real], torch.ones(int(real.sum())))


@pytest.mark.parametrize("attention", MECHANISMS)
def test_batch_equals_single_texts(attention) -> None:
    new = model(attention=attention).eval()
    options = SearchOptions(beam_size=3, max_length=5)

    with torch.inference_mode():
        together = search(DecoderStepper(new.decoder, new.memory(SOURCE)), options)
        for row, length in enumerate((6, 3, 1)):
            memory = new.memory(SOURCE[row : row + 1, :length])
            (alone,) = search(DecoderStepper(new.decoder, memory), options)
            assert alone[0].tokens == together[row][0].tokens
            assert alone[0].log_prob == pytest.approx(together[row][0].log_prob, rel=1e-4)
            torch.testing.assert_close(alone[0].alphas, together[row][0].alphas[:, :length])


def test_fixed_context_depends_only_on_the_summary() -> None:
    new = model(attention="fixed").eval()
    text = new.encoder(SOURCE)

    def logits(features: Tensor, summary: Tensor) -> Tensor:
        memory = new.decoder.memory(features, text.mask, summary)
        unrolled = new.decoder(memory, TARGET[..., :-1])
        return new.decoder.readout(unrolled.embedded, *unrolled.outputs)

    expected = logits(text.features, text.summary)

    torch.testing.assert_close(logits(torch.randn_like(text.features), text.summary), expected)
    assert not torch.allclose(logits(text.features, torch.randn_like(text.summary)), expected)


@pytest.mark.slow
def test_attention_learns_to_reverse_a_text() -> None:
    """Reverse three words; half of the texts are held out, so memorizing them is not enough."""
    every = torch.cartesian_prod(*[torch.arange(4, 9)] * 3)[torch.randperm(125)]
    shown, kept_back = every[:90], every[90:]

    def target(texts: Tensor) -> Tensor:
        ends = torch.full((len(texts), 1), 1)
        return torch.cat([ends * START, texts.flip(1), ends * END], dim=1).unsqueeze(1)

    config = DecoderConfig(embed_dim=16, hidden_dim=32, attention_dim=16, dropout=0.0)
    new = TextModel(TextEncoder(S, 16, 16), config, S, max_words=3)
    optimizer = torch.optim.AdamW(new.parameters(), lr=1e-2)
    for _ in range(120):
        losses = new(shown, target(shown))
        (losses.cross_entropy / losses.words).backward()
        optimizer.step()
        optimizer.zero_grad()
    new.eval()

    found = search(
        DecoderStepper(new.decoder, new.memory(kept_back)), SearchOptions(beam_size=1, max_length=5)
    )

    right = [h[0].tokens == row for h, row in zip(found, kept_back.flip(1).tolist(), strict=True)]
    assert sum(right) >= 0.9 * len(right)
