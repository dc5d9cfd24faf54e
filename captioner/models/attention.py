"""Attention: a query asks, regions are scored, and a context comes back with the scores' softmax.

    e_i     = score(q, a_i)            how well region i answers the query: a Scorer
    alpha   = softmax(e)               where the decoder looks
    z       = sum_i alpha_i a_i        the context: what it sees there

One interface, ``Attention``: ``memory`` prepares what depends on the photo alone, once a photo;
``forward`` is asked at every word. ``build_attention`` picks by the config's words:

    decoder.attention   additive, concat, dot, general, location, scaled_dot (a Scorer each),
                        multi_head, or no attention: fixed, fixed_at_start
    decoder.query       hidden (asked by the hidden state); self, mean (asked by the photo alone)
    decoder.selection   soft (a weighted mean), hard (one region, sampled)

A region is a place of a photo's grid or a word of a text. Captions and beams of a photo share its
memory through broadcasting; nothing of it is copied for them.

Notation: B photos, R captions (or beams) a photo, L regions, D feature size, N query size (the
hidden state's), A attention size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioner.config import DecoderConfig
from captioner.errors import ConfigError
from captioner.models.additive import additive_scores, compiled_scores, exponentials


class Sizes(NamedTuple):
    """What a scorer may need to know to make its weights."""

    features: int
    """D."""
    query: int
    """N."""
    attention: int
    """A, ``decoder.attention_dim``."""
    regions: int
    """Most regions there will be (L)."""


def widen(tensor: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


# --- scorers -------------------------------------------------------------------------------------


class Scorer(nn.Module):
    """Scores every region against a query. A new scorer is a subclass and a line in ``SCORERS``."""

    equal_sizes = False
    """Whether query and features must have one size."""
    compiled = False
    """Whether the additive score is torch.compile's; see ``Decoder.compile_scores``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def keys(self, features: Tensor) -> Tensor:
        """What the scorer wants to know of the regions; called once a photo.

        Args:
            features: (B, L, D).

        Returns:
            (B, L, ...), float32: scores are small differences, which bf16 would round away.
        """
        return widen(features)

    def additive(self, query: Tensor, keys: Tensor, energy: nn.Linear) -> Tensor:
        """v^T tanh(key_i + query): (B, R, A) and the exponentials (B, L, A) to (B, R, L)."""
        scores = compiled_scores() if self.compiled else additive_scores
        with torch.autocast(query.device.type, enabled=False):
            return scores(exponentials(widen(query)), keys, widen(energy.weight).flatten())

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score every region against every query.

        Args:
            query: (B, R, N).
            keys: (B, L, ...), from ``keys``.

        Returns:
            Unnormalised scores, (B, R, L), float32.
        """
        raise NotImplementedError


class AdditiveScorer(Scorer):
    """Additive (Bahdanau) attention scores.

        e_i = v^T tanh(W_a a_i + W_h q + b)

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), appendix A.1.2, as used by Xu et al. 2015
    (arXiv:1502.03044). Deviation: none but the bias b, which the appendix leaves out for brevity.
    (v carries none: the softmax would cancel it.)
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.key = nn.Linear(sizes.features, sizes.attention)
        self.query = nn.Linear(sizes.query, sizes.attention, bias=False)
        self.energy = nn.Linear(sizes.attention, 1, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """exp(-2 (W_a a_i + b)), (B, L, A): see ``models.additive``."""
        return exponentials(widen(self.key(features)))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, N) and keys (B, L, A)."""
        return self.additive(self.query(query), keys, self.energy)


class ConcatScorer(Scorer):
    """Concat (Luong) attention scores: additive with one matrix over both, and no bias.

        e_i = v^T tanh(W [q; a_i])

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "concat". Deviation: none; W is
    applied in its two halves, so that the features' half is computed once a photo.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.mix = nn.Linear(sizes.query + sizes.features, sizes.attention, bias=False)
        self.energy = nn.Linear(sizes.attention, 1, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """exp(-2 x) of x, the features' half of W [q; a_i], (B, L, A): see ``models.additive``."""
        half = nn.functional.linear(features, self.mix.weight[:, self.sizes.query :])
        return exponentials(widen(half))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, N) and keys (B, L, A)."""
        half = nn.functional.linear(query, self.mix.weight[:, : self.sizes.query])
        return self.additive(half, keys, self.energy)


class DotScorer(Scorer):
    """Dot-product attention scores; no weights at all.

        e_i = q^T a_i

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, "dot". Deviation: none. Query and
    features must have one size; ``decoder.projection_dim`` gives the features that of the query.
    """

    equal_sizes = True

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, D) and keys (B, L, D)."""
        return _products(query, keys)


