"""Every attention mechanism against its equation, and what each must be whatever its weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from captioner.config import DecoderConfig, SearchOptions, TrainingConfig
from captioner.decoding.search import search
from captioner.decoding.stepper import DecoderStepper
from captioner.errors import ConfigError
from captioner.models.attention import (
    PHOTO_QUERIES,
    SCORERS,
    AdditiveScorer,
    Attention,
    ConcatScorer,
    DotScorer,
    FixedVector,
    GeneralScorer,
    LocationScorer,
    MultiHeadAttention,
    ScaledDotScorer,
    Scorer,
    Sizes,
    build_attention,
    masked_mean,
    register_scorer,
    sample_index,
)
from captioner.models.decoder import build_decoder
from captioner.models.losses import caption_losses
from captioner.vocabulary import END, START

B, R, L, D, N, A, HEADS = 2, 3, 5, 4, 6, 14, 7
Array = NDArray[np.float64]
Words = dict[str, str]

# A hole, and an end of another length in every photo.
MASK = torch.tensor([[True, True, False, True, False], [True, True, True, False, True]])

ASKED_BY_HIDDEN: list[Words] = [{"attention": name} for name in (*SCORERS, "multi_head")]
ASKED_BY_PHOTO: list[Words] = [
    {"attention": name, "query": query} for name in PHOTO_QUERIES for query in ("self", "mean")
]
FIXED: list[Words] = [{"attention": "fixed"}, {"attention": "fixed_at_start"}]
SOFT = [*ASKED_BY_HIDDEN, *ASKED_BY_PHOTO, *FIXED]
HARD: list[Words] = [{"attention": name, "selection": "hard"} for name in SCORERS]


def named(words: Words) -> str:
    return " ".join(words.values())


def each(choices: list[Words]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("words", choices, ids=named)


masked_or_not = pytest.mark.parametrize("mask", [None, MASK], ids=["all real", "masked"])


def query_size(words: Words, features: int = D, query: int = N) -> int:
    scorer = SCORERS.get(words["attention"])
    return features if scorer is not None and scorer.equal_sizes else query


def config_of(words: Words, **sizes: int) -> DecoderConfig:
    changes: dict[str, Any] = {"attention_dim": A, "heads": HEADS, **words, **sizes}
    return DecoderConfig(**changes)


def build(words: Words) -> Attention:
    """In float64 and eval mode, with weights large enough that nothing hides in a small number."""
    attention = build_attention(config_of(words), Sizes(D, query_size(words), A, L))
    return randomized(attention)


def randomized(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.8)
    return module.double().eval()


def photos() -> tuple[Tensor, Tensor]:
    """Features (B, L, D) and a summary (B, 1, D) that is no mean of them."""
    return torch.randn(B, L, D).double(), torch.randn(B, 1, D).double()


def asked(words: Words) -> Tensor:
    return torch.randn(B, R, query_size(words)).double()


def numbers(module: nn.Module) -> dict[str, Array]:
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


# --- Known answers -------------------------------------------------------------------------------

# One score, from the weights p, the query q, the region's features a and its place i.
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


def real_places(mask: Tensor | None, photo: int) -> list[int]:
    return [i for i in range(L) if mask is None or mask[photo, i]]


def test_every_scorer_has_an_equation_here() -> None:
    assert set(EQUATIONS) == set(SCORERS)


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_is_its_equation(name: str) -> None:
    words = {"attention": name}
    scorer = randomized(SCORERS[name](Sizes(D, query_size(words), A, L)))
    (features, _), query, p = photos(), asked(words), numbers(scorer)

    scores = scorer(query, scorer.keys(features)).detach().numpy()

    assert scores.shape == (B, R, L)
    for photo in range(B):
        for caption in range(R):
            for region in range(L):
                a, q = features[photo, region].numpy(), query[photo, caption].numpy()
                expected = EQUATIONS[name](p, q, a, region)
                np.testing.assert_allclose(scores[photo, caption, region], expected, rtol=1e-10)


@masked_or_not
@pytest.mark.parametrize("name", SCORERS)
def test_alphas_are_a_softmax_and_the_context_their_weighted_mean(
    name: str, mask: Tensor | None
) -> None:
    words = {"attention": name}
    attention, (features, summary), query = build(words), photos(), asked(words)
    p = numbers(attention.scorer)

    context, alphas, chosen = attention(query, attention.memory(features, summary, mask))

    assert chosen is None
    for photo in range(B):
        places = real_places(mask, photo)
        for caption in range(R):
            q, expected, mean = query[photo, caption].numpy(), np.zeros(L), np.zeros(D)
            expected[places] = softmax(
                [EQUATIONS[name](p, q, features[photo, i].numpy(), i) for i in places]
            )
            for i in places:
                mean += expected[i] * features[photo, i].numpy()
            at = (photo, caption)
            np.testing.assert_allclose(alphas[at].detach().numpy(), expected, rtol=1e-10)
            np.testing.assert_allclose(context[at].detach().numpy(), mean, rtol=1e-10)


@masked_or_not
@each(ASKED_BY_PHOTO)
def test_a_photo_that_asks_itself_is_its_equation(words: Words, mask: Tensor | None) -> None:
    attention, (features, summary) = build(words), photos()
    p, equation = numbers(attention.scorer), EQUATIONS[words["attention"]]

    attended = attention(asked(words), attention.memory(features, summary, mask))

    for photo in range(B):
        regions = features[photo].numpy()
        places = real_places(mask, photo)
        mean = sum(regions[i] for i in places) / len(places)
        own = words["query"] == "self"
        expected, context = np.zeros(L), np.zeros(D)
        expected[places] = softmax(
            [equation(p, regions[i] if own else mean, regions[i], i) for i in places]
        )
        for i in places:
            context += expected[i] * regions[i]
        for caption in range(R):
            at = (photo, caption)
            np.testing.assert_allclose(attended.alphas[at].detach().numpy(), expected, rtol=1e-10)
            np.testing.assert_allclose(attended.context[at].detach().numpy(), context, rtol=1e-10)


@masked_or_not
def test_multi_head_is_its_equation(mask: Tensor | None) -> None:
    words = {"attention": "multi_head"}
    attention, (features, summary), query = build(words), photos(), asked(words)
    p, d = numbers(attention), A // HEADS

    context, alphas, _ = attention(query, attention.memory(features, summary, mask))

    for photo in range(B):
        places = real_places(mask, photo)
        for caption in range(R):
            heads, maps = [], np.zeros((HEADS, L))
            for head in range(HEADS):
                rows = slice(head * d, (head + 1) * d)
                q = p["query.weight"][rows] @ query[photo, caption].numpy()
                keys = {i: p["key.weight"][rows] @ features[photo, i].numpy() for i in places}
                maps[head, places] = softmax([float(q @ keys[i]) / np.sqrt(d) for i in places])
                values = {i: p["value.weight"][rows] @ features[photo, i].numpy() for i in places}
                heads.append(sum(maps[head, i] * values[i] for i in places))
            expected = p["output.weight"] @ np.concatenate(heads)
            at = (photo, caption)
            np.testing.assert_allclose(context[at].detach().numpy(), expected, rtol=1e-9)
            np.testing.assert_allclose(alphas[at].detach().numpy(), maps.mean(0), rtol=1e-9)


@masked_or_not
def test_multi_head_is_torchs(mask: Tensor | None) -> None:
    """torch's query and output have one size, so ours asks with A and its last matrix is added."""
    ours = randomized(MultiHeadAttention(Sizes(D, A, A, L), HEADS))
    oracle = nn.MultiheadAttention(A, HEADS, bias=False, kdim=D, vdim=D, batch_first=True).double()
    with torch.no_grad():
        oracle.q_proj_weight.copy_(ours.query.weight)
        oracle.k_proj_weight.copy_(ours.key.weight)
        oracle.v_proj_weight.copy_(ours.value.weight)
        oracle.out_proj.weight.copy_(torch.eye(A))
    (features, summary), query = photos(), torch.randn(B, R, A).double()
    padding = None if mask is None else ~mask

    context, alphas, _ = ours(query, ours.memory(features, summary, mask))
    found, expected_alphas = oracle(query, features, features, key_padding_mask=padding)

    torch.testing.assert_close(context, ours.output(found))
    torch.testing.assert_close(alphas, expected_alphas)


