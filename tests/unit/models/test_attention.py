"""The scorer against its equation, and what attention must be whatever its weights."""

from __future__ import annotations

import numpy as np
import torch

from captioner.models.attention import AdditiveScorer, attend

B, R, L, D, N, A = 2, 3, 5, 4, 6, 7


def scorer() -> AdditiveScorer:
    new = AdditiveScorer(D, N, A)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.normal_()
    return new


def test_the_additive_scorer_is_its_equation() -> None:
    additive, features, query = scorer(), torch.randn(B, L, D), torch.randn(B, R, N)
    w_a, b = additive.key.weight.detach().numpy(), additive.key.bias.detach().numpy()
    w_h, v = additive.query.weight.detach().numpy(), additive.energy.weight.detach().numpy()[0]
    expected = np.zeros((B, R, L))
    for photo in range(B):
        for caption in range(R):
            for region in range(L):
                a, h = features[photo, region].numpy(), query[photo, caption].numpy()
                expected[photo, caption, region] = v @ np.tanh(w_a @ a + w_h @ h + b)

    scores = additive(query, additive.keys(features)).detach().numpy()

    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


def test_alphas_are_a_softmax_and_the_context_their_weighted_mean() -> None:
    scores, features = 3 * torch.randn(B, R, L), torch.randn(B, L, D)

    context, alphas = attend(scores, features)

    assert context.shape == (B, R, D)
    assert (alphas >= 0).all()
    torch.testing.assert_close(alphas.sum(-1), torch.ones(B, R))
    for photo in range(B):
        for caption in range(R):
            powers = np.exp(scores[photo, caption].double().numpy())
            weights = powers / powers.sum()
            mean = sum(w * a for w, a in zip(weights, features[photo].numpy(), strict=True))
            np.testing.assert_allclose(alphas[photo, caption].numpy(), weights, rtol=1e-5)
            np.testing.assert_allclose(context[photo, caption].numpy(), mean, rtol=1e-4, atol=1e-6)


def test_another_hidden_state_looks_elsewhere() -> None:
    """tanh(W_a a) + tanh(W_h h), summed after the tanh, would cancel in the softmax."""
    additive, features = scorer(), torch.randn(B, L, D)
    keys = additive.keys(features)

    _, alphas = attend(additive(torch.zeros(B, 1, N), keys), features)
    _, others = attend(additive(torch.ones(B, 1, N), keys), features)

    assert (alphas - others).abs().amax(dim=-1).min() > 0.01


def test_equal_regions_are_looked_at_equally() -> None:
    additive, features = scorer(), torch.randn(B, 1, D).expand(B, L, D)

    context, alphas = attend(additive(torch.randn(B, R, N), additive.keys(features)), features)

    torch.testing.assert_close(alphas, torch.full((B, R, L), 1 / L))
    torch.testing.assert_close(context, features[:, :1].expand(B, R, D))


def test_the_order_of_the_regions_does_not_matter() -> None:
    additive, features, query = scorer(), torch.randn(B, L, D), torch.randn(B, R, N)
    order = torch.tensor([3, 0, 4, 2, 1])

    context, alphas = attend(additive(query, additive.keys(features)), features)
    mixed = features[:, order]
    same, turned = attend(additive(query, additive.keys(mixed)), mixed)

    torch.testing.assert_close(same, context)
    torch.testing.assert_close(turned, alphas[..., order])


def test_scores_stay_float32_when_the_features_are_bf16() -> None:
    additive = scorer()
    features, query = torch.randn(B, L, D), torch.randn(B, R, N)
    exact = additive(query, additive.keys(features))

    with torch.autocast("cpu", torch.bfloat16):
        scores = additive(query, additive.keys(features))
        context, alphas = attend(scores, features.bfloat16())

    assert scores.dtype == alphas.dtype == torch.float32
    assert context.dtype == torch.bfloat16
    torch.testing.assert_close(scores, exact, rtol=0.1, atol=0.2)
