"""The table of gate inputs: the layer's own values, whenever they are computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from captioner.model.kernels import WordGates


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


def test_only_blocks_of_words_that_occur_are_computed(cached) -> None:
    cached.table.fill_(torch.nan)
    cached.look_up(torch.tensor([WordGates.BLOCK + 1]))

    computed = ~cached.table.isnan().any(dim=1)
    assert computed.nonzero().flatten().tolist() == [*range(WordGates.BLOCK, 2 * WordGates.BLOCK)]
    assert cached.missing == {0, 2}


def test_gates_cached_in_inference_mode_are_completed_outside_of_it() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        cached = WordGates(nn.Embedding(130, 6), nn.Linear(6, 8))
        cached.look_up(torch.tensor([0]))
    assert torch.isfinite(cached.look_up(torch.tensor([129]))).all()