@masked_or_not
def test_a_fixed_vector_is_the_summary_with_an_even_map(mask: Tensor | None) -> None:
    attention, (features, summary) = FixedVector(), photos()

    context, alphas, chosen = attention(
        torch.randn(B, R, N), attention.memory(features, summary, mask)
    )

    assert torch.equal(context, summary.expand(B, R, D))
    assert chosen is None
    for photo in range(B):
        places = real_places(mask, photo)
        expected = [1 / len(places) if i in places else 0.0 for i in range(L)]
        np.testing.assert_allclose(alphas[photo].numpy(), [expected] * R)


def test_the_masked_mean_counts_the_real_regions_only() -> None:
    features = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [100.0, 200.0]], [[5.0, 7.0]] * 3])
    mask = torch.tensor([[True, True, False], [False, True, False]])

    assert masked_mean(features, mask).tolist() == [[[2.0, 4.0]], [[5.0, 7.0]]]
    torch.testing.assert_close(masked_mean(features, None), features.mean(1, keepdim=True))


def test_the_masked_mean_is_as_exact_as_its_features() -> None:
    features, _ = photos()
    mask = torch.tensor([[True, True, True, False, False]] * B)  # a third has no end

    mean = masked_mean(features, mask)

    torch.testing.assert_close(mean, features[:, :3].mean(1, keepdim=True), rtol=1e-14, atol=1e-14)


