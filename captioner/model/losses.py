"""Training losses, computed from a memory and target captions; for photos and texts alike.

Notation: B photos, R captions per photo, T steps, L regions, P packed positions, W words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from captioner.hardware import upload
from captioner.model.attention import HardAttention, Memory, sample_index, widen
from captioner.model.decoder import Decoder
from captioner.model.kernels.packing import PackedLayout
from captioner.options import TrainingConfig
from captioner.text.vocabulary import NEVER_GENERATED, PAD

Advantages: TypeAlias = Callable[[], Tensor]
"""Returns the advantage of each caption, (B, R), on the CPU. Called only after the forward pass has
been queued, so that the rewards can be computed in the meantime."""


class Losses(NamedTuple):
    """Sums over a batch, so that processes with different numbers of words average correctly."""

    cross_entropy: Tensor
    """Sum over words, nats; for ``policy_gradient_loss`` weighted by the advantages."""
    attention_penalty: Tensor
    """Sum over captions."""
    score_function: Tensor
    """Sum over words; its gradient trains hard attention. 0 for soft attention."""
    entropy: Tensor
    """Entropy of hard attention's maps, summed over words, nats. 0 for soft attention."""
    words: Tensor
    """Number of target words, end tokens included."""
    photo_words: Tensor
    """See ``photo_words_loss``; 0 without ``PhotoWords``."""

    def objective(self, config: TrainingConfig) -> Tensor:
        """The weighted total to minimize, summed over the batch."""
        return (
            self.cross_entropy
            + config.attention_penalty * self.attention_penalty
            + config.hard_reward * self.score_function
            - config.hard_entropy * self.entropy
            + config.photo_words * self.photo_words
        )


@dataclass(frozen=True)
class PhotoWords:
    """The words that photos are about, without the others of the vocabulary.

    Not a tuple, for the reason given at ``objectives.Task``.
    """

    tokens: Tensor
    """Token ids of all content words, (C,), on the CPU."""
    present: Tensor
    """(B, C), 1 at the words of each photo; on the CPU."""


def caption_losses(
    decoder: Decoder,
    memory: Memory,
    tokens: Tensor,
    label_smoothing: float = 0.0,
    *,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
) -> Losses:
    """Cross-entropy of teacher-forced captions, and the attention losses.

    Args:
        decoder: In training mode hard attention samples regions and updates its baseline.
        memory: The photos, (B, ...).
        tokens: (B, R, T + 1): start token, words, end token, padding. A row of padding marks a
            missing caption. Keep them on the CPU whatever the device: shapes are computed from
            them without a synchronization.
        label_smoothing: Share of the target distribution spread evenly over the vocabulary.
        inputs: Decoder inputs, (B, R, T), on the CPU or the device; None: the true words. See
            ``scheduled_inputs``.
        targets: Probabilities to learn, (W + padding, V), one row for each of
            ``score_longest_first``; None: the true words.
    """
    _, scored = score_longest_first(decoder, memory, tokens, inputs)
    if targets is not None:
        nats = nn.functional.cross_entropy(scored.logits, targets, reduction="none")
        cross_entropy = nats.masked_fill(scored.targets == PAD, 0.0).sum()
    else:
        cross_entropy = nn.functional.cross_entropy(
            scored.logits,
            scored.targets,
            reduction="sum",
            ignore_index=PAD,
            label_smoothing=label_smoothing,
        )
    return _with_attention_losses(decoder, scored, cross_entropy)


def photo_words_loss(decoder: Decoder, memory: Memory, words: PhotoWords) -> Tensor:
    """Predict the words of a photo from its mean feature alone, with the decoder's own readout.

        - sum over photos, sum over the photo's words w of log softmax(readout_photo)_w

    The softmax is over content words. It asks the encoder for what the captions name, wherever it
    is in the photo, and adds no weights.

    Source: the word detectors of Fang et al. 2015 (arXiv:1411.4952), section 3, and the attributes
    of Wu et al. 2016 (arXiv:1506.01144). Deviation: one softmax over the mean feature instead of a
    detector per region and word.

    Args:
        decoder: Any but that of attention ``fixed_at_start``.
        memory: The photos, (B, ...).
        words: Of the same photos.

    Returns:
        Nats, a scalar.
    """
    logits = widen(decoder.readout_photo(memory))
    device = logits.device
    log_probs = logits.index_select(1, upload(words.tokens, device)).log_softmax(dim=1)
    return -(log_probs * upload(words.present, device)).sum()


