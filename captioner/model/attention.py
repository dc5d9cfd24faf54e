"""Soft attention over the regions of a photo.

At every word, a score compares each region with the decoder's hidden state. The softmax of the
scores gives the attention weights, and the weighted mean of the features is the context:

    e_i    = v^T tanh(W_a a_i + W_h h + b)     score of region i: how well it matches the state h
    alpha  = softmax(e)                        how much the next word looks at each region
    z      = sum_i alpha_i a_i                 context, the input of the decoder

In the code, the features a are also called values, h is the query, and W_a a_i + b are the keys.

A `Scorer` computes the first line. An `Attention` computes the other two: its ``memory`` runs once
per photo and precomputes everything that depends on the photo alone, such as the keys. Its
``forward`` runs once per word. All captions of a photo share its memory by broadcasting.

Other scores and mechanisms are in ``attention_variants``, and ``hard_attention`` picks one region.

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
    """Largest number of regions, L. Only the location score needs it."""


class Scorer(nn.Module):
    """Base class for scores. docs/attention.md shows how to add your own."""

    equal_sizes = False
    """Whether query and features must have the same size."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def keys(self, features: Tensor) -> Tensor:
        """Project the features once per photo: (B, L, D) to keys (B, L, ...), float32."""
        return widen(features)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score every region against the query.

        Args:
            query: Hidden states, (B, R, N).
            keys: Projected features, (B, L, ...).

        Returns:
            The scores, (B, R, L), float32.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method forward(query, keys)")


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
        """Return W_a a_i + b, (B, L, A)."""
        return widen(self.key(features))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score every region: query (B, R, N) and keys (B, L, A) to (B, R, L)."""
        return self.compare(self.query(query), keys)

    def compare(self, query: Tensor, keys: Tensor) -> Tensor:
        """Compute v^T tanh(k_i + q) from projected queries (B, R, A) and keys: (B, R, L)."""
        with torch.autocast(query.device.type, enabled=False):  # in float32
            mixed = torch.tanh(widen(query).unsqueeze(2) + keys.unsqueeze(1))  # (B, R, L, A)
            return mixed @ widen(self.energy.weight).flatten()


class Memory(NamedTuple):
    """The results that depend on the photo alone, shared by all captions of the photo."""

    values: Tensor
    """The features that are averaged to the context, (B, L, D). Shapes vary by mechanism."""
    keys: Tensor
    """The scorer's input, (B, L, ...). Shapes vary by mechanism."""
    summary: Tensor
    """The photo as one vector, (B, 1, D), for the decoder's first state."""
    mask: Tensor | None
    """True at real regions, (B, L). None means that all regions are real, as in encoder grids."""

    def select(self, rows: Tensor | slice) -> Memory:
        """Return the memory of some photos, chosen by a slice or by row indices."""
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
    """True if the mechanism uses the regions' features, False if only their number (``fixed``)."""

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Compute the memory of photos once, before the first word.

        Args:
            features: Features of the regions, (B, L, D).
            summary: The photo as one vector, (B, 1, D).
            mask: True at real regions, (B, L), or None if all are real.
        """
        raise NotImplementedError

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Attend to the photos before one word, with the decoder's hidden state (B, R, N)."""
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
        """Keep the features as values, and compute the scorer's keys."""
        return Memory(features, self.scorer.keys(features), summary, mask)

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Return the context and the alphas for the query, (B, R, N)."""
        alphas = softmax(self.scorer(query, memory.keys), memory.mask)
        context = alphas.to(memory.values.dtype) @ memory.values
        return AttentionOutput(context, alphas)


def softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Turn scores (..., R, L) into alphas. They are 0 where the mask (..., L) is False."""
    scores = widen(scores)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-2), -torch.inf)
    return scores.softmax(dim=-1)


def masked_mean(features: Tensor, mask: Tensor | None) -> Tensor:
    """Average the features over the real regions: (B, L, D) to (B, 1, D)."""
    if mask is None:
        return features.mean(dim=1, keepdim=True)
    return mask.unsqueeze(1).to(features.dtype) @ features / mask.sum(dim=1)[:, None, None]


def widen(tensor: Tensor) -> Tensor:
    """Convert half precision to float32, because bf16 rounds away small differences of scores.

    Tensors in float32 and float64 are returned unchanged.
    """
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
