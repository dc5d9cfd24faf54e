"""Alternatives to additive soft attention: other scores, several heads, or one map for all words.

In the equations, q is the query (the decoder's hidden state) and a_i are the features of region i.
The other symbols and the letters in shapes are the same as in ``attention``.
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
    """Return the dot products q^T k_i, (..., R, L), of queries (..., R, N) and keys (..., L, N).

    Autocast is switched off, because it would compute the products in half precision.
    """
    with torch.autocast(query.device.type, enabled=False):
        return torch.matmul(widen(query), keys.transpose(-1, -2))


class ConcatScorer(AdditiveScorer):
    """Concat (Luong) attention scores: additive scores with one matrix and without a bias.

        e_i = v^T tanh(W [q; a_i])          [q; a_i]: both vectors joined

    W is applied in two parts, so that the part for the features is computed only once per photo.

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "concat". Deviation: none.
    """

    def __init__(self, sizes: Sizes) -> None:
        Scorer.__init__(self, sizes)
        self.mix = nn.Linear(sizes.query + sizes.features, sizes.attention, bias=False)
        self.energy = nn.Linear(sizes.attention, 1, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """Return the part of W [q; a_i] that depends on the features, (B, L, A)."""
        return widen(nn.functional.linear(features, self.mix.weight[:, self.sizes.query :]))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return the scores (B, R, L) for queries (B, R, N) and keys (B, L, A)."""
        half = nn.functional.linear(query, self.mix.weight[:, : self.sizes.query])
        return self.compare(half, keys)


class DotScorer(Scorer):
    """Dot-product attention scores, without weights.

        e_i = q^T a_i

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "dot". Deviation: none.
    """

    equal_sizes = True

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return the scores (B, R, L) for queries (B, R, D) and keys (B, L, D)."""
        return dot_products(query, keys)


class ScaledDotScorer(DotScorer):
    """Scaled dot-product attention scores, without weights.

        e_i = q^T a_i / sqrt(D)

    The features serve as keys and as values. `MultiHeadAttention` instead projects the features to
    keys and values.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1. Deviation: none.
    """

    def keys(self, features: Tensor) -> Tensor:
        """Return the features divided by sqrt(D), (B, L, D), so that the scores are scaled."""
        return widen(features) / math.sqrt(self.sizes.features)


class GeneralScorer(Scorer):
    """General (bilinear) attention scores, for queries and features of different sizes.

        e_i = q^T W a_i

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "general". Deviation: none.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.key = nn.Linear(sizes.features, sizes.query, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """Return the keys W a_i, (B, L, N), for features a, (B, L, D)."""
        return widen(self.key(features))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return the scores (B, R, L) for queries (B, R, N) and keys (B, L, N)."""
        return dot_products(query, keys)


class LocationScorer(Scorer):
    """Location-based scores, which depend on the query and not on the features.

        e = W q          W has one row per region

    If a photo has fewer regions than W has rows, only the first rows are used, as in the paper for
    short sentences.

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, equation 8.
    Deviation: A photo with more regions than rows causes an error. The paper ignores the end of a
    long sentence.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.place = nn.Linear(sizes.query, sizes.regions, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """Return an empty tensor, (B, L, 0). ``forward`` only needs its number of regions."""
        return widen(features[..., :0])

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return the scores (B, R, L) for queries (B, R, N) and keys (B, L, 0)."""
        scores: Tensor = widen(self.place(query))[..., : keys.shape[1]]
        return scores


class MultiHeadAttention(Attention):
    """Multi-head scaled dot-product attention.

        e^h_i = W_q^h q . W_k^h a_i / sqrt(d)                 score of region i for head h
        z^h   = sum_i softmax(e^h)_i W_v^h a_i                context of head h, (d)
        z     = W_o [z^1; z^2; ...]                           context

    The queries, keys and values of each head have the size d = A / heads. In the memory, keys and
    values have the shape (B, heads, L, d). ``forward`` returns the mean of the attention weights
    over the heads.

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
        """Project the features to keys and values, and split both into heads."""
        keys = widen(self._by_head(self.key(features)))
        return Memory(self._by_head(self.value(features)), keys, summary, mask)

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Return the context and the mean attention weights for the queries, (B, R, N)."""
        queries = self._by_head(self.query(query))  # (B, heads, R, d)
        mask = None if memory.mask is None else memory.mask.unsqueeze(1)
        alphas = softmax(dot_products(queries, memory.keys) / queries.shape[-1] ** 0.5, mask)
        heads = alphas.to(memory.values.dtype) @ memory.values  # (B, heads, R, d)
        context = self.output(heads.transpose(1, 2).flatten(2))
        return AttentionOutput(context, alphas.mean(dim=1))

    def _by_head(self, tensor: Tensor) -> Tensor:
        """Split the last axis of a tensor (B, n, A) into heads, (B, heads, n, d)."""
        return tensor.view(*tensor.shape[:2], self.heads, -1).transpose(1, 2)


class OneMap(Attention):
    """Base class for attention that uses one context and one map for all words of a photo.

    Subclasses compute both in ``memory``. ``Memory.values`` contains the context, (B, 1, D), and
    ``Memory.keys`` contains the attention weights, (B, 1, L).
    """

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Return the photo's context and attention weights for every query, (B, R, N)."""
        context, alphas = (
            part.expand(-1, query.shape[1], -1) for part in (memory.values, memory.keys)
        )
        return AttentionOutput(context, alphas)


class FixedVector(OneMap):
    """Replacement for attention: the context is the photo's summary, and the map is uniform.

        z = summary,   alpha_i = 1 / L

    Source: Cho et al. 2014 (arXiv:1406.1078), where the decoder reads one vector at every step.
    Deviation: The summary of a photo is its mean feature, not the last state of a recurrent
    encoder.
    """

    reads_regions = False

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Return the memory with the summary as context and with uniform attention weights."""
        scores = features.new_zeros(features.shape[0], 1, features.shape[1])
        return Memory(summary, softmax(scores.to(widen(summary).dtype), mask), summary, mask)


class PhotoAttention(OneMap):
    """Attention that takes its query from the photo instead of the decoder.

        self   q_i = a_i              each region is scored against its own features
        mean   q   = sum_i a_i / L    all regions are scored against the mean feature

    The queries are features, so the scorer is built for queries of size D. The result does not
    depend on the word. All words of a photo therefore have the same map.

    Source: ``self`` with the additive scorer: Lin et al. 2017 (arXiv:1703.03130), equation 5. For
    all other combinations, the source is in the docstring of the scorer.
    Deviation: With ``self``, the scorer multiplies a_i by two matrices, W_a and W_h. The paper has
    one matrix, which corresponds to the sum of both. The paper computes several maps per sentence,
    but this class computes one map per photo.
    """

    def __init__(self, scorer: Scorer, query: str) -> None:
        """Create the attention from a scorer and the source of the query, ``self`` or ``mean``."""
        super().__init__()
        self.scorer, self.source = scorer, query

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Compute the context and the attention weights with queries from the photo."""
        keys = self.scorer.keys(features)  # (B, L, ...)
        if self.source == "self":  # score each region as if it were a photo of a single region
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
"""The built-in scorers by their ``decoder.attention`` value.

To add a scorer, write its class and add an entry to this dictionary. Also add its equation to
tests/unit/model/test_attention.py and a row to docs/attention.md.
"""
