"""Compare training losses with known values, and hard attention with an enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from toy_decoder import random_decoder

from captioner.model.decoder import Decoder
from captioner.model.hard_attention import HardLosses, map_entropy, score_function
from captioner.model.losses import Losses, attention_penalty, caption_losses
from captioner.options import TrainingConfig
from captioner.text.vocabulary import END, NEVER_GENERATED, PAD, START
from captioner.training.objectives import policy_gradient_loss

L, D, V = 3, 4, 8


def build(selection: str = "hard", **settings: Any) -> Decoder:
    return random_decoder(D, V, L, selection=selection, **settings).double()


def features(photos: int) -> Tensor:
    return torch.randn(photos, L, D).double()


# --- Penalty -------------------------------------------------------------------------------------


def test_attention_penalty_known_answer() -> None:
    # One photo with two captions and 4 regions. The first has 2 words, both on region 0: total
    # alphas of 2, 0, 0, 0 against an even 2/4 give 1.5**2 + 3 * 0.5**2 = 3. The second has 1 word
    # with uniform alphas, and ignored padding: 0.
    first = [[1.0, 0, 0, 0], [1.0, 0, 0, 0]]
    second = [[0.25] * 4, [0, 1.0, 0, 0]]
    alphas = torch.tensor([[first, second]])
    mask = torch.tensor([[[True, True], [True, False]]])

    assert float(attention_penalty(alphas, mask)) == pytest.approx(3.0)
    assert float(attention_penalty(alphas[:, 1:], mask[:, 1:])) == pytest.approx(0.0)


def test_penalty_has_the_same_gradient_as_the_papers_target_of_one() -> None:
    scores = torch.randn(2, 3, 7, L, requires_grad=True)
    mask = torch.ones(2, 3, 7, dtype=torch.bool)
    mask[1, 2, 3:] = False

    attention_penalty(scores.softmax(-1), mask).backward()
    estimate, scores.grad = scores.grad, None
    looked = (scores.softmax(-1) * mask.unsqueeze(-1)).sum(2)
    (1 - looked).square().sum().backward()

    torch.testing.assert_close(estimate, scores.grad)
    assert estimate.abs().max() > 0.01


# --- Entropy -------------------------------------------------------------------------------------


def test_entropy_of_one_hot_alphas_has_a_finite_gradient() -> None:
    """In float32, the alphas of a confident model can be exactly 0 and 1."""
    scores = torch.tensor([[0.0, 300.0, -300.0], [0.0, 0.0, -torch.inf]], requires_grad=True)

    entropy = map_entropy(scores.softmax(-1))
    entropy.sum().backward()

    torch.testing.assert_close(entropy, torch.tensor([0.0, math.log(2)]))
    assert scores.grad.isfinite().all()


# --- Score function ------------------------------------------------------------------------------


def test_score_function_known_answer() -> None:
    # One photo with captions of 2 words and of 1; the padding has values that must be ignored.
    halves, quarters = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    alphas = torch.tensor([[[halves, quarters], [quarters, [0.0, 0.0, 1.0]]]])
    chosen = torch.tensor([[[0, 2], [0, 1]]])  # alphas 1/2 and 1/4; 1/4
    log_probs = torch.tensor([[[-1.0, -3.0], [-5.0, -99.0]]])
    mask = torch.tensor([[[True, True], [True, False]]])
    ln2 = math.log(2)

    def surrogate(baseline: float) -> float:
        return float(score_function(alphas, chosen, log_probs, mask, torch.tensor(baseline)))

    # First caption: the first choice gets the reward -1 - 3 = -4, the second -3.
    assert surrogate(0.0) == pytest.approx(-(-4 * -ln2 + -3 * -2 * ln2 + -5 * -2 * ln2))
    # The baseline is subtracted for each remaining word: -4 + 2 * 2, -3 + 2, -5 + 2.
    assert surrogate(-2.0) == pytest.approx(-(0 * -ln2 + -1 * -2 * ln2 + -3 * -2 * ln2))


# --- Hard attention's gradient against enumeration -----------------------------------------------

# Captions of one photo: three choices of one of three regions each, in two shapes.
SHAPES = {"one caption": [[START, 5, 7, END]], "two captions": [[START, 6, END], [START, END, PAD]]}


class Enumeration:
    """A hard-attention decoder with one photo, and every possible choice of regions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, order: str, shape: str) -> None:
        self.decoder, self.photo = build(order=order), features(1)
        self.tokens = torch.tensor([SHAPES[shape]])
        self.real = self.tokens[..., 1:] != PAD
        self.steps: Iterator[tuple[int, ...]] = iter(())
        monkeypatch.setattr("captioner.model.hard_attention.sample_index", self.sample)

    def script(self, sequence: tuple[int, ...]) -> None:
        rest, lengths = iter(sequence), self.real.sum(-1)[0].tolist()
        regions = [[next(rest) for _ in range(length)] for length in lengths]
        self.steps = itertools.zip_longest(*regions)

    def sample(self, alphas: Tensor) -> Tensor:
        """Return the scripted regions step by step, in place of ``sample_index``."""
        regions = [region or 0 for region in next(self.steps)]  # None after the end of a caption
        return torch.tensor(regions).view(alphas.shape[:2])

    def choices(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the probability and cross-entropy of every choice, from alphas and logits.

        Until the next one, the decoder's next pass repeats the same choice.
        """
        decoder, words, total = self.decoder, self.tokens[..., 1:][self.real], 0.0
        for sequence in itertools.product(range(L), repeat=int(self.real.sum())):
            self.script(sequence)
            inputs = self.tokens[..., :-1].masked_fill(~self.real, PAD)
            unrolled = decoder(decoder.memory(self.photo), inputs)
            logits = decoder.readout(unrolled.embedded, *unrolled.outputs)[self.real]
            regions = unrolled.chosen[self.real]
            assert regions.tolist() == [*sequence]
            probability = unrolled.alphas[self.real].gather(-1, regions.unsqueeze(-1)).prod()
            self.script(sequence)
            yield probability, cross_entropy(logits, words, reduction="sum")
            total += probability.item()
        assert total == pytest.approx(1)  # all choices were enumerated

    def loss(self) -> Tensor:
        """Compute the objective of hard attention, sum_s p(s) CE(s)."""
        return sum(probability * loss for probability, loss in self.choices())

    def objectives(self, baseline: float, reward: float = 1.0) -> Iterator[tuple[float, Tensor]]:
        """Yield the probability (a constant) and the training objective of every choice."""
        config = TrainingConfig(attention_penalty=0.0, hard_reward=reward, hard_entropy=0.0)
        for probability, _ in self.choices():
            self.decoder.attention.baseline.fill_(baseline)  # the previous choice has updated it
            losses = caption_losses(self.decoder, self.decoder.memory(self.photo), self.tokens)
            yield probability.item(), losses.total(config)

    def gradients(self, value: Tensor) -> dict[str, Tensor]:
        names, parameters = zip(*self.decoder.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ["bahdanau", "luong"])
def test_hard_attention_gradient_is_unbiased(
    monkeypatch: pytest.MonkeyPatch, order: str, shape: str
) -> None:
    enumeration = Enumeration(monkeypatch, order, shape)

    expected = enumeration.gradients(enumeration.loss())
    cross_entropy_only = enumeration.gradients(
        sum(p * value for p, value in enumeration.objectives(0.0, reward=0.0))
    )
    for baseline in (0.0, -1.3):
        estimate = enumeration.gradients(
            sum(p * value for p, value in enumeration.objectives(baseline))
        )
        for name, gradient in expected.items():
            torch.testing.assert_close(estimate[name], gradient, rtol=0, atol=1e-9, msg=name)

    # Cross-entropy alone has no gradient for the alphas, and a wrong one for the hidden states.
    energy, gates = "attention.scorer.energy.weight", "hidden_gates.weight"
    assert not cross_entropy_only[energy].any()
    assert expected[energy].abs().max() > 1e-3
    assert (cross_entropy_only[gates] - expected[gates]).abs().max() > 1e-3


# --- caption_losses ------------------------------------------------------------------------------

# Not in the order of their lengths, by which the decoder sorts photos and captions.
CAPTIONS = torch.tensor(
    [
        [[START, 7, END, PAD, PAD, PAD], [START, 5, 4, 6, END, PAD]],
        [[PAD] * 6, [START, 4, 6, 6, 7, END]],
    ]
)
INPUTS, TARGETS = CAPTIONS[..., :-1], CAPTIONS[..., 1:]
REAL = TARGETS != PAD
WORDS = int(REAL.sum())


def by_hand(decoder: Decoder, photos: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits (T, V) and the words (T,) of each caption."""
    for photo, captions in zip(photos, CAPTIONS, strict=True):
        for tokens in (caption[caption != PAD] for caption in captions if END in caption):
            unrolled = decoder(decoder.memory(photo[None]), tokens[None, None, :-1])
            yield decoder.readout(unrolled.embedded, *unrolled.outputs)[0, 0], tokens[1:]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_ignores_padding_and_mixes_in_the_uniform_distribution(smoothing: float) -> None:
    decoder, photos = build("soft"), features(2)

    losses = caption_losses(decoder, decoder.memory(photos), CAPTIONS, smoothing)

    expected = -sum(
        (1 - smoothing) * log_probs[word] + smoothing * log_probs.mean()
        for logits, words in by_hand(decoder, photos)
        for log_probs, word in zip(logits.log_softmax(-1), words, strict=True)
    )
    torch.testing.assert_close(losses.cross_entropy, expected)


def test_losses_of_an_all_padding_batch_are_zero() -> None:
    decoder = build("soft")
    losses = caption_losses(decoder, decoder.memory(features(2)), torch.full((2, 1, 4), PAD))

    assert losses.cross_entropy == losses.attention_penalty == 0
    assert losses.hard is losses.reading is None
    (losses.cross_entropy + losses.attention_penalty).backward()
    for parameter in decoder.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


def test_baseline_is_a_running_mean_of_log_probabilities() -> None:
    decoder, photos, expected = build(), features(2), 0.0
    for _ in range(3):
        losses = caption_losses(decoder, decoder.memory(photos), CAPTIONS)
        expected = 0.9 * expected - 0.1 * losses.cross_entropy.item() / WORDS
        assert decoder.attention.baseline.item() == pytest.approx(expected, rel=1e-12)


def test_objective_is_the_weighted_sum_of_its_parts() -> None:
    ce, penalty, score, entropy, read = (torch.tensor(float(n)) for n in (2, 3, 5, 7, 11))
    config = TrainingConfig(
        attention_penalty=10.0, hard_reward=100.0, hard_entropy=1000.0, reading=10_000.0
    )

    assert Losses(ce, penalty).total(config).item() == 2 + 10 * 3
    losses = Losses(ce, penalty, HardLosses(score, entropy), read)
    assert losses.total(config).item() == 2 + 10 * 3 + 100 * 5 - 1000 * 7 + 10_000 * 11


# --- Policy gradient -----------------------------------------------------------------------------


def test_policy_gradient_is_the_weighted_negative_log_probability() -> None:
    decoder, photos = build("soft"), features(2)
    advantages = torch.tensor([[0.5, -2.0], [9.0, 3.0]])  # 9: of padding
    parameters = list(decoder.parameters())

    memory = decoder.memory(photos)
    estimate = policy_gradient_loss(decoder, memory, CAPTIONS, lambda: advantages).cross_entropy

    expected = torch.zeros(()).double()
    for advantage, (logits, words) in zip((0.5, -2.0, 3.0), by_hand(decoder, photos), strict=True):
        logits[:, list(NEVER_GENERATED)] = -torch.inf
        expected += advantage * cross_entropy(logits, words, reduction="sum")
    torch.testing.assert_close(estimate, expected)
    gradients = (torch.autograd.grad(value, parameters) for value in (estimate, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
        assert one.isfinite().all()
