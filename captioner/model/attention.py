"""Attention mechanisms: score regions against a query and return a context.

    e_i     = score(q, a_i)            how well region i matches the query: a Scorer
    alpha   = softmax(e)               attention weights
    z       = sum_i alpha_i a_i        context

``Attention.memory`` precomputes what depends on the photo alone; ``Attention.forward`` runs at
every word. ``build_attention`` chooses the mechanism by config:

    decoder.attention   additive, concat, dot, general, location, scaled_dot (a Scorer each), a
                        registered scorer, multi_head, or no attention: fixed, fixed_at_start
    decoder.query       hidden (the hidden state); self, mean (features of the photo)
    decoder.selection   soft (weighted mean), hard (one sampled region)

A region is a cell of a photo's grid or a word of a text. Captions and beams of a photo share its
memory through broadcasting, without copies.

Notation: B photos, R captions (or beams) per photo, L regions, D feature size, N query size (the
hidden state's), A attention size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioner.errors import ConfigError
from captioner.model.kernels.additive import AdditiveScores, exponentials
from captioner.model.kernels.deferred import DeferredLinear, DeferredWeightedSum
from captioner.model.registry import Registry
from captioner.options import DecoderConfig


class Sizes(NamedTuple):
    """Sizes of a scorer's weights."""

    features: int
    """D."""
    query: int
    """N."""
    attention: int
    """A, ``decoder.attention_dim``."""
    regions: int
    """Maximum number of regions (L)."""


def widen(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; leave float32 and float64 unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def sample_index(probabilities: Tensor) -> Tensor:
    """Sample an index from each row of probabilities, (..., n) to (...).

    ``torch.multinomial`` draws the same sample, but first waits for the device to check the values.

    Source: the exponential race, argmax of p_i / E_i with E_i ~ Exp(1).
    """
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)


# --- scorers -------------------------------------------------------------------------------------


class Scorer(nn.Module):
    """Scores every region against a query. To add one, subclass it and `register_scorer`."""

    equal_sizes = False
    """Whether query and features must have the same size."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.additive_scores = AdditiveScores()

    def keys(self, features: Tensor) -> Tensor:
        """Project the features; called once per photo.

        Args:
            features: (B, L, D).

        Returns:
            (B, L, ...), float32: bf16 would round away small differences between scores.
        """
        return widen(features)

    def additive(self, query: Tensor, keys: Tensor, energy: nn.Linear) -> Tensor:
        """v^T tanh(key_i + query): (B, R, A) and the exponentials (B, L, A) to (B, R, L)."""
        with torch.autocast(query.device.type, enabled=False):
            scores: Tensor = self.additive_scores(
                exponentials(widen(query)), keys, widen(energy.weight).flatten()
            )
        return scores

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score every region against every query.

        Args:
            query: (B, R, N).
            keys: (B, L, ...), from ``keys``.

        Returns:
            Unnormalized scores, (B, R, L), float32.
        """
        raise NotImplementedError


class AdditiveScorer(Scorer):
    """Additive (Bahdanau) attention scores.

        e_i = v^T tanh(W_a a_i + W_h q + b)

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), appendix A.1.2, as used by Xu et al. 2015
    (arXiv:1502.03044). Deviation: none except the bias b, which the appendix omits for brevity.
    (v has no bias, as the softmax would cancel it.)
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.key = nn.Linear(sizes.features, sizes.attention)
        self.query = DeferredLinear(sizes.query, sizes.attention)
        self.energy = nn.Linear(sizes.attention, 1, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """exp(-2 (W_a a_i + b)), (B, L, A): see ``models.additive``."""
        return exponentials(widen(self.key(features)))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, N) and keys (B, L, A)."""
        return self.additive(self.query(query), keys, self.energy)