class ScaledDotScorer(DotScorer):
    """Dot products that keep their spread however large the features are.

        e_i = q^T a_i / sqrt(D)

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1. Deviation: none; the features are
    keys and values both. ``multi_head`` has the projections of section 3.2.2.
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
        return _products(query, keys)


class LocationScorer(Scorer):
    """Location-based scores: from the query alone, blind to what the regions hold.

        e = W q,   W has a row for every region

    Source: Luong et al. 2015 (arXiv:1508.04025), section 3.1, equation 8. With fewer regions than
    rows the first rows are used, as the paper does for short sentences. Deviation: more regions
    than rows are refused; the paper leaves the rest of a long sentence out.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.place = nn.Linear(sizes.query, sizes.regions, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """Nothing of the features but how many there are, (B, L, 0).

        Raises:
            ConfigError: There are more regions than the scorer has rows.
        """
        if features.shape[1] > self.sizes.regions:
            raise ConfigError(
                f"attention 'location' knows {self.sizes.regions} regions and was given "
                f"{features.shape[1]}; give as many as it was made for, or take another attention"
            )
        return widen(features[..., :0])

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, R, L) from query (B, R, N) and keys (B, L, 0)."""
        scores: Tensor = widen(self.place(query))[..., : keys.shape[1]]
        return scores


SCORERS: dict[str, type[Scorer]] = {
    "additive": AdditiveScorer,
    "concat": ConcatScorer,
    "dot": DotScorer,
    "general": GeneralScorer,
    "location": LocationScorer,
    "scaled_dot": ScaledDotScorer,
}
"""The scorers by their config words."""


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """q^T k_i in full precision: (..., R, N) and (..., L, N) to (..., R, L)."""
    with torch.autocast(query.device.type, enabled=False):
        return torch.matmul(widen(query), keys.transpose(-1, -2))


# --- attention -----------------------------------------------------------------------------------


class Memory(NamedTuple):
    """What depends on the photo alone: made once, shared by all its captions and beams."""

    values: Tensor
    """(B, L, D), what the context is a mean of; by head, or the context itself, where the
    attention says so."""
    keys: Tensor
    """(B, L, ...), what the scorer reads; likewise."""
    summary: Tensor
    """(B, 1, D), the photo as one vector of fixed length."""
    mask: Tensor | None
    """(B, L), True at real regions; None: all of them are."""

    def select(self, rows: Tensor | slice) -> Memory:
        """Some of the photos: a slice, or row numbers (B',)."""
        return Memory(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


class Glimpse(NamedTuple):
    """What attention gives at one word."""

    context: Tensor
    """(B, R, D)."""
    alphas: Tensor
    """(B, R, L), rows sum to 1, 0 at regions that are not real."""
    chosen: Tensor | None
    """(B, R), the region that hard attention took; None where attention is soft."""


class Attention(nn.Module):
    """The interface: photos are prepared once, then asked at every word."""

    reads_regions = True
    """Whether the features of the regions matter, or only how many there are."""

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Prepare photos.

        Args:
            features: (B, L, D).
            summary: (B, 1, D), e.g. the mean feature.
            mask: (B, L), True at real regions, at least one a photo; None: all are real.
        """
        raise NotImplementedError

    def forward(self, query: Tensor, memory: Memory) -> Glimpse:
        """Ask.

        Args:
            query: The decoder's hidden state, (B, R, N).
            memory: The photos, (B, ...).
        """
        raise NotImplementedError


class SoftAttention(Attention):
    """The expected region.

        alpha = softmax(e),   z = sum_i alpha_i a_i

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), equations 5 and 6. Deviation: none.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Values are the features as they are; keys are the scorer's."""
        return Memory(features, self.scorer.keys(features), summary, mask)

    def forward(self, query: Tensor, memory: Memory) -> Glimpse:
        """Context and alphas for query (B, R, N)."""
        alphas = _softmax(self.scorer(query, memory.keys), memory.mask)
        return Glimpse(_weighted(alphas, memory.values), alphas, None)


class HardAttention(SoftAttention):
    """One region: sampled in training, the most probable one in use.

        s ~ Multinoulli(alpha),   z = a_s

    No gradient passes through the sample; ``losses.score_function`` teaches the alphas instead.

    Source: Xu et al. 2015 (arXiv:1502.03044), section 4.1. Deviation: the paper's trick
    of using the expected context for half of the photos is left out.
    """

    BASELINE_DECAY = 0.9
    """The paper's: b <- 0.9 b + 0.1 log p."""

    baseline: Tensor
    """Moving average of a word's log-probability (nats), kept with the weights. With several
    processes it follows the first one's words, which leaves the estimate unbiased."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer)
        self.register_buffer("baseline", torch.zeros(()))

    def forward(self, query: Tensor, memory: Memory) -> Glimpse:
        """Context, alphas and the chosen region for query (B, R, N)."""
        alphas = _softmax(self.scorer(query, memory.keys), memory.mask)
        if self.training:
            chosen = torch.multinomial(alphas.detach().flatten(0, 1), 1).view(alphas.shape[:2])
        else:
            chosen = alphas.argmax(dim=-1)
        picked = nn.functional.one_hot(chosen, alphas.shape[-1])
        return Glimpse(_weighted(picked, memory.values), alphas, chosen)

    @torch.no_grad()
    def observe(self, log_prob: Tensor) -> None:
        """Move the baseline towards the mean log-probability of a batch's words, a scalar."""
        self.baseline.lerp_(log_prob.to(self.baseline.dtype), 1 - self.BASELINE_DECAY)


class MultiHeadAttention(Attention):
    """Several scaled dot products side by side, each in its own projection.

        head_h = softmax(W_q^h q . W_k^h a_i / sqrt(d)) W_v^h a_i,   z = W_o [head_1; head_2; ...]

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2; d = A / heads. Deviation: none.
    The alphas that are shown are the mean over the heads.
    """

    def __init__(self, sizes: Sizes, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(sizes.query, sizes.attention, bias=False)
        self.key = nn.Linear(sizes.features, sizes.attention, bias=False)
        self.value = nn.Linear(sizes.features, sizes.attention, bias=False)
        self.output = nn.Linear(sizes.attention, sizes.features, bias=False)

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Keys and values by head, (B, heads, L, d) each."""
        keys = widen(self._by_head(self.key(features)))
        return Memory(self._by_head(self.value(features)), keys, summary, mask)

    def forward(self, query: Tensor, memory: Memory) -> Glimpse:
        """Context and mean alphas for query (B, R, N)."""
        asked = self._by_head(self.query(query))  # (B, heads, R, d)
        mask = None if memory.mask is None else memory.mask.unsqueeze(1)
        alphas = _softmax(_products(asked, memory.keys) / asked.shape[-1] ** 0.5, mask)
        found = _weighted(alphas, memory.values).transpose(1, 2).flatten(2)  # (B, R, A)
        return Glimpse(self.output(found), alphas.mean(dim=1), None)

    def _by_head(self, tensor: Tensor) -> Tensor:
        """(B, n, A) to (B, heads, n, d)."""
        batch, length, size = tensor.shape
        return tensor.view(batch, length, self.heads, size // self.heads).transpose(1, 2)


class OneMap(Attention):
    """One context and one map for all words: both are made with the memory, once a photo.

    The memory's values are the context itself, (B, 1, D), and its keys the alphas, (B, 1, L).
    """

    def forward(self, query: Tensor, memory: Memory) -> Glimpse:
        """The same context and alphas whatever the query, (B, R, N)."""
        captions = query.shape[1]
        return Glimpse(
            memory.values.expand(-1, captions, -1), memory.keys.expand(-1, captions, -1), None
        )


class FixedVector(OneMap):
    """No attention: the photo as one vector of fixed length, its map even.

        z = summary,   alpha_i = 1 / L

    Source: Cho et al. 2014 (arXiv:1406.1078), whose decoder is given the vector at every step: the
    bottleneck that attention was invented for. Deviation: the summary of a photo is its mean
    feature, not the last state of a recurrent encoder.
    """

    reads_regions = False

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """The summary as it is; of the features only their number counts."""
        even = torch.zeros(len(features), 1, features.shape[1], device=features.device)
        return Memory(summary, _softmax(even.to(widen(summary).dtype), mask), summary, mask)


class PhotoAttention(OneMap):
    """Asked by the photo alone.

        self   q_i = a_i              every region by its own features
        mean   q   = sum_i a_i / L    by the mean of all features

    Source: the scorer's; with ``self`` and the additive scorer, Lin et al. 2017
    (arXiv:1703.03130), equation 5. Deviation: the scorer's two matrices both read a_i there and
    act as their sum, and there is one map. Queries and features have one size here.
    """

    def __init__(self, scorer: Scorer, query: str) -> None:
        super().__init__()
        self.scorer, self.source = scorer, query

    def memory(self, features: Tensor, summary: Tensor, mask: Tensor | None = None) -> Memory:
        """Scores, alphas and context, all at once."""
        keys = self.scorer.keys(features)  # (B, L, ...)
        if self.source == "self":
            # Every region as a photo of one region, which asks itself.
            regions, own = features.flatten(0, 1).unsqueeze(1), keys.flatten(0, 1).unsqueeze(1)
            scores = self.scorer(regions, own).view(len(features), 1, -1)  # (B, 1, L)
        else:
            scores = self.scorer(masked_mean(features, mask), keys)
        alphas = _softmax(scores, mask)
        return Memory(_weighted(alphas, features), alphas, summary, mask)


def masked_mean(features: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the real regions: (B, L, D) to (B, 1, D)."""
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
    """Weighted sums of values (..., L, D) under weights (..., R, L)."""
    return weights.to(values.dtype) @ values


# --- choosing one --------------------------------------------------------------------------------

WITHOUT_SCORER = ("multi_head", "fixed", "fixed_at_start")
"""Words of ``decoder.attention`` beside the scorers'."""

PHOTO_QUERIES = ("additive", "dot", "general")
"""Scorers that the photo itself may ask."""


def build_attention(config: DecoderConfig, sizes: Sizes) -> Attention:
    """The attention that a config names.

    Raises:
        ConfigError: The words or sizes do not go together.
    """
    check_attention(config)
    if config.attention == "multi_head":
        return MultiHeadAttention(sizes, config.heads)
    if config.attention in ("fixed", "fixed_at_start"):
        return FixedVector()
    if config.query != "hidden":
        sizes = sizes._replace(query=sizes.features)
    scorer_class = SCORERS[config.attention]
    if scorer_class.equal_sizes and sizes.features != sizes.query:
        raise ConfigError(
            f"decoder.attention {config.attention!r} multiplies features ({sizes.features}) and "
            f"hidden state ({sizes.query}), which must have one size; set decoder.projection_dim "
            f"to {sizes.query}, or take 'general'"
        )
    scorer = scorer_class(sizes)
    if config.query != "hidden":
        return PhotoAttention(scorer, config.query)
    return HardAttention(scorer) if config.selection == "hard" else SoftAttention(scorer)


def check_attention(config: DecoderConfig) -> None:
    """Refuse words that are unknown or do not go together.

    Raises:
        ConfigError: What was given, what is allowed.
    """
    name = config.attention
    if name not in SCORERS and name not in WITHOUT_SCORER:
        allowed = ", ".join([*SCORERS, *WITHOUT_SCORER])
        raise ConfigError(f"decoder.attention {name!r} is unknown; give one of {allowed}")
    if name == "multi_head" and config.attention_dim % config.heads:
        raise ConfigError(
            f"decoder.attention_dim {config.attention_dim} cannot be shared among decoder.heads "
            f"{config.heads}; give a multiple of {config.heads}"
        )
    if config.query != "hidden" and name not in PHOTO_QUERIES:
        raise ConfigError(
            f"decoder.query {config.query!r} does not go with decoder.attention {name!r}; "
            f"give query 'hidden', or attention {', '.join(PHOTO_QUERIES)}"
        )
    if config.selection == "hard" and (config.query != "hidden" or name not in SCORERS):
        raise ConfigError(
            f"decoder.selection 'hard' does not go with decoder.attention {name!r} and "
            f"decoder.query {config.query!r}; give query 'hidden' and attention "
            f"{', '.join(SCORERS)}"
        )