# --- Equivalences --------------------------------------------------------------------------------


def scores_of(scorer: Scorer, query: Tensor, features: Tensor) -> Tensor:
    return scorer(query, scorer.keys(features))


def test_concat_is_additive_when_their_weights_are_equal() -> None:
    additive, concat = (
        randomized(kind(Sizes(D, N, A, L))) for kind in (AdditiveScorer, ConcatScorer)
    )
    with torch.no_grad():
        additive.key.bias.zero_()
        concat.mix.weight.copy_(torch.cat([additive.query.weight, additive.key.weight], dim=1))
        concat.energy.weight.copy_(additive.energy.weight)
    (features, _), query = photos(), torch.randn(B, R, N).double()

    torch.testing.assert_close(
        scores_of(concat, query, features), scores_of(additive, query, features)
    )


def test_scaled_dot_is_dot_over_the_root_of_the_size_and_general_with_identity_is_dot() -> None:
    sizes = Sizes(D, D, A, L)
    general = GeneralScorer(sizes).double()
    nn.init.eye_(general.key.weight)
    (features, _), query = photos(), torch.randn(B, R, D).double()

    dot = scores_of(DotScorer(sizes), query, features)

    torch.testing.assert_close(scores_of(ScaledDotScorer(sizes), query, features), dot / 2)
    torch.testing.assert_close(scores_of(general, query, features), dot)


def test_one_head_is_scaled_dot_over_projected_regions() -> None:
    sizes = Sizes(D, N, A, L)
    attention = randomized(MultiHeadAttention(sizes, heads=1))
    (features, summary), query = photos(), torch.randn(B, R, N).double()
    scorer = ScaledDotScorer(Sizes(A, A, A, L))

    context, alphas, _ = attention(query, attention.memory(features, summary))
    scores = scores_of(scorer, attention.query(query), attention.key(features))
    mean = scores.softmax(-1) @ attention.value(features)

    torch.testing.assert_close(alphas, scores.softmax(-1))
    torch.testing.assert_close(context, attention.output(mean))


@each([*SOFT, *HARD])
def test_a_padded_photo_is_the_photo(words: Words) -> None:
    """For location too: it uses the first rows for however many regions there are."""
    attention, (features, summary), query = build(words), photos(), asked(words)
    count = 3
    mask = (torch.arange(L) < count).expand(B, L)

    padded = attention(query, attention.memory(features, summary, mask))
    alone = attention(query, attention.memory(features[:, :count], summary))

    torch.testing.assert_close(padded.context, alone.context)
    torch.testing.assert_close(padded.alphas[..., :count], alone.alphas)
    assert (padded.alphas[..., count:] == 0).all()
    if words in HARD:
        assert torch.equal(padded.chosen, alone.chosen)


# --- Invariants ----------------------------------------------------------------------------------


