"""What training minimises, from a memory and true captions: photos and texts alike.

Notation: B photos, R captions a photo, T steps, L regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from captioner.config import TrainingConfig
from captioner.models.attention import HardAttention, Memory, widen
from captioner.models.decoder import Decoder
from captioner.models.layout import Layout, upload
from captioner.vocabulary import PAD, UNSPOKEN

Weights: TypeAlias = Callable[[], Tensor]
"""Gives weights of captions, (B, R)."""


class Losses(NamedTuple):
    """Sums over a batch, so that processes with unequal words can be weighted right."""

    cross_entropy: Tensor
    """Sum over words, nats."""
    attention_penalty: Tensor
    """Sum over captions."""
    score_function: Tensor
    """Sum over words; its gradient teaches hard attention where to look. 0 where it is soft."""
    entropy: Tensor
    """Of the maps that hard attention samples from, sum over words, nats. 0 where it is soft."""
    words: Tensor
    """Number of words, the end tokens included."""

    def objective(self, config: TrainingConfig) -> Tensor:
        """What is minimised, summed over the batch."""
        return (
            self.cross_entropy
            + config.attention_penalty * self.attention_penalty
            + config.hard_reward * self.score_function
            - config.hard_entropy * self.entropy
        )


def caption_losses(
    decoder: Decoder,
    memory: Memory,
    tokens: Tensor,
    label_smoothing: float = 0.0,
    *,
    inputs: Tensor | None = None,
    weights: Weights | None = None,
) -> Losses:
    """Losses of teacher-forced captions.

    Args:
        decoder: In training mode hard attention samples and moves its baseline.
        memory: The photos, (B, ...).
        tokens: (B, R, T + 1), start token, words, end token, then padding; a row of padding
            alone stands for a caption that the photo does not have. On the CPU, whatever the
            device: the shape of the work is read from them, and nothing waits for the device.
        label_smoothing: Share of the target spread evenly over the vocabulary.
        inputs: What the decoder is told in the place of the true words, (B, R, T), on the CPU;
            None: the true words. See ``scheduled_inputs``.
        weights: Gives what each caption's cross-entropy counts, (B, R), on the CPU; it is called
            when the device has its work, so that it may take a while. None: 1. With weights the
            words that the search never says are no choice and dropout is off: the captions are
            then the model's own, drawn without either.
    """
    tokens = tokens.cpu()
    inputs = tokens[..., :-1] if inputs is None else inputs.cpu()
    order = longest_first(tokens)
    memory, tokens, inputs = order.sort(memory, tokens, inputs)
    with nullcontext() if weights is None else _without_dropout(decoder):
        said = say(decoder, memory, inputs, tokens[..., 1:])
    if weights is None:
        cross_entropy = nn.functional.cross_entropy(
            said.logits,
            said.targets,
            reduction="sum",
            ignore_index=PAD,
            label_smoothing=label_smoothing,
        )
    else:
        unspoken = upload(torch.tensor(UNSPOKEN), said.rows.device)
        told = nn.functional.cross_entropy(
            said.logits.index_fill(1, unspoken, torch.finfo(said.logits.dtype).min),
            said.targets,
            reduction="none",
            ignore_index=PAD,
        )
        of_words = order.sort_captions(weights()).unsqueeze(2).expand(said.mask.shape)
        of_rows = upload(of_words.flatten()[said.layout.places()], told.device)[said.rows]
        cross_entropy = (told * of_rows).sum()
    words = upload(said.words, cross_entropy.device)
    alphas = said.layout.unpack(said.alphas)
    mask = upload(said.mask, alphas.device)
    penalty = attention_penalty(alphas, mask)
    nothing = torch.zeros_like(penalty)
    if not isinstance(decoder.attention, HardAttention):
        return Losses(cross_entropy, penalty, nothing, nothing, words)
    assert said.chosen is not None
    with torch.no_grad():
        log_probs = said.unpack_words(
            -nn.functional.cross_entropy(
                said.logits, said.targets, reduction="none", ignore_index=PAD
            )
        )
    surrogate = score_function(
        alphas, said.layout.unpack(said.chosen), log_probs, mask, decoder.attention.baseline
    )
    spread = (map_entropy(alphas) * mask).sum()
    if decoder.training and int(said.words):
        decoder.attention.observe(log_probs.sum() / int(said.words))
    return Losses(cross_entropy, penalty, surrogate, spread, words)


@contextmanager
def _without_dropout(decoder: Decoder) -> Iterator[None]:
    training = decoder.dropout.training
    decoder.dropout.eval()
    try:
        yield
    finally:
        decoder.dropout.train(training)


class Said(NamedTuple):
    """What the decoder thinks of the words of given sentences; W real words, then some padding."""

    layout: Layout
    mask: Tensor
    """(B, R, T), True at real words; on the CPU."""
    words: Tensor
    """W, on the CPU."""
    rows: Tensor
    """Which of the layout's P each of the rows below is, (W + padding,)."""
    logits: Tensor
    """(W + padding, V), float32."""
    targets: Tensor
    """(W + padding,), then padding tokens."""
    alphas: Tensor
    """(P, L)."""
    chosen: Tensor | None
    """(P,)."""

    def unpack_words(self, values: Tensor) -> Tensor:
        """Values of the words (W + padding,) at their places, (B, R, T), 0 elsewhere."""
        real = int(self.words)
        packed = values.new_zeros(len(self.alphas))
        return self.layout.unpack(packed.index_copy(0, self.rows[:real], values[:real]))