def policy_gradient_loss(
    decoder: Decoder, memory: Memory, tokens: Tensor, advantages: Advantages
) -> Losses:
    """Surrogate loss for captions sampled from the model: its gradient is the policy gradient.

        - sum over captions of advantage * log p(caption)

    It replaces ``Losses.cross_entropy``. As in sampling, dropout is off and tokens that
    are never generated have probability 0; attention still trains in the decoder's mode.

    Args:
        decoder: See ``caption_losses``.
        memory: The photos, (B, ...).
        tokens: Sampled captions, (B, R, T + 1); see ``caption_losses``.
        advantages: Returns the advantages, (B, R).
    """
    with _without_dropout(decoder):
        order, scored = score_longest_first(decoder, memory, tokens)
    never = upload(torch.tensor(NEVER_GENERATED), scored.rows.device)
    negative_log_probs = nn.functional.cross_entropy(
        scored.logits.index_fill(1, never, torch.finfo(scored.logits.dtype).min),
        scored.targets,
        reduction="none",
        ignore_index=PAD,
    )
    of_rows = scored.of_rows(order.sort_captions(advantages()))
    return _with_attention_losses(decoder, scored, (negative_log_probs * of_rows).sum())


def _with_attention_losses(
    decoder: Decoder, scored: ScoredCaptions, cross_entropy: Tensor
) -> Losses:
    words = upload(scored.words, cross_entropy.device)
    alphas = scored.layout.unpack(scored.alphas)
    mask = upload(scored.mask, alphas.device)
    penalty = attention_penalty(alphas, mask)
    zero = torch.zeros_like(penalty)
    if not isinstance(decoder.attention, HardAttention):
        return Losses(cross_entropy, penalty, zero, zero, words, zero)
    assert scored.chosen is not None
    with torch.no_grad():
        log_probs = scored.unpack_words(-scored.nats())
    surrogate = score_function(
        alphas, scored.layout.unpack(scored.chosen), log_probs, mask, decoder.attention.baseline
    )
    entropy = (map_entropy(alphas) * mask).sum()
    if decoder.training and int(scored.words):
        decoder.attention.observe(log_probs.sum() / int(scored.words))
    return Losses(cross_entropy, penalty, surrogate, entropy, words, zero)


@torch.inference_mode()
def photo_nats(decoder: Decoder, memory: Memory, tokens: Tensor) -> Tensor:
    """Cross-entropy of the teacher-forced captions of each photo, summed over their words.

    Args:
        decoder: In evaluation mode.
        memory: The photos, (B, ...).
        tokens: See ``caption_losses``.

    Returns:
        (B,), nats, on the CPU.
    """
    order, scored = score_longest_first(decoder, memory, tokens)
    sums = scored.unpack_words(scored.nats()).sum(dim=(1, 2)).cpu()  # (B,), longest first
    return torch.zeros_like(sums).index_copy(0, order.photos, sums)


@contextmanager
def _without_dropout(decoder: Decoder) -> Iterator[None]:
    training = decoder.dropout.training
    decoder.dropout.eval()
    try:
        yield
    finally:
        decoder.dropout.train(training)


class ScoredCaptions(NamedTuple):
    """Logits of the words of given captions: W real words, then a few rows of padding."""

    layout: PackedLayout
    mask: Tensor
    """(B, R, T), True at real words; on the CPU."""
    words: Tensor
    """W, on the CPU."""
    rows: Tensor
    """Packed position of each row below, (W + padding,)."""
    logits: Tensor
    """(W + padding, V), float32."""
    targets: Tensor
    """(W + padding,), PAD in the padding rows."""
    alphas: Tensor
    """(P, L)."""
    chosen: Tensor | None
    """(P,)."""

    def nats(self) -> Tensor:
        """Cross-entropy of each word, (W + padding,)."""
        return nn.functional.cross_entropy(
            self.logits, self.targets, reduction="none", ignore_index=PAD
        )

    def of_rows(self, values: Tensor) -> Tensor:
        """The value of each row's caption, (W + padding,), of (B, R) on the CPU, sorted alike."""
        of_words = values.unsqueeze(2).expand(self.mask.shape)
        packed = of_words.flatten()[self.layout.indices()]  # (P,)
        return upload(packed, self.rows.device)[self.rows]

    def unpack_words(self, values: Tensor) -> Tensor:
        """Values of the words, (W + padding,), as (B, R, T), 0 elsewhere."""
        real = int(self.words)
        packed = values.new_zeros(len(self.alphas))
        return self.layout.unpack(packed.index_copy(0, self.rows[:real], values[:real]))