@masked_or_not
@each([*SOFT, *HARD])
def test_alphas_sum_to_one_and_are_nothing_where_masked(words: Words, mask: Tensor | None) -> None:
    attention, (features, summary) = build(words), photos()

    context, alphas, _ = attention(asked(words), attention.memory(features, summary, mask))

    assert context.shape == (B, R, D)
    assert (alphas >= 0).all()
    torch.testing.assert_close(alphas.sum(-1), torch.ones(B, R).double())
    if mask is not None:
        real = mask.unsqueeze(1).expand(B, R, L)
        assert (alphas[~real] == 0).all()
        assert (alphas[real] > 0).all()


@each([*SOFT, *HARD])
def test_what_stands_in_a_masked_region_changes_nothing(words: Words) -> None:
    attention, (features, summary), query = build(words), photos(), asked(words)
    other = torch.where(MASK.unsqueeze(-1), features, 1000 * torch.randn(B, L, D).double())

    one = attention(query, attention.memory(features, summary, MASK))
    two = attention(query, attention.memory(other, summary, MASK))

    torch.testing.assert_close(two.context, one.context, rtol=1e-12, atol=0)
    torch.testing.assert_close(two.alphas, one.alphas, rtol=1e-12, atol=0)


@each([*ASKED_BY_HIDDEN, *HARD])
def test_another_hidden_state_looks_elsewhere(words: Words) -> None:
    """tanh(W_a a) + tanh(W_h h), summed after the tanh, would cancel in the softmax."""
    attention, (features, summary) = build(words), photos()
    memory = attention.memory(features, summary)

    one, two = (attention(asked(words), memory).alphas for _ in "ab")

    assert (one - two).abs().amax(dim=-1).min() > 0.01


@each([*ASKED_BY_PHOTO, *FIXED])
def test_a_photo_that_asks_itself_does_not_hear_the_hidden_state(words: Words) -> None:
    attention, (features, summary) = build(words), photos()
    memory = attention.memory(features, summary)

    one, two = (attention(asked(words), memory) for _ in "ab")

    assert torch.equal(one.alphas, two.alphas)
    assert torch.equal(one.context, two.context)
    assert torch.equal(one.alphas, one.alphas[:, :1].expand(B, R, L))  # one map for all words


@each(ASKED_BY_PHOTO)
def test_a_photo_that_asks_itself_looks_at_some_regions_more(words: Words) -> None:
    attention, (features, summary) = build(words), photos()

    alphas = attention(asked(words), attention.memory(features, summary)).alphas

    assert (alphas.amax(-1) - alphas.amin(-1)).min() > 0.01


@each([words for words in SOFT if words["attention"] != "location"])
def test_equal_regions_are_looked_at_equally(words: Words) -> None:
    attention, (features, _) = build(words), photos()
    equal = features[:, :1].expand(B, L, D)

    context, alphas, _ = attention(asked(words), attention.memory(equal, equal[:, :1]))

    torch.testing.assert_close(alphas, torch.full((B, R, L), 1 / L).double())
    if words["attention"] != "multi_head":  # which projects what it finds
        torch.testing.assert_close(context, equal[:, :1].expand(B, R, D))


@each([*SOFT, *HARD])
def test_the_order_of_the_regions_matters_to_location_alone(words: Words) -> None:
    attention, (features, summary), query = build(words), photos(), asked(words)
    order = torch.tensor([3, 0, 4, 2, 1])

    context, alphas, _ = attention(query, attention.memory(features, summary))
    same, turned, _ = attention(query, attention.memory(features[:, order], summary))

    if words["attention"] == "location":
        torch.testing.assert_close(turned, alphas)  # blind to what the regions hold
        assert (same - context).abs().max() > 0.01
    else:
        torch.testing.assert_close(same, context)
        torch.testing.assert_close(turned, alphas[..., order])


@each(SOFT)
def test_alphas_stay_float32_when_the_features_are_bf16(words: Words) -> None:
    attention = build(words).float()
    features, summary, query = (part.float() for part in (*photos(), asked(words)))
    exact = attention(query, attention.memory(features, summary))

    with torch.autocast("cpu", torch.bfloat16):
        memory = attention.memory(features.bfloat16(), summary.bfloat16(), None)
        context, alphas, _ = attention(query, memory)

    assert alphas.dtype == torch.float32
    assert context.dtype == torch.bfloat16
    torch.testing.assert_close(alphas, exact.alphas, rtol=0, atol=0.05)
    torch.testing.assert_close(context.float(), exact.context, rtol=0.05, atol=0.1)


