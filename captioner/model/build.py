"""Construction of the attention and the decoder that a config describes.

These settings select the classes:

    decoder.attention   the name of a scorer, such as additive, or of your own scorer
                        multi_head: attention with several heads
                        fixed: the same vector at every word, without attention
                        fixed_at_start: the photo sets only the initial state
    decoder.query       hidden: the decoder's hidden state
                        self or mean: the features of each region, or their mean
    decoder.selection   soft: the context is the weighted mean of all regions
                        hard: the context is one region, which is sampled in training
    decoder.order       bahdanau: attend, then run the LSTM
                        luong: run the LSTM, then attend
                        the name of your own decoder in DECODERS
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from captioner.errors import ConfigError
from captioner.hints import hinted
from captioner.messages import either, first_line
from captioner.model.attention import Attention, Scorer, Sizes, SoftAttention
from captioner.model.attention_variants import (
    BUILT_IN,
    FixedVector,
    MultiHeadAttention,
    PhotoAttention,
)
from captioner.model.decoder import BahdanauDecoder, Decoder
from captioner.model.decoder_variants import LuongDecoder, PlainDecoder
from captioner.model.hard_attention import HardAttention
from captioner.model.registry import Registry
from captioner.options import DecoderConfig

WITHOUT_SCORER = ("multi_head", "fixed", "fixed_at_start")
"""Values of ``decoder.attention`` that do not name a scorer."""

PHOTO_QUERIES = ("additive", "dot", "general")
"""Scorers that support ``decoder.query`` self and mean."""

SCORERS: Registry[type[Scorer]] = Registry("scorer", BUILT_IN)
"""All scorers by their ``decoder.attention`` value: built in, registered or installed."""

DECODERS: dict[str, type[Decoder]] = {"bahdanau": BahdanauDecoder, "luong": LuongDecoder}
"""Decoders by their ``decoder.order`` value."""


@hinted
def register_scorer(name: str, scorer: type[Scorer]) -> None:
    """Add a scorer as a value of ``decoder.attention``, for this process only.

    To use a scorer on the command line, or to share it, declare an entry point of the group
    ``captioner.scorers`` in a package instead. See docs/attention.md.

    Args:
        name: The value of ``decoder.attention`` that selects the scorer.
        scorer: A subclass of `Scorer`.

    Raises:
        ConfigError: The name is already taken.
    """
    if name in WITHOUT_SCORER:
        raise ConfigError(f"scorer {name!r} is built in; choose another name")
    SCORERS.register(name, scorer)


def build_attention(config: DecoderConfig, sizes: Sizes) -> Attention:
    """Build the attention that a config describes.

    Args:
        config: The settings of the decoder.
        sizes: The sizes of features, hidden state and attention, and the number of regions.

    Raises:
        ConfigError: `check_attention` rejects the settings, the scorer needs other sizes, or its
            code does not work.
    """
    check_attention(config)
    if config.attention == "multi_head":
        return MultiHeadAttention(sizes, config.heads)
    if config.attention in ("fixed", "fixed_at_start"):
        return FixedVector()
    if config.query != "hidden":
        sizes = sizes._replace(query=sizes.features)
    scorer_class: Any = SCORERS[config.attention]
    if not (isinstance(scorer_class, type) and issubclass(scorer_class, Scorer)):
        raise ConfigError(
            f"scorer {config.attention!r} is {scorer_class!r:.60}; register a subclass of "
            "captioner.model.attention.Scorer"
        )
    if scorer_class.equal_sizes and sizes.features != sizes.query:
        raise ConfigError(
            f"decoder.attention {config.attention!r} needs features ({sizes.features}) and hidden "
            f"state ({sizes.query}) of the same size; set decoder.projection_dim to {sizes.query}, "
            "or use 'general'"
        )
    scorer = _checked(scorer_class, sizes)
    if config.query != "hidden":
        return PhotoAttention(scorer, config.query)
    return HardAttention(scorer) if config.selection == "hard" else SoftAttention(scorer)


def _checked(scorer_class: type[Scorer], sizes: Sizes) -> Scorer:
    """Build a scorer, and try it on zeros to check the shape of its scores.

    Without this check, broadcasting could turn scores of a wrong shape into attention that mixes
    photos.

    Raises:
        ConfigError: The scorer fails, or its scores do not have the shape (B, R, L).
    """
    query = torch.zeros(2, 3, sizes.query)
    features = torch.zeros(2, sizes.regions, sizes.features)
    expected, kind = (2, 3, sizes.regions), scorer_class.__name__
    try:
        scorer = scorer_class(sizes).eval()
        with torch.no_grad():
            shape = tuple(scorer(query, scorer.keys(features)).shape)
    except Exception as error:  # the scorer may be code of the user, which can raise any error
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            f"scorer {kind} fails with features {tuple(features.shape)} and a query "
            f"{tuple(query.shape)} ({reason}); see captioner.model.attention.Scorer"
        ) from error
    if shape != expected:
        raise ConfigError(
            f"scorer {kind} returns scores of shape {shape}; return (B, R, L), here {expected}"
        )
    return scorer.train()


def check_attention(config: DecoderConfig) -> None:
    """Check that the settings of attention and step order are known and compatible.

    Raises:
        ConfigError: A setting is unknown, or two settings are not compatible.
    """
    name = config.attention
    if config.order not in DECODERS:
        raise ConfigError(
            f"decoder.order {config.order!r} is unknown; use {either(DECODERS)}, or add your own "
            "(see docs/gru.md)"
        )
    if name not in WITHOUT_SCORER and name not in SCORERS:
        allowed = ", ".join([*SCORERS, *WITHOUT_SCORER])
        raise ConfigError(
            f"decoder.attention {name!r} is unknown; use one of {allowed}, or register it (see "
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


def build_decoder(
    config: DecoderConfig,
    feature_dim: int,
    vocabulary_size: int,
    regions: int,
    styles: int = 0,
    *,
    initialize: bool = True,
) -> Decoder:
    """Build the decoder that a config describes.

    Args:
        config: The settings of the decoder.
        feature_dim: Size of the encoder's features, D.
        vocabulary_size: Number of words and special tokens, V.
        regions: Largest number of regions, L.
        styles: Number of caption styles, or 0 for a single unnamed style. Each style has its own
            start token after the V tokens of the vocabulary (see ``Vocabulary.start``).
        initialize: Whether to set the initial weights for training. This is not necessary if you
            read weights from a file afterwards.
    """
    kind = PlainDecoder if config.attention == "fixed_at_start" else DECODERS[config.order]
    sizes = Sizes(
        config.projection_dim or feature_dim, config.hidden_dim, config.attention_dim, regions
    )
    attention = build_attention(config, sizes)
    decoder = kind(config, attention, feature_dim, vocabulary_size, styles)
    if initialize:
        initialize_weights(decoder)
    return decoder


@torch.no_grad()
def initialize_weights(decoder: Decoder) -> None:
    """Initialize the weights of a new decoder for training, in place.

    Linear layers start with Xavier's uniform distribution, embeddings with a normal distribution,
    and each gate's matrix for the hidden state with an orthogonal matrix. Biases are 0, except for
    the bias of the forget gate, which is 1. The LSTM then keeps its state at first.

    Source: Jozefowicz et al. 2015, An Empirical Exploration of Recurrent Network Architectures, for
    the bias of the forget gate. Deviation: none.
    """
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.normal_(decoder.embedding.weight, std=0.5)
    for gates in decoder.hidden_gates.weight.chunk(decoder.GATES):
        nn.init.orthogonal_(gates)
    # Gate 1 is the forget gate. Layer norm subtracts the mean of its input, so an equal bias of all
    # units before the norm would have no effect. The norm's own bias is set instead.
    if decoder.gate_norms is None:
        decoder.word_gates.bias.chunk(decoder.GATES)[1].fill_(1.0)
    else:
        decoder.gate_norms[1].bias.fill_(1.0)  # type: ignore[operator]


@torch.no_grad()
def start_at_frequencies(decoder: Decoder, counts: Tensor) -> None:
    """Set the bias of the output layer to the logarithm of each token's frequency.

    The decoder then starts with the right frequencies. Otherwise, the first training steps would
    learn only these frequencies.

    Args:
        decoder: Decoder to change, in place.
        counts: How often each token occurs in the training targets, (V,).
    """
    share = (counts + 1) / (counts + 1).sum()  # + 1, so that unseen tokens are not impossible
    decoder.word_output.bias.copy_(share.log())