def say(decoder: Decoder, memory: Memory, inputs: Tensor, targets: Tensor) -> Said:
    """Run the decoder over sentences, the longest first, and score the words that are to come.

    Args:
        decoder: In the mode that is wanted.
        memory: The photos, (B, ...).
        inputs: What the decoder is told, (B, R, T); on the CPU.
        targets: What it should say next, then padding, (B, R, T); on the CPU.
    """
    mask = targets != PAD
    # The end token is no input that matters: nothing comes after it.
    inputs = inputs.masked_fill(~mask, PAD)
    layout = Layout.of(inputs)
    device = memory.summary.device
    packed = decoder.unroll(memory, upload(inputs, device), layout)
    # Readout and cross-entropy over the real words only, rounded up to a multiple of 128: with
    # another number of rows at every step oneDNN would keep a kernel for each of them.
    wanted = targets.flatten()[layout.places()]  # (P,)
    rows = (wanted != PAD).nonzero().squeeze(1)  # (W,)
    words = len(rows)
    rows = nn.functional.pad(rows, (0, -words % 128))
    wanted = wanted[rows]
    wanted[words:] = PAD
    rows = upload(rows, device)
    logits = widen(decoder.readout(*(part[rows] for part in (packed.embedded, *packed.outputs))))
    return Said(
        layout,
        mask,
        torch.tensor(words),
        rows,
        logits,
        upload(wanted, device),
        packed.alphas,
        packed.chosen,
    )


class Order(NamedTuple):
    """Photos by their longest caption and captions by their length, so that little is padding."""

    photos: Tensor
    """(B,)."""
    captions: Tensor
    """(B, R), of the photos in their old order."""

    def sort_captions(self, values: Tensor) -> Tensor:
        """Values of captions, (B, R, ...)."""
        rows = torch.arange(len(values)).unsqueeze(1)
        return values[rows, self.captions][self.photos]

    def sort(self, memory: Memory, tokens: Tensor, inputs: Tensor) -> tuple[Memory, Tensor, Tensor]:
        """Everything that goes into the decoder."""
        if not torch.equal(self.photos, torch.arange(len(self.photos))):  # loaders sort, too
            memory = memory.select(upload(self.photos, memory.summary.device))
        return memory, self.sort_captions(tokens), self.sort_captions(inputs)


def longest_first(tokens: Tensor) -> Order:
    """The order of tokens (B, R, T), on the CPU."""
    lengths = (tokens != PAD).sum(dim=-1)  # (B, R)
    return Order(
        lengths.amax(dim=1).argsort(descending=True, stable=True),
        lengths.argsort(dim=1, descending=True, stable=True),
    )


