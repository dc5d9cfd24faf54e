"""Compare accelerated models with plain models, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from toy_decoder import random_decoder

from captioner.hardware import autocast
from captioner.inference.torch_engine import DecoderStepper
from captioner.model.attention import AdditiveScorer, Memory
from captioner.model.build import SCORERS
from captioner.model.decoder import BahdanauDecoder, Decoder, State
from captioner.model.kernels import WordGates, accelerate
from captioner.model.kernels.packing import ROWS
from captioner.model.losses import caption_losses
from captioner.options import Precision, SearchOptions, TrainingConfig
from captioner.search.search import search
from captioner.text.vocabulary import END, PAD, START

L, D, V = 5, 8, 9
KINDS: dict[str, dict[str, Any]] = {
    "additive": {},
    "projected": {"projection_dim": 7},
    "concat": {"attention": "concat"},
    "general": {"attention": "general"},
    "location": {"attention": "location"},
    "multi-head": {"attention": "multi_head", "heads": 2},
    "mean": {"query": "mean"},
    "self": {"query": "self"},
    "norms": {"layer_norm": True},
    "luong": {"order": "luong"},
    "luong, not fed": {"order": "luong", "input_feeding": False},
    "plain": {"attention": "fixed_at_start"},
}
LENGTHS = [[1, 4, 0], [0, 0, 0], [5, 2, 3], [0, 0, 2]]
"""Number of words of each caption: unsorted, with a photo without captions and a single word."""


def captions(lengths: list[list[int]] = LENGTHS) -> Tensor:
    """Return tokens, (B, R, T + 1)."""
    longest = max(max(of_photo) for of_photo in lengths)
    tokens = torch.full((len(lengths), len(lengths[0]), longest + 2), PAD)
    for photo, of_photo in enumerate(lengths):
        for caption, words in enumerate(of_photo):
            if words:
                content = torch.randint(4, V, (words,)).tolist()
                tokens[photo, caption, : words + 2] = torch.tensor([START, *content, END])
    return tokens


def build(kind: str) -> Decoder:
    sizes = {"embed_dim": 4, "attention_dim": 4}
    return random_decoder(D, V, L, std=0.6, **{**sizes, **KINDS[kind]})


def accelerated(decoder: Decoder, *, fixed: bool = False) -> Decoder:
    """Return an accelerated copy."""
    decoder = copy.deepcopy(decoder)
    accelerate(decoder, fixed=fixed)
    return decoder


def losses_and_gradients(
    decoder: Decoder, features: Tensor, tokens: Tensor, precision: Precision = "fp32"
) -> list[Tensor]:
    given = features.clone().requires_grad_()
    with autocast(precision, torch.device("cpu")):
        losses = caption_losses(decoder, decoder.memory(given), tokens)
    loss = losses.total(TrainingConfig(attention_penalty=0.5))
    gradients = torch.autograd.grad(loss, [given, *decoder.parameters()])
    return [losses.cross_entropy, losses.attention_penalty, *gradients]


def assert_equal(decoder: Decoder, tokens: Tensor) -> None:
    """An accelerated copy has the same losses and gradients as the decoder."""
    decoder, features = decoder.double(), torch.randn(len(tokens), L, D).double()
    expected = losses_and_gradients(decoder, features, tokens)
    fast = accelerated(decoder)
    for _ in range(2):  # nothing of a pass is left for the next
        found = losses_and_gradients(fast, features, tokens)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


# --- Equal results -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_the_plain_model(kind: str) -> None:
    assert_equal(build(kind), captions())


def test_readouts_of_rounded_numbers_of_rows_are_equal() -> None:
    tokens = captions([[40, 30, 20], [15, 35, 1]])
    assert ROWS < (tokens[..., 1:] != PAD).sum() < 2 * ROWS
    assert_equal(build("additive"), tokens)


@pytest.mark.parametrize("kind", ["additive", "projected", "luong"])
def test_in_half_precision_the_results_are_close(kind: str) -> None:
    decoder, features, tokens = build(kind), torch.randn(4, L, D), captions()

    expected = losses_and_gradients(decoder, features, tokens, "bf16")
    found = losses_and_gradients(accelerated(decoder), features, tokens, "bf16")

    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).double().norm() <= 0.05 * other.double().norm() + 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fixed", [False, True], ids=["", "fixed"])
@torch.inference_mode()
def test_searches_are_equal(kind: str, fixed: bool) -> None:
    decoder, features = build(kind).eval(), torch.randn(3, L, D)
    options = SearchOptions(beam_size=3, max_length=5)

    found, expected = (
        search(DecoderStepper(one, one.memory(features)), options)
        for one in (accelerated(decoder, fixed=fixed), decoder)
    )

    for (one, *_), (other, *_) in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.log_prob == pytest.approx(other.log_prob, rel=1e-4)


def test_gradients_of_the_features_are_equal_in_eval_mode() -> None:
    """Explanations run the decoder in this way."""
    decoder, features = build("additive").double().eval(), torch.randn(4, L, D).double()
    decoder.requires_grad_(False)
    tokens, found = captions([[3], [1], [4], [2]]), []
    for model in (decoder, accelerated(decoder, fixed=True)):
        given = features.clone().requires_grad_()
        losses = caption_losses(model, model.memory(given), tokens)
        found += torch.autograd.grad(losses.cross_entropy, given)

    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


# --- Custom parts --------------------------------------------------------------------------------


class TwiceADecoder(BahdanauDecoder):
    """A decoder that runs its LSTM twice per word."""

    def recur(self, inputs: Tensor, state: State) -> State:
        return super().recur(inputs, super().recur(inputs, state))


class SometimesADecoder(BahdanauDecoder):
    """A decoder that skips its LSTM at the third step."""

    def start(self, memory: Memory, captions: int = 1) -> State:
        self.steps = 0
        return super().start(memory, captions)

    def recur(self, inputs: Tensor, state: State) -> State:
        self.steps += 1
        return state if self.steps == 3 else super().recur(inputs, state)


class PairScorer(AdditiveScorer):
    """A scorer that applies its query layer to every pair."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        pairs = self.query(query.unsqueeze(2).expand(-1, -1, keys.shape[1], -1))
        return self.energy(torch.tanh(pairs + keys.unsqueeze(1))).squeeze(-1)


