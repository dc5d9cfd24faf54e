"""Attention mechanisms with queries, selections and step orders.

Every setting of one with every setting of the next two: what they are made of is independent, so
that more combinations find no more mistakes.
"""

from __future__ import annotations

from captioner.model.build import SCORERS
from captioner.options import DecoderConfig

MECHANISMS = (
    "additive hidden soft bahdanau normed projected",
    "additive hidden hard luong",
    "additive hidden soft luong unfed normed",
    "additive self soft luong",
    "additive mean soft bahdanau",
    "concat hidden soft luong",
    "concat hidden hard bahdanau",
    "dot hidden soft luong",
    "dot hidden hard bahdanau",
    "dot self soft bahdanau",
    "general hidden soft bahdanau projected",
    "general hidden hard luong unfed",
    "general mean soft luong",
    "location hidden soft bahdanau",
    "location hidden hard luong",
    "scaled_dot hidden soft bahdanau",
    "scaled_dot hidden hard luong unfed",
    "multi_head hidden soft bahdanau",
    "multi_head hidden soft luong",
    "fixed hidden soft bahdanau",
    "fixed hidden soft luong unfed",
    "fixed_at_start hidden soft bahdanau",
    "fixed_at_start hidden soft luong normed",
)
MECHANISMS += tuple(
    f"{name} hidden soft bahdanau"
    for name in SCORERS
    if not any(known.startswith(f"{name} ") for known in MECHANISMS)
)
ONE_OF_EACH = MECHANISMS[:1] + tuple(MECHANISMS[n] for n in (2, 3, 6, 7, 12, 14, 15, 18, 19, 21))
"""Each setting at least once."""


def config_of(name: str) -> DecoderConfig:
    """The config of a mechanism, with sizes that all differ where they may."""
    attention, query, selection, order, *more = name.split()
    scorer = SCORERS.get(attention)
    equal = scorer is not None and scorer.equal_sizes
    return DecoderConfig(
        embed_dim=5, hidden_dim=6, attention_dim=14, dropout=0.0, heads=7,
        attention=attention, query=query, selection=selection, order=order,
        input_feeding="unfed" not in more, layer_norm="normed" in more,
        projection_dim=6 if equal else 4 * ("projected" in more),
    )  # fmt: skip