@torch.no_grad()
def scheduled_inputs(decoder: Decoder, memory: Memory, tokens: Tensor, share: float) -> Tensor:
    """True captions of which the model has said some words itself.

    Word by word the model is told what stands there, or, with probability ``share``, a word drawn
    from its own distribution after what it was told so far; the gradient does not pass through the
    draw.

    Source: Bengio et al. 2015 (arXiv:1506.03099). Deviation: the words are drawn in a pass of their
    own, without dropout, so that the pass that learns can still run its products over all words.

    Args:
        decoder: Put back in its mode afterwards.
        memory: The photos, (B, ...).
        tokens: (B, R, T + 1), see ``caption_losses``; on the CPU.
        share: 0 to 1.

    Returns:
        Inputs (B, R, T), on the CPU; the start token stands as it is.
    """
    training, device = decoder.training, memory.summary.device
    decoder.eval()
    inputs = upload(tokens[..., :-1].clone(), device)
    replaced = (torch.rand(inputs.shape, device=device) < share) & (inputs != PAD)
    unspoken = upload(torch.tensor(UNSPOKEN), device)
    state = decoder.start(memory, inputs.shape[1])
    for t in range(inputs.shape[2] - 1):
        embedded, word_gates = decoder.take_words(inputs[..., t])
        step = decoder.step(word_gates, state, memory)
        state = step.state
        logits = widen(decoder.readout(embedded, *step.outputs))
        shares = logits.index_fill(2, unspoken, -torch.inf).softmax(dim=-1)
        drawn = shares.flatten(0, 1).multinomial(1).view(inputs.shape[:2])
        inputs[..., t + 1] = torch.where(replaced[..., t + 1], drawn, inputs[..., t + 1])
    decoder.train(training)
    return inputs.cpu()


def attention_penalty(alphas: Tensor, mask: Tensor) -> Tensor:
    """Doubly stochastic penalty: every region should be looked at about equally over a sentence.

        sum over captions, sum over regions i of (T / L - sum_t alpha_ti) ** 2

    Source: Xu et al. 2015 (arXiv:1502.03044), equation 14, lambda left to the caller.
    Deviation: the paper's target is 1, which T words cannot reach on more than T regions. T / L is
    what they can reach; as the alphas of a sentence sum to T the two differ by a constant and the
    gradient is the paper's. (L counts masked regions too: again a constant.)

    Args:
        alphas: (B, R, T, L).
        mask: (B, R, T), True at real words.

    Returns:
        The sum.
    """
    alphas = widen(alphas) * mask.unsqueeze(-1)
    looked = alphas.sum(dim=2)  # (B, R, L)
    target = mask.sum(dim=2, keepdim=True) / alphas.shape[-1]  # (B, R, 1)
    return (target - looked).square().sum()


def score_function(
    alphas: Tensor, chosen: Tensor, log_probs: Tensor, mask: Tensor, baseline: Tensor
) -> Tensor:
    """Surrogate whose gradient is the score-function (REINFORCE) estimate for sampled regions.

        - sum_t (R_t - b_t) log alpha_t[s_t],   R_t = sum over u >= t of log p(y_u)

    with R_t and b_t constants: added to the plain cross-entropy it makes the expected gradient that
    of the expected cross-entropy over all choices of regions. (Label smoothing and the penalties on
    the maps are no part of the reward: what the regions are chosen for is the true words.)

    Source: Xu et al. 2015 (arXiv:1502.03044), section 4.1, lambda_r left to the caller.
    Deviation: a choice is paid only for the words from its own on (it cannot change earlier ones)
    and the baseline counts those words, b_t = b * (words left); both leave the expectation as it
    is and lower the variance. One sample a caption.

    Args:
        alphas: (B, R, T, L).
        chosen: Sampled regions, (B, R, T).
        log_probs: Of the true words, nats, (B, R, T).
        mask: (B, R, T), True at real words.
        baseline: Expected log-probability of a word, nats, a scalar from earlier batches.

    Returns:
        The sum over words.
    """
    advantage = (log_probs.detach() - baseline) * mask
    to_go = advantage.flip(2).cumsum(2).flip(2)  # (B, R, T)
    # Padding is masked before the logarithm: 0 times the log of a vanished alpha would be NaN.
    taken = alphas.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 1.0)
    return -(to_go * taken.log()).sum()


def map_entropy(alphas: Tensor) -> Tensor:
    """Entropy of attention maps (..., L), nats: 0 on one region, ln L when even."""
    # Where alpha is 0 its logarithm would give a NaN gradient.
    floor = torch.finfo(alphas.dtype).tiny
    return -(alphas * alphas.clamp(min=floor).log()).sum(dim=-1)
