"""Dropout: the share of zeros, the scale, reproducible numbers, and the gradient."""

from __future__ import annotations

import pytest
import torch

from captioner.model.kernels.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.4, 0.5, 0.9])
def test_the_share_of_zeros_and_the_mean_are_those_of_dropout(p: float) -> None:
    torch.manual_seed(0)
    values = torch.ones(1000, 1001)

    dropped = Dropout(p)(values)

    assert dropped.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    # Five standard deviations of the share of a million values.
    assert (dropped == 0).double().mean() == pytest.approx(p, abs=5 * (p * (1 - p) / 1e6) ** 0.5)


def test_every_position_of_a_drawn_number_is_dropped_equally_often() -> None:
    """Four values share a random number of 64 bits."""
    torch.manual_seed(0)

    dropped = Dropout(0.4)(torch.ones(400_000)).view(-1, 4) == 0

    torch.testing.assert_close(
        dropped.double().mean(dim=0), torch.full((4,), 0.4).double(), atol=0.008, rtol=0
    )
    together = torch.corrcoef(dropped.double().t()) - torch.eye(4, dtype=torch.float64)
    assert together.abs().max() < 0.02


def test_numbers_follow_the_seed() -> None:
    values, layer = torch.ones(7, 9), Dropout(0.5)

    torch.manual_seed(3)
    first = layer(values)
    second = layer(values)
    torch.manual_seed(3)

    assert torch.equal(layer(values), first)
    assert not torch.equal(first, second)


def test_the_gradient_passes_where_values_were_kept() -> None:
    values = torch.randn(5, 11, requires_grad=True)

    dropped = Dropout(0.3)(values)
    dropped.sum().backward()

    torch.testing.assert_close(values.grad, dropped.detach() / values.detach())


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_or_everything_is_dropped(p: float) -> None:
    dropped = Dropout(p)(torch.ones(1000))

    assert dropped.tolist() == [1 - p] * 1000


def test_nothing_is_dropped_in_evaluation_mode() -> None:
    values = torch.randn(3, 4)

    assert torch.equal(Dropout(0.5).eval()(values), values)


def test_half_precision_stays_half_precision() -> None:
    assert Dropout(0.5)(torch.ones(3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