def score_captions(
    decoder: Decoder, memory: Memory, inputs: Tensor, targets: Tensor
) -> ScoredCaptions:
    """Run the decoder over captions, longest first, and compute the logits of the target words.

    Args:
        decoder: In the mode to run in.
        memory: The photos, (B, ...).
        inputs: Decoder inputs, (B, R, T), on the CPU or the device; a word at every target.
        targets: The next word at each position, then padding, (B, R, T), on the CPU.
    """
    mask = targets != PAD
    device = memory.summary.device
    # Nothing follows the end token, so it is not needed as an input.
    inputs = upload(inputs, device).masked_fill(upload(~mask, device), PAD)
    layout = PackedLayout.of(targets)
    packed = decoder.unroll(memory, inputs, layout)
    # Readout and cross-entropy run on the real words only, rounded up to a multiple of 128:
    # oneDNN caches a kernel for every number of rows that it sees.
    packed_targets = targets.flatten()[layout.indices()]  # (P,)
    rows = (packed_targets != PAD).nonzero().squeeze(1)  # (W,)
    words = len(rows)
    rows = nn.functional.pad(rows, (0, -words % 128))
    row_targets = packed_targets[rows]
    row_targets[words:] = PAD
    rows = upload(rows, device)
    # Not part[rows], whose gradient takes longer.
    given = (part.index_select(0, rows) for part in (packed.embedded, *packed.outputs))
    logits = widen(decoder.readout(*given))
    return ScoredCaptions(
        layout,
        mask,
        torch.tensor(words),
        rows,
        logits,
        upload(row_targets, device),
        packed.alphas,
        packed.chosen,
    )


class Order(NamedTuple):
    """Photos by their longest caption and captions by length, to keep padding small."""

    photos: Tensor
    """(B,)."""
    captions: Tensor
    """(B, R), indexed by the photos' original order."""

    def sort_captions(self, values: Tensor) -> Tensor:
        """Reorder values of captions, (B, R, ...), on the CPU or the device."""
        rows, columns = self.photos.unsqueeze(1), self.captions[self.photos]
        return values[upload(rows, values.device), upload(columns, values.device)]

    def sort(self, memory: Memory, tokens: Tensor, inputs: Tensor) -> tuple[Memory, Tensor, Tensor]:
        """Reorder everything that goes into the decoder."""
        if not torch.equal(self.photos, torch.arange(len(self.photos))):  # the loader may have
            memory = memory.select(upload(self.photos, memory.summary.device))
        return memory, self.sort_captions(tokens), self.sort_captions(inputs)


def longest_first(tokens: Tensor) -> Order:
    """The order for tokens (B, R, T) on the CPU."""
    lengths = (tokens != PAD).sum(dim=-1)  # (B, R)
    return Order(
        lengths.amax(dim=1).argsort(descending=True, stable=True),
        lengths.argsort(dim=1, descending=True, stable=True),
    )


def score_longest_first(
    decoder: Decoder, memory: Memory, tokens: Tensor, inputs: Tensor | None = None
) -> tuple[Order, ScoredCaptions]:
    """``score_captions`` in the order that keeps padding small; see ``caption_losses``.

    The order, and with it that of the rows, depends on the tokens alone.
    """
    tokens = tokens.cpu()
    order = longest_first(tokens)
    given = tokens[..., :-1] if inputs is None else inputs
    memory, tokens, given = order.sort(memory, tokens, given)
    return order, score_captions(decoder, memory, given, tokens[..., 1:])


