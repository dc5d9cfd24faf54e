"""Alternatives to additive soft attention: other scores, several heads, one map for all words.

Notation: as in ``attention``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from captioner.model.attention import (
    AdditiveScorer,
    Attention,
    AttentionOutput,
    Memory,
    Scorer,
    Sizes,
    masked_mean,
    softmax,
    widen,
)


def dot_products(query: Tensor, keys: Tensor) -> Tensor:
    """Compute q^T k_i without autocast: (..., R, N) and (..., L, N) to (..., R, L)."""
    with torch.autocast(query.device.type, enabled=False):
        return torch.matmul(widen(query), keys.transpose(-1, -2))


class ConcatScorer(AdditiveScorer):
    """Concat (Luong) attention scores: additive scores with one matrix, without a bias.

        e_i = v^T tanh(W [q; a_i])

    W is applied in two halves, so that the half for the features is computed once per photo.

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "concat". Deviation: none.
    """

    def __init__(self, sizes: Sizes) -> None:
        Scorer.__init__(self, sizes)
        self.mix = nn.Linear(sizes.query + sizes.features, sizes.attention, bias=False)
        self.energy = nn.Linear(sizes.attention, 1, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """Compute the features' half of W [q; a_i], (B, L, A)."""
        return widen(nn.functional.linear(features, self.mix.weight[:, self.sizes.query :]))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score every region: query (B, R, N) and keys (B, L, A) to (B, R, L)."""
        half = nn.functional.linear(query, self.mix.weight[:, : self.sizes.query])
        return self.compare(half, keys)


class DotScorer(Scorer):
    """Dot-product attention scores, without weights.

        e_i = q^T a_i

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "dot". Deviation: none.
    """

    equal_sizes = True

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score every region: query (B, R, D) and keys (B, L, D) to (B, R, L)."""
        return dot_products(query, keys)


class ScaledDotScorer(DotScorer):
    """Dot products scaled by the feature size.

        e_i = q^T a_i / sqrt(D)

    The features are both keys and values. `MultiHeadAttention` adds projections.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1. Deviation: none.
    """

    def keys(self, features: Tensor) -> Tensor:
        """Compute a_i / sqrt(D), (B, L, D)."""
        return widen(features) / math.sqrt(self.sizes.features)


class GeneralScorer(Scorer):
    """General (bilinear) attention scores. Query and features may differ in size.

        e_i = q^T W a_i

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "general". Deviation: none.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.key = nn.Linear(sizes.features, sizes.query, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """Compute W a_i, (B, L, N)."""
        return widen(self.key(features))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score every region: query (B, R, N) and keys (B, L, N) to (B, R, L)."""
        return dot_products(query, keys)


class LocationScorer(Scorer):
    """Location-based scores, computed from the query alone.

        e = W q,   W has one row per region

    If a photo has fewer regions than W has rows, the first rows are used, as in the paper for short
    sentences.

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, equation 8.
    Deviation: More regions than rows are an error. The paper ignores the end of a long sentence.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.place = nn.Linear(sizes.query, sizes.regions, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """Return an empty tensor, (B, L, 0), that only carries the number of regions."""
        return widen(features[..., :0])

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score every region: query (B, R, N) and keys (B, L, 0) to (B, R, L)."""
        scores: Tensor = widen(self.place(query))[..., : keys.shape[1]]
        return scores


class MultiHeadAttention(Attention):
    """Multi-head scaled dot-product attention.

        head_h = softmax(W_q^h q . W_k^h a_i / sqrt(d)) W_v^h a_i,   z = W_o [head_1; head_2; ...]

    The alphas that ``forward`` returns are the mean over the heads. In the memory, keys and values
    have the shape (B, heads, L, d) with d = A / heads.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2. Deviation: none.
    """

    def __init__(self, sizes: Sizes, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(sizes.query, sizes.attention, bias=False)
        self.key = nn.Linear(sizes.features, sizes.attention, bias=False)
        self.value = nn.Linear(sizes.features, sizes.attention, bias=False)
        self.output = nn.Linear(sizes.attention, sizes.features, bias=False)

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """See ``Attention.memory``."""
        keys = widen(self._by_head(self.key(features)))
        return Memory(self._by_head(self.value(features)), keys, summary, mask)

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """See ``Attention.forward``."""
        queries = self._by_head(self.query(query))  # (B, heads, R, d)
        mask = None if memory.mask is None else memory.mask.unsqueeze(1)
        alphas = softmax(dot_products(queries, memory.keys) / queries.shape[-1] ** 0.5, mask)
        heads = alphas.to(memory.values.dtype) @ memory.values  # (B, heads, R, d)
        context = self.output(heads.transpose(1, 2).flatten(2))
        return AttentionOutput(context, alphas.mean(dim=1))

    def _by_head(self, tensor: Tensor) -> Tensor:
        """Split the last axis into heads: (B, n, A) to (B, heads, n, d)."""
        return tensor.view(*tensor.shape[:2], self.heads, -1).transpose(1, 2)


class OneMap(Attention):
    """One context and one map for all words, computed once per photo.

    ``Memory.values`` is the context, (B, 1, D), and ``Memory.keys`` are the alphas, (B, 1, L).
    """

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """See ``Attention.forward``."""
        context, alphas = (
            part.expand(-1, query.shape[1], -1) for part in (memory.values, memory.keys)
        )
        return AttentionOutput(context, alphas)


class FixedVector(OneMap):
    """No attention: the context is the summary vector and the map is uniform.

        z = summary,   alpha_i = 1 / L

    Source: Cho et al. 2014 (arXiv:1406.1078): their decoder reads the same vector at every step.
    Deviation: The summary of a photo is its mean feature, not the last state of a recurrent
    encoder.
    """

    reads_regions = False

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """See ``Attention.memory``."""
        scores = features.new_zeros(features.shape[0], 1, features.shape[1])
        return Memory(summary, softmax(scores.to(widen(summary).dtype), mask), summary, mask)


class PhotoAttention(OneMap):
    """Attention that takes its query from the photo instead of the decoder.

        self   q_i = a_i              each region is scored against its own features
        mean   q   = sum_i a_i / L    all regions are scored against the mean feature

    Queries and features have the same size.

    Source: ``self`` with the additive scorer: Lin et al. 2017 (arXiv:1703.03130), equation 5. For
    other combinations, see the scorer.
    Deviation: With ``self``, both matrices of the scorer are applied to a_i and act as their sum.
    One map is computed, not several.
    """

    def __init__(self, scorer: Scorer, query: str) -> None:
        super().__init__()
        self.scorer, self.source = scorer, query

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """See ``Attention.memory``."""
        keys = self.scorer.keys(features)  # (B, L, ...)
        if self.source == "self":  # score each region as if it were a photo with one region
            regions, own = features.flatten(0, 1).unsqueeze(1), keys.flatten(0, 1).unsqueeze(1)
            scores = self.scorer(regions, own).view(features.shape[0], 1, -1)  # (B, 1, L)
        else:
            scores = self.scorer(masked_mean(features, mask), keys)
        alphas = softmax(scores, mask)
        return Memory(alphas.to(features.dtype) @ features, alphas, summary, mask)


BUILT_IN: dict[str, type[Scorer]] = {
    "additive": AdditiveScorer,
    "concat": ConcatScorer,
    "dot": DotScorer,
    "general": GeneralScorer,
    "location": LocationScorer,
    "scaled_dot": ScaledDotScorer,
}
"""The built-in scorers by their ``decoder.attention`` value. To add one, write its class and add an
entry here, its equation in tests/unit/model/test_attention.py and a row in docs/attention.md."""
