"""Blockwise additive scores: same values and gradients as the plain form, with less memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from captioner.errors import ConfigError
from captioner.model.decoder import build_decoder
from captioner.model.kernels import additive
from captioner.model.kernels.additive import LARGEST, AdditiveScores, exponentials
from captioner.model.losses import caption_losses
from captioner.options import DecoderConfig

# Photos, queries, regions, size; the later ones have a single photo, query or region.
SHAPES = [(3, 4, 5, 6), (3, 1, 5, 6), (3, 4, 1, 6), (1, 4, 5, 6), (1, 1, 1, 1)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def parts(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries (B, R, A), keys (B, L, A) and energy (A,)."""
    photos, queries, regions, size = shape
    made = [(photos, queries, size), (photos, regions, size), (size,)]
    return [(2 * torch.randn(one, dtype=torch.float64)).to(dtype).requires_grad_() for one in made]


def blockwise(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
    scores: Tensor = AdditiveScores()(exponentials(query), exponentials(keys), energy)
    return scores


def reference(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
    """v^T tanh(k + q)."""
    return torch.tanh(query.unsqueeze(2) + keys.unsqueeze(1)) @ energy


def scores_and_gradients(score: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Scores, and gradients of a sum that weighs each score differently."""
    scores = score(*inputs)
    weights = torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype).view_as(scores)
    return [scores.detach(), *torch.autograd.grad((weights * scores).sum(), inputs)]


def assert_all_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@each_shape
def test_scores_and_gradients_match_the_equation(shape) -> None:
    inputs = parts(shape)

    assert blockwise(*inputs).shape == shape[:3]
    assert_all_close(
        scores_and_gradients(blockwise, inputs), scores_and_gradients(reference, inputs), 1e-10
    )


def test_float32_is_close_to_float64() -> None:
    inputs = parts((3, 4, 49, 64), torch.float32)

    scores = blockwise(*inputs)

    assert scores.dtype == torch.float32
    exact = reference(*(part.double() for part in inputs))
    torch.testing.assert_close(scores.double(), exact, rtol=1e-4, atol=1e-4)


@each_shape
def test_gradients_are_exact_in_float64(shape) -> None:
    assert torch.autograd.gradcheck(blockwise, parts(shape))


@pytest.mark.parametrize("pairs", [1, 2, 3, 4, 5, 8, 11])
@each_shape
def test_block_size_does_not_change_results(
    monkeypatch: pytest.MonkeyPatch, shape, pairs: int
) -> None:
    """Blocks of part of a photo's queries, of one photo and of several photos."""
    inputs = parts(shape)
    whole, blocks, cut = scores_and_gradients(blockwise, inputs), [], additive._blocks

    def counting(query: Tensor, keys: Tensor):
        for photos, queries, share in cut(query, keys):
            blocks.append(share.shape[0] * share.shape[1])
            yield photos, queries, share

    monkeypatch.setattr(additive, "_blocks", counting)
    monkeypatch.setattr(additive, "CPU_BLOCK", pairs * shape[2] * shape[3] * 8)

    assert_all_close(scores_and_gradients(blockwise, inputs), whole, 1e-12)
    assert max(blocks) <= pairs
    assert sum(blocks) == 2 * shape[0] * shape[1]  # once forward, once backward


def test_a_block_has_at_least_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = parts((2, 3, 4, 5))
    whole = scores_and_gradients(blockwise, inputs)

    monkeypatch.setattr(additive, "CPU_BLOCK", 1)

    assert_all_close(scores_and_gradients(blockwise, inputs), whole, 1e-12)


# --- Saturation ----------------------------------------------------------------------------------

EDGES = (-1000.0, -100.0, -LARGEST, -20.0, 0.0, 20.0, LARGEST, 100.0, 1000.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_scores_reach_their_limits_with_finite_gradients(dtype: torch.dtype) -> None:
    """tanh is exact even there, except for large keys and queries of opposite signs."""
    for key, query in itertools.product(EDGES, EDGES):
        inputs = [torch.tensor([[[value]]], dtype=dtype) for value in (query, key)]
        inputs = [part.requires_grad_() for part in (*inputs, torch.ones(1, dtype=dtype))]

        scores, *gradients = scores_and_gradients(blockwise, inputs)

        assert all(part.isfinite().all() for part in (scores, *gradients)), (key, query)
        clamped = [max(-LARGEST, min(LARGEST, value)) for value in (key, query)]
        expected = torch.tensor(sum(clamped), dtype=torch.float64).tanh().item()
        assert scores.item() == pytest.approx(expected, abs=1e-6)
        if min(abs(key), abs(query)) < LARGEST or key * query > 0:
            assert scores.item() == pytest.approx(torch.tensor(key + query).tanh().item(), abs=1e-6)


def test_one_saturated_dimension_leaves_other_gradients_intact() -> None:
    inputs = parts((2, 3, 4, 5), torch.float32)
    with torch.no_grad():
        inputs[0][..., 0], inputs[1][..., 0] = 1000.0, -1000.0  # clamped: they cancel
        inputs[0][..., 1], inputs[1][..., 1] = -1000.0, 3.0

    found = scores_and_gradients(blockwise, inputs)

    with torch.no_grad():
        inputs[0][..., 0], inputs[1][..., 0] = LARGEST, -LARGEST
    expected = scores_and_gradients(
        reference, [part.detach().double().requires_grad_() for part in inputs]
    )
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=1e-4)
    for one, other in zip(found[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(one[..., 2:].double(), other[..., 2:], rtol=1e-4, atol=1e-4)
        assert one[..., :2].abs().max() < 1e-20  # key or query is clamped
    torch.testing.assert_close(found[3].double(), expected[3], rtol=1e-4, atol=1e-4)


# --- Memory and gradients ------------------------------------------------------------------------


def test_no_pairwise_tensor_is_saved_for_backward() -> None:
    photos, queries, regions, size = shape = (3, 4, 5, 6)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    inputs = parts(shape)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        blockwise(*inputs)
        largest = max(kept)
        kept.clear()
        reference(*inputs)

    assert largest <= photos * max(queries, regions) * size
    assert max(kept) == photos * queries * regions * size  # the hooks do see saved tensors


@pytest.mark.parametrize(
    "requested", [n for k in (1, 2) for n in itertools.combinations(range(3), k)]
)
def test_only_requested_gradients_are_computed(requested: tuple[int, ...]) -> None:
    inputs = parts((2, 3, 4, 5))
    expected = torch.autograd.grad(blockwise(*inputs).sum(), inputs)
    for number, part in enumerate(inputs):
        part.requires_grad_(number in requested)

    blockwise(*inputs).sum().backward()

    for number, part in enumerate(inputs):
        if number in requested:
            assert torch.equal(part.grad, expected[number])
        else:
            assert part.grad is None


def test_views_and_expanded_tensors() -> None:
    """The first state is expanded over captions, and keys may be a slice."""
    query, keys, energy = parts((3, 1, 5, 6))
    query = query.expand(-1, 4, -1)
    keys = keys.transpose(1, 2).contiguous().transpose(1, 2)[:, ::2]

    torch.testing.assert_close(blockwise(query, keys, energy), reference(query, keys, energy))
    scores = blockwise(query, keys, energy)
    expanded = torch.ones(1, 1, 1, dtype=torch.float64).expand_as(scores)
    found = torch.autograd.grad(scores, (query, keys, energy), expanded)
    expected = torch.autograd.grad(reference(query, keys, energy), (query, keys, energy), expanded)
    assert_all_close(list(found), list(expected), 1e-10)


# --- Compiled ---


# torch's tracer looks at the gradients of what it traces.
quiet = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@quiet
@pytest.mark.slow
def test_compiled_scores_equal_eager_ones() -> None:
    module = AdditiveScores()
    module.compiled = True

    def compiled(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
        scores: Tensor = module(exponentials(query), exponentials(keys), energy)
        return scores

    for shape in SHAPES:
        inputs = parts(shape, torch.float32)
        for found, expected in zip(
            scores_and_gradients(compiled, inputs),
            scores_and_gradients(reference, inputs),
            strict=True,
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@quiet
@pytest.mark.slow
def test_compiled_scores_give_the_decoder_the_same_gradients() -> None:
    decoder = build_decoder(DecoderConfig(embed_dim=4, hidden_dim=5, attention_dim=6), 3, 9, 7)
    features, tokens = torch.randn(2, 7, 3), torch.tensor([[[1, 5, 6, 2], [1, 7, 2, 0]]] * 2)

    def gradients() -> list[Tensor]:
        loss = caption_losses(decoder, decoder.memory(features), tokens).cross_entropy
        return list(torch.autograd.grad(loss, decoder.parameters()))

    decoder.eval()
    blocks = gradients()
    decoder.compile_scores()
    assert decoder.attention.scorer.additive_scores.compiled
    for found, expected in zip(gradients(), blocks, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@quiet
@pytest.mark.slow
def test_batches_of_all_sizes_share_their_graphs() -> None:
    torch._dynamo.reset()
    additive.compiled_kernels.cache_clear()
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
        for b in range(photos):  # later steps have fewer photos and captions
            tokens[b, :, words - b % words :] = 0
        caption_losses(decoder, decoder.memory(features), tokens).cross_entropy.backward()
        with torch.inference_mode():  # validation
            caption_losses(decoder, decoder.memory(features), tokens)
    assert graphs["unique_graphs"] == 2  # forward and backward


def test_failed_compilation_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*inputs: Tensor) -> Tensor:
        raise RuntimeError("no compiler\nand much more")

    kernels = additive.Kernels(fails, fails)
    monkeypatch.setattr(additive, "compiled_kernels", lambda: kernels)
    decoder = build_decoder(DecoderConfig(embed_dim=4, hidden_dim=5, attention_dim=6), 3, 9, 7)
    with pytest.raises(ConfigError, match=r"torch\.compile failed \(no compiler\)") as caught:
        decoder.compile_scores()
    assert "\n" not in str(caught.value)
