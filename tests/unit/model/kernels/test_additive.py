"""Compare additive scores in blocks with the plain formula: same results, less memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from captioner.model.attention import AdditiveScorer, Sizes
from captioner.model.kernels import additive
from captioner.model.kernels.additive import LARGEST, BlockwiseScorer, SharedKeys

# Photos, queries, regions, size; the later ones have a single photo, query or region.
SHAPES = [(3, 4, 5, 6), (3, 1, 5, 6), (3, 4, 1, 6), (1, 4, 5, 6), (1, 1, 1, 1)]


def parts(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return queries (B, R, A), keys (B, L, A) and energy (A,)."""
    photos, queries, regions, size = shape
    made = [(photos, queries, size), (photos, regions, size), (size,)]
    return [(2 * torch.randn(one, dtype=torch.float64)).to(dtype).requires_grad_() for one in made]


def in_blocks(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
    shared = SharedKeys(keys, energy)
    return shared.scores(query, energy)


def plain(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
    return torch.tanh(query.unsqueeze(2) + keys.unsqueeze(1)) @ energy


@pytest.mark.parametrize("block", [1, 3 * 5 * 6 * 8, 4 << 20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_block_size_gives_the_plain_formula(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int], block: int
) -> None:
    monkeypatch.setattr(additive, "CPU_BLOCK", block)
    given = parts(shape)
    torch.testing.assert_close(in_blocks(*given), plain(*given), rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(in_blocks, given)


def test_float32_is_close_to_the_plain_formula() -> None:
    given = parts((3, 4, 49, 64), torch.float32)
    scores = [score(*given) for score in (in_blocks, plain)]
    weights = torch.linspace(-1, 2, scores[0].numel()).view_as(scores[0])  # each another
    found = [(each, *torch.autograd.grad((weights * each).sum(), given)) for each in scores]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_scores_reach_their_limits_with_finite_gradients(dtype: torch.dtype) -> None:
    """Clamping keeps tanh exact, except for large keys and queries of opposite signs."""
    edges = (-1000.0, -100.0, -LARGEST, -20.0, 0.0, 20.0, LARGEST, 100.0, 1000.0)
    for key, query in itertools.product(edges, edges):
        given = [torch.tensor([[[value]]], dtype=dtype) for value in (query, key)]
        given = [part.requires_grad_() for part in (*given, torch.ones(1, dtype=dtype))]
        scores = in_blocks(*given)
        gradients = torch.autograd.grad(scores.sum(), given)
        assert all(part.isfinite().all() for part in (scores, *gradients)), (key, query)
        if min(abs(key), abs(query)) < LARGEST or key * query > 0:
            expected = torch.tensor(key + query).tanh().item()
            assert scores.item() == pytest.approx(expected, abs=1e-6)


def test_no_pairwise_tensor_is_kept_for_the_backward_pass() -> None:
    photos, queries, regions, size = shape = (3, 4, 5, 6)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        in_blocks(*parts(shape))
        largest = max(kept)
        plain(*parts(shape))

    assert largest <= photos * max(queries, regions) * size
    assert max(kept) == photos * queries * regions * size  # the hooks do see saved tensors


@torch.no_grad()
def test_a_search_gives_the_plain_formula() -> None:
    query, keys, _ = parts((3, 4, 5, 6))
    sizes = Sizes(features=6, query=6, attention=6, regions=5)
    scorer, fast = AdditiveScorer(sizes).double(), BlockwiseScorer(sizes).double()
    fast.load_state_dict(scorer.state_dict())
    for given in (query, query + 1):  # the second step reuses the exponentials of the keys
        torch.testing.assert_close(fast.compare(given, keys), scorer.compare(given, keys))
