"""Every attention mechanism against its equation, and invariants that hold for all weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from captioner.errors import ConfigError
from captioner.model.attention import (
    Attention,
    Sizes,
    masked_mean,
    sample_index,
)
from captioner.model.attention_variants import (
    FixedVector,
)
from captioner.model.build import (
    PHOTO_QUERIES,
    SCORERS,
    build_attention,
)
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


def query_size(settings: Settings, features: int = D, query: int = N) -> int:
    scorer = SCORERS.get(settings["attention"])
    return features if scorer is not None and scorer.equal_sizes else query


def config_of(settings: Settings, **sizes: int) -> DecoderConfig:
    changes: dict[str, Any] = {"attention_dim": A, "heads": HEADS, **settings, **sizes}
    return DecoderConfig(**changes)


def build(settings: Settings) -> Attention:
    """Build in float64 and eval mode, with weights large enough to make errors visible."""
    attention = build_attention(config_of(settings), Sizes(D, query_size(settings), A, L))
    return randomized(attention)


def randomized(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.8)
    return module.double().eval()


def photos() -> tuple[Tensor, Tensor]:
    """Features (B, L, D) and a summary (B, 1, D) that is not their mean."""
    return torch.randn(B, L, D).double(), torch.randn(B, 1, D).double()


def random_query(settings: Settings) -> Tensor:
    return torch.randn(B, R, query_size(settings)).double()


def weights_of(module: nn.Module) -> dict[str, Array]:
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


# --- Known answers -------------------------------------------------------------------------------

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


def real_regions(mask: Tensor | None, photo: int) -> list[int]:
    return [i for i in range(L) if mask is None or mask[photo, i]]


@with_and_without_mask
@pytest.mark.parametrize("name", SCORERS)
def test_alphas_are_softmax_and_context_is_weighted_mean(name: str, mask: Tensor | None) -> None:
    settings = {"attention": name}
    attention, (features, summary), query = build(settings), photos(), random_query(settings)
    p = weights_of(attention.scorer)

    context, alphas, chosen = attention(query, attention.memory(features, summary, mask))

    assert chosen is None
    for photo in range(B):
        real = real_regions(mask, photo)
        for caption in range(R):
            q, expected, mean = query[photo, caption].numpy(), np.zeros(L), np.zeros(D)
            expected[real] = softmax(
                [EQUATIONS[name](p, q, features[photo, i].numpy(), i) for i in real]
            )
            for i in real:
                mean += expected[i] * features[photo, i].numpy()
            index = (photo, caption)
            np.testing.assert_allclose(alphas[index].detach().numpy(), expected, rtol=1e-10)
            np.testing.assert_allclose(context[index].detach().numpy(), mean, rtol=1e-10)


@with_and_without_mask
@each(PHOTO_QUERY)
def test_photo_query_matches_its_equation(settings: Settings, mask: Tensor | None) -> None:
    attention, (features, summary) = build(settings), photos()
    p, equation = weights_of(attention.scorer), EQUATIONS[settings["attention"]]

    attended = attention(random_query(settings), attention.memory(features, summary, mask))

    for photo in range(B):
        regions = features[photo].numpy()
        real = real_regions(mask, photo)
        mean = sum(regions[i] for i in real) / len(real)
        own = settings["query"] == "self"
        expected, context = np.zeros(L), np.zeros(D)
        expected[real] = softmax(
            [equation(p, regions[i] if own else mean, regions[i], i) for i in real]
        )
        for i in real:
            context += expected[i] * regions[i]
        for caption in range(R):
            index = (photo, caption)
            np.testing.assert_allclose(
                attended.alphas[index].detach().numpy(), expected, rtol=1e-10
            )
            np.testing.assert_allclose(
                attended.context[index].detach().numpy(), context, rtol=1e-10
            )


@with_and_without_mask
def test_multi_head_matches_its_equation(mask: Tensor | None) -> None:
    settings = {"attention": "multi_head"}
    attention, (features, summary), query = build(settings), photos(), random_query(settings)
    p, d = weights_of(attention), A // HEADS

    context, alphas, _ = attention(query, attention.memory(features, summary, mask))

    for photo in range(B):
        real = real_regions(mask, photo)
        for caption in range(R):
            heads, maps = [], np.zeros((HEADS, L))
            for head in range(HEADS):
                rows = slice(head * d, (head + 1) * d)
                q = p["query.weight"][rows] @ query[photo, caption].numpy()
                keys = {i: p["key.weight"][rows] @ features[photo, i].numpy() for i in real}
                maps[head, real] = softmax([float(q @ keys[i]) / np.sqrt(d) for i in real])
                values = {i: p["value.weight"][rows] @ features[photo, i].numpy() for i in real}
                heads.append(sum(maps[head, i] * values[i] for i in real))
            expected = p["output.weight"] @ np.concatenate(heads)
            index = (photo, caption)
            np.testing.assert_allclose(context[index].detach().numpy(), expected, rtol=1e-9)
            np.testing.assert_allclose(alphas[index].detach().numpy(), maps.mean(0), rtol=1e-9)


@with_and_without_mask
def test_fixed_vector_is_the_summary_with_uniform_alphas(mask: Tensor | None) -> None:
    attention, (features, summary) = FixedVector(), photos()

    context, alphas, chosen = attention(
        torch.randn(B, R, N), attention.memory(features, summary, mask)
    )

    assert torch.equal(context, summary.expand(B, R, D))
    assert chosen is None
    for photo in range(B):
        real = real_regions(mask, photo)
        expected = [1 / len(real) if i in real else 0.0 for i in range(L)]
        np.testing.assert_allclose(alphas[photo].numpy(), [expected] * R)


def test_masked_mean_ignores_masked_regions() -> None:
    features = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [100.0, 200.0]], [[5.0, 7.0]] * 3])
    mask = torch.tensor([[True, True, False], [False, True, False]])

    assert masked_mean(features, mask).tolist() == [[[2.0, 4.0]], [[5.0, 7.0]]]
    torch.testing.assert_close(masked_mean(features, None), features.mean(1, keepdim=True))


# --- Equivalences --------------------------------------------------------------------------------


@each([*SOFT, *HARD])
def test_masked_padding_equals_fewer_regions(settings: Settings) -> None:
    """For location too, which uses as many rows of its weights as there are regions."""
    attention, (features, summary), query = build(settings), photos(), random_query(settings)
    count = 3
    mask = (torch.arange(L) < count).expand(B, L)

    padded = attention(query, attention.memory(features, summary, mask))
    alone = attention(query, attention.memory(features[:, :count], summary))

    torch.testing.assert_close(padded.context, alone.context)
    torch.testing.assert_close(padded.alphas[..., :count], alone.alphas)
    assert (padded.alphas[..., count:] == 0).all()
    if settings in HARD:
        assert torch.equal(padded.chosen, alone.chosen)


# --- Invariants ----------------------------------------------------------------------------------


@each([*HIDDEN_QUERY, *HARD])
def test_alphas_depend_on_the_hidden_state(settings: Settings) -> None:
    """tanh(W_a a) + tanh(W_h h), summed after the tanh, would cancel in the softmax."""
    attention, (features, summary) = build(settings), photos()
    memory = attention.memory(features, summary)

    one, two = (attention(random_query(settings), memory).alphas for _ in "ab")

    assert (one - two).abs().amax(dim=-1).min() > 0.01


@each(SOFT)
def test_alphas_stay_float32_when_the_features_are_bf16(settings: Settings) -> None:
    attention = build(settings).float()
    features, summary, query = (part.float() for part in (*photos(), random_query(settings)))
    exact = attention(query, attention.memory(features, summary))

    with torch.autocast("cpu", torch.bfloat16):
        memory = attention.memory(features.bfloat16(), summary.bfloat16(), None)
        context, alphas, _ = attention(query, memory)

    assert alphas.dtype == torch.float32
    assert context.dtype == torch.bfloat16
    torch.testing.assert_close(alphas, exact.alphas, rtol=0, atol=0.05)
    torch.testing.assert_close(context.float(), exact.context, rtol=0.05, atol=0.1)


# --- Hard attention ------------------------------------------------------------------------------


@with_and_without_mask
@each(HARD)
def test_hard_attention_takes_the_most_probable_region_in_eval_mode(
    settings: Settings, mask: Tensor | None
) -> None:
    attention, (features, summary), query = build(settings), photos(), random_query(settings)
    memory = attention.memory(features, summary, mask)

    context, alphas, chosen = attention(query, memory)
    soft = build_attention(
        config_of({**settings, "selection": "soft"}), Sizes(D, query.shape[-1], A, L)
    )
    soft.double().load_state_dict(
        attention.state_dict(), strict=False
    )  # soft attention has no baseline

    torch.testing.assert_close(alphas, soft(query, memory).alphas)
    assert torch.equal(chosen, alphas.argmax(-1))
    for photo in range(B):
        for caption in range(R):
            assert torch.equal(context[photo, caption], features[photo, chosen[photo, caption]])


@with_and_without_mask
def test_hard_attention_samples_regions_from_alpha_in_training(
    mask: Tensor | None,
) -> None:
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


# --- Settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"attention": "aditive"}, "'aditive'; use one of additive, concat, .*fixed_at_start, or"),
        ({"attention": "dot"}, f"features \\({D}\\) and hidden state \\({N}\\) of the same size"),
        ({"attention": "multi_head", "heads": 4}, f"{A} is not divisible by decoder.heads 4"),
        ({"attention": "concat", "query": "mean"}, "'mean' does not support .*'concat'"),
        ({"attention": "fixed", "selection": "hard"}, "'hard' does not support .*'fixed'"),
    ],
)
def test_incompatible_settings_raise(settings: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        build_attention(config_of(settings), Sizes(D, N, A, L))


def test_sample_index_equals_multinomial():
    probabilities = torch.rand(4, 3, 50).softmax(-1)
    torch.manual_seed(3)
    expected = torch.multinomial(probabilities.flatten(0, 1), 1).view(4, 3)
    torch.manual_seed(3)
    assert torch.equal(sample_index(probabilities), expected)
