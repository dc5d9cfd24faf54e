"""Soft attention over the regions of a photo.

Before every word, each region gets a score that compares the region's features a_i with the
decoder's hidden state h. The softmax of the scores yields the attention weights. The context is the
mean of the features, weighted by the attention weights:

    e_i    = v^T tanh(W_a a_i + W_h h + b)     score of region i: how well it matches the state h
    alpha  = softmax(e)                        attention weights: how much each region counts
    z      = sum_i alpha_i a_i                 context: the decoder's input from the photo

The matrices W_a and W_h and the vectors v and b are learned. The code calls the features a_i the
values, the hidden state h the query, and W_a a_i + b the keys.

A `Scorer` computes the first line, and an `Attention` computes the other two lines.
``Attention.memory`` runs once per photo and precomputes everything that depends on the photo alone,
such as the keys. ``Attention.forward`` runs once per word. All captions of a photo share the
photo's memory by broadcasting.

The modules ``attention_variants`` and ``hard_attention`` contain alternatives.

Notation: B photos, R captions (or beams) per photo, L regions.
D feature size, N hidden size (the size of the query), A attention size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Sizes(NamedTuple):
    """The sizes that a scorer needs to create its weights."""

    features: int
    """Feature size, D."""
    query: int
    """Hidden size, N."""
    attention: int
    """Attention size, A: the setting ``decoder.attention_dim``."""
    regions: int
    """Largest number of regions, L. Only `LocationScorer` uses it."""


class Scorer(nn.Module):
    """Base class for scorers, which compare the regions with the decoder's hidden state.

    docs/attention.md shows how to add your own scorer.
    """

    equal_sizes = False
    """Whether the query and the features must have the same size. If so, a config with different
    sizes is rejected."""

    def __init__(self, sizes: Sizes) -> None:
        """Store the sizes. Subclasses create their weights here."""
        super().__init__()
        self.sizes = sizes

    def keys(self, features: Tensor) -> Tensor:
        """Compute the keys, (B, L, ...), float32, from the features, (B, L, D).

        This method runs once per photo, so everything that does not depend on the query belongs
        here. By default, the keys are the features.
        """
        return widen(features)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score every region against the query.

        Args:
            query: Hidden states, (B, R, N).
            keys: The result of ``keys``, (B, L, ...).

        Returns:
            The scores, (B, R, L), float32.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define forward(query, keys)")


class AdditiveScorer(Scorer):
    """Additive (Bahdanau) attention scores.

        e_i = v^T tanh(W_a a_i + W_h h + b)

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), appendix A.1.2, as used by Xu et al. 2015
    (arXiv:1502.03044). Deviation: a bias b, which the appendix omits for brevity. (v has no bias,
    because the softmax would cancel it.)
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.key = nn.Linear(sizes.features, sizes.attention)  # W_a, b
        self.query = nn.Linear(sizes.query, sizes.attention, bias=False)  # W_h
        self.energy = nn.Linear(sizes.attention, 1, bias=False)  # v

    def keys(self, features: Tensor) -> Tensor:
        """Return the keys W_a a_i + b, (B, L, A), for features a, (B, L, D)."""
        return widen(self.key(features))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return the scores (B, R, L) for queries (B, R, N) and keys (B, L, A)."""
        return self.compare(self.query(query), keys)

    def compare(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return the scores v^T tanh(k_i + q), (B, R, L).

        Subclasses can call this method with another projection of the queries.

        Args:
            query: Projected queries q, such as W_h h, (B, R, A).
            keys: Keys k_i of the regions, (B, L, A).
        """
        with torch.autocast(query.device.type, enabled=False):  # in float32
            mixed = torch.tanh(widen(query).unsqueeze(2) + keys.unsqueeze(1))  # (B, R, L, A)
            return mixed @ widen(self.energy.weight).flatten()


class Memory(NamedTuple):
    """Tensors that depend on the photo alone, computed once and shared by all of its captions."""

    values: Tensor
    """The features that are averaged into the context, (B, L, D). `MultiHeadAttention` and `OneMap`
    store different tensors here."""
    keys: Tensor
    """The keys that the scorer compares with the query, (B, L, ...). `MultiHeadAttention` and
    `OneMap` store different tensors here."""
    summary: Tensor
    """One vector per photo, (B, 1, D). The decoder computes its initial state from this vector."""
    mask: Tensor | None
    """True at real regions and False at padding, (B, L). None if all regions are real, as in the
    grid of an encoder."""

    def select(self, rows: Tensor | slice) -> Memory:
        """Return the memory of the photos in ``rows``, a slice or a tensor of indices."""
        return Memory(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


class AttentionOutput(NamedTuple):
    """The result of attention for one word."""

    context: Tensor
    """Weighted mean of the features, (B, R, D)."""
    alphas: Tensor
    """Attention weights, (B, R, L), float32. They sum to 1 and are 0 at masked regions."""
    chosen: Tensor | None = None
    """Index of the region that hard attention chose, (B, R), or None for soft attention."""


class Attention(nn.Module):
    """Base class for attention mechanisms."""

    reads_regions = True
    """Whether the mechanism uses the features of the regions. `FixedVector` uses only the number of
    regions, so the decoder need not project the features."""

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Compute the memory of photos once, before the first word.

        Args:
            features: Features of the regions, (B, L, D).
            summary: One vector per photo, (B, 1, D).
            mask: True at real regions, (B, L), or None if all are real.
        """
        raise NotImplementedError

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Attend to the photos before one word.

        Args:
            query: Hidden states of the decoder, (B, R, N).
            memory: The memory of the photos, (B, ...).

        Returns:
            The context and the attention weights of every caption.
        """
        raise NotImplementedError


class SoftAttention(Attention):
    """Soft attention: the context is the weighted mean of the features.

        alpha = softmax(e),   z = sum_i alpha_i a_i

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), equations 5 and 6. Deviation: none.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Return the memory with the features as values and with the scorer's keys."""
        return Memory(features, self.scorer.keys(features), summary, mask)

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Return the context and the attention weights for the queries, (B, R, N)."""
        alphas = softmax(self.scorer(query, memory.keys), memory.mask)
        context = alphas.to(memory.values.dtype) @ memory.values
        return AttentionOutput(context, alphas)


def softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Turn scores into attention weights.

    Args:
        scores: Scores of the regions, (..., R, L).
        mask: True at real regions, (..., L), or None if all are real.

    Returns:
        The attention weights, (..., R, L), float32. They are 0 at masked regions.
    """
    scores = widen(scores)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-2), -torch.inf)
    return scores.softmax(dim=-1)


def masked_mean(features: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of the features over the real regions, (B, 1, D).

    Args:
        features: Features of the regions, (B, L, D).
        mask: True at real regions, (B, L), or None if all are real.
    """
    if mask is None:
        return features.mean(dim=1, keepdim=True)
    return mask.unsqueeze(1).to(features.dtype) @ features / mask.sum(dim=1)[:, None, None]


def widen(tensor: Tensor) -> Tensor:
    """Convert a tensor in half precision (bf16 or fp16) to float32.

    Scores are computed in float32, because bf16 rounds away small differences between them. Tensors
    in float32 and float64 are returned unchanged.
    """
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