class ConcatScorer(Scorer):
    """Concat (Luong) attention scores: additive scores with one matrix and no bias.

        e_i = v^T tanh(W [q; a_i])

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "concat". Deviation: none; W is
    applied in two halves, so that the features' half is computed once per photo.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.mix = nn.Linear(sizes.query + sizes.features, sizes.attention, bias=False)
        self.energy = nn.Linear(sizes.attention, 1, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """exp(-2 x), x the features' half of W [q; a_i], (B, L, A): see ``models.additive``."""
        half = nn.functional.linear(features, self.mix.weight[:, self.sizes.query :])
        return exponentials(widen(half))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, N) and keys (B, L, A)."""
        half = nn.functional.linear(query, self.mix.weight[:, : self.sizes.query])
        return self.additive(half, keys, self.energy)


class DotScorer(Scorer):
    """Dot-product attention scores, without weights.

        e_i = q^T a_i

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "dot". Deviation: none. Query and
    features must have the same size; set ``decoder.projection_dim`` to project the features.
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
        """An empty tensor that carries the number of regions only, (B, L, 0).

        Raises:
            ConfigError: There are more regions than rows.
        """
        if features.shape[1] > self.sizes.regions:
            raise ConfigError(
                f"attention 'location' was built for {self.sizes.regions} regions and got "
                f"{features.shape[1]}; use images of the original size or another attention"
            )
        return widen(features[..., :0])

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, N) and keys (B, L, 0)."""
        scores: Tensor = widen(self.place(query))[..., : keys.shape[1]]
        return scores


SCORERS: Registry[type[Scorer]] = Registry(
    "scorer",
    {
        "additive": AdditiveScorer,
        "concat": ConcatScorer,
        "dot": DotScorer,
        "general": GeneralScorer,
        "location": LocationScorer,
        "scaled_dot": ScaledDotScorer,
    },
)
"""Scorers by their ``decoder.attention`` value."""


def register_scorer(name: str, scorer: type[Scorer]) -> None:
    """Add a scorer as a value of ``decoder.attention``, in this process.

    A package that other people install declares an entry point of the group ``captioner.scorers``
    instead, which the command line finds too; see docs/attention.md.

    Args:
        name: Value of ``decoder.attention``.
        scorer: A subclass of `Scorer`.

    Raises:
        ConfigError: The name is taken, or it is not a subclass.
    """
    _check_scorer(name, scorer)
    if name in WITHOUT_SCORER:
        raise ConfigError(f"scorer {name!r} is built in; choose another name")
    SCORERS.register(name, scorer)


def _check_scorer(name: str, scorer: object) -> None:
    if not (isinstance(scorer, type) and issubclass(scorer, Scorer)):
        raise ConfigError(
            f"scorer {name!r} is {scorer!r:.60}; give a subclass of "
            "captioner.model.attention.Scorer"
        )


def dot_products(query: Tensor, keys: Tensor) -> Tensor:
    """q^T k_i without autocast: (..., R, N) and (..., L, N) to (..., R, L)."""
    with torch.autocast(query.device.type, enabled=False):
        return torch.matmul(widen(query), keys.transpose(-1, -2))


# --- attention -----------------------------------------------------------------------------------


class Memory(NamedTuple):
    """What depends on the photo alone: computed once, shared by all its captions and beams."""

    values: Tensor
    """(B, L, D), averaged to the context; some mechanisms define another shape."""
    keys: Tensor
    """(B, L, ...), input of the scorer; some mechanisms define another shape."""
    summary: Tensor
    """(B, 1, D), the photo as one vector."""
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
        """Precompute what depends on the photos alone.

        Args:
            features: (B, L, D).
            summary: (B, 1, D), e.g. the mean feature.
            mask: (B, L), True at real regions, at least one per photo; None: all are real.
        """
        raise NotImplementedError

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Attend to the photos.

        Args:
            query: The decoder's hidden state, (B, R, N).
            memory: The photos, (B, ...).
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
        self.weighted_sum = DeferredWeightedSum()

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Values are the features; keys are the scorer's."""
        return Memory(features, self.scorer.keys(features), summary, mask)

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Context and alphas for query (B, R, N)."""
        alphas = _softmax(self.scorer(query, memory.keys), memory.mask)
        return AttentionOutput(self.weighted_sum(alphas, memory.values), alphas, None)


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
        alphas = _softmax(self.scorer(query, memory.keys), memory.mask)
        chosen = sample_index(alphas.detach()) if self.training else alphas.argmax(dim=-1)
        picked = torch.zeros_like(alphas).scatter(-1, chosen.unsqueeze(-1), 1.0)
        return AttentionOutput(self.weighted_sum(picked, memory.values), alphas, chosen)

    @torch.no_grad()
    def observe(self, log_prob: Tensor) -> None:
        """Update the baseline with the mean log-probability of a batch's words, a scalar."""
        self.baseline.lerp_(log_prob.to(self.baseline.dtype), 1 - self.BASELINE_DECAY)