# --- Gradients -----------------------------------------------------------------------------------


class _AttentionOutputs(nn.Module):
    """Makes ``memory`` and ``forward`` one function, for ``functional_call``."""

    def __init__(self, attention: Attention, mask: Tensor | None) -> None:
        super().__init__()
        self.attention, self.mask = attention, mask

    def forward(self, query: Tensor, features: Tensor, summary: Tensor) -> tuple[Tensor, Tensor]:
        context, alphas, _ = self.attention(
            query, self.attention.memory(features, summary, self.mask)
        )
        return context, alphas


@masked_or_not
@each(SOFT[:-1])  # fixed_at_start is fixed
def test_gradients_are_exact_in_float64(words: Words, mask: Tensor | None) -> None:
    features, query, attention_dim, count = 2, query_size(words, 2, 3), 4, 4
    config = config_of(words, attention_dim=attention_dim, heads=2)
    module = randomized(build_attention(config, Sizes(features, query, attention_dim, count)))
    attended = _AttentionOutputs(module, None if mask is None else mask[:, 1:])
    names = [name for name, _ in attended.named_parameters()]
    values = [value.detach().requires_grad_() for value in attended.parameters()]
    inputs = [(B, 1, query), (B, count, features), (B, 1, features)]

    def both(*parts: Tensor) -> tuple[Tensor, Tensor]:
        weights = dict(zip(names, parts[3:], strict=True))
        return functional_call(attended, weights, parts[:3])

    drawn = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in inputs]
    assert torch.autograd.gradcheck(both, (*drawn, *values))


# --- Hard attention ------------------------------------------------------------------------------


@masked_or_not
@each(HARD)
def test_in_use_hard_attention_takes_the_most_probable_region(
    words: Words, mask: Tensor | None
) -> None:
    attention, (features, summary), query = build(words), photos(), asked(words)
    memory = attention.memory(features, summary, mask)

    context, alphas, chosen = attention(query, memory)
    soft = build_attention(
        config_of({**words, "selection": "soft"}), Sizes(D, query.shape[-1], A, L)
    )
    soft.double().load_state_dict(attention.state_dict(), strict=False)  # it has no baseline

    torch.testing.assert_close(alphas, soft(query, memory).alphas)
    assert torch.equal(chosen, alphas.argmax(-1))
    for photo in range(B):
        for caption in range(R):
            assert torch.equal(context[photo, caption], features[photo, chosen[photo, caption]])


@masked_or_not
def test_in_training_hard_attention_draws_regions_as_often_as_alpha_says(
    mask: Tensor | None,
) -> None:
    words = {"attention": "general", "selection": "hard"}
    attention, (features, summary) = build(words).train(), photos()
    draws = 20_000
    query = 0.5 * torch.randn(B, 1, N).double().expand(B, draws, N)

    context, alphas, chosen = attention(query, attention.memory(features, summary, mask))

    probability = alphas[:, 0].detach()
    share = torch.stack([(chosen == region).double().mean(1) for region in range(L)], dim=1)
    deviation = (probability * (1 - probability) / draws).sqrt()
    assert probability.max() < 0.9  # else the bound below would be empty
    assert ((share - probability).abs() <= 4 * deviation).all()
    assert (share > 0).sum() == (B * L if mask is None else mask.sum())  # never a masked one
    taken = features.take_along_dim(chosen.unsqueeze(-1), dim=1)
    assert torch.equal(context, taken)


def test_no_gradient_passes_through_the_choice() -> None:
    attention = build({"attention": "additive", "selection": "hard"}).train()
    (features, summary), query = photos(), torch.randn(B, R, N).double()

    context, alphas, _ = attention(query, attention.memory(features.requires_grad_(), summary))
    context.sum().backward(retain_graph=True)

    assert features.grad.any()  # what was seen is learned from
    assert all(parameter.grad is None for parameter in attention.parameters())
    alphas.square().sum().backward()
    assert attention.scorer.energy.weight.grad.any()


# --- Choosing one --------------------------------------------------------------------------------


