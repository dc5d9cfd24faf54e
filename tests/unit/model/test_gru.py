"""Run the code of docs/gru.md and compare it with ``torch.nn.GRUCell``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from captioner.inference.torch_engine import DecoderStepper
from captioner.model import build
from captioner.model.decoder import Decoder
from captioner.model.losses import caption_losses
from captioner.options import DecoderConfig, SearchOptions
from captioner.search.search import search
from captioner.text.vocabulary import END, START

PAGE = Path(__file__).parents[3] / "docs" / "gru.md"
B, L, D, V, N = 2, 5, 8, 9, 6


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    new_file, entry = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names = dict(vars(build))
    exec(compile(new_file, "docs/gru.md", "exec"), names)
    exec(compile(entry, "docs/gru.md", "exec"), names)
    monkeypatch.setattr(build, "DECODERS", names["DECODERS"])
    config = DecoderConfig(embed_dim=5, hidden_dim=N, attention_dim=7, dropout=0.0, order="gru")
    return build.build_decoder(config, D, V, L)


@torch.no_grad()
def test_step_equals_torchs_gru_cell(decoder: Decoder) -> None:
    memory = decoder.memory(torch.randn(B, L, D))
    state = decoder.start(memory)
    embedded = decoder.embed(torch.tensor([[2], [7]]))

    step = decoder.step(decoder.word_gates(embedded), state, memory)

    cell = nn.GRUCell(5 + D, N)
    cell.weight_ih.copy_(torch.cat([decoder.word_gates.weight, decoder.context_gates.weight], 1))
    cell.weight_hh.copy_(decoder.hidden_gates.weight)
    cell.bias_ih.copy_(decoder.word_gates.bias)
    cell.bias_hh.zero_()
    context = step.outputs[1]  # beta z
    expected = cell(torch.cat([embedded, context], dim=-1)[:, 0], state.hidden[:, 0])
    torch.testing.assert_close(step.state.hidden[:, 0], expected)


def test_it_learns_captions_by_heart(decoder: Decoder) -> None:
    features = torch.randn(B, L, D)
    tokens = torch.tensor([[[START, 5, 6, 4, END]], [[START, 8, 6, 7, END]]])
    learned = [p for p in decoder.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        caption_losses(decoder.train(), decoder.memory(features), tokens).cross_entropy.backward()
        assert all(p.grad is not None for p in learned)
        optimizer.step()

    stepper = DecoderStepper(decoder.eval(), decoder.memory(features))
    found = search(stepper, SearchOptions(beam_size=2, max_length=6))

    assert [hypotheses[0].tokens for hypotheses in found] == [[5, 6, 4], [8, 6, 7]]