class MultiHeadAttention(Attention):
    """Multi-head scaled dot-product attention.

        head_h = softmax(W_q^h q . W_k^h a_i / sqrt(d)) W_v^h a_i,   z = W_o [head_1; head_2; ...]

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2; d = A / heads. Deviation: none.
    The returned alphas are the mean over the heads.
    """

    def __init__(self, sizes: Sizes, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(sizes.query, sizes.attention, bias=False)
        self.key = nn.Linear(sizes.features, sizes.attention, bias=False)
        self.value = nn.Linear(sizes.features, sizes.attention, bias=False)
        self.output = nn.Linear(sizes.attention, sizes.features, bias=False)

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Keys and values per head, (B, heads, L, d) each."""
        keys = widen(self._by_head(self.key(features)))
        return Memory(self._by_head(self.value(features)), keys, summary, mask)

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Context and mean alphas for query (B, R, N)."""
        queries = self._by_head(self.query(query))  # (B, heads, R, d)
        mask = None if memory.mask is None else memory.mask.unsqueeze(1)
        alphas = _softmax(dot_products(queries, memory.keys) / queries.shape[-1] ** 0.5, mask)
        heads = _weighted(alphas, memory.values).transpose(1, 2).flatten(2)  # (B, R, A)
        return AttentionOutput(self.output(heads), alphas.mean(dim=1), None)

    def _by_head(self, tensor: Tensor) -> Tensor:
        """(B, n, A) to (B, heads, n, d)."""
        batch, length, size = tensor.shape
        return tensor.view(batch, length, self.heads, size // self.heads).transpose(1, 2)


class OneMap(Attention):
    """One context and one map for all words, computed once per photo.

    ``Memory.values`` is the context, (B, 1, D), and ``Memory.keys`` the alphas, (B, 1, L).
    """

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """The same context and alphas for every query (B, R, N)."""
        captions = query.shape[1]
        return AttentionOutput(
            memory.values.expand(-1, captions, -1), memory.keys.expand(-1, captions, -1), None
        )


class FixedVector(OneMap):
    """No attention: the context is the summary vector and the map is uniform.

        z = summary,   alpha_i = 1 / L

    Source: Cho et al. 2014 (arXiv:1406.1078), whose decoder gets the same vector at every step.
    Deviation: the summary of a photo is its mean feature, not the last state of a recurrent
    encoder.
    """

    reads_regions = False

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """The summary, and a uniform map over the regions."""
        scores = features.new_zeros(features.shape[0], 1, features.shape[1])
        return Memory(summary, _softmax(scores.to(widen(summary).dtype), mask), summary, mask)


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
        """Compute scores, alphas and context."""
        keys = self.scorer.keys(features)  # (B, L, ...)
        if self.source == "self":
            # Score each region as a photo of one region.
            regions, own = features.flatten(0, 1).unsqueeze(1), keys.flatten(0, 1).unsqueeze(1)
            scores = self.scorer(regions, own).view(features.shape[0], 1, -1)  # (B, 1, L)
        else:
            scores = self.scorer(masked_mean(features, mask), keys)
        alphas = _softmax(scores, mask)
        return Memory(_weighted(alphas, features), alphas, summary, mask)


def masked_mean(features: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over real regions: (B, L, D) to (B, 1, D)."""
    if mask is None:
        return features.mean(dim=1, keepdim=True)
    return _weighted(mask.unsqueeze(1), features) / mask.sum(dim=1)[:, None, None]


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Alphas from scores (..., R, L); 0 where mask (..., L) is False."""
    scores = widen(scores)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-2), -torch.inf)
    return scores.softmax(dim=-1)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Weighted sums of values (..., L, D) with weights (..., R, L)."""
    return weights.to(values.dtype) @ values


# --- construction --------------------------------------------------------------------------------

WITHOUT_SCORER = ("multi_head", "fixed", "fixed_at_start")
"""Values of ``decoder.attention`` that are not in ``SCORERS``."""

PHOTO_QUERIES = ("additive", "dot", "general")
"""Scorers that support ``decoder.query`` self and mean."""


def build_attention(config: DecoderConfig, sizes: Sizes) -> Attention:
    """Build the attention that a config describes.

    Raises:
        ConfigError: Incompatible settings.
    """
    check_attention(config)
    if config.attention == "multi_head":
        return MultiHeadAttention(sizes, config.heads)
    if config.attention in ("fixed", "fixed_at_start"):
        return FixedVector()
    if config.query != "hidden":
        sizes = sizes._replace(query=sizes.features)
    scorer_class = SCORERS[config.attention]
    _check_scorer(config.attention, scorer_class)  # of an entry point
    if scorer_class.equal_sizes and sizes.features != sizes.query:
        raise ConfigError(
            f"decoder.attention {config.attention!r} needs features ({sizes.features}) and hidden "
            f"state ({sizes.query}) of the same size; set decoder.projection_dim to {sizes.query}, "
            "or use 'general'"
        )
    scorer = scorer_class(sizes)
    if config.query != "hidden":
        return PhotoAttention(scorer, config.query)
    return HardAttention(scorer) if config.selection == "hard" else SoftAttention(scorer)


def check_attention(config: DecoderConfig) -> None:
    """Check that the attention settings are known and compatible.

    Raises:
        ConfigError: They are not.
    """
    name = config.attention
    if name not in WITHOUT_SCORER and name not in SCORERS:
        allowed = ", ".join([*SCORERS, *WITHOUT_SCORER])
        raise ConfigError(
            f"unknown decoder.attention {name!r}; use one of {allowed}, or register it (see "
            "docs/attention.md)"
        )
    if name == "multi_head" and config.attention_dim % config.heads:
        raise ConfigError(
            f"decoder.attention_dim {config.attention_dim} is not divisible by decoder.heads "
            f"{config.heads}; use a multiple of {config.heads}"
        )
    if config.query != "hidden" and name not in PHOTO_QUERIES:
        raise ConfigError(
            f"decoder.query {config.query!r} does not support decoder.attention {name!r}; "
            f"use query 'hidden', or attention {', '.join(PHOTO_QUERIES)}"
        )
    if config.selection == "hard" and (config.query != "hidden" or name not in SCORERS):
        raise ConfigError(
            f"decoder.selection 'hard' does not support decoder.attention {name!r} with "
            f"decoder.query {config.query!r}; use query 'hidden' and attention "
            f"{', '.join(SCORERS)}"
        )