def test_location_with_too_many_regions_is_an_error() -> None:
    scorer = LocationScorer(Sizes(D, N, A, L))

    assert scorer.keys(torch.zeros(B, L, D)).shape == (B, L, 0)
    with pytest.raises(ConfigError, match="'location' was built for 5 regions and got 6; use"):
        scorer.keys(torch.zeros(B, L + 1, D))


ALLOWED = "additive, concat, dot, general, location, scaled_dot"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            {"attention": "aditive"},
            "unknown decoder.attention 'aditive'; use one of "
            f"{ALLOWED}, multi_head, fixed, fixed_at_start",
        ),
        ({"attention": ""}, "unknown decoder.attention ''; use one of additive"),
        *(
            (
                {"attention": name},
                f"decoder.attention '{name}' needs features ({D}) and hidden state ({N}) of the "
                f"same size; set decoder.projection_dim to {N}, or use 'general'",
            )
            for name in ("dot", "scaled_dot")
        ),
        (
            {"attention": "multi_head", "heads": 4},
            f"decoder.attention_dim {A} is not divisible by decoder.heads 4; use a multiple of 4",
        ),
        *(
            (
                {"attention": name, "query": query},
                f"decoder.query '{query}' does not support decoder.attention '{name}'; "
                "use query 'hidden', or attention additive, dot, general",
            )
            for query in ("self", "mean")
            for name in ("concat", "location", "scaled_dot", "multi_head", "fixed")
        ),
        *(
            (
                {"attention": name, "selection": "hard"},
                f"decoder.selection 'hard' does not support decoder.attention '{name}' with "
                f"decoder.query 'hidden'; use query 'hidden' and attention {ALLOWED}",
            )
            for name in ("multi_head", "fixed", "fixed_at_start")
        ),
        (
            {"attention": "additive", "query": "mean", "selection": "hard"},
            "decoder.selection 'hard' does not support decoder.attention 'additive' with "
            "decoder.query 'mean'; use query 'hidden'",
        ),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_incompatible_settings_are_errors(words: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        build_attention(config_of(words), Sizes(D, N, A, L))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["dot", "scaled_dot"])
def test_a_projection_lets_features_of_another_size_be_multiplied(name: str) -> None:
    config = config_of({"attention": name}, hidden_dim=N, embed_dim=3, projection_dim=N)

    decoder = build_decoder(config, D, 8, L)

    assert decoder.memory(torch.randn(B, L, D)).values.shape == (B, L, N)


class DistanceScorer(Scorer):
    """e_i = - |W q - a_i|^2, which the project does not have."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.place = nn.Linear(sizes.query, sizes.features, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return -(self.place(query).unsqueeze(2) - keys.unsqueeze(1)).square().sum(-1)


@pytest.mark.parametrize("selection", ["soft", "hard"])
@pytest.mark.parametrize("order", ["bahdanau", "luong"])
def test_a_registered_scorer_is_trained_and_searched(
    monkeypatch: pytest.MonkeyPatch, order: str, selection: str
) -> None:
    monkeypatch.setattr(SCORERS, "_registered", {})
    register_scorer("distance", DistanceScorer)
    words = {"attention": "distance", "order": order, "selection": selection}
    config = config_of(words, embed_dim=3, hidden_dim=N)
    config.dropout = 0.0
    decoder = build_decoder(config, D, 8, L)
    assert isinstance(decoder.attention.scorer, DistanceScorer)
    features, tokens = torch.randn(B, L, D), torch.tensor([[[START, 5, 6, 7, END]]] * B)

    losses = caption_losses(decoder.train(), decoder.memory(features), tokens)
    losses.objective(TrainingConfig()).backward()
    stepper = DecoderStepper(decoder.eval(), decoder.memory(features))
    found = search(stepper, SearchOptions(beam_size=2, max_length=4))

    assert decoder.attention.scorer.place.weight.grad.any()
    assert [len(hypotheses) for hypotheses in found] == [1] * B


def test_sampled_regions_are_those_of_multinomial():
    probabilities = torch.rand(4, 3, 50).softmax(-1)
    torch.manual_seed(3)
    expected = torch.multinomial(probabilities.flatten(0, 1), 1).view(4, 3)
    torch.manual_seed(3)
    assert torch.equal(sample_index(probabilities), expected)
