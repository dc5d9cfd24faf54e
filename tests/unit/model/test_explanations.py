"""Compare explanation methods with finite differences, linear models and brute force."""

from __future__ import annotations

import pytest
import torch
from mechanisms import MECHANISMS, config_of
from torch import Tensor

from captioner.model import explanations
from captioner.model.build import build_decoder
from captioner.model.decoder import Decoder
from captioner.model.explanations import (
    WordScorer,
    grad_cam,
    gradient_input,
    occlusion,
    word_gradients,
)
from captioner.text.vocabulary import START

REGIONS, SIZE, WORDS = 4, 6, 9
TOKENS = [5, 4, 8, 5]


@pytest.fixture(params=MECHANISMS)
def decoder(request) -> Decoder:
    """Build a decoder in float64 and eval mode, with initial weights."""
    return build_decoder(config_of(request.param), SIZE, WORDS, REGIONS).double().eval()


@pytest.fixture
def grid() -> Tensor:
    return torch.randn(REGIONS, SIZE, dtype=torch.float64)


def word_by_word(decoder: Decoder, grid: Tensor, tokens: list[int]) -> Tensor:
    """Compute log-probabilities one step at a time, as a search does, (T,)."""
    memory = decoder.memory(grid[None])
    state, found = decoder.start(memory), []
    for previous, token in zip([START, *tokens], tokens, strict=False):
        embedded = decoder.embed(torch.tensor([[previous]]))
        step = decoder.step(decoder.word_gates(embedded), state, memory)
        state = step.state
        logits = decoder.readout(embedded, *step.outputs)
        found.append(logits.log_softmax(dim=-1)[0, 0, token])
    return torch.stack(found)


# --- scores --------------------------------------------------------------------------------------


def test_scores_equal_those_of_a_search(decoder) -> None:
    grids = torch.randn(5, REGIONS, SIZE, dtype=torch.float64)
    scorer = WordScorer(decoder, START, TOKENS)

    every = scorer.every_word(grids)

    for version, row in zip(grids, every, strict=True):
        torch.testing.assert_close(row, word_by_word(decoder, version, TOKENS))
    positions = torch.tensor([3, 3, 2, 0, 0])
    torch.testing.assert_close(scorer.one_word(grids, positions), every[torch.arange(5), positions])


# --- gradients -----------------------------------------------------------------------------------


def test_gradients_equal_finite_differences(decoder, grid) -> None:
    """Gradients follow every path: context, scores, earlier words and initial state."""
    scorer, step = WordScorer(decoder, START, TOKENS), 1e-6

    found = word_gradients(scorer.one_word, grid, len(TOKENS))

    steps = step * torch.eye(grid.numel(), dtype=grid.dtype).view(-1, *grid.shape)
    with torch.no_grad():
        slopes = (scorer.every_word(grid + steps) - scorer.every_word(grid - steps)) / (2 * step)
    torch.testing.assert_close(found, slopes.T.view_as(found), rtol=1e-4, atol=1e-8)
    assert found[-1].abs().sum() > 0


def test_block_size_does_not_change_gradients(grid, monkeypatch) -> None:
    decoder = build_decoder(config_of(MECHANISMS[0]), SIZE, WORDS, REGIONS).double().eval()
    scorer = WordScorer(decoder, START, TOKENS)
    gradients = word_gradients(scorer.one_word, grid, len(TOKENS))
    drops = occlusion(scorer.every_word, grid)

    monkeypatch.setattr(explanations, "BLOCK", 3 * grid.numel() * grid.element_size())

    again = word_gradients(scorer.one_word, grid, len(TOKENS))
    torch.testing.assert_close(again, gradients)
    torch.testing.assert_close(occlusion(scorer.every_word, grid), drops)


def test_gradient_input_is_complete_for_a_linear_model(grid) -> None:
    """The relevances of all regions sum to the score, because a grid of zeros scores 0."""
    weights = torch.randn(3, REGIONS, SIZE, dtype=torch.float64)

    def score(grids: Tensor, positions: Tensor) -> Tensor:
        return (weights[positions] * grids).sum(dim=(1, 2))

    found = gradient_input(word_gradients(score, grid, 3), grid).sum(dim=1)

    torch.testing.assert_close(found, score(grid.repeat(3, 1, 1), torch.arange(3)))


def test_grad_cam_against_its_equations(grid) -> None:
    gradients = torch.randn(2, REGIONS, SIZE, dtype=torch.float64)
    expected = [
        [max(sum(float(word[:, k].mean() * a[k]) for k in range(SIZE)), 0.0) for a in grid]
        for word in gradients
    ]
    torch.testing.assert_close(grad_cam(gradients, grid), torch.tensor(expected).double())


# --- occlusion -----------------------------------------------------------------------------------


def test_occlusion_is_the_score_drop_without_a_region(decoder, grid) -> None:
    found = occlusion(WordScorer(decoder, START, TOKENS).every_word, grid)

    whole = word_by_word(decoder, grid, TOKENS)
    for region in range(REGIONS):
        without = grid.clone()
        without[region] = grid.mean(dim=0)
        drop = whole - word_by_word(decoder, without, TOKENS)
        torch.testing.assert_close(found[:, region], drop)