class OwnComparison(AdditiveScorer):
    """A scorer with its own ``compare``."""

    def compare(self, query: Tensor, keys: Tensor) -> Tensor:
        return (query.unsqueeze(2) * keys.unsqueeze(1)).sin() @ self.energy.weight.flatten()


@pytest.mark.parametrize("custom", [TwiceADecoder, SometimesADecoder])
def test_decoders_that_use_a_layer_more_or_less_often_stay_right(
    custom: type[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captioner.model.build.DECODERS", {"bahdanau": custom})
    assert_equal(build("additive"), captions())


@pytest.mark.parametrize("scorer", [PairScorer, OwnComparison])
def test_scorers_of_other_shapes_or_formulas_stay_right(
    scorer: type[AdditiveScorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SCORERS, "_builtin", {"additive": scorer})
    assert_equal(build("additive"), captions())


def test_a_decoder_with_its_own_loop_keeps_it() -> None:
    class Own(BahdanauDecoder):
        def forward(self, memory: Any, tokens: Tensor) -> Any:
            return super().forward(memory, tokens)._replace(betas=torch.full((), 7.0))

    decoder = build("additive")
    decoder.__class__ = Own
    accelerate(decoder)
    assert decoder(decoder.memory(torch.randn(4, L, D)), captions()[..., :-1]).betas == 7.0


# --- What stays ----------------------------------------------------------------------------------


def test_weights_names_hooks_and_classes_stay() -> None:
    decoder, seen = build("additive"), []
    before = dict(decoder.named_parameters())
    decoder.hidden_gates.register_forward_hook(lambda *given: seen.append(1))

    accelerate(decoder)
    classes = [type(module) for module in decoder.modules()]
    accelerate(decoder)

    assert [type(module) for module in decoder.modules()] == classes
    after = dict(decoder.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert isinstance(decoder, BahdanauDecoder)
    assert isinstance(decoder.attention.scorer, AdditiveScorer)
    caption_losses(decoder, decoder.memory(torch.randn(4, L, D)), captions())
    assert len(seen) == 6  # steps
    plain = build("additive")
    plain.load_state_dict(decoder.state_dict())


def test_a_plain_model_has_no_kernels() -> None:
    """The plain loop in the source runs until ``accelerate`` is called."""
    for kind in KINDS:
        decoder = build(kind)
        assert type(decoder).forward is Decoder.forward
        assert not any("kernels" in type(module).__module__ for module in decoder.modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: AveragedModel(model).module])
def test_copies_are_accelerated_and_have_their_own_weights(copied: Any) -> None:
    decoder, features, tokens = build("additive"), torch.randn(4, L, D), captions()
    expected = losses_and_gradients(decoder, features, tokens)
    accelerate(decoder, fixed=True)

    other = copied(decoder)
    assert type(other) is type(decoder)
    assert other.table is None  # its weights may change
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()

    for one, wanted in zip(losses_and_gradients(other, features, tokens), expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


# --- The table of gate inputs --------------------------------------------------------------------


@pytest.fixture
def table() -> WordGates:
    """Return a table of two and a half blocks, for a layer with all values different."""
    torch.manual_seed(0)
    words = 2 * WordGates.BLOCK + WordGates.BLOCK // 2
    return WordGates(nn.Embedding(words, 6), nn.Linear(6, 8))


def test_looked_up_gates_are_the_layers_own(table: WordGates) -> None:
    last = len(table.table) - 1
    tokens = torch.tensor([[[3, WordGates.BLOCK], [last, 3]]])

    with torch.inference_mode():
        found = table.look_up(tokens)

    torch.testing.assert_close(found, table.layer(table.embedding(tokens)).detach())
    assert not table.missing


def test_gates_cached_in_inference_mode_are_completed_outside_of_it() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        table = WordGates(nn.Embedding(130, 6), nn.Linear(6, 8))
        table.look_up(torch.tensor([0]))
    assert torch.isfinite(table.look_up(torch.tensor([129]))).all()
