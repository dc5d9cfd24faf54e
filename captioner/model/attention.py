"""Attention: compare each region of a photo with the decoder's state, and average the features.

    e_i    = v^T tanh(W_a a_i + W_h h + b)     score of region i: how well it matches the state h
    alpha  = softmax(e)                        how much the next word looks at each region
    z      = sum_i alpha_i a_i                 context, which the decoder reads

In the code, a are the features or values, h is the query, e are the scores, and W_a a_i + b are the
keys.

A `Scorer` computes the first line and an `Attention` computes the other two. ``memory`` runs once
per photo and computes everything that depends on the photo alone, such as W_a a_i + b. ``forward``
runs at every word. All captions of a photo share its memory by broadcasting.

``attention_variants`` has other scores and mechanisms, and ``hard_attention`` picks one region.

Notation: B photos, R captions (or beams) per photo, L regions, D feature size, N size of the hidden
state (the query), A attention size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Sizes(NamedTuple):
    """The sizes that a scorer needs to create its weights."""

    features: int
    """D."""
    query: int
    """N."""
    attention: int
    """A, ``decoder.attention_dim``."""
    regions: int
    """Maximum number of regions, L. Only the location score needs it."""


class Scorer(nn.Module):
    """Base class of the scores. To add one, subclass it and see docs/attention.md."""

    equal_sizes = False
    """Whether query and features must have the same size."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def keys(self, features: Tensor) -> Tensor:
        """Project the features once per photo, (B, L, D) to (B, L, ...), float32."""
        return widen(features)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return the scores (B, R, L), float32, from query (B, R, N) and keys (B, L, ...)."""
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
        """Return the scores (B, R, L) from query (B, R, N) and keys (B, L, A)."""
        return self.compare(self.query(query), keys)

    def compare(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return v^T tanh(k_i + q), (B, R, L), from projected queries (B, R, A) and keys."""
        with torch.autocast(query.device.type, enabled=False):  # in float32
            mixed = torch.tanh(widen(query).unsqueeze(2) + keys.unsqueeze(1))  # (B, R, L, A)
            return mixed @ widen(self.energy.weight).flatten()


class Memory(NamedTuple):
    """The part of attention that depends on the photo alone, shared by all its captions."""

    values: Tensor
    """(B, L, D), averaged to the context. Some mechanisms define another shape."""
    keys: Tensor
    """(B, L, ...), input of the scorer. Some mechanisms define another shape."""
    summary: Tensor
    """(B, 1, D), the photo as one vector, for the decoder's first state."""
    mask: Tensor | None
    """(B, L), True at real regions; None if all regions are real, as in the encoder's grids."""

    def select(self, rows: Tensor | slice) -> Memory:
        """Select photos by a slice or by row indices (B',)."""
        return Memory(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


class AttentionOutput(NamedTuple):
    """The result of attention for one word."""

    context: Tensor
    """(B, R, D)."""
    alphas: Tensor
    """(B, R, L), float32. Rows sum to 1 and are 0 at masked regions."""
    chosen: Tensor | None = None
    """(B, R), the region that hard attention chose; None for soft attention."""


class Attention(nn.Module):
    """Base class of the mechanisms."""

    reads_regions = True
    """Whether the features of the regions are used, or only their number, as in ``fixed``."""

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Compute the memory once per photo, from features (B, L, D); see `Memory`."""
        raise NotImplementedError

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Attend to the photos with the decoder's hidden state, (B, R, N), at every word."""
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
        """Keep the features as values and the scorer's keys."""
        return Memory(features, self.scorer.keys(features), summary, mask)

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Return context and alphas for the query, (B, R, N)."""
        alphas = softmax(self.scorer(query, memory.keys), memory.mask)
        context = alphas.to(memory.values.dtype) @ memory.values
        return AttentionOutput(context, alphas)


def softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Turn scores (..., R, L) into alphas, which are 0 where the mask (..., L) is False."""
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
    """Convert half precision to float32, as bf16 would round away small differences of scores.

    Tensors in float32 and float64 are returned unchanged.
    """
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
