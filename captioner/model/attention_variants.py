"""Other attention than `AdditiveScorer`'s: scores, several heads, and one map for all words.

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
    """q^T k_i without autocast: (..., R, N) and (..., L, N) to (..., R, L)."""
    with torch.autocast(query.device.type, enabled=False):
        return torch.matmul(widen(query), keys.transpose(-1, -2))


class ConcatScorer(AdditiveScorer):
    """Concat (Luong) attention scores: additive scores with one matrix and no bias.

        e_i = v^T tanh(W [q; a_i])

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "concat". Deviation: none; W is
    applied in two halves, so that the features' half is computed once per photo.
    """

    def __init__(self, sizes: Sizes) -> None:
        Scorer.__init__(self, sizes)
        self.mix = nn.Linear(sizes.query + sizes.features, sizes.attention, bias=False)
        self.energy = nn.Linear(sizes.attention, 1, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """The features' half of W [q; a_i], (B, L, A)."""
        return widen(nn.functional.linear(features, self.mix.weight[:, self.sizes.query :]))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, N) and keys (B, L, A)."""
        half = nn.functional.linear(query, self.mix.weight[:, : self.sizes.query])
        return self.compare(half, keys)


class DotScorer(Scorer):
    """Dot-product attention scores, without weights.

        e_i = q^T a_i

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "dot". Deviation: none.
    """

    equal_sizes = True

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, D) and keys (B, L, D)."""
        return dot_products(query, keys)


class ScaledDotScorer(DotScorer):
    """Dot products scaled by the feature size.

        e_i = q^T a_i / sqrt(D)

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1. Deviation: none; the features are
    both keys and values. ``multi_head`` adds the projections of section 3.2.2.
    """

    def keys(self, features: Tensor) -> Tensor:
        """a_i / sqrt(D), (B, L, D)."""
        return widen(features) / math.sqrt(self.sizes.features)


class GeneralScorer(Scorer):
    """General (bilinear) attention scores: query and features may differ in size.

        e_i = q^T W a_i

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "general". Deviation: none.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.key = nn.Linear(sizes.features, sizes.query, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """W a_i, (B, L, N)."""
        return widen(self.key(features))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, N) and keys (B, L, N)."""
        return dot_products(query, keys)


class LocationScorer(Scorer):
    """Location-based scores, computed from the query alone.

        e = W q,   W has one row per region

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, equation 8. With fewer regions than
    rows the first rows are used, as in the paper for short sentences. Deviation: more regions than
    rows are an error; the paper ignores the rest of a long sentence.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.place = nn.Linear(sizes.query, sizes.regions, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """An empty tensor that carries the number of regions only, (B, L, 0)."""
        return widen(features[..., :0])

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, N) and keys (B, L, 0)."""
        scores: Tensor = widen(self.place(query))[..., : keys.shape[1]]
        return scores


class MultiHeadAttention(Attention):
    """Multi-head scaled dot-product attention.

        head_h = softmax(W_q^h q . W_k^h a_i / sqrt(d)) W_v^h a_i,   z = W_o [head_1; head_2; ...]

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2; d = A / heads. Deviation: none.
    The returned alphas are the mean over the heads. Memory: keys and values are (B, heads, L, d).
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
        """(B, n, A) to (B, heads, n, d)."""
        return tensor.view(*tensor.shape[:2], self.heads, -1).transpose(1, 2)


class OneMap(Attention):
    """One context and one map for all words, computed once per photo.

    ``Memory.values`` is the context, (B, 1, D), and ``Memory.keys`` the alphas, (B, 1, L).
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

    Source: Cho et al. 2014 (arXiv:1406.1078), whose decoder gets the same vector at every step.
    Deviation: the summary of a photo is its mean feature, not the last state of a recurrent
    encoder.
    """

    reads_regions = False

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """See ``Attention.memory``."""
        scores = features.new_zeros(features.shape[0], 1, features.shape[1])
        return Memory(summary, softmax(scores.to(widen(summary).dtype), mask), summary, mask)


class PhotoAttention(OneMap):
    """Attention whose query is the photo itself.

        self   q_i = a_i              each region is scored against its own features
        mean   q   = sum_i a_i / L    all regions are scored against the mean feature

    Source: the scorer's; with ``self`` and the additive scorer, Lin et al. 2017
    (arXiv:1703.03130), equation 5. Deviation: with ``self`` both matrices of the scorer are applied
    to a_i and act as their sum, and there is one map. Queries and features have the same size.
    """

    def __init__(self, scorer: Scorer, query: str) -> None:
        super().__init__()
        self.scorer, self.source = scorer, query

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """See ``Attention.memory``."""
        keys = self.scorer.keys(features)  # (B, L, ...)
        if self.source == "self":  # score each region as a photo of one region
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
"""The scorers by their ``decoder.attention`` value. A new one needs its class and an entry here,
its equation in tests/unit/model/test_attention.py, and a row in docs/attention.md."""
