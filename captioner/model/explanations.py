"""Relevance of each region of the photo for each word of a caption, by five methods.

In the table, a_i are the features of region i, alpha_i is its attention weight, and beta is the
context gate. log p is the log-probability of a word, given the words before it (nats).

    method           relevance of region i       meaning
    attention        alpha_i                     how much the decoder attended to the region
    attention_gate   beta alpha_i                how much of this attention reached the word
    gradient_input   a_i . d log p / d a_i       estimated drop of log p if a_i were 0
    grad_cam         relu(w . a_i)               w = mean_i d log p / d a_i
    occlusion        log p - log p_i             p_i: a_i is replaced by the mean of all a_i

The decoder computes the first two methods anyway. This module computes the other three.

Gradients and occlusions include every way in which a region can influence a word: the context and
the scores of this word and of all earlier words (through the hidden state), and the initial state.
The grid is the encoder's output, so the encoder does not run again.

Sources:
    gradient_input: Shrikumar et al. 2016 (arXiv:1605.01713). Deviation: none.
    grad_cam: Selvaraju et al. 2017 (arXiv:1610.02391), equations 1 and 2, with the log-probability
        of a word, as in its section on captioning. Deviation: The weights belong to one word, not
        to the whole caption.
    occlusion: Zeiler and Fergus 2014 (arXiv:1311.2901). Deviation: Features are replaced, not
        pixels.

Notation: The grid contains the features of a photo's L regions, (L, D). N versions of a grid differ
in some regions. T words, D feature size.
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
"""Maximum size of the grids that are processed together (bytes). It limits the use of memory."""


class WordScorer:
    """The log-probabilities of a caption's words as functions of the photo's grid."""

    def __init__(self, decoder: Decoder, start: int, tokens: Sequence[int]) -> None:
        """Prepare the inputs and the targets of a caption.

        Args:
            decoder: A decoder in eval mode.
            start: The start token of the caption.
            tokens: The T tokens of the caption, without start and end tokens.
        """
        self.decoder = decoder
        device = decoder.embedding.weight.device
        self.inputs = torch.tensor([start, *tokens[:-1]], device=device)[: len(tokens)]  # (T,)
        self.targets = torch.tensor(list(tokens), dtype=torch.long, device=device)  # (T,)

    def __len__(self) -> int:
        """Return the number of words, T."""
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
    """Return the gradient of each word's log-probability with respect to the grid, (T, L, D).

    Each word has its own copy of the grid, so that one backward pass serves many words.

    Args:
        score: A function such as ``WordScorer.one_word``.
        grid: The photo's features, (L, D).
        words: Number of words, T.
    """
    found: list[Tensor] = []
    positions = torch.arange(words - 1, -1, -1, device=grid.device)
    for block in torch.split(positions, rows_per_block(grid)):
        with torch.enable_grad():
            copies = grid.repeat(len(block), 1, 1).requires_grad_()
            found += torch.autograd.grad(score(copies, block).sum(), copies)
    return torch.cat(found).flip(0)


def gradient_input(gradients: Tensor, grid: Tensor) -> Tensor:
    """Multiply gradients (T, L, D) by the grid (L, D), and sum over D.

    Returns:
        The relevance of every region for every word, (T, L).
    """
    return (gradients * grid).sum(dim=-1)


def grad_cam(gradients: Tensor, grid: Tensor) -> Tensor:
    """Sum each region's features, weighted by the mean gradient over all regions, and clip at 0.

    Args:
        gradients: The result of ``word_gradients``, (T, L, D).
        grid: The photo's features, (L, D).

    Returns:
        The relevance of every region for every word, (T, L).
    """
    return (gradients.mean(dim=1) @ grid.T).relu()


def occlusion(every_word: Callable[[Tensor], Tensor], grid: Tensor) -> Tensor:
    """Replace each region's features by the mean, and return how much each log-probability drops.

    Args:
        every_word: A function such as ``WordScorer.every_word``.
        grid: The photo's features, (L, D).

    Returns:
        The relevance of every region for every word (nats), (T, L).
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

    The relevance is negative if a region makes the word less likely. With grad_cam, it is then 0.

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
    """Return the number of versions of a grid (L, D) that fit ``BLOCK``, at least 1."""
    return max(1, BLOCK // (grid.numel() * grid.element_size()))
