"""Compare every attention mechanism with its equation, and test invariants for all weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from captioner.errors import ConfigError
from captioner.model.attention import Attention, Sizes
from captioner.model.build import PHOTO_QUERIES, SCORERS, build_attention
from captioner.options import DecoderConfig

B, R, L, D, N, A, HEADS = 2, 3, 5, 4, 6, 14, 7
Array = NDArray[np.float64]
Settings = dict[str, str]

# Masked regions in the middle or at the end, different for each photo.
MASK = torch.tensor([[True, True, False, True, False], [True, True, True, False, True]])

HIDDEN_QUERY: list[Settings] = [{"attention": name} for name in (*SCORERS, "multi_head")]
PHOTO_QUERY: list[Settings] = [
    {"attention": name, "query": query} for name in PHOTO_QUERIES for query in ("self", "mean")
]
FIXED: list[Settings] = [{"attention": "fixed"}, {"attention": "fixed_at_start"}]
SOFT = [*HIDDEN_QUERY, *PHOTO_QUERY, *FIXED]
HARD: list[Settings] = [{"attention": name, "selection": "hard"} for name in SCORERS]


def id_of(settings: Settings) -> str:
    return " ".join(settings.values())


def each(choices: list[Settings]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("settings", choices, ids=id_of)


with_and_without_mask = pytest.mark.parametrize("mask", [None, MASK], ids=["unmasked", "masked"])


def query_size(settings: Settings) -> int:
    scorer = SCORERS.get(settings["attention"])
    return D if scorer is not None and scorer.equal_sizes else N


def config_of(settings: Settings) -> DecoderConfig:
    changes: dict[str, Any] = {"attention_dim": A, "heads": HEADS, **settings}
    return DecoderConfig(**changes)


def build(settings: Settings) -> Attention:
    """Build in float64 and eval mode, with weights large enough to make errors visible."""
    attention = build_attention(config_of(settings), Sizes(D, query_size(settings), A, L))
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.8)
    return attention.double().eval()


def photos() -> tuple[Tensor, Tensor]:
    """Return features (B, L, D) and a summary (B, 1, D) that is not their mean."""
    return torch.randn(B, L, D).double(), torch.randn(B, 1, D).double()


def random_query(settings: Settings) -> Tensor:
    return torch.randn(B, R, query_size(settings)).double()


# The score, given the weights p, the query q, the region's features a and its index i.
Equation = Callable[[dict[str, Array], Array, Array, int], float]

EQUATIONS: dict[str, Equation] = {
    "additive": lambda p, q, a, i: p["energy.weight"][0] @ np.tanh(
        p["key.weight"] @ a + p["query.weight"] @ q + p["key.bias"]
    ),
    "concat": lambda p, q, a, i: p["energy.weight"][0] @ np.tanh(
        p["mix.weight"] @ np.concatenate([q, a])
    ),
    "dot": lambda p, q, a, i: sum(q[n] * a[n] for n in range(D)),
    "general": lambda p, q, a, i: q @ (p["key.weight"] @ a),
    "location": lambda p, q, a, i: p["place.weight"][i] @ q,
    "scaled_dot": lambda p, q, a, i: sum(q[n] * a[n] for n in range(D)) / D**0.5,
}  # fmt: skip


def softmax(scores: list[float]) -> Array:
    powers = np.exp(scores)
    return powers / powers.sum()


def by_scores(
    settings: Settings, p: dict[str, Array], q: Array, a: dict[int, Array]
) -> tuple[Array, Array]:
    """Compute context and alphas of one caption over its real regions, from the equation."""
    weights = {name.removeprefix("scorer."): value for name, value in p.items()}
    mean, query = sum(a.values()) / len(a), settings.get("query")
    scores = [
        EQUATIONS[settings["attention"]](weights, {"self": own, "mean": mean}.get(query, q), own, i)
        for i, own in a.items()
    ]
    alphas = softmax(scores)
    return sum(alpha * own for alpha, own in zip(alphas, a.values(), strict=True)), alphas


def by_heads(p: dict[str, Array], q: Array, a: dict[int, Array]) -> tuple[Array, Array]:
    heads, maps, d = [], [], A // HEADS
    for head in range(HEADS):
        query, keys, values = (
            p[f"{name}.weight"][head * d : (head + 1) * d] for name in ("query", "key", "value")
        )
        maps.append(softmax([float(query @ q @ (keys @ own)) / np.sqrt(d) for own in a.values()]))
        pairs = zip(maps[-1], a.values(), strict=True)
        heads.append(sum(weight * (values @ own) for weight, own in pairs))
    return p["output.weight"] @ np.concatenate(heads), np.mean(maps, axis=0)


@with_and_without_mask
@each([*SOFT, *HARD])
def test_context_and_alphas_match_their_equations(settings: Settings, mask: Tensor | None) -> None:
    attention, (features, summary), query = build(settings), photos(), random_query(settings)
    p = {name: value.detach().numpy() for name, value in attention.named_parameters()}

    attended = attention(query, attention.memory(features, summary, mask))

    chosen = attended.alphas.argmax(-1) if settings in HARD else None  # in eval mode
    assert attended.chosen is chosen is None or torch.equal(attended.chosen, chosen)
    for photo, caption in np.ndindex(B, R):
        q, regions = query[photo, caption].numpy(), features[photo].numpy()
        a = {i: regions[i] for i in range(L) if mask is None or mask[photo, i]}
        if settings in FIXED:
            context, of_real = summary[photo, 0].numpy(), np.full(len(a), 1 / len(a))
        elif settings["attention"] == "multi_head":
            context, of_real = by_heads(p, q, a)
        else:
            context, of_real = by_scores(settings, p, q, a)
        if chosen is not None:
            context = regions[chosen[photo, caption]]
        alphas = np.zeros(L)
        alphas[list(a)] = of_real
        found = (part[photo, caption].detach().numpy() for part in attended[:2])
        for one, expected in zip(found, (context, alphas), strict=True):
            np.testing.assert_allclose(one, expected, rtol=1e-9)


@each(SOFT)
def test_alphas_stay_float32_when_the_features_are_bf16(settings: Settings) -> None:
    attention = build(settings).float()
    features, summary, query = (part.float() for part in (*photos(), random_query(settings)))
    exact = attention(query, attention.memory(features, summary))

    with torch.autocast("cpu", torch.bfloat16):
        memory = attention.memory(features.bfloat16(), summary.bfloat16())
        context, alphas, _ = attention(query, memory)

    assert alphas.dtype == torch.float32
    assert context.dtype == torch.bfloat16
    torch.testing.assert_close(alphas, exact.alphas, rtol=0, atol=0.05)
    torch.testing.assert_close(context.float(), exact.context, rtol=0.05, atol=0.1)


@with_and_without_mask
def test_hard_attention_samples_regions_from_alpha_in_training(mask: Tensor | None) -> None:
    settings = {"attention": "general", "selection": "hard"}
    attention, (features, summary) = build(settings).train(), photos()
    samples = 20_000
    query = 0.5 * torch.randn(B, 1, N).double().expand(B, samples, N)

    context, alphas, chosen = attention(query, attention.memory(features, summary, mask))

    probability = alphas[:, 0].detach()
    frequency = torch.stack([(chosen == region).double().mean(1) for region in range(L)], dim=1)
    deviation = (probability * (1 - probability) / samples).sqrt()
    assert probability.max() < 0.9  # or the bound below would be trivial
    assert ((frequency - probability).abs() <= 4 * deviation).all()
    assert (frequency > 0).sum() == (B * L if mask is None else mask.sum())  # never a masked region
    chosen_features = features.take_along_dim(chosen.unsqueeze(-1), dim=1)
    assert torch.equal(context, chosen_features)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"attention": "aditive"},
            "'aditive' is unknown; use one of additive, concat, .*fixed_at_start, or",
        ),
        ({"order": "gru"}, "'gru' is unknown; use bahdanau or luong"),
        ({"attention": "dot"}, f"features \\({D}\\) and hidden state \\({N}\\) of the same size"),
        ({"attention": "multi_head", "heads": 4}, f"{A} is not divisible by decoder.heads 4"),
        ({"attention": "concat", "query": "mean"}, "'mean' does not support .*'concat'"),
        ({"attention": "fixed", "selection": "hard"}, "'hard' does not support .*'fixed'"),
    ],
)
def test_incompatible_settings_raise(settings: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        build_attention(config_of(settings), Sizes(D, N, A, L))
