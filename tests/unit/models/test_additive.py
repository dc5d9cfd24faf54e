"""The additive score in blocks: the same numbers and gradients as written plainly, in less room."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from captioner.config import DecoderConfig
from captioner.errors import ConfigError
from captioner.models import additive
from captioner.models.additive import LARGEST, additive_scores, exponentials
from captioner.models.decoder import build_decoder
from captioner.models.losses import caption_losses

# Photos, queries, regions, sizes; the last ones have a photo, a query or a region alone.
SHAPES = [(3, 4, 5, 6), (3, 1, 5, 6), (3, 4, 1, 6), (1, 4, 5, 6), (1, 1, 1, 1)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def parts(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries (B, R, A), keys (B, L, A) and energy (A,)."""
    photos, queries, regions, size = shape
    made = [(photos, queries, size), (photos, regions, size), (size,)]
    return [(2 * torch.randn(one, dtype=torch.float64)).to(dtype).requires_grad_() for one in made]


def ours(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
    return additive_scores(exponentials(query), exponentials(keys), energy)


def plain(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
    """v^T tanh(k + q)."""
    return torch.tanh(query.unsqueeze(2) + keys.unsqueeze(1)) @ energy


def scores_and_gradients(score: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """Scores, and the gradients of something that weighs each of them by itself."""
    scores = score(*given)
    weights = torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype).view_as(scores)
    return [scores.detach(), *torch.autograd.grad((weights * scores).sum(), given)]


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@each_shape
def test_scores_and_gradients_are_those_of_the_equation(shape) -> None:
    given = parts(shape)

    assert ours(*given).shape == shape[:3]
    assert_near(scores_and_gradients(ours, given), scores_and_gradients(plain, given), 1e-10)


def test_float32_is_near_float64() -> None:
    given = parts((3, 4, 49, 64), torch.float32)

    scores = ours(*given)

    assert scores.dtype == torch.float32
    exact = plain(*(part.double() for part in given))
    torch.testing.assert_close(scores.double(), exact, rtol=1e-4, atol=1e-4)


@each_shape
def test_gradients_are_exact_in_float64(shape) -> None:
    assert torch.autograd.gradcheck(ours, parts(shape))


@pytest.mark.parametrize("pairs", [1, 2, 3, 4, 5, 8, 11])
@each_shape
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, shape, pairs: int) -> None:
    """So many photos times queries a block: parts of a photo's, one photo's, several photos'."""
    given = parts(shape)
    whole, blocks, cut = scores_and_gradients(ours, given), [], additive._blocks

    def counted(query: Tensor, keys: Tensor):
        for photos, queries, share in cut(query, keys):
            blocks.append(share.shape[0] * share.shape[1])
            yield photos, queries, share

    monkeypatch.setattr(additive, "_blocks", counted)
    monkeypatch.setattr(additive, "CPU_BLOCK", pairs * shape[2] * shape[3] * 8)

    assert_near(scores_and_gradients(ours, given), whole, 1e-12)
    assert max(blocks) <= pairs
    assert sum(blocks) == 2 * shape[0] * shape[1]  # forward, and again backward


def test_a_block_smaller_than_one_query_still_holds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = parts((2, 3, 4, 5))
    whole = scores_and_gradients(ours, given)

    monkeypatch.setattr(additive, "CPU_BLOCK", 1)

    assert_near(scores_and_gradients(ours, given), whole, 1e-12)


# --- Large numbers -------------------------------------------------------------------------------

EDGES = (-1000.0, -100.0, -LARGEST, -20.0, 0.0, 20.0, LARGEST, 100.0, 1000.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_scores_have_their_limits_and_finite_gradients(dtype: torch.dtype) -> None:
    """tanh is known even there, but for large keys and queries of opposite signs."""
    for key, query in itertools.product(EDGES, EDGES):
        given = [torch.tensor([[[value]]], dtype=dtype) for value in (query, key)]
        given = [part.requires_grad_() for part in (*given, torch.ones(1, dtype=dtype))]

        scores, *gradients = scores_and_gradients(ours, given)

        assert all(part.isfinite().all() for part in (scores, *gradients)), (key, query)
        clamped = [max(-LARGEST, min(LARGEST, value)) for value in (key, query)]
        expected = torch.tensor(sum(clamped), dtype=torch.float64).tanh().item()
        assert scores.item() == pytest.approx(expected, abs=1e-6)
        if min(abs(key), abs(query)) < LARGEST or key * query > 0:
            assert scores.item() == pytest.approx(torch.tensor(key + query).tanh().item(), abs=1e-6)


def test_a_saturated_size_leaves_the_others_their_gradient() -> None:
    given = parts((2, 3, 4, 5), torch.float32)
    with torch.no_grad():
        given[0][..., 0], given[1][..., 0] = 1000.0, -1000.0  # clamped: they cancel
        given[0][..., 1], given[1][..., 1] = -1000.0, 3.0

    found = scores_and_gradients(ours, given)

    with torch.no_grad():
        given[0][..., 0], given[1][..., 0] = LARGEST, -LARGEST
    expected = scores_and_gradients(
        plain, [part.detach().double().requires_grad_() for part in given]
    )
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=1e-4)
    for one, other in zip(found[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(one[..., 2:].double(), other[..., 2:], rtol=1e-4, atol=1e-4)
        assert one[..., :2].abs().max() < 1e-20  # beyond LARGEST, and across from it
    torch.testing.assert_close(found[3].double(), expected[3], rtol=1e-4, atol=1e-4)


# --- Room and gradients --------------------------------------------------------------------------


def test_nothing_of_the_size_of_all_pairs_is_kept_for_the_backward_pass() -> None:
    photos, queries, regions, size = shape = (3, 4, 5, 6)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    given = parts(shape)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours(*given)
        largest = max(kept)
        kept.clear()
        plain(*given)

    assert largest <= photos * max(queries, regions) * size
    assert max(kept) == photos * queries * regions * size  # the measure sees what is kept


@pytest.mark.parametrize("asked", [n for k in (1, 2) for n in itertools.combinations(range(3), k)])
def test_a_gradient_that_is_not_asked_for_is_not_given(asked: tuple[int, ...]) -> None:
    given = parts((2, 3, 4, 5))
    expected = torch.autograd.grad(ours(*given).sum(), given)
    for number, part in enumerate(given):
        part.requires_grad_(number in asked)

    ours(*given).sum().backward()

    for number, part in enumerate(given):
        if number in asked:
            assert torch.equal(part.grad, expected[number])
        else:
            assert part.grad is None


def test_views_and_expanded_tensors_are_read_right() -> None:
    """A first state is expanded over the captions, and keys may be a slice."""
    query, keys, energy = parts((3, 1, 5, 6))
    query = query.expand(-1, 4, -1)
    keys = keys.transpose(1, 2).contiguous().transpose(1, 2)[:, ::2]

    torch.testing.assert_close(ours(query, keys, energy), plain(query, keys, energy))
    scores = ours(query, keys, energy)
    expanded = torch.ones(1, 1, 1, dtype=torch.float64).expand_as(scores)
    found = torch.autograd.grad(scores, (query, keys, energy), expanded)
    expected = torch.autograd.grad(plain(query, keys, energy), (query, keys, energy), expanded)
    assert_near(list(found), list(expected), 1e-10)


# --- Compiled ---


# torch's tracer looks at the gradients of what it traces.
quiet = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@quiet
@pytest.mark.slow
def test_the_compiled_score_is_the_score() -> None:
    def compiled(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
        return additive.compiled_scores()(exponentials(query), exponentials(keys), energy)

    for shape in SHAPES:
        given = parts(shape, torch.float32)
        for found, expected in zip(
            scores_and_gradients(compiled, given), scores_and_gradients(plain, given), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@quiet
@pytest.mark.slow
def test_a_decoder_with_compiled_scores_learns_the_same() -> None:
    decoder = build_decoder(DecoderConfig(embed_dim=4, hidden_dim=5, attention_dim=6), 3, 9, 7)
    features, tokens = torch.randn(2, 7, 3), torch.tensor([[[1, 5, 6, 2], [1, 7, 2, 0]]] * 2)

    def gradients() -> list[Tensor]:
        loss = caption_losses(decoder, decoder.memory(features), tokens).cross_entropy
        return list(torch.autograd.grad(loss, decoder.parameters()))

    decoder.eval()
    blocks = gradients()
    decoder.compile_scores()
    assert decoder.attention.scorer.compiled
    for found, expected in zip(gradients(), blocks, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@quiet
@pytest.mark.slow
def test_all_batches_of_a_run_share_one_graph() -> None:
    torch._dynamo.reset()
    additive.compiled_scores.cache_clear()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    decoder = build_decoder(DecoderConfig(embed_dim=4, hidden_dim=5, attention_dim=6), 3, 9, 7)
    decoder.compile_scores()
    for photos, captions, words in [
        (4, 5, 9),
        (3, 5, 4),
        (5, 2, 7),
        (1, 5, 3),
        (6, 6, 6),
        (2, 1, 2),
    ]:
        features = torch.randn(photos, 7, 3)
        tokens = torch.randint(4, 9, (photos, captions, words + 1))
        for b in range(photos):  # each step runs on fewer photos and captions
            tokens[b, :, words - b % words :] = 0
        caption_losses(decoder, decoder.memory(features), tokens).cross_entropy.backward()
        with torch.inference_mode():  # a validation
            caption_losses(decoder, decoder.memory(features), tokens)
    assert graphs["unique_graphs"] == 1


def test_where_nothing_can_be_compiled_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Tensor) -> Tensor:
        raise RuntimeError("no compiler\nand much more")

    monkeypatch.setattr(additive, "compiled_scores", lambda: fails)
    decoder = build_decoder(DecoderConfig(embed_dim=4, hidden_dim=5, attention_dim=6), 3, 9, 7)
    with pytest.raises(ConfigError, match=r"torch\.compile failed \(no compiler\)") as caught:
        decoder.compile_scores()
    assert "\n" not in str(caught.value)
