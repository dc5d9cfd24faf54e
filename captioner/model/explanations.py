"""Relevance of each region of the photo for each word of a caption, by five methods.

a_i are the features of region i, alpha its attention weights and beta the gate. log p is the
log-probability of a word after the words before it (nats). The relevance of region i is:

    attention        alpha_i                     how much the decoder attended to it
    attention_gate   beta alpha_i                how much of that reached the word
    gradient_input   a_i . d log p / d a_i       first-order effect of its features
    grad_cam         relu(w . a_i),  w = mean_i d log p / d a_i
    occlusion        log p - log p with a_i replaced by the mean feature

Gradients and occlusions follow every path from the grid to the word: the context and the scores of
this word and of all earlier words (through the hidden state), and the initial state. They start at
the encoder's output, so the encoder does not run again.

Sources:
    gradient_input: Shrikumar et al. 2016 (arXiv:1605.01713). Deviation: none.
    grad_cam: Selvaraju et al. 2017 (arXiv:1610.02391), equations 1 and 2, with the log-probability
        of a word, as in its section on captioning. Deviation: The weights belong to one word, not
        to the whole caption.
    occlusion: Zeiler and Fergus 2014 (arXiv:1311.2901). Deviation: Features are replaced, not
        pixels.

Notation: N versions of one photo's grid, T words, L regions, D feature size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from captioner.model.attention import widen
from captioner.model.decoder import Decoder
from captioner.options import ExplanationMethod
from captioner.text.vocabulary import PAD

BLOCK = 64 << 20
"""Size of the features that are processed together (bytes). It limits the memory that is used."""


class WordScorer:
    """The log-probabilities of a caption's words as functions of the photo's grid."""

    def __init__(self, decoder: Decoder, start: int, tokens: Sequence[int]) -> None:
        """Prepare a caption of T tokens, without start and end, and a decoder in eval mode."""
        self.decoder = decoder
        device = decoder.embedding.weight.device
        self.inputs = torch.tensor([start, *tokens[:-1]], device=device)[: len(tokens)]  # (T,)
        self.targets = torch.tensor(list(tokens), dtype=torch.long, device=device)  # (T,)

    def __len__(self) -> int:
        return len(self.targets)

    def every_word(self, grids: Tensor) -> Tensor:
        """Return the log-probability of every word for each version of the grid, (N, T).

        ``grids`` are the versions, (N, L, D).
        """
        tokens = self.inputs.expand(len(grids), 1, -1)
        unrolled = self.decoder(self.decoder.memory(grids), tokens)
        logits = self.decoder.readout(unrolled.embedded, *unrolled.outputs)[:, 0]  # (N, T, V)
        log_probs = widen(logits).log_softmax(dim=-1)
        return log_probs.gather(2, self.targets.expand(len(grids), -1).unsqueeze(2)).squeeze(2)

    def one_word(self, grids: Tensor, positions: Tensor) -> Tensor:
        """Return the log-probability of one word for each version of the grid, (N,).

        Args:
            grids: Versions of the grid, (N, L, D).
            positions: Position of the word for each version, in descending order, (N,). The decoder
                skips the steps after it.
        """
        steps = torch.arange(len(self), device=positions.device)
        read = steps <= positions.unsqueeze(1)  # (N, T)
        tokens = self.inputs.where(read, PAD).unsqueeze(1)
        unrolled = self.decoder(self.decoder.memory(grids), tokens)
        rows = torch.arange(len(grids), device=positions.device)
        embedded, *outputs = (
            part[rows, 0, positions] for part in (unrolled.embedded, *unrolled.outputs)
        )
        log_probs = widen(self.decoder.readout(embedded, *outputs)).log_softmax(dim=-1)
        return log_probs[rows, self.targets[positions]]


def word_gradients(score: Callable[[Tensor, Tensor], Tensor], grid: Tensor, words: int) -> Tensor:
    """Return the gradients of the words' log-probabilities by the grid (L, D): (T, L, D).

    Each word has its own copy of the grid, so that one backward pass serves many words. ``score``
    is a function such as ``WordScorer.one_word``.
    """
    found: list[Tensor] = []
    positions = torch.arange(words - 1, -1, -1, device=grid.device)
    for block in torch.split(positions, rows_per_block(grid)):
        with torch.enable_grad():
            copies = grid.repeat(len(block), 1, 1).requires_grad_()
            found += torch.autograd.grad(score(copies, block).sum(), copies)
    return torch.cat(found).flip(0)


def gradient_input(gradients: Tensor, grid: Tensor) -> Tensor:
    """Multiply gradients (T, L, D) by a grid (L, D), and sum over the features, to (T, L)."""
    return (gradients * grid).sum(dim=-1)


def grad_cam(gradients: Tensor, grid: Tensor) -> Tensor:
    """Sum the features, weighted by the mean gradient of their channel, and clip at 0: (T, L)."""
    return (gradients.mean(dim=1) @ grid.T).relu()


def occlusion(every_word: Callable[[Tensor], Tensor], grid: Tensor) -> Tensor:
    """Return the drop of each log-probability if a region has the mean feature instead: (T, L).

    ``grid`` is (L, D), and ``every_word`` is a function such as ``WordScorer.every_word``.
    """
    drops = []
    whole = every_word(grid.unsqueeze(0))  # (1, T)
    for block in torch.split(torch.arange(len(grid), device=grid.device), rows_per_block(grid)):
        versions = grid.repeat(len(block), 1, 1)
        versions[torch.arange(len(block), device=grid.device), block] = grid.mean(dim=0)
        drops.append(whole - every_word(versions))
    return torch.cat(drops).T


def relevance(method: ExplanationMethod, scorer: WordScorer, grid: Tensor) -> Tensor:
    """Return the relevance of every region for every word of a caption (nats), (T, L).

    It is negative where a region makes the word less likely.

    Args:
        method: gradient_input, grad_cam or occlusion.
        scorer: The caption's words.
        grid: The encoder's output for the photo, (L, D), float32.
    """
    if len(scorer) == 0:
        return grid.new_zeros(0, len(grid))
    if method == "occlusion":
        with torch.no_grad():
            return occlusion(scorer.every_word, grid)
    gradients = word_gradients(scorer.one_word, grid, len(scorer))
    return (grad_cam if method == "grad_cam" else gradient_input)(gradients, grid)


def rows_per_block(grid: Tensor) -> int:
    """Return the number of versions of a grid (L, D) to process together."""
    return max(1, BLOCK // (grid.numel() * grid.element_size()))
