"""Attention: score the regions of a photo against the decoder's state and return a context.

    e_i     = v^T tanh(W_a a_i + W_h h + b)     how well region i matches the state
    alpha   = softmax(e)                        attention weights
    z       = sum_i alpha_i a_i                 context

``Attention.memory`` computes what depends on the photo alone, once; ``Attention.forward`` runs at
every word. Captions and beams of a photo share its memory through broadcasting, without copies.

Hard attention is here too; ``attention_variants`` has other scores and mechanisms, and
``build.build_attention`` chooses.

Notation: B photos, R captions (or beams) per photo, L regions, D feature size, N size of the hidden
state (the query), A attention size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioner.model import kernels
from captioner.model.kernels import StepLinear


class Sizes(NamedTuple):
    """Sizes of a scorer's weights."""

    features: int
    """D."""
    query: int
    """N."""
    attention: int
    """A, ``decoder.attention_dim``."""
    regions: int
    """Maximum number of regions (L), which only the location score needs."""


class Scorer(nn.Module):
    """Scores every region against a query. To add one, subclass it and `register_scorer`."""

    equal_sizes = False
    """Whether query and features must have the same size."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def keys(self, features: Tensor) -> Tensor:
        """Project the features, (B, L, D) to (B, L, ...); called once per photo.

        In float32: bf16 would round away small differences between scores.
        """
        return widen(features)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Unnormalized scores (B, R, L), float32, from query (B, R, N) and keys (B, L, ...)."""
        raise NotImplementedError(f"{type(self).__name__} has no method forward(query, keys)")


class AdditiveScorer(Scorer):
    """Additive (Bahdanau) attention scores.

        e_i = v^T tanh(W_a a_i + W_h h + b)

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), appendix A.1.2, as used by Xu et al. 2015
    (arXiv:1502.03044). Deviation: none except the bias b, which the appendix omits for brevity.
    (v has no bias, as the softmax would cancel it.)
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.key = nn.Linear(sizes.features, sizes.attention)  # W_a, b
        self.query = StepLinear(sizes.query, sizes.attention)  # W_h, without a bias
        self.energy = nn.Linear(sizes.attention, 1, bias=False)  # v

    def keys(self, features: Tensor) -> Tensor:
        """W_a a_i + b, (B, L, A)."""
        return widen(self.key(features))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, N) and keys (B, L, A)."""
        return additive_scores(self.query(query), keys, self.energy)


class Memory(NamedTuple):
    """What depends on the photo alone: computed once, shared by all its captions and beams."""

    values: Tensor
    """(B, L, D), averaged to the context; some mechanisms define another shape."""
    keys: Tensor
    """(B, L, ...), input of the scorer; some mechanisms define another shape."""
    summary: Tensor
    """(B, 1, D), the photo as one vector, for the decoder's first state."""
    mask: Tensor | None
    """(B, L), True at real regions; None: all regions are real."""

    def select(self, rows: Tensor | slice) -> Memory:
        """Select photos by a slice or by row indices (B',)."""
        return Memory(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


class AttentionOutput(NamedTuple):
    """Result of attention for one word."""

    context: Tensor
    """(B, R, D)."""
    alphas: Tensor
    """(B, R, L), rows sum to 1; 0 at masked regions."""
    chosen: Tensor | None
    """(B, R), the region chosen by hard attention; None for soft attention."""


class Attention(nn.Module):
    """Base class: ``memory`` runs once per photo, ``forward`` at every word."""

    reads_regions = True
    """Whether the regions' features are used, or only their number."""

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Precompute what depends on the photos alone, from features (B, L, D); see `Memory`."""
        raise NotImplementedError

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Attend to the photos with the decoder's hidden state, (B, R, N)."""
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
        """Values are the features; keys are the scorer's."""
        return Memory(features, self.scorer.keys(features), summary, mask)

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Context and alphas for query (B, R, N)."""
        alphas = softmax(self.scorer(query, memory.keys), memory.mask)
        return AttentionOutput(alphas.to(memory.values.dtype) @ memory.values, alphas, None)


class HardAttention(SoftAttention):
    """Hard attention: one region, sampled in training mode, the most probable in eval mode.

        s ~ Multinoulli(alpha),   z = a_s

    No gradient passes through the sample; ``losses.score_function`` trains the alphas instead.

    Source: Xu et al. 2015 (arXiv:1502.03044), section 4.1. Deviation: the paper's use of the
    expected context for half of the photos is omitted.
    """

    BASELINE_DECAY = 0.9
    """As in the paper: b <- 0.9 b + 0.1 log p."""

    baseline: Tensor
    """Moving average of a word's log-probability (nats), saved with the weights. With several
    processes it follows the words of the first, which keeps the estimate unbiased."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer)
        self.register_buffer("baseline", torch.zeros(()))

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Context, alphas and chosen region for query (B, R, N)."""
        alphas = softmax(self.scorer(query, memory.keys), memory.mask)
        chosen = sample_index(alphas.detach()) if self.training else alphas.argmax(dim=-1)
        picked = torch.zeros_like(alphas).scatter(-1, chosen.unsqueeze(-1), 1.0)
        return AttentionOutput(picked.to(memory.values.dtype) @ memory.values, alphas, chosen)

    @torch.no_grad()
    def observe(self, log_prob: Tensor) -> None:
        """Update the baseline with the mean log-probability of a batch's words, a scalar."""
        self.baseline.lerp_(log_prob.to(self.baseline.dtype), 1 - self.BASELINE_DECAY)


def additive_scores(query: Tensor, keys: Tensor, energy: nn.Linear) -> Tensor:
    """v^T tanh(k_i + q), in float32: (B, R, A) and (B, L, A) to (B, R, L)."""
    with torch.autocast(query.device.type, enabled=False):
        return kernels.additive_scores(widen(query), keys, widen(energy.weight).flatten())


def softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Alphas from scores (..., R, L); 0 where mask (..., L) is False."""
    scores = widen(scores)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-2), -torch.inf)
    return scores.softmax(dim=-1)


def masked_mean(features: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over real regions: (B, L, D) to (B, 1, D)."""
    if mask is None:
        return features.mean(dim=1, keepdim=True)
    return mask.unsqueeze(1).to(features.dtype) @ features / mask.sum(dim=1)[:, None, None]


def widen(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; leave float32 and float64 unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def sample_index(probabilities: Tensor) -> Tensor:
    """Sample an index from each row of probabilities, (..., n) to (...).

    ``torch.multinomial`` draws the same sample, but first waits for the device to check the values.

    Source: the exponential race, argmax of p_i / E_i with E_i ~ Exp(1).
    """
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)