@torch.no_grad()
def scheduled_inputs(decoder: Decoder, memory: Memory, tokens: Tensor, share: float) -> Tensor:
    """Scheduled sampling: true captions with some words replaced by the model's own samples.

    With probability ``share`` an input word is sampled from the model's distribution given the
    inputs before it. No gradient passes through the samples.

    Source: Bengio et al. 2015 (arXiv:1506.03099). Deviation: words are sampled in a separate pass
    without dropout, so that the training pass can still process all words in one product.

    Args:
        decoder: Its training mode is restored afterwards.
        memory: The photos, (B, ...).
        tokens: (B, R, T + 1), see ``caption_losses``; on the CPU.
        share: 0 to 1.

    Returns:
        Inputs (B, R, T), on the device; the start token is never replaced.
    """
    training, device = decoder.training, memory.summary.device
    decoder.eval()
    inputs = upload(tokens[..., :-1].clone(), device)
    replaced = (torch.rand(inputs.shape, device=device) < share) & (inputs != PAD)
    never = upload(torch.tensor(NEVER_GENERATED), device)
    state = decoder.start(memory, inputs.shape[1])
    for t in range(inputs.shape[2] - 1):
        embedded, word_gates = decoder.embed_with_gates(inputs[..., t])
        step = decoder.step(word_gates, state, memory)
        state = step.state
        logits = widen(decoder.readout(embedded, *step.outputs))
        probabilities = logits.index_fill(2, never, -torch.inf).softmax(dim=-1)
        sampled = sample_index(probabilities)
        inputs[..., t + 1] = torch.where(replaced[..., t + 1], sampled, inputs[..., t + 1])
    decoder.train(training)
    return inputs


def attention_penalty(alphas: Tensor, mask: Tensor) -> Tensor:
    """Doubly stochastic penalty: encourages equal total attention to every region.

        sum over captions, sum over regions i of (T / L - sum_t alpha_ti) ** 2

    Source: Xu et al. 2015 (arXiv:1502.03044), equation 14, without the factor lambda.
    Deviation: the paper's target is 1, which T words cannot reach on more than T regions; T / L is
    reachable. As the alphas of a caption sum to T, the two penalties differ by a constant and have
    the same gradient. (L counts masked regions too, which again adds a constant.)

    Args:
        alphas: (B, R, T, L).
        mask: (B, R, T), True at real words.

    Returns:
        The sum over captions, a scalar.
    """
    alphas = widen(alphas) * mask.unsqueeze(-1)
    totals = alphas.sum(dim=2)  # (B, R, L)
    target = mask.sum(dim=2, keepdim=True) / alphas.shape[-1]  # (B, R, 1)
    return (target - totals).square().sum()


def score_function(
    alphas: Tensor, chosen: Tensor, log_probs: Tensor, mask: Tensor, baseline: Tensor
) -> Tensor:
    """Surrogate whose gradient is the score-function (REINFORCE) estimate for sampled regions.

        - sum_t (R_t - b_t) log alpha_t[s_t],   R_t = sum over u >= t of log p(y_u)

    R_t and b_t are constants. Added to cross-entropy, it makes the expected gradient that of the
    cross-entropy's expectation over all choices of regions. Label smoothing and the attention
    penalty are not part of the reward.

    Source: Xu et al. 2015 (arXiv:1502.03044), section 4.1, without the factor lambda_r.
    Deviation: a choice is credited only for words from its own position on, as it cannot change
    earlier ones, and the baseline counts those words, b_t = b * (words left). Both keep the
    expectation and reduce the variance. One sample per caption.

    Args:
        alphas: (B, R, T, L).
        chosen: Sampled regions, (B, R, T).
        log_probs: Of the true words, nats, (B, R, T).
        mask: (B, R, T), True at real words.
        baseline: Mean log-probability of a word in earlier batches, nats, a scalar.

    Returns:
        The sum over words, a scalar.
    """
    advantage = (log_probs.detach() - baseline) * mask
    to_go = advantage.flip(2).cumsum(2).flip(2)  # (B, R, T)
    # Mask padding before the logarithm: 0 times the log of a vanished alpha would be NaN.
    taken = alphas.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 1.0)
    return -(to_go * taken.log()).sum()


def map_entropy(alphas: Tensor) -> Tensor:
    """Entropy of attention maps (..., L) in nats: 0 for one region, ln L for a uniform map."""
    # Clamp: where alpha is 0 the gradient of its logarithm would be NaN.
    floor = torch.finfo(alphas.dtype).tiny
    return -(alphas * alphas.clamp(min=floor).log()).sum(dim=-1)
