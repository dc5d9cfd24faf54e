"""Test the reading of photos: its equations, gradients and loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Binomial

from captioner.model.reading import PhotoReading, reading_loss

B, L, D, H, S = 2, 4, 3, 5, 6


@pytest.fixture
def reading() -> PhotoReading:
    made = PhotoReading(D, S, hidden=H).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def test_it_computes_its_equations(reading) -> None:
    features = torch.randn(B, L, D, dtype=torch.float64)

    found = reading(features)

    w1, b1 = reading.reduce.weight.detach().numpy(), reading.reduce.bias.detach().numpy()
    w, u = reading.words.weight.detach().numpy(), reading.mean.weight.detach().numpy()
    c = reading.mean.bias.detach().numpy()
    for photo in range(B):
        a = features[photo].numpy()
        whole = sum(a) / L
        for k in range(S):
            said = [w[k] @ np.maximum(w1 @ a[region] + b1, 0) for region in range(L)]
            linear = u[k] @ whole + c[k]
            odds = np.log(sum(map(np.exp, said)) / L) + linear
            assert found.words[photo, k].item() == pytest.approx(odds)
            for region in range(L):
                expected = said[region] + linear
                assert found.regions[photo, region, k].item() == pytest.approx(expected)


def test_the_odds_of_a_photo_are_the_mean_of_the_odds_of_its_regions(reading) -> None:
    found = reading(torch.randn(B, L, D, dtype=torch.float64))

    torch.testing.assert_close(found.words.exp(), found.regions.exp().mean(dim=1))


def test_it_starts_at_the_shares_of_the_words() -> None:
    made = PhotoReading(D, S, hidden=H).eval()
    shares = torch.linspace(0.1, 0.9, S)

    made.start_at(shares)

    found = made(torch.zeros(B, L, D)).words.sigmoid()
    torch.testing.assert_close(found, shares.expand(B, S), atol=0.01, rtol=0)


def test_the_loss_is_the_likelihood_of_the_counts() -> None:
    odds, captions = torch.randn(3, 2), torch.tensor([5.0, 1.0, 0.0])
    counts = torch.tensor([[0.0, 3.0], [1.0, 0.0], [0.0, 0.0]])

    loss = reading_loss(odds, counts, captions)

    exact = Binomial(captions.unsqueeze(1), logits=odds).log_prob(counts)
    torch.testing.assert_close(loss, math.log(10) - exact.sum())  # 10 ways to choose 3 of 5


def test_every_parameter_has_a_gradient(reading) -> None:
    features = torch.randn(B, L, D, dtype=torch.float64, requires_grad=True)
    counts = torch.ones(B, S, dtype=torch.float64)

    reading_loss(reading(features).words, counts, torch.tensor([2.0, 3.0]).double()).backward()

    for parameter in (features, *reading.parameters()):
        assert parameter.grad.abs().amax(dim=-1).any()


def test_half_precision_gives_float32() -> None:
    made = PhotoReading(D, S, hidden=H).eval().bfloat16()

    found = made(torch.randn(B, L, D, dtype=torch.bfloat16))

    assert {part.dtype for part in found} == {torch.float32}
